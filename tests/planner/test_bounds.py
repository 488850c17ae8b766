"""The bounds in a plan."""

import pytest
from brute_force import fitting
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import at_depth, rates

from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving.problem import Problem, proven_bound
from sequoia_plan.planner.solving.tokens import frontier


@settings(max_examples=40)
@given(rates(), st.integers(1, 6), st.integers(2, 5))
def test_the_bound_is_the_enumerated_optimum(rates, size, depth):
    """And where rows increase and no solver runs, it still holds."""
    problem = Problem(at_depth(rates, depth), size)
    fits = [tree for tree in fitting(problem.rates, size) if tree.size == size]
    if fits:
        optimum = max(expected_tokens(tree, problem.rates) for tree in fits)
        assert frontier.most_tokens(problem, size) == pytest.approx(optimum, rel=1e-12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frontier, "max_rising_budget", lambda rows: 0)
            assert frontier.most_tokens(problem, size) >= optimum * (1 - 1e-12)


def test_a_bound_below_the_speed_of_a_tree_fails_loudly():
    assert proven_bound(2.0, 2.5) == 2.5
    assert proven_bound(2.0, 2.0 - 1e-12) == 2.0  # rounding
    with pytest.raises(AssertionError, match=r"found 1\.9, expected at least 2\.0"):
        proven_bound(2.0, 1.9)


def test_a_hundred_thousand_nodes():
    solution = solve([0.7, 0.15, 0.05, 0.02], budget=100_000, depth=64)
    assert solution.tree.size == 100_000
    assert solution.plan.upper_bound == solution.plan.expected_tokens
