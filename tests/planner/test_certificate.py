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
from sequoia_plan.planner.solving.tokens import dynamic_programming


def test_certificate():
    """The next node makes the best larger tree; a worse tree has the same bound."""
    vector, best = [0.5, 0.2, 0.1], solve([0.5, 0.2, 0.1], budget=10, depth=5)
    proof = check(best.tree, vector, 5)
    assert proof.upper_bound == proof.expected_tokens
    parent, rank, value = proof.next_node
    assert best.tree.child_count[parent] + 1 == rank
    best_larger = solve(vector, budget=11, depth=5).plan.expected_tokens
    assert best.plan.expected_tokens + value == pytest.approx(best_larger)
    worse = check(TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]), vector, 5)
    assert worse.upper_bound == pytest.approx(best.plan.expected_tokens)
    assert worse.upper_bound > 1.01 * worse.expected_tokens
    for tree, limits, message in (
        (TokenTree.chain(4), {"depth": 3}, "depth 4, expected at most 3"),
        (TokenTree.star(3), {"branching": 2}, "branching 3, expected at most 2"),
    ):
        with pytest.raises(SequoiaPlanError, match=message):
            check(tree, vector, **limits)


@settings(max_examples=60)
@given(rates(), st.integers(1, 7), st.integers(2, 5))
def test_the_bound_is_the_enumerated_optimum(rates, size, depth):
    """The next node adds the value that it is said to; where no solver runs, the bound holds."""
    rows = at_depth(rates, depth)
    fits = [tree for tree in fitting(rows, size) if tree.size == size]
    optimum = max((expected_tokens(tree, rows) for tree in fits), default=None)
    for tree in fits[:: max(1, len(fits) // 5)]:
        proof = check(tree, rates, depth)
        assert proof.upper_bound == pytest.approx(optimum, rel=1e-12)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(certificate, "max_budget", lambda rows: 0)
            assert check(tree, rates, depth).upper_bound >= optimum * (1 - 1e-12)
        if proof.next_node:
            parent, _, value = proof.next_node
            larger = TokenTree.from_parents([*tree.parents.tolist(), parent])
            assert expected_tokens(larger, rates) == pytest.approx(proof.expected_tokens + value)


def test_the_certificate_where_rows_increase(monkeypatch):
    rising = [0.05, 0.1, 0.7]
    tree = solve(rising, budget=12, depth=4).tree
    optimum = dynamic_programming.most_tokens(at_depth(rising, 4), 12)[-1]
    assert check(tree, rising, 4).upper_bound == pytest.approx(optimum, rel=1e-12)
    monkeypatch.setattr(certificate, "max_budget", lambda rows: 11)
    assert check(tree, rising, 4).upper_bound > optimum * 1.001


def test_a_million_nodes():
    solution = solve([0.7, 0.15, 0.05, 0.02], budget=1_000_000, depth=64)
    assert solution.tree.size == 1_000_000
    proof = check(solution.tree, [0.7, 0.15, 0.05, 0.02], 64)
    assert proof.upper_bound == proof.expected_tokens
