"""`solve`: what it takes and refuses, and what its plan says."""

import json
import math

import pytest
from brute_force import DFLASH, EAGLE
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from strategies import latencies, rates

from sequoia_plan.artifacts import Acceptance, Latency, Profile
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import solve

LLAMA3 = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026]
STEEP = Latency(
    {1: 0.04, 4: 0.045, 8: 0.05, 32: 0.09, 64: 0.2},
    {1: 0.004, 2: 0.0042, 16: 0.008, 64: 0.02},
    0.001,
)


def profile(rates, **fields):
    return Profile(Acceptance.given(rates), **fields)


@settings(max_examples=40)
@given(rates(), latencies(), st.integers(2, 7), st.sampled_from([DFLASH, EAGLE]))
def test_plans_say_what_is_proven_and_keep_to_the_drafts_levels(rates, latency, depth, drafting):
    """The upper bound is the optimum of the tree's size, whatever the objective."""
    measured = profile(rates, latency=latency, drafting=drafting)
    fastest = solve(measured, budget=7, depth=depth)
    assert fastest.tree.depth <= min(depth, drafting.max_depth)
    assert fastest.plan.speedup_bound >= fastest.plan.predicted_speedup * (1 - 1e-12)
    if fastest.tree.size > 1:
        best = solve(measured, budget=fastest.tree.size, depth=depth, objective="tokens")
        assert best.tree.size == fastest.tree.size and best.tree.depth <= drafting.max_depth
        assert best.plan.upper_bound == best.plan.expected_tokens
        assert fastest.plan.upper_bound == pytest.approx(best.plan.expected_tokens, rel=1e-12)


def test_the_predicted_speed_is_tokens_over_time():
    solution = solve(profile(LLAMA3, latency=STEEP), budget=64, depth=10)
    assert solution.plan.predicted_speedup == pytest.approx(
        solution.plan.expected_tokens * (0.04 + 0.001) / StepTime(STEEP).step_seconds(solution.tree)
    )
    assert 1 < solution.tree.size <= 64 and solution.plan.solver == "branch and bound"


def test_step_time_never_invents_speed():
    times = StepTime(Latency({1: 0.04, 2: 0.09, 4: 0.05, 8: 0.10}, {1: 0.01}))
    assert times.target_seconds(2) == 0.05  # padding two nodes up to four
    # Between two measured sizes a pass takes as long as the next measured one.
    assert times.target_seconds(5) == times.target_seconds(8) == 0.10
    assert times.target_seconds(9) == times.draft_seconds(2) == math.inf


def test_the_objective_tokens_takes_exactly_the_budget_even_where_no_latency_is_known():
    latency = Latency({1: 0.04}, {2: 0.01})
    solution = solve(profile([0.5, 0.3], latency=latency), budget=12, depth=5, objective="tokens")
    assert solution.tree.size == 12 and solution.plan.predicted_speedup is None


def test_the_plan_is_json_and_complete():
    plan = solve(profile([0.5, 0.3], latency=STEEP, settings={"a": 1}), budget=16, depth=5).plan
    document = json.loads(json.dumps(plan.to_dict()))
    assert document["settings"] == {"a": 1}
    names = {"acceptance", "budget", "depth", "objective", "solver", "expected_tokens"}
    assert names | {"step_seconds", "predicted_speedup", "speedup_bound"} <= document.keys()


@pytest.mark.parametrize(
    ("acceptance", "limits", "message"),
    [
        ([0.5], {"budget": 10**12}, "expected 1 to 1000000"),
        ([0.5], {"depth": 1}, "has depth 1 with 1 children a node"),
        ([0.5], {"branching": 0}, "branching: found 0"),
        ([0.5, 0.2, 0.1], {"budget": 14}, "the largest has 13"),
        ([[0.5, 0.1], [0.5]], {}, "all of one length"),
        ([[[[0.5]], [[0.1]]]], {}, "a list of probabilities"),
        ([0.6, 0.6], {}, r"found \[0.6, 0.6\] at level 0, .* the sum 1.2"),
        ([float("nan")], {}, r"found \[nan\]"),
        ([[[0.5], [1.1]]], {}, r"found \[1.1\] at level 0, off the spine"),
        ([0.5], {"objective": "speed"}, "objective speed needs latencies"),
        ([0.5], {"draft": False}, "draft none"),
    ],
)
def test_solve_refuses(acceptance, limits, message):
    with refusal(message):
        solve(acceptance, **{"budget": 4, "depth": 3, **limits})
