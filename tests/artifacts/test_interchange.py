"""Other engines' formats: round trips, the layouts that those engines read, and clear errors."""

import json

import numpy as np
import pytest
from hypothesis import given
from refusals import refusal
from strategies import trees

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.interchange import FORMATS, export_tree, from_nxd, import_tree, parse

TREE = TokenTree(np.array([-1, 0, 0, 1, 1, 2, 3]))
"""Nodes 1 and 2 below the root, 3 and 4 below 1, 5 below 2, 6 below 3."""
ROWS = ("1000000", "1100000", "1010000", "1101000", "1100100", "1010010", "1101001")
GROWMAP = {
    "roots": [[0], [1, 2], [3, 4, 5], [6]],
    "branches": [[2], [2, 1], [1, 0, 0], [0]],
    "Successors": [[1, 2], [3, 4], [5], [6], [], [], []],
    "mask": [[int(bit) for bit in row] for row in ROWS],
    "depth": [0, 1, 1, 2, 2, 2, 3],
    "size": 7,
}
LAYOUTS = {"nxd": {"0": ["1", "2"], "1": ["3", "4"], "2": ["5"], "3": ["6"]}, "growmap": GROWMAP}
"""What the engines read, written out by hand."""


@given(trees())
def test_round_trips(tree):
    for to_format in FORMATS.values():
        assert parse(to_format(tree)) == tree


@pytest.mark.parametrize("name", FORMATS)
def test_layouts(tmp_path, name):
    export_tree(TREE, tmp_path / "t.json", name)
    assert json.loads((tmp_path / "t.json").read_text()) == LAYOUTS[name]
    assert import_tree(tmp_path / "t.json") == TREE


def test_looser_inputs_that_other_engines_take():
    names = {"0": [7, "5"], "5": ["9"], "7": ["8", "2"], "8": ["3"], "3": [], "9": []}
    assert from_nxd(names) == TREE  # any numbers, leaves listed


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"0": 3}, r"NxD token tree: Expected `array`, got `int` - at `\$\[\.\.\.\]`"),
        ({"0": ["a"]}, "NxD token tree: found 'a' below '0', expected the number of a node"),
        ({"0": ["1"], "2": ["3"]}, "NxD token tree: '2' cannot be reached from \"0\""),
        ({"Successors": [[1], []]}, "growmap: roots is not as Successors says"),
        (GROWMAP | {"Successors": [[], [1]]}, r"parents\[1\] is 1, expected a node from 0 to 0"),
        (GROWMAP | {"mask": GROWMAP["mask"][::-1]}, "growmap: mask is not as Successors says"),
        ({"1": ["2"]}, "unknown layout; expected an NxD"),
    ],
)
def test_refuses(document, message):
    with refusal(message):
        parse(document)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"PK\3\4" + bytes(99)])
def test_refuses_what_is_no_json(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with refusal(r"f: not JSON \(.*\); expected an NxD"):
        import_tree(tmp_path / "f")


def test_refuses_exports(tmp_path):
    with refusal(r"5000 nodes, .* with a smaller --budget"):
        export_tree(TokenTree.chain(5000), tmp_path / "t", "nxd")
    assert not (tmp_path / "t").exists()
