"""Other engines' formats: round trips, the layouts that those engines read, and clear errors."""

from __future__ import annotations

import io
import json

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import trees

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.interchange import (
    FORMATS,
    export_tree,
    from_growmap,
    from_medusa,
    from_nxd,
    import_tree,
    parse,
    to_dot,
    to_growmap,
    to_networkx,
)

TREE = TokenTree(np.array([-1, 0, 0, 1, 1, 2, 3]))
"""    0
      / \\
     1   2
    / \\   \\
   3   4   5
   |
   6
"""


@given(trees())
def test_round_trips(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("exports")
    for form, name in (
        ("medusa", "m.json"),
        ("nxd", "n.json"),
        ("growmap", "g.json"),
        ("growmap", "g.pt"),
    ):
        if tree.size == 1 and form == "medusa":
            continue  # no choice at all: an empty list
        export_tree(tree, folder / name, form)
        assert import_tree(folder / name) == tree


def test_layouts(tmp_path):
    """What the engines read, written out by hand."""
    for form in FORMATS:
        export_tree(TREE, tmp_path / f"{form}.json", form)
    assert json.loads((tmp_path / "medusa.json").read_text()) == [
        [0],
        [1],
        [0, 0],
        [0, 1],
        [1, 0],
        [0, 0, 0],
    ]
    assert json.loads((tmp_path / "nxd.json").read_text()) == {
        "0": ["1", "2"],
        "1": ["3", "4"],
        "2": ["5"],
        "3": ["6"],
    }
    assert json.loads((tmp_path / "growmap.json").read_text()) == {
        "roots": [[0], [1, 2], [3, 4, 5], [6]],
        "branches": [[2], [2, 1], [1, 0, 0], [0]],
        "Successors": [[1, 2], [3, 4], [5], [6], [], [], []],
        "mask": [
            [1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0, 0],
            [1, 1, 0, 1, 0, 0, 0],
            [1, 1, 0, 0, 1, 0, 0],
            [1, 0, 1, 0, 0, 1, 0],
            [1, 1, 0, 1, 0, 0, 1],
        ],
        "depth": [0, 1, 1, 2, 2, 2, 3],
        "size": 7,
    }
    dot = (tmp_path / "dot.json").read_text()
    assert dot.startswith('digraph tree {\n  0 [label="root"];\n  1 [label="1"];\n')
    assert "  3 -> 6;\n}\n" in to_dot(TREE)


def test_torch_growmap_layout(tmp_path):
    """The keys that the authors' tree search saves.

    Mask and depth are int64 tensors; the rest are lists, and an int.
    """
    export_tree(TREE, tmp_path / "t.pt", "growmap")
    stored = torch.load(tmp_path / "t.pt", weights_only=True)
    plain = to_growmap(TREE)
    assert list(stored) == ["roots", "branches", "Successors", "mask", "depth", "size"]
    for key, value in stored.items():
        if key in ("mask", "depth"):
            assert value.dtype == torch.int64
            assert value.tolist() == plain[key]
        else:
            assert value == plain[key]
    export_tree(TREE, tmp_path / "again.pt", "growmap")
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "t.pt").read_bytes()


def test_growmap_of_a_real_shape():
    """The published tree A100-CNN-68m-13b-stochastic-S8 of Infini-AI-Lab/Sequoia, as its file."""
    tree = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3, 6])
    assert tree.level_widths.tolist() == [1, 2, 3, 1, 1]
    assert to_growmap(tree)["branches"] == [[2], [2, 1], [1, 0, 0], [1], [0]]


@given(trees())
def test_networkx(tree):
    graph = to_networkx(tree)
    assert networkx.is_arborescence(graph) or tree.size == 1
    assert networkx.single_source_shortest_path_length(graph, 0) == dict(
        enumerate(tree.position_ids.tolist())
    )
    assert [graph.nodes[node]["rank"] for node in range(tree.size)] == tree.ranks.tolist()


def test_looser_inputs_other_engines_take():
    assert from_medusa([[0, 0, 0], [1, 0], [0, 1]]) == TREE  # leaves alone, any order
    assert (
        from_nxd({"0": [7, "5"], "5": ["9"], "7": ["8", "2"], "8": ["3"], "3": [], "9": []}) == TREE
    )  # any numbers, leaves listed


GROWMAP = to_growmap(TREE)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([[0], []], "Medusa choices: path 1 is [], expected a non-empty list of 0-based ranks"),
        (
            [[0], [0, -1]],
            "Medusa choices: path 1 is [0, -1], expected a non-empty list of 0-based ranks",
        ),
        ([[0], [0, True]], "path 1"),
        (
            [[0], [2]],
            "Medusa choices: siblings of the ranks 0, 2, expected 0 to 1: rank 1 is missing",
        ),
        ([[1]], "siblings of the ranks 1, expected 0 to 0: rank 0 is missing"),
        (
            [[r] for r in range(2, 20)],
            "siblings of the ranks 2, 3, 4, 5, 6, 7, 8, 9, ..., expected 0 to 17",
        ),
        ([[0] * 5000], "more than 4096 nodes, expected at most that many in an exchange format"),
        ({"0": "1"}, "NxD token tree: the children of '0' are '1', expected a list"),
        ({"0": ["a"]}, "NxD token tree: 'a' is a child of '0', expected the number of a node"),
        (
            {"0": ["1", "1"]},
            "NxD token tree: '1' is a child twice or its own ancestor, expected one parent",
        ),
        ({"0": ["1"], "1": ["0"]}, "'0' is a child twice or its own ancesto"),
        ({"0": ["1"], "2": ["3"]}, "NxD token tree: '2' cannot be reached from \"0\""),
        ({"0": [str(n) for n in range(1, 5000)]}, "more than 4096 nodes"),
        (
            {"Successors": [[1], []]},
            "growmap: expected the keys roots, branches, Successors, mask, depth, size",
        ),
        (
            GROWMAP | {"Successors": 3},
            "growmap: Successors must be a non-empty list of lists of node numbers",
        ),
        (
            GROWMAP | {"Successors": []},
            "growmap: Successors must be a non-empty list of lists of node numbers",
        ),
        (
            GROWMAP | {"Successors": [[2, 1], [], []]},
            "growmap: Successors must name the nodes 1, 2, ... once and in order (breadth-first, "
            "siblings adjacent)",
        ),
        (GROWMAP | {"Successors": [[], [1]]}, "parents[1] is 1, expected a node from 0 to 0"),
        (GROWMAP | {"size": 8}, "growmap: size contradicts Successors"),
        (GROWMAP | {"depth": [0, 1, 1, 2, 2, 2, 2]}, "growmap: depth contradicts Successors"),
        (GROWMAP | {"mask": GROWMAP["mask"][::-1]}, "growmap: mask contradicts Successors"),
        (GROWMAP | {"roots": [[0]]}, "growmap: roots contradicts Successors"),
        (GROWMAP | {"branches": [[2]]}, "growmap: branches contradicts Successors"),
        (
            {"1": ["2"]},
            'unknown layout; expected a list of paths (Medusa), an object with "0" (NxD) or one '
            'with "Successors" (growmap)',
        ),
        (5, "unknown layout"),
    ],
)
def test_refuses(document, message):
    with pytest.raises(SequoiaPlanError) as error:
        parse(json.dumps(document).encode())
    assert message in str(error.value)


def test_refuses_files(tmp_path):
    (tmp_path / "f").write_bytes(b"\xff")
    with pytest.raises(
        SequoiaPlanError,
        match="f: neither JSON nor a file saved by torch; expected Medusa choices, an NxD token "
        "tree or a growmap",
    ):
        import_tree(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"PK\x03\x04" + bytes(99))
    with pytest.raises(
        SequoiaPlanError, match=r"f: not a growmap that torch.load reads with weights_only=True"
    ):
        import_tree(tmp_path / "f")
    with pytest.raises(
        SequoiaPlanError,
        match=r"nothing: cannot be read \(No such file or directory\); expected Medusa choices, "
        "an NxD",
    ):
        import_tree(tmp_path / "nothing")


def test_a_pickle_is_not_executed(tmp_path):
    """A growmap that runs a command when unpickled is refused, and the command is not run."""

    class Attack:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    for options in ({}, {"_use_new_zipfile_serialization": False}):
        buffer = io.BytesIO()
        torch.save({"Successors": Attack()}, buffer, **options)
        with pytest.raises(SequoiaPlanError, match="weights_only=True"):
            parse(buffer.getvalue())
    assert not (tmp_path / "harm").exists()


def test_refuses_exports(tmp_path):
    with pytest.raises(
        SequoiaPlanError,
        match="a tree of 5000 nodes, expected at most 4096 for the format nxd; "
        "solve with a smaller --budget",
    ):
        export_tree(TokenTree.chain(5000), tmp_path / "t", "nxd")
    with pytest.raises(
        ArgumentError, match="format: found 'onnx', expected one of medusa, nxd, growmap, dot"
    ):
        export_tree(TREE, tmp_path / "t", "onnx")
    assert not (tmp_path / "t").exists()


def test_growmap_tensors_of_other_shapes():
    with pytest.raises(SequoiaPlanError, match="depth contradicts Successors"):
        from_growmap(
            GROWMAP
            | {"mask": torch.tensor(GROWMAP["mask"]), "depth": torch.tensor([GROWMAP["depth"]])}
        )
