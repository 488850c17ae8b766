"""Files from anywhere: a reader returns their content or raises one SequoiaPlanError."""

import json

import independent_reader
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from strategies import places, trees

from sequoia_plan.artifacts import Acceptance, Latency, Plan, Profile, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.interchange import FORMATS, parse
from sequoia_plan.artifacts.tree_file import _tensors, from_bytes, to_bytes

PLAN = {
    "acceptance": [0.5, 0.25],
    "upper_bound": 9.5,
    "settings": {"temperature": 0.5},
    "models": {"draft": {"name": "d"}},
}
HEADER = {"format": "sequoia-plan-tree", "version": 1, "plan": {}}
TREE = TokenTree(np.array([-1, 0, 0, 1, 1, 2, 3]), PLAN)
LEVELS = [{"trials": 6, "counts": [3.0, 1.0]}, {"trials": 2, "counts": [1.0, 0.0]}]
PROFILE = Profile(
    Acceptance.from_file(LEVELS),
    latency=Latency(
        {1: 0.04, 8: 0.06},
        {1: 0.004},
        0.001,
        128,
        samples={1: 7},
        quartiles={"target": {1: (0.03, 0.05)}, "draft": {1: (0.003, 0.005)}},
        out_of_memory=16,
    ),
    settings={"temperature": 0.6},
    models={"target": {"name": "t"}},
    hardware={"threads": 2},
)


def read_tree(data):
    """Whether `data` is accepted as a tree file.

    If so, an independent reader finds the same tree in it, and it can be written and read again.
    """
    try:
        tree = from_bytes(data, "f")
    except SequoiaPlanError:
        return False
    tensors, plan = independent_reader.read(data)
    assert tensors["parents"].tolist() == tree.parents.tolist()
    assert Plan.from_dict(plan, "plan") == tree.plan
    again = from_bytes(to_bytes(tree), "f")
    assert again == tree and again.plan == tree.plan
    return True


def read_foreign(document):
    """Whether a document is accepted as another engine's tree; if so, it survives every format."""
    try:
        tree = parse(document)
    except SequoiaPlanError:
        return False
    copies = [parse(to_format(tree)) for to_format in FORMATS.values()]
    assert copies == [tree] * len(FORMATS)
    return True


def read_profile(data):
    """Whether `data` is accepted as a profile; if so, it can be written and read again."""
    try:
        profile = Profile.from_bytes(data, "f")
    except SequoiaPlanError:
        return False
    assert Profile.from_bytes(profile.to_yaml().encode(), "f") == profile
    return True


@pytest.mark.slow
def test_every_flipped_bit_of_a_tree_file():
    """One bit at a time, more than 10,000 cases.

    Only a flip in the plan, or in a name that nobody reads, can leave a valid file.
    """
    whole = to_bytes(TokenTree(np.array([-1, *(node // 3 for node in range(29))]), PLAN))
    begin = 8 + int.from_bytes(whole[:8], "little")
    cases = accepted = 0
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            valid = read_tree(bytes(damaged))
            assert not (valid and place >= begin), "a changed tensor was accepted"
            accepted += valid
            cases += 1
    assert cases > 10_000
    assert 0 < accepted < cases / 10


def test_every_truncation_and_extension_of_a_tree_file():
    whole = to_bytes(TREE)
    assert read_tree(whole) and read_profile(PROFILE.to_yaml().encode())
    assert not any(read_tree(whole[:length]) for length in range(len(whole)))
    assert not any(read_tree(whole + extra) for extra in (b"\0", b" ", whole))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(sorted(PLAN)), inner, max_size=4)
    ),
    max_leaves=12,
)
arrays = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 4, shape).astype(dtype),
    st.sampled_from(["int32", "int64", "uint8", "float32", "bool"]),
    st.lists(st.integers(0, 8), max_size=3),
    st.integers(0, 99),
)


@settings(max_examples=250)
@given(
    trees(9),
    st.dictionaries(st.sampled_from(sorted(_tensors(TREE))), arrays, max_size=2),
    json_values,
    st.booleans(),
)
def test_any_structure(tree, changed, plan, is_whole_header):
    """Tensors are replaced by others, and the plan or the whole metadata by any JSON.

    This includes NaN, deep nesting and wrong types.
    """
    header = plan if is_whole_header else HEADER | {"plan": plan}
    valid = read_tree(save({**_tensors(tree), **changed}, {"sequoia_plan": json.dumps(header)}))
    consistent = all(np.array_equal(value, _tensors(tree)[name]) for name, value in changed.items())
    assert consistent or not valid


@settings(max_examples=200)
@given(st.binary(max_size=64), st.integers(0, 2**64 - 1), json_values)
def test_any_header(tail, length, header):
    """Headers that safetensors does not write.

    Lengths reach beyond the file, tensors overlap, shapes are huge.
    """
    read_tree(tail)
    read_tree(length.to_bytes(8, "little") + tail)
    text = json.dumps(header).encode()
    read_tree(len(text).to_bytes(8, "little") + text + tail)
    for shape, offsets in (
        ([length], [0, len(tail)]),
        ([2**62, 4], [0, len(tail)]),
        ([1], [length, length + 4]),
        ([-1], [0, 4]),
        (header, header),
    ):
        parents = {"dtype": "I32", "shape": shape, "data_offsets": offsets}
        entries = {"__metadata__": {"sequoia_plan": json.dumps(HEADER)}, "parents": parents}
        text = json.dumps(entries).encode()
        assert not read_tree(len(text).to_bytes(8, "little") + text + tail)


def replaced(document, path, value):
    """`document` with the item at `path` replaced."""
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


PROFILE_DOCUMENT = yaml.safe_load(PROFILE.to_yaml())


@settings(max_examples=300)
@given(st.sampled_from(sorted(places(PROFILE_DOCUMENT), key=str)), json_values)
def test_any_value_anywhere_in_a_profile(path, value):
    read_profile(yaml.safe_dump(replaced(PROFILE_DOCUMENT, path, value)).encode())


DOCUMENTS = {name: to_format(TREE) for name, to_format in FORMATS.items()}


@settings(max_examples=250)
@given(
    st.sampled_from(
        [(name, path) for name, document in DOCUMENTS.items() for path in places(document)]
    ),
    json_values | st.integers(-1, 8),
)
def test_any_value_anywhere_in_a_foreign_tree(where, value):
    name, path = where
    document = replaced(DOCUMENTS[name], path, value)
    valid = read_foreign(document)
    if name == "growmap" and path and valid:
        # A growmap repeats everything, so no other value can stand anywhere.
        assert document == DOCUMENTS[name]
