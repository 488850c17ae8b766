"""Tree files: round trips, stable bytes, and one clear line for everything that is wrong."""

import hashlib
import json
import pickle
import tracemalloc

import independent_reader
import numpy as np
import pytest
from hypothesis import given
from refusals import refusal
from safetensors.numpy import load_file, save_file
from strategies import acceptance_vectors, trees

from sequoia_plan.artifacts import TokenTree, load_tree, save_tree
from sequoia_plan.artifacts.tree_file import from_bytes, to_bytes

HEADER = {"format": "sequoia-plan-tree", "version": 1, "plan": {}}


@given(trees(), acceptance_vectors())
def test_round_trip_and_stable_bytes(tree, acceptance):
    """tests/helpers/independent_reader.py knows docs/format.md and nothing of the package."""
    plan = {"solver": "dp", "acceptance": acceptance, "settings": {"temperature": 0.6}}
    tree = TokenTree(tree.parents, plan)
    data = to_bytes(tree)
    loaded = from_bytes(data, "t")
    assert loaded == tree and loaded.plan == tree.plan and to_bytes(loaded) == data
    tensors, stored_plan = independent_reader.read(data)
    assert stored_plan == tree.plan.to_dict()
    mask = np.unpackbits(tensors.pop("attention_mask"), axis=1, count=tree.size, bitorder="little")
    assert np.array_equal(mask, tree.attention_mask)
    assert all(np.array_equal(tensors[name], getattr(tree, name)) for name in tensors)


def test_trees_by_context_keep_their_plans_and_trees_by_match(tmp_path):
    match = TokenTree.chain(3)
    long = TokenTree([-1, 0], {"budget": 2}, by_match={2: match})
    tree = TokenTree([-1, 0, 0], {"budget": 3}, by_context={1024: long, 4096: TokenTree.chain(1)})
    save_tree(tree, tmp_path / "t")
    loaded = load_tree(tmp_path / "t")
    assert loaded == tree and hash(loaded) == hash(tree) and to_bytes(loaded) == to_bytes(tree)
    assert loaded.by_context[1024].plan == long.plan
    assert [loaded.for_context(n).size for n in (0, 1023, 1024, 4095, 5000)] == [3, 3, 2, 2, 1]
    assert loaded.all_trees == [loaded, long, match, TokenTree.chain(1)]
    assert tree != TokenTree(tree.parents) and pickle.loads(pickle.dumps(tree)) == tree


def test_golden_bytes():
    """The format is a promise: if this fails, raise the version."""
    data = to_bytes(TokenTree([-1, 0, 0, 1], {"solver": "dp", "budget": 4}))
    assert hashlib.sha256(data).hexdigest() == (
        "ca9e194fd47e6ff066ae37bb12218744d4a6faa3b82c63807bde82c2743db334"
    )


def test_unknown_tensors_and_keys_are_ignored(tmp_path):
    """What a later version 1 may add must not stop this one."""
    path = tampered(tmp_path, HEADER | {"plan": {"later": [1]}, "later": 2}, later=np.zeros(3))
    assert load_tree(path) == TokenTree.chain(4)


def test_a_hundred_thousand_levels_load(tmp_path):
    """No step takes time or memory that grows with the square of the size."""
    save_tree(TokenTree.chain(100_000), tmp_path / "t")
    tracemalloc.start()
    assert load_tree(tmp_path / "t").depth == 100_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * (tmp_path / "t").stat().st_size


def test_a_large_tree_stores_no_mask(tmp_path):
    save_tree(TokenTree.star(5000), tmp_path / "t")
    assert "attention_mask" not in load_file(tmp_path / "t")
    assert load_tree(tmp_path / "t").size == 5001


def tampered(tmp_path, header=HEADER, **tensors):
    """A tree file with the header or some tensors replaced, or left out if None."""
    save_tree(TokenTree.chain(4), tmp_path / "good")
    stored = load_file(tmp_path / "good") | tensors
    stored = {name: value for name, value in stored.items() if value is not None}
    save_file(stored, tmp_path / "bad", {"sequoia_plan": json.dumps(header)})
    return tmp_path / "bad"


def int32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(parents=int32(-1, 0, 2, 1)), r"parents\[2\] is 2"),
        (dict(parents=None), r"parents: expected a tensor I32 \[nodes\]"),
        (dict(ranks=None), "ranks contradicts parents; solve again"),
        *(
            (dict(header=HEADER | {"version": x}), f"version {x}, expected .*-tree, version 1")
            for x in (3, True, 1.0)
        ),
        (
            dict(header=HEADER | {"by_match": []}),
            "version 1, expected sequoia-plan-tree, version 2",
        ),
        (dict(header=HEADER | {"format": "sequoia-plan-draft"}), "found format 'sequoia-plan-dra"),
        (dict(header=HEADER | {"version": 2, "by_match": [[1, True]]}), "by_match.1.parents: exp"),
        (dict(header=HEADER | {"by_context": [[9, {"plan": {}}]]}), "by_context.9.parents: exp"),
        (dict(header=HEADER | {"by_context": [[0, {"plan": {}}]]}), "by_context.*>= 1"),
        (dict(header=HEADER | {"by_context": [[9, []]]}), "by_context.*expected `object`"),
    ],
)
def test_contradictions_are_refused(tmp_path, change, message):
    path = tampered(tmp_path, **change)
    with refusal(f"^{path}: .*{message}"):
        load_tree(path)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (3, "expected `object`, got `int`"),
        ({"hardware": {"a": [float("nan")]}}, "finite numbers"),
        ({"hardware": {"a": "\x1b[2J"}}, "printable text"),
        ({"hardware": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}, "at most 16 levels deep"),
        ({"profile_sha256": "ab"}, "profile_sha256: expected `str` matching regex"),
        ({"acceptance": [0.9, 0.9]}, "acceptance: found .* the sum 1.8"),
        ({"acceptance": [[0.5], [0.5, 0.1]]}, "acceptance: found .* of one length"),
    ],
)
def test_impossible_plans_are_neither_taken_nor_read(tmp_path, plan, message):
    with refusal(f"^plan: .*{message}"):
        TokenTree(TokenTree.chain(4).parents, plan)
    path = tampered(tmp_path, HEADER | {"plan": plan})
    with refusal(f"^{path}: .*({message}|found no format)"):
        load_tree(path)
