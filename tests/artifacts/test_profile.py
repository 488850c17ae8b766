"""Profiles: round trips, the hash of the content, one clear line for each error, and provenance."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from strategies import acceptance_vectors

from sequoia_plan.artifacts import (
    Acceptance,
    Latency,
    LevelCounts,
    Profile,
    SequoiaPlanError,
    TokenTree,
)
from sequoia_plan.artifacts.counts import Counts
from sequoia_plan.artifacts.plan import provenance
from sequoia_plan.artifacts.tree_file import from_bytes, to_bytes

PROFILE = Profile(
    acceptance=Acceptance.given((0.5, 0.125)),
    trials=800,
    latency=Latency({1: 0.04, 2: 0.041, 8: 0.06}, {1: 0.004, 8: 0.005}, 0.001, 128),
    settings={"temperature": 0.6, "top_p": 1.0, "verifier": "sequoia"},
    models={"target": {"name": "t", "digest": "00", "dtype": "float32"}},
    hardware={"device": "cpu", "threads": 2},
)


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
        (
            "1: 0.04,",
            "1: -0.04,",
            r"latency.target\[1\]: found -0.04, expected seconds from 1e-12 to 1e12",
        ),
        ("1: 0.04,", "1: .nan,", r"latency.target\[1\]: found nan"),
        ("1: 0.04,", "1: fast,", r"latency.target\[1\]: found 'fast'"),
        ("{1: 0.04,", "{0: 0.04,", "latency.target: found the key 0, expected a whole number >= 1"),
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
        (
            "trials: 800",
            "trials: 1.5",
            "acceptance.trials: found 1.5, expected a whole number >= 0",
        ),
        ("context: 128", "context: -1", "latency.context: found -1, expected a whole number >= 0"),
        ("settings: {", "settings: 3 # {", "settings: found 3, expected a mapping"),
        ("threads: 2", "threads: 2001-01-01", "hardware.threads: found a date, expected text"),
        ("threads: 2", "threads: 2001-99-99", "not YAML"),
        (
            "threads: 2",
            "threads: [[[[[[[[[[[[[[[[[[1",
            "nested deeper than 16 levels; expected a profile",
        ),
        ("threads: 2", "threads: &a 2, b: *a", r"holds the YAML alias \*a; write the value itself"),
    ],
)
def test_profile_refuses(tmp_path, old, new, message):
    text = PROFILE.to_yaml()
    assert old in text
    (tmp_path / "p.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(SequoiaPlanError, match=message) as error:
        Profile.load(tmp_path / "p.yaml")
    assert "p.yaml" in str(error.value)


def test_profile_hash_is_of_the_content(tmp_path):
    """Comments and layout do not change it; every number does."""
    (tmp_path / "p.yaml").write_text(
        "# mine\n" + PROFILE.to_yaml().replace("trials: 800", "trials:   800")
    )
    assert (
        Profile.load(tmp_path / "p.yaml").sha256
        == PROFILE.sha256
        == "1818a67a32dde66e376d3c674bd00a1cfa01067308233bf049bf37c635a3b91d"
    )
    (tmp_path / "p.yaml").write_text(PROFILE.to_yaml().replace("trials: 800", "trials: 801"))
    assert Profile.load(tmp_path / "p.yaml").sha256 != PROFILE.sha256


COUNTED = replace(
    PROFILE, levels=(LevelCounts(600, (300.25, 75.0)), LevelCounts(200, (99.75, 25.0)))
)


def test_a_profile_of_an_earlier_version_with_the_acceptance_ratio_loads(tmp_path):
    """Earlier versions wrote acceptance.lift; the key is read over, and not written again."""
    lift = (
        "  lift:\n    ratio: [1.0, 1.02]\n    ranks: [3, 2]\n"
        "    covariance: [[0.0, 0.0], [0.0, 0.1]]\n"
    )
    text = COUNTED.to_yaml().replace("latency:", lift + "latency:", 1)
    assert lift in text
    (tmp_path / "p.yaml").write_text(text)
    loaded = Profile.load(tmp_path / "p.yaml")
    assert loaded == COUNTED and loaded.to_yaml() == COUNTED.to_yaml()


def test_counts_by_level_survive(tmp_path):
    COUNTED.save(tmp_path / "p.yaml")
    assert Profile.load(tmp_path / "p.yaml") == COUNTED
    assert COUNTED.sha256 == "e4ab411d506bb2fbb6152d0790ee97fb5e613796605d3baa15f9498b561e1e5f"
    assert COUNTED.acceptance_by_level == ((300.25 / 600, 0.125), (99.75 / 200, 0.125))
    assert PROFILE.acceptance_by_level == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "trials: 600",
            "trials: -1",
            r"acceptance.levels\[0\].trials: found -1, expected a whole number",
        ),
        ("trials: 200", "trials: .inf", r"acceptance.levels\[1\].trials: found inf"),
        ("trials: 200", "trials: 1" + "0" * 400, r"acceptance.levels\[1\].trials: found 100"),
        (
            "trials: 200",
            "trials: 100",
            r"levels\[1\].counts: sum to 124.75, expected at most 100 trials",
        ),
        ("[99.75, 25.0]", "[99.75]", r"levels\[1\].counts: found 1 ranks, expected 2"),
        (
            "[99.75, 25.0]",
            "[99.75, -1]",
            r"levels\[1\].counts\[1\]: found -1, expected a number >= 0",
        ),
        ("[99.75, 25.0]", "[]", r"levels\[1\].counts: found \[\], expected numbers >= 0"),
        (
            "counts: [300.25, 75.0]",
            "count: 7",
            r"acceptance.levels\[0\].counts: found None, expected numbers >= 0",
        ),
    ],
)
def test_counts_by_level_are_checked(tmp_path, old, new, message):
    text = COUNTED.to_yaml()
    assert old in text
    (tmp_path / "p.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(SequoiaPlanError, match=message):
        Profile.load(tmp_path / "p.yaml")


CLASS_COUNTS = replace(
    PROFILE,
    levels=(
        LevelCounts(600, (300.25, 75.0)),
        LevelCounts(2000, (997.5, 250.0), Counts(790, (158.0, 79.0))),
    ),
)


def test_counts_by_class_survive(tmp_path):
    CLASS_COUNTS.save(tmp_path / "p.yaml")
    assert Profile.load(tmp_path / "p.yaml") == CLASS_COUNTS
    root = (300.25 / 600, 0.125)
    assert CLASS_COUNTS.acceptance_by_class[0] == (root, root)
    assert CLASS_COUNTS.acceptance_by_class[1][0] == pytest.approx(
        (839.5 / 1210, 171 / 1210), abs=0.002
    )
    assert CLASS_COUNTS.acceptance_by_class[1][1] == pytest.approx((0.2, 0.1), abs=0.002)
    assert CLASS_COUNTS.acceptance_by_level == (root, (997.5 / 2000, 0.125))
    assert COUNTED.acceptance_by_class == PROFILE.acceptance_by_class == ()
    assert (
        CLASS_COUNTS.sha256
        != replace(
            CLASS_COUNTS,
            levels=(CLASS_COUNTS.levels[0], replace(CLASS_COUNTS.levels[1], off_spine=None)),
        ).sha256
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "trials: 790",
            "trials: 2400",
            r"levels\[1\].off_spine: found 2400 of 2000 trials.* expected a part of the level's",
        ),
        (
            "[158.0, 79.0]",
            "[158.0, 280.0]",
            r"levels\[1\].off_spine: found 790 of 2000 trials, with counts that sum to 438 of "
            r"1247.5; expected a part",
        ),
        (
            "trials: 790",
            "trials: 1200",
            r"levels\[1\].off_spine: found 1200 of 2000 trials.* whose rest holds at most one "
            r"accepted child",
        ),
        (
            "[158.0, 79.0]",
            "[800.0, 80.0]",
            r"levels\[1\].off_spine.counts: sum to 880, expected at most 790 trials",
        ),
        ("[158.0, 79.0]", "[158.0]", r"levels\[1\].off_spine.counts: found 1 ranks, expected 2"),
        ("trials: 790", "trials: -1", r"off_spine.trials: found -1, expected a whole number"),
        (
            "off_spine:\n      trials: 790\n      counts: [158.0, 79.0]",
            "off_spine: 3",
            r"off_spine: found 3, expected a mapping",
        ),
    ],
)
def test_counts_by_class_are_checked(tmp_path, old, new, message):
    text = CLASS_COUNTS.to_yaml()
    assert old in text
    (tmp_path / "p.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(SequoiaPlanError, match=message):
        Profile.load(tmp_path / "p.yaml")


def test_classes_of_kinds_add_up():
    first = CLASS_COUNTS.levels[0]
    parts = (
        [LevelCounts(900, (400.0, 150.0), Counts(n, (58.0, n - 251.0))) for n in (290, 400)],
        LevelCounts(1100, (597.5, 100.0), Counts(500, (100.0, 40.0))),
    )
    nothing = LevelCounts(0, (0.0, 0.0))
    assert (
        replace(
            CLASS_COUNTS, kinds={"a": (first, parts[0][0]), "b": (nothing, parts[1])}
        ).acceptance_by_class
        == CLASS_COUNTS.acceptance_by_class
    )
    for wrong in (parts[0][1], replace(parts[0][0], off_spine=None)):
        with pytest.raises(
            SequoiaPlanError,
            match=r"acceptance.kinds: found .* trials off the spine on level 1, expected 790 "
            r"together",
        ):
            replace(CLASS_COUNTS, kinds={"a": (first, wrong), "b": (nothing, parts[1])})


KINDS = replace(
    COUNTED,
    kinds={
        "code": (LevelCounts(350, (200.25, 50.0)), LevelCounts(200, (99.75, 25.0))),
        "no: 1": (LevelCounts(250, (100.0, 25.0)), LevelCounts(0, (0.0, 0.0))),
    },
)


def test_counts_by_kind_survive(tmp_path):
    KINDS.save(tmp_path / "p.yaml")
    loaded = Profile.load(tmp_path / "p.yaml")
    assert loaded == KINDS
    trials = [[level.trials for level in levels] for levels in loaded.kinds.values()]
    counts = np.array([[level.counts for level in levels] for levels in loaded.kinds.values()])
    assert trials == [[350, 200], [250, 0]]
    assert counts.sum(0).tolist() == [[300.25, 75.0], [99.75, 25.0]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "trials: 350",
            "trials: 340",
            r"acceptance.kinds: found 590 trials on level 0, expected every level in each kind, "
            r"and 600 trials",
        ),
        (
            "    - trials: 0\n      counts: [0.0, 0.0]\n",
            "",
            r"acceptance.kinds: found 600 trials on level 0, expected every level in each kind",
        ),
        (
            "counts: [100.0, 25.0]",
            "counts: [100.0]",
            r"acceptance.kinds.no: 1\[0\].counts: found 1 ranks, expected 2",
        ),
        (
            "counts: [100.0, 25.0]",
            "counts: [300.0, 25.0]",
            r"acceptance.kinds.no: 1\[0\].counts: sum to 325, expected at most 250 trials",
        ),
        (
            "code:",
            "7:",
            r"acceptance.kinds: found the key 7, expected printable text of 1 to 60 characters",
        ),
        ("code:", "c" * 61 + ":", r"acceptance.kinds: found the key 'cc"),
    ],
)
def test_counts_by_kind_are_checked(tmp_path, old, new, message):
    text = KINDS.to_yaml()
    assert old in text
    (tmp_path / "p.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(SequoiaPlanError, match=message):
        Profile.load(tmp_path / "p.yaml")


SPREAD = {"target": {1: (0.039, 0.042), 8: (0.06, 0.06)}, "draft": {8: (0.004, 0.006)}}


def test_spread_of_times_survives_and_is_checked(tmp_path):
    timed = replace(
        PROFILE,
        latency=replace(PROFILE.latency, samples={1: 9, 8: 5}, quartiles=SPREAD, out_of_memory=64),
    )
    timed.save(tmp_path / "p.yaml")
    assert Profile.load(tmp_path / "p.yaml") == timed
    for old, new, message in (
        (
            "{1: 9, 8: 5}",
            "{1: -9, 8: 5}",
            r"latency.samples\[1\]: found -9, expected a whole number >= 1",
        ),
        (
            "{1: 9, 8: 5}",
            "{7: 9}",
            "latency.samples: found the size 7, expected sizes that were measured",
        ),
        ("{1: 9, 8: 5}", "9", "latency.samples: found 9, expected a mapping of"),
        ("out_of_memory: 64", "out_of_memory: 0", "latency.out_of_memory: found 0"),
        (
            "[0.039, 0.042]",
            "[0.042, 0.039]",
            r"latency.quartiles.target\[1\]: found \[0.042, 0.039\], expected a measured size",
        ),
        (
            "8: [0.06, 0.06]",
            "9: [0.06, 0.06]",
            r"latency.quartiles.target\[9\]: found \[0.06, 0.06\], expected a measured size",
        ),
        (
            "[0.06, 0.06]",
            "[0.06]",
            r"latency.quartiles.target\[8\]: found \[0.06\], expected \[seconds from 1e-12 "
            r"to 1e12, seconds from 1e-12 to 1e12\]",
        ),
        ("[0.06, 0.06]", "0.06", r"latency.quartiles.target\[8\]: found 0.06, expected \[seconds"),
        ("quartiles:", "quartiles: 3 #", "not YAML|latency.quartiles: found"),
    ):
        assert old in timed.to_yaml()
        (tmp_path / "p.yaml").write_text(timed.to_yaml().replace(old, new, 1))
        with pytest.raises(SequoiaPlanError, match=message):
            Profile.load(tmp_path / "p.yaml")


def test_a_large_profile_is_refused(tmp_path):
    (tmp_path / "p.yaml").write_text(PROFILE.to_yaml() + "#" * 1_100_000)
    with pytest.raises(
        SequoiaPlanError,
        match="larger than 1048576 bytes; expected a profile written by sequoia-plan profile",
    ):
        Profile.load(tmp_path / "p.yaml")


def test_a_plan_says_where_it_comes_from():
    """It names tool, profile, trials, settings, models, machine, and the latencies used."""
    plan = provenance(PROFILE)
    assert plan.to_dict() == {
        "tool": f"sequoia-plan {version('sequoia-plan')}",
        "profile_sha256": PROFILE.sha256,
        "trials": 800,
        "settings": {"temperature": 0.6, "top_p": 1.0, "verifier": "sequoia"},
        "models": {"target": {"name": "t", "digest": "00", "dtype": "float32"}},
        "hardware": {"device": "cpu", "threads": 2},
        "latency": {
            "context": 128,
            "overhead": 0.001,
            "target": [[1, 0.04], [2, 0.041], [8, 0.06]],
            "draft": [[1, 0.004], [8, 0.005]],
        },
    }
    tree = TokenTree(TokenTree.chain(2).parents, plan)
    assert from_bytes(to_bytes(tree), "t").plan == plan
    assert provenance(None).to_dict() == {"tool": plan.tool}
