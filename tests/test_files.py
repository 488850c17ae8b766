"""Tree and profile files: round trips, stable bytes, and one clear line for everything that is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from strategies import acceptance_vectors, trees

from sequoia_plan.artifacts import Latency, Profile, SequoiaPlanError, TokenTree, load_tree, save_tree

PROFILE = Profile(
    acceptance=(0.5, 0.125),
    trials=800,
    latency=Latency({1: 0.04, 2: 0.041, 8: 0.06}, {1: 0.004, 8: 0.005}, 0.001, 128),
    settings={"temperature": 0.6, "top_p": 1.0, "verifier": "sequoia"},
    models={"target": {"name": "t", "digest": "00", "dtype": "float32"}},
    hardware={"device": "cpu", "threads": 2},
)


@given(trees(), acceptance_vectors())
def test_tree_round_trip_and_byte_stability(tmp_path_factory, tree, acceptance):
    path = tmp_path_factory.mktemp("tree") / "t.safetensors"
    tree = TokenTree(tree.parents, {"expected_tokens": 1.5, "acceptance": acceptance})
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
    assert hashlib.sha256((tmp_path / "t").read_bytes()).hexdigest() == "a47794210870b368d184f904255268f97313c0e17195289e175659ebb7fdb817"


def test_tree_file_contents(tmp_path):
    tree = TokenTree.from_parents([-1, *(node // 3 for node in range(20))])
    save_tree(tree, tmp_path / "t")
    stored = load_file(tmp_path / "t")
    mask = np.unpackbits(stored["attention_mask"], axis=1, count=tree.size, bitorder="little").astype(bool)
    assert np.array_equal(mask, tree.attention_mask)
    assert {name: str(array.dtype) for name, array in stored.items() if name != "attention_mask"} == dict.fromkeys(
        ("parents", "ranks", "position_ids", "first_child", "child_count", "level_offsets"), "int32"
    )


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
        ({"header": {"format": "sequoia-plan-tree", "version": 2, "plan": {}}}, "tree file version 2, expected 1; solve again"),
        ({"header": {"format": "sequoia-plan-draft", "version": 1}}, "not a tree file"),
        ({"header": []}, "not a tree file"),
        ({"header": {"format": "sequoia-plan-tree", "version": 1, "plan": 3}}, "plan: found 3, expected a mapping"),
        ({"header": {"format": "sequoia-plan-tree", "version": 1}}, "without its plan"),
    ],
)
def test_tree_file_refuses_contradictions(tmp_path, change, message):
    path = tampered(tmp_path, **change)
    with pytest.raises(SequoiaPlanError, match=message) as error:
        load_tree(path)
    assert str(path) in str(error.value)


def test_every_truncation_of_a_tree_file_is_refused(tmp_path):
    save_tree(TokenTree.star(6), tmp_path / "t")
    whole = (tmp_path / "t").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "t").write_bytes(whole[:length])
        with pytest.raises(SequoiaPlanError):
            load_tree(tmp_path / "t")


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 200, b"\x00" * 64, b"GGUF" + b"\x01" * 60])
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


def test_writing_fails_cleanly_and_keeps_the_old_file(tmp_path, monkeypatch):
    save_tree(TokenTree.chain(2), tmp_path / "t")
    before = (tmp_path / "t").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SequoiaPlanError, match="No space left"):
        save_tree(TokenTree.chain(3), tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    monkeypatch.undo()
    with pytest.raises(SequoiaPlanError, match="cannot be written"):
        save_tree(TokenTree.chain(3), tmp_path / "none" / "t")
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o644


def test_profile_round_trip_and_byte_stability(tmp_path):
    PROFILE.save(tmp_path / "p.yaml")
    loaded = Profile.load(tmp_path / "p.yaml")
    assert loaded == PROFILE
    assert loaded.to_yaml() == PROFILE.to_yaml()


@given(acceptance_vectors(), st.dictionaries(st.integers(1, 9), st.floats(1e-6, 10), max_size=5))
def test_profile_round_trip_any_numbers(tmp_path_factory, acceptance, curve):
    path = tmp_path_factory.mktemp("profile") / "p.yaml"
    profile = Profile(tuple(acceptance), 3, Latency({1: 0.5} | curve, {2: 0.1} | curve, 0.0, 7))
    profile.save(path)
    assert Profile.load(path) == profile


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: 9", "profile version 9, expected 1"),
        ("format: sequoia-plan-profile", "format: x", "not a profile"),
        ("1: 0.04,", "1: -0.04,", r"latency.target\[1\]: found -0.04, expected seconds > 0"),
        ("1: 0.04,", "1: .nan,", r"latency.target\[1\]: found nan"),
        ("1: 0.04,", "1: fast,", r"latency.target\[1\]: found 'fast'"),
        ("{1: 0.04,", "{0: 0.04,", "latency.target: found 0 tokens"),
        ("{1: 0.04,", "{3: 0.04,", "no measurement at 1 token"),
        ("overhead: 0.001", "overhead: -1", "latency.overhead: found -1"),
        ("[0.5, 0.125]", "[0.9, 0.125]", "sums to 1.025, expected at most 1"),
        ("[0.5, 0.125]", "[0.5, -0.125]", r"p\[2\] is -0.125"),
        ("[0.5, 0.125]", "[]", "non-empty list"),
        ("[0.5, 0.125]", "0.5", "non-empty list"),
        ("[0.5, 0.125]", "[.nan]", r"p\[1\] is nan"),
        ("trials: 800", "trials: many", "acceptance.trials: found 'many'"),
        ("acceptance:", "accepted:", "acceptance: found None, expected a mapping"),
        ("trials: 800", "trials: ]800", "not YAML at line"),
    ],
)
def test_profile_refuses(tmp_path, old, new, message):
    text = PROFILE.to_yaml()
    assert old in text
    (tmp_path / "p.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(SequoiaPlanError, match=message) as error:
        Profile.load(tmp_path / "p.yaml")
    assert "p.yaml" in str(error.value)
