"""Profiles: round trips, the hash of the content, one clear line for each error, and provenance."""

from importlib.metadata import version

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from refusals import refusal
from strategies import acceptance_vectors

from sequoia_plan.artifacts import (
    Acceptance,
    Counts,
    Latency,
    Plan,
    Profile,
    TokenTree,
)
from sequoia_plan.artifacts.counts import ClassCounts
from sequoia_plan.artifacts.plan import provenance
from sequoia_plan.artifacts.tree_file import from_bytes, to_bytes

PROFILE = Profile(
    acceptance=Acceptance.given((0.5, 0.125)),
    latency=Latency({1: 0.04, 2: 0.041, 8: 0.06}, {1: 0.004, 8: 0.005}, 0.001, 128),
    settings={"temperature": 0.6, "top_p": 1.0, "verifier": "sequoia"},
    models={"target": {"name": "t", "digest": "00", "dtype": "float32"}},
    hardware={"device": "cpu", "threads": 2},
)


@given(acceptance_vectors(), st.dictionaries(st.integers(1, 9), st.floats(1e-6, 10), max_size=5))
def test_profile_round_trip_any_numbers(acceptance, curve):
    given = Acceptance.given(acceptance)
    profile = Profile(given, Latency({1: 0.5} | curve, {2: 0.1} | curve, 0.0, 7))
    assert Profile.from_bytes(profile.to_yaml().encode(), "p") == profile


@pytest.mark.parametrize("digest", ["1234567e90123456", "12345678901234e2", "0987654321098765"])
def test_texts_that_look_like_numbers_stay_texts(digest):
    profile = replace(PROFILE, models={"target": {"name": "1e5", "digest": digest}})
    assert Profile.from_bytes(profile.to_yaml().encode(), "p") == profile


@pytest.mark.parametrize("contexts", [(0, 4096), (4096, 256), (256, 256), (128, 1024, 512)])
def test_longer_contexts_ascend(contexts):
    first, *longer = (Latency({1: 0.5}, {1: 0.1}, 0.0, context) for context in contexts)
    with refusal("longer: found the contexts"):
        replace(PROFILE, latency=first, longer=tuple(longer))


def test_profile_hash_is_of_the_content():
    """Comments and layout do not change it; every number does."""
    for context, is_same in (("  128", True), (" 129", False)):
        text = "# comment\n" + PROFILE.to_yaml().replace("context: 128", f"context:{context}")
        assert (Profile.from_bytes(text.encode(), "p").sha256 == PROFILE.sha256) == is_same


def with_counts(counts, **prompts):
    return replace(PROFILE, acceptance=Acceptance.counted(counts), prompts=prompts)


ROOT = [[300.25, 75.0], [0.0, 0.0]]
BY_LEVEL = with_counts(Counts([[600], [200]], [[ROOT[0]], [[99.75, 25.0]]]))
BY_CLASS = with_counts(Counts([[600, 0], [1210, 790]], [ROOT, [[839.5, 171.0], [158.0, 79.0]]]))
BY_KIND = with_counts(
    BY_LEVEL.acceptance.counts,
    **{
        "code": (ClassCounts(350, (200.25, 50.0)), ClassCounts(200, (99.75, 25.0))),
        "no: 1": (ClassCounts(250, (100.0, 25.0)),),
    },
)
COUNTED = {"by level": BY_LEVEL, "by class": BY_CLASS, "by kind": BY_KIND}


@pytest.mark.parametrize("profile", COUNTED.values(), ids=COUNTED)
def test_counts_survive(profile):
    loaded = Profile.from_bytes(profile.to_yaml().encode(), "p")
    assert loaded == profile and loaded.to_yaml() == profile.to_yaml()


def test_rates_are_those_of_the_counts():
    assert BY_LEVEL.acceptance.rates.tolist() == [[[0.500417, 0.125]], [[0.49875, 0.125]]]
    assert BY_LEVEL.acceptance.pooled().tolist() == [0.5, 0.125]
    rates = BY_CLASS.acceptance.rates
    assert rates[0].tolist() == [[0.500417, 0.125]] * 2
    assert rates[1] == pytest.approx(np.array([[839.5 / 1210, 171 / 1210], [0.2, 0.1]]), abs=0.002)
    one_class = BY_CLASS.acceptance.with_one_class().rates
    assert one_class.tolist() == [[[0.500417, 0.125]], [[0.49875, 0.125]]]


@pytest.mark.parametrize(
    ("counted", "old", "new", "message"),
    [
        ("by level", "trials: 600", "trials: -1", r"acceptance\[0\].trials: expected `int` >= 0"),
        ("by level", "trials: 200", "trials: 100", "sum to 124.75 of 100"),
        ("by level", "[99.75, 25.0]", "[99.75]", "acceptance: found levels of different lengths"),
        ("by class", "trials: 790", "trials: 2400", r"\[1\]: .* of -400 trials on the spine"),
        ("by class", "trials: 790", "trials: 1200", "1010.5 of 800 trials on the spine"),
        ("by class", "[158.0, 79.0]", "[800.0, 80.0]", "880 of 790 trials off the spine"),
        ("by kind", "trials: 350", "trials: 340", "prompts: found trials that do not add up"),
        ("by kind", "[100.0, 25.0]", "[300.0]", "prompts: .*the same ranks"),
        ("by kind", "code:", "c" * 61 + ":", "key in prompts: expected `str` matching"),
    ],
)
def test_counts_are_checked(counted, old, new, message):
    text = COUNTED[counted].to_yaml()
    assert old in text
    with refusal(message):
        Profile.from_bytes(text.replace(old, new, 1).encode(), "p.yaml")


def test_a_plan_says_where_it_comes_from():
    """It names tool, profile, trials, settings, models, machine, and the latencies used."""
    plan = Plan(**provenance(PROFILE), latency=PROFILE.latency.without_spread())
    assert plan.to_dict() == {
        "tool": f"sequoia-plan {version('sequoia-plan')}",
        "profile_sha256": PROFILE.sha256,
        "settings": {"temperature": 0.6, "top_p": 1.0, "verifier": "sequoia"},
        "models": {"target": {"name": "t", "digest": "00", "dtype": "float32"}},
        "hardware": {"device": "cpu", "threads": 2},
        "latency": {
            "context": 128,
            "overhead": 0.001,
            "target": {1: 0.04, 2: 0.041, 8: 0.06},
            "draft": {1: 0.004, 8: 0.005},
        },
    }
    assert from_bytes(to_bytes(TokenTree(TokenTree.chain(2).parents, plan)), "t").plan == plan
