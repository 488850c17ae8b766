"""Files from anywhere: a reader returns their content or raises one SequoiaPlanError."""

from __future__ import annotations

import json
import random
import string

import independent_reader
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from strategies import trees

from sequoia_plan.artifacts import (
    Acceptance,
    Counts,
    Latency,
    Plan,
    Profile,
    SequoiaPlanError,
    TokenTree,
)
from sequoia_plan.artifacts.interchange import (
    from_growmap,
    from_medusa,
    from_nxd,
    parse,
    to_growmap,
    to_medusa,
    to_nxd,
)
from sequoia_plan.artifacts.tree_file import _tensors, from_bytes, to_bytes

PLAN = {
    "acceptance": [0.5, 0.25],
    "upper_bound": 9.5,
    "settings": {"temperature": 0.5},
    "models": {"draft": {"name": "d"}},
}
TREE = TokenTree(np.array([-1, 0, 0, 1, 1, 2, 3]), PLAN)
LATENCY = Latency(
    {1: 0.04, 8: 0.06},
    {1: 0.004},
    0.001,
    128,
    {1: 7},
    {"target": {1: (0.03, 0.05)}, "draft": {1: (0.003, 0.005)}},
    16,
)
COUNTS = Counts([[6, 0], [1, 1]], [[[3, 1], [0, 0]], [[1, 0], [0, 0]]])
PROFILE = Profile(
    Acceptance.counted(COUNTS),
    8,
    LATENCY,
    {"temperature": 0.6},
    {"target": {"name": "t"}},
    {"threads": 2},
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
    assert Plan.from_dict(plan) == tree.plan
    again = from_bytes(to_bytes(tree), "f")
    assert again == tree and again.plan == tree.plan
    return True


def read_foreign(data):
    """Whether `data` is accepted as another engine's tree; if so, it survives every format."""
    try:
        tree = parse(data)
    except SequoiaPlanError:
        return False
    assert (
        tree
        == from_medusa(to_medusa(tree))
        == from_nxd(to_nxd(tree))
        == from_growmap(to_growmap(tree))
    )
    return True


def read_profile(data):
    """Whether `data` is accepted as a profile; if so, it can be written and read again."""
    try:
        profile = Profile.from_bytes(data, "f")
    except SequoiaPlanError:
        return False
    assert Profile.from_bytes(profile.to_yaml().encode(), "f") == profile
    return True


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
    assert read_tree(whole)
    for length in range(len(whole)):
        assert not read_tree(whole[:length])
    for extra in (b"\0", b" ", whole):
        assert not read_tree(whole + extra)


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


@settings(max_examples=400)
@given(
    trees(9),
    st.dictionaries(st.sampled_from(sorted(_tensors(TREE))), arrays, max_size=2),
    json_values,
    st.booleans(),
)
def test_any_structure(tree, changed, plan, whole_header):
    """Tensors are replaced by others, and the plan or the whole metadata by any JSON.

    This includes NaN, deep nesting and wrong types.
    """
    header = plan if whole_header else {"format": "sequoia-plan-tree", "version": 1, "plan": plan}
    data = save({**_tensors(tree), **changed}, {"sequoia_plan": json.dumps(header)})
    valid = read_tree(data)
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
    meta = {"sequoia_plan": json.dumps({"format": "sequoia-plan-tree", "version": 1, "plan": {}})}
    for shape, offsets in (
        ([length], [0, len(tail)]),
        ([2**62, 4], [0, len(tail)]),
        ([1], [length, length + 4]),
        ([-1], [0, 4]),
        (header, header),
    ):
        text = json.dumps(
            {
                "__metadata__": meta,
                "parents": {"dtype": "I32", "shape": shape, "data_offsets": offsets},
            }
        ).encode()
        assert not read_tree(len(text).to_bytes(8, "little") + text + tail)


def replaced(document, path, value):
    """`document` with the item at `path` (drawn from its leaves) replaced."""
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def places(document, path=()):
    """Every place in a document of lists and mappings."""
    yield path
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


PROFILE_DOCUMENT = yaml.safe_load(PROFILE.to_yaml())


@settings(max_examples=300)
@given(st.sampled_from(sorted(places(PROFILE_DOCUMENT), key=str)), json_values)
def test_any_value_anywhere_in_a_profile(path, value):
    read_profile(yaml.safe_dump(replaced(PROFILE_DOCUMENT, path, value)).encode())


def test_any_character_anywhere_in_a_profile():
    text = PROFILE.to_yaml()
    pick = random.Random(0)
    for _ in range(1000):
        place = pick.randrange(len(text))
        inserted = pick.choice(string.printable + "\x00\u2028é")
        rest = text[place + pick.randrange(3) :]
        read_profile(f"{text[:place]}{inserted}{rest}".encode())


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [echo]",
        "9" * 5000,
        "2001-99-99",
        "!!binary x",
        "? {a: b}\n: c",
        "[" * 5000,
        "&a [*a]",
        "0x",
        "1:60",
        "\ud800",
    ],
)
def test_awkward_yaml(text):
    document = PROFILE.to_yaml()
    for content in (
        text,
        document.replace("trials: 8", f"trials: {text}"),
        document.replace("name: t", f"name: {text}"),
    ):
        read_profile(content.encode(errors="surrogatepass"))


DOCUMENTS = {"medusa": to_medusa(TREE), "nxd": to_nxd(TREE), "growmap": to_growmap(TREE)}


@settings(max_examples=400)
@given(
    st.sampled_from(
        [(name, path) for name, document in DOCUMENTS.items() for path in places(document)]
    ),
    json_values | st.integers(-1, 8),
)
def test_any_value_anywhere_in_a_foreign_tree(where, value):
    name, path = where
    valid = read_foreign(json.dumps(replaced(DOCUMENTS[name], path, value)).encode())
    if name == "growmap" and path and valid:
        # A growmap repeats everything, so no other value can stand anywhere.
        assert replaced(DOCUMENTS[name], path, value) == DOCUMENTS[name]
