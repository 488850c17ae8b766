"""The certificate and its bounds."""

import pytest
from brute_force import fitting
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import at_depth, rates

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.planner import check, solve
from sequoia_plan.planner.solving import certificate
from sequoia_plan.planner.solving.problem import proven_bound

VECTOR = [0.5, 0.2, 0.1]


def test_a_worse_tree_has_the_bound_of_the_best():
    best = solve(VECTOR, budget=10, depth=5)
    assert check(best.tree, VECTOR, 5) == (best.plan.expected_tokens,) * 2
    worse = check(TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]), VECTOR, 5)
    assert worse.upper_bound == pytest.approx(best.plan.expected_tokens)
    assert worse.upper_bound > 1.01 * worse.expected_tokens


@pytest.mark.parametrize(
    ("tree", "limits", "message"),
    [
        (TokenTree.chain(4), {"depth": 3}, "depth 4, expected at most 3"),
        (TokenTree.star(3), {"branching": 2}, "branching 3, expected at most 2"),
    ],
)
def test_a_tree_beyond_the_limits_is_refused(tree, limits, message):
    with pytest.raises(SequoiaPlanError, match=message):
        check(tree, VECTOR, **limits)


@settings(max_examples=40)
@given(rates(), st.integers(1, 6), st.integers(2, 5))
def test_the_bound_is_the_enumerated_optimum(rates, size, depth):
    """And where rows increase and no solver runs, it still holds."""
    rows = at_depth(rates, depth)
    fits = [tree for tree in fitting(rows, size) if tree.size == size]
    optimum = max((expected_tokens(tree, rows) for tree in fits), default=None)
    for tree in fits[:: max(1, len(fits) // 3)]:
        assert check(tree, rates, depth).upper_bound == pytest.approx(optimum, rel=1e-12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(certificate, "max_rising_budget", lambda rows: 0)
            assert check(tree, rates, depth).upper_bound >= optimum * (1 - 1e-12)


def test_a_bound_below_the_speed_of_a_tree_fails_loudly():
    assert proven_bound(2.0, 2.5) == 2.5
    assert proven_bound(2.0, 2.0 - 1e-12) == 2.0  # rounding
    with pytest.raises(AssertionError, match=r"found 1\.9, expected at least 2\.0"):
        proven_bound(2.0, 1.9)


def test_a_hundred_thousand_nodes():
    solution = solve([0.7, 0.15, 0.05, 0.02], budget=100_000, depth=64)
    assert solution.tree.size == 100_000
    assert solution.plan.upper_bound == solution.plan.expected_tokens
