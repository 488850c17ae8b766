"""Tree files: round trips, stable bytes, and one clear line for everything that is wrong."""

from __future__ import annotations

import hashlib
import json
import re
import tracemalloc
from pathlib import Path

import independent_reader
import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import load_file, save_file
from strategies import acceptance_vectors, trees

from sequoia_plan.artifacts import Profile, SequoiaPlanError, TokenTree, load_tree, save_tree
from sequoia_plan.artifacts.tree_file import to_bytes


@given(trees(), acceptance_vectors())
def test_an_independent_reader_agrees(tree, acceptance):
    """tests/helpers/independent_reader.py knows docs/format.md and nothing of the package."""
    tree = TokenTree(
        tree.parents, {"acceptance": acceptance, "settings": {"temperature": 0.6}, "bound": [1.5]}
    )
    tensors, plan = independent_reader.read(to_bytes(tree))
    assert plan == tree.plan.to_dict()
    assert tensors["parents"].tolist() == tree.parents.tolist()
    assert tensors["ranks"].tolist() == tree.ranks.tolist()
    assert tensors["position_ids"].tolist() == tree.position_ids.tolist()
    assert tensors["first_child"].tolist() == tree.first_child.tolist()
    assert tensors["child_count"].tolist() == tree.child_count.tolist()
    assert tensors["level_offsets"].tolist() == tree.level_offsets.tolist()
    assert np.array_equal(
        np.unpackbits(tensors["attention_mask"], axis=1, count=tree.size, bitorder="little"),
        tree.attention_mask,
    )


def test_the_independent_reader_is_short_and_independent():
    source = Path(independent_reader.__file__).read_text()
    assert len(source.splitlines()) <= 60
    assert "sequoia_plan." not in source and re.findall(
        r"^import (\w+)|^from (\w+)", source, re.M
    ) == [("json", ""), ("numpy", "")]


@given(trees(), acceptance_vectors())
def test_tree_round_trip_and_byte_stability(tmp_path_factory, tree, acceptance):
    path = tmp_path_factory.mktemp("tree") / "t.safetensors"
    tree = TokenTree(tree.parents, {"solver": "dp", "acceptance": acceptance})
    save_tree(tree, path)
    first = path.read_bytes()
    loaded = load_tree(path)
    assert loaded == tree
    assert loaded.plan == tree.plan
    save_tree(loaded, path)
    assert path.read_bytes() == first


def test_tree_file_golden_bytes(tmp_path):
    """The format is a promise: if this fails, raise the version."""
    save_tree(TokenTree.from_parents([-1, 0, 0, 1], {"b": 1, "a": [0.5]}), tmp_path / "t")
    assert (
        hashlib.sha256((tmp_path / "t").read_bytes()).hexdigest()
        == "a47794210870b368d184f904255268f97313c0e17195289e175659ebb7fdb817"
    )


def test_tree_file_contents(tmp_path):
    tree = TokenTree.from_parents([-1, *(node // 3 for node in range(20))])
    save_tree(tree, tmp_path / "t")
    stored = load_file(tmp_path / "t")
    mask = np.unpackbits(
        stored["attention_mask"], axis=1, count=tree.size, bitorder="little"
    ).astype(bool)
    assert np.array_equal(mask, tree.attention_mask)
    assert {
        name: str(array.dtype) for name, array in stored.items() if name != "attention_mask"
    } == dict.fromkeys(
        ("parents", "ranks", "position_ids", "first_child", "child_count", "level_offsets"), "int32"
    )


def test_extra_tensors_and_plan_keys_are_ignored(tmp_path):
    """What a later version 1 may add must not stop this one."""
    path = tampered(
        tmp_path,
        {"format": "sequoia-plan-tree", "version": 1, "plan": {"later": [1]}, "later": 2},
        later=np.zeros(3),
    )
    assert load_tree(path) == TokenTree.chain(4)
    assert load_tree(path).plan.to_dict() == {"later": [1]}


def test_a_million_levels_load(tmp_path):
    """No step takes time or memory that grows with the square of the size."""
    save_tree(TokenTree.chain(1_000_000), tmp_path / "t")
    tracemalloc.start()
    assert load_tree(tmp_path / "t").depth == 1_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * (tmp_path / "t").stat().st_size


def test_large_tree_stores_no_mask(tmp_path):
    save_tree(TokenTree.star(5000), tmp_path / "t")
    assert "attention_mask" not in load_file(tmp_path / "t")
    assert load_tree(tmp_path / "t").size == 5001


def tampered(tmp_path, header=None, **tensors):
    """A tree file with some tensors or the header replaced."""
    save_tree(TokenTree.chain(4), tmp_path / "good")
    stored = load_file(tmp_path / "good") | tensors
    stored = {name: value for name, value in stored.items() if value is not None}
    header = {"format": "sequoia-plan-tree", "version": 1, "plan": {}} if header is None else header
    save_file(stored, tmp_path / "bad", {"sequoia_plan": json.dumps(header)})
    return tmp_path / "bad"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": np.array([-1, 0, 2, 1], np.int32)}, r"parents\[2\] is 2"),
        ({"parents": None}, "without its parents"),
        ({"ranks": None}, "ranks is missing"),
        ({"ranks": np.zeros(4, np.int32)}, "ranks contradicts parents"),
        ({"attention_mask": np.zeros((4, 1), np.uint8)}, "attention_mask contradicts parents"),
        ({"position_ids": np.arange(4)}, r"position_ids is I64 \[4\], expected I32 \[4\]"),
        (
            {"parents": np.array([[-1, 0, 1, 2]], np.int32)},
            r"parents is I32 \[1, 4\], expected I32 \[nodes\]; solve again",
        ),
        (
            {"parents": np.array([-1, 0, 1, 2])},
            r"parents is I64 \[4\], expected I32 \[nodes\]; solve again",
        ),
        ({"parents": np.array([], np.int32)}, "parents must be a non-empty list of integers"),
        (
            {"level_offsets": np.array([0, 1, 2, 4], np.int32)},
            r"level_offsets is I32 \[4\], expected I32 \[5\]; solve again",
        ),
        (
            {"header": {"format": "sequoia-plan-tree", "version": True, "plan": {}}},
            "tree file version True, expected 1",
        ),
        (
            {"header": {"format": "sequoia-plan-tree", "version": 3, "plan": {}}},
            "tree file version 3, expected 1 or 2; solve again",
        ),
        ({"header": {"format": "sequoia-plan-draft", "version": 1}}, "not a tree file"),
        ({"header": []}, "not a tree file"),
        (
            {"header": {"format": "sequoia-plan-tree", "version": 1, "plan": 3}},
            "plan: found 3, expected a mapping",
        ),
        ({"header": {"format": "sequoia-plan-tree", "version": 1}}, "without its plan"),
    ],
)
def test_tree_file_refuses_contradictions(tmp_path, change, message):
    path = tampered(tmp_path, **change)
    with pytest.raises(SequoiaPlanError, match=message) as error:
        load_tree(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"a": 1.0 + 2j},
            "plan.a: found a complex, expected text, numbers, true, false, null, or lists and "
            "mappings of these",
        ),
        ({"a": [float("nan")]}, "plan.a[0]: found nan, expected a finite number"),
        ({"a": {"b": 2**63}}, "plan.a.b: found a whole number beyond 64 bits"),
        ({"a": "\x1b[2J"}, "plan.a: found '\\x1b[2J', expected printable text"),
        ({1: 2}, "plan: found the key 1, expected printable text"),
        ({"a": [[[[[[[[1]]]]]]]]}, "plan: nested deeper than 8 levels"),
        ({"budget": 0}, "plan.budget: found 0, expected a whole number >= 1"),
        ({"effective_trials": -1}, "plan.effective_trials: found -1, expected a whole number >= 0"),
        ({"solver": 1}, "plan.solver: found 1, expected text"),
        (
            {"profile_sha256": "ab"},
            "plan.profile_sha256: found 'ab', expected 64 hexadecimal digits",
        ),
        ({"expected_tokens": 0.5}, "plan.expected_tokens: found 0.5, expected a number >= 1"),
        ({"step_seconds": 0}, "plan.step_seconds: found 0, expected seconds from 1e-12 to 1e12"),
        (
            {"predicted_speedup": 2.0},
            "plan.predicted_speedup: found without step_seconds, expected both or neither",
        ),
        ({"settings": []}, "plan.settings: found [], expected a mapping"),
        (
            {"settings": {"temperature": "hot"}},
            "plan.settings.temperature: found 'hot', expected a number >= 0",
        ),
        (
            {"settings": {"top_p": 0}},
            "plan.settings.top_p: found 0, expected a number > 0 and <= 1",
        ),
        ({"models": {"draft": "d"}}, "plan.models.draft: found 'd', expected a mapping"),
        (
            {"latency": {"target": [[0, 1.0]], "draft": [[1, 1.0]]}},
            "plan.latency.target: found the key 0, expected a whole number >= 1",
        ),
        (
            {"latency": {"target": [[1]], "draft": [[1, 1.0]]}},
            "plan.latency.target: found [[1]], expected a list of [tokens, seconds]",
        ),
        (
            {"latency": {"target": [[1, 1.0]], "draft": [[2, 1.0], [2, 2.0]]}},
            "plan.latency.draft: found [[2, 1.0], [2, 2.0]], expected each size once",
        ),
        (
            {"interval": {"lost": [0.1]}},
            "plan.interval.lost: found [0.1], expected [a number >= 0, a number >= 0]",
        ),
        (
            {"acceptance": [0.9, 0.9]},
            "plan.acceptance: sums to 1.8, expected at most 1 (at most one child is accepted)",
        ),
    ],
)
def test_impossible_plans_are_neither_written_nor_read(tmp_path, plan, message):
    with pytest.raises(SequoiaPlanError) as error:
        TokenTree(TokenTree.chain(4).parents, plan)
    assert str(error.value) == message
    try:
        text = json.dumps(plan, allow_nan=False)
    except (TypeError, ValueError):
        return
    if json.loads(text) == plan:
        with pytest.raises(SequoiaPlanError) as error:
            load_tree(
                tampered(tmp_path, {"format": "sequoia-plan-tree", "version": 1, "plan": plan})
            )
        assert str(error.value) == f"{tmp_path / 'bad'}: {message}"


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\xff" * 200, b"\x00" * 64, b"GGUF" + b"\x01" * 60]
)
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(SequoiaPlanError, match="not a tree file"):
        load_tree(tmp_path / "t")
    with pytest.raises(SequoiaPlanError, match=r"not a profile|not YAML"):
        Profile.load(tmp_path / "t")


@pytest.mark.parametrize("read", [load_tree, Profile.load])
def test_missing_file_or_folder(tmp_path, read):
    with pytest.raises(SequoiaPlanError, match="No such file"):
        read(tmp_path / "nothing")
    with pytest.raises(SequoiaPlanError, match="Is a directory"):
        read(tmp_path)
