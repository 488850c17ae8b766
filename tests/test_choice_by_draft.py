"""The choice for the hardware where the draft's passes are those of one block, or its first pass is as wide as the tree is deep."""

from __future__ import annotations

import pytest
from brute_force import BLOCK, FEATURES, most_speed
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import latencies, level_rows

from sequoia_plan.artifacts import Drafting, Latency, Profile
from sequoia_plan.artifacts.cost import StepTime, acceptance_rows
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving import fastest as choice
from sequoia_plan.planner.solving.fastest import fastest


@settings(max_examples=60, deadline=None)
@given(level_rows(non_increasing=False), latencies(), st.integers(2, 7), st.integers(2, 6), st.sampled_from([BLOCK, FEATURES]))
def test_the_bound_on_speed_holds_for_every_kind_of_draft(rows, latency, budget, depth, drafting):
    times = StepTime(latency, drafting)
    table, most = acceptance_rows(rows, min(depth, drafting.deepest)), min(budget, times.largest())
    found = fastest(acceptance_rows(rows, depth), budget, times)
    assert found.tree.depth <= drafting.deepest and found.speed <= found.bound * (1 + 1e-12)
    assert most_speed(table, times, most) <= found.bound * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(latencies(), st.integers(2, 7))
def test_plans_keep_to_the_levels_that_a_draft_reaches(latency, budget):
    """Whatever the objective, and although the acceptance would pay for more."""
    for drafting in (BLOCK, FEATURES):
        profile = Profile((0.9, 0.05), latency=latency, drafting=drafting)
        for objective in ("speed", "tokens", "paper"):
            assert solve(profile, budget, 7, objective=objective).tree.depth <= drafting.deepest
        assert solve(profile, budget, 7, baseline="chain").tree.depth <= drafting.deepest


def test_the_paper_counts_one_pass_of_a_block_draft():
    """F / (t(n) + d1): with a pass for each level the deepest chain would not pay."""
    latency = Latency({n: 0.04 + 0.0001 * n for n in range(1, 8)}, {4: 0.03}, 0.0, 0)
    chain = solve(Profile((0.9,), latency=latency, drafting=Drafting("block", 4, False, 7)), 7, 7, objective="paper").tree
    assert chain.depth == 7
    assert solve(Profile((0.9,), latency=latency), 7, 7, objective="paper").tree.depth < 7


def test_a_first_pass_priced_as_if_it_did_not_widen_is_noticed(monkeypatch):
    """The control: a search that takes the first pass of two levels for any depth finds a tree that is slower than the best."""
    latency = Latency({n: 0.04 for n in range(1, 8)}, {1: 0.001, 2: 0.002, 3: 0.002, 4: 0.2, 5: 0.2}, 0.001, 0)
    times, rows = StepTime(latency, FEATURES), acceptance_rows([0.9, 0.05], 5)
    best = most_speed(rows, times, 7)
    assert fastest(rows, 7, times).speed == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(choice, "_depths_to_search", lambda deepest, times: [deepest])
    right = choice.costs_of
    monkeypatch.setattr(choice, "costs_of", lambda times, most, depth: right(times, most, 2))
    assert fastest(rows, 7, times).speed < best * 0.999
