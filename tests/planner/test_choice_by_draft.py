"""The fastest tree for DFlash drafts, with one pass for all levels, and for EAGLE drafts."""

from __future__ import annotations

import pytest
from brute_force import DFLASH, EAGLE, max_speed
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import latencies, level_rows

from sequoia_plan.artifacts import Acceptance, Latency, Profile
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving import fastest
from sequoia_plan.planner.solving.fastest import fastest_tree


@settings(max_examples=60)
@given(
    level_rows(non_increasing=False),
    latencies(),
    st.integers(2, 7),
    st.integers(2, 6),
    st.sampled_from([DFLASH, EAGLE]),
)
def test_the_bound_on_speed_holds_for_every_type_of_draft(rows, latency, budget, depth, drafting):
    times = StepTime(latency, drafting)
    table = Acceptance.given(rows).at_depth(min(depth, drafting.max_depth))
    max_size = min(budget, times.largest_size())
    chosen = fastest_tree(Acceptance.given(rows).at_depth(depth), budget, times)
    assert chosen.tree.depth <= drafting.max_depth and chosen.speed <= chosen.bound * (1 + 1e-12)
    assert max_speed(table, times, max_size) <= chosen.bound * (1 + 1e-12)


@settings(max_examples=40)
@given(latencies(), st.integers(2, 7))
def test_plans_keep_to_the_levels_that_a_draft_reaches(latency, budget):
    """Whatever the objective, and although the acceptance would pay for more."""
    for drafting in (DFLASH, EAGLE):
        profile = Profile(Acceptance.given((0.9, 0.05)), latency=latency, drafting=drafting)
        for objective in ("speed", "tokens"):
            tree = solve(profile, budget=budget, depth=7, objective=objective).tree
            assert tree.depth <= drafting.max_depth


def test_a_first_pass_priced_as_if_it_did_not_widen_is_noticed(monkeypatch):
    """The control: a search with the first pass of two levels for any depth finds a slower tree."""
    latency = Latency(
        {n: 0.04 for n in range(1, 8)}, {1: 0.001, 2: 0.002, 3: 0.002, 4: 0.2, 5: 0.2}, 0.001, 0
    )
    times, rows = StepTime(latency, EAGLE), Acceptance.given([0.9, 0.05]).at_depth(5)
    best = max_speed(rows, times, 7)
    assert fastest_tree(rows, 7, times).speed == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(fastest, "_depths_to_search", lambda max_depth, *_: [max_depth])
    right = fastest.cost_tables
    monkeypatch.setattr(fastest, "cost_tables", lambda times, size, depth: right(times, size, 2))
    assert fastest_tree(rows, 7, times).speed < best * 0.999
