"""The certificate, its bounds, and the baselines, none of which has more expected tokens."""

from __future__ import annotations

import pytest
from brute_force import fitting
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import acceptance_vectors, rates

from sequoia_plan.artifacts import Acceptance, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.planner import baseline, check, solve
from sequoia_plan.planner.solving import certificate
from sequoia_plan.planner.solving.tokens import dynamic_programming


def test_certificate():
    vector, rows = [0.5, 0.2, 0.1], Acceptance.given([0.5, 0.2, 0.1]).rates
    best = solve(vector, budget=10, depth=5)
    proof = check(best.tree, vector, 5)
    assert (proof.argument, proof.gap) == ("best node left out", 0.0)
    parent, rank, value = proof.next_node
    larger = TokenTree.from_parents([*best.tree.parents.tolist(), parent])
    assert best.tree.child_count[parent] + 1 == rank
    assert expected_tokens(larger, rows) == pytest.approx(best.plan.expected_tokens + value)
    best_larger = solve(vector, budget=11, depth=5)
    assert expected_tokens(larger, rows) == pytest.approx(best_larger.plan.expected_tokens)
    worse = check(TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]), vector, 5)
    assert worse.upper_bound == pytest.approx(best.plan.expected_tokens)
    assert worse.gap > 0.01
    assert (worse.argument, worse.exact) == ("most valuable nodes", True)
    with pytest.raises(SequoiaPlanError, match="depth 4, expected at most 3"):
        check(TokenTree.chain(4), vector, 3)
    with pytest.raises(SequoiaPlanError, match="branching 3, expected at most 2"):
        check(TokenTree.star(3), vector, branching=2)


@settings(max_examples=60)
@given(rates(), st.integers(1, 7), st.integers(2, 5))
def test_the_bound_is_the_enumerated_optimum(rates, size, depth):
    """The next node adds the value that it is said to; where no solver runs, the bound holds."""
    rows = Acceptance.given(rates).at_depth(depth)
    fits = [tree for tree in fitting(rows, size) if tree.size == size]
    optimum = max((expected_tokens(tree, rows) for tree in fits), default=None)
    for tree in fits[:: max(1, len(fits) // 5)]:
        proof = check(tree, rates, depth)
        assert proof.exact and proof.upper_bound == pytest.approx(optimum, rel=1e-12)
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
    optimum = dynamic_programming.most_tokens(Acceptance.given(rising).at_depth(4), 12)[-1]
    proof = check(tree, rising, 4)
    assert (proof.argument, proof.exact) == ("exact recursion", True)
    assert proof.upper_bound == pytest.approx(optimum, rel=1e-12)
    monkeypatch.setattr(certificate, "max_budget", lambda rows: 11)
    too_large = check(tree, rising, 4)
    assert (too_large.argument, too_large.exact) == ("most valuable nodes", False)
    assert too_large.upper_bound > optimum * 1.001


def test_a_million_nodes():
    solution = solve([0.7, 0.15, 0.05, 0.02], budget=1_000_000, depth=64)
    assert solution.tree.size == 1_000_000
    assert check(solution.tree, [0.7, 0.15, 0.05, 0.02], 64).gap == 0


@settings(max_examples=40)
@given(
    acceptance_vectors(longest=5),
    st.integers(2, 30),
    st.integers(2, 7),
    st.sampled_from(["chain", "chains:3", "k-ary:2", "specinfer:3,1,2"]),
)
def test_no_baseline_is_worth_more(acceptance, size, depth, name):
    tree = baseline(name, size, depth)
    assert tree.size <= size and tree.depth <= depth
    vector = acceptance + [0.0] * max(0, tree.branching - len(acceptance))
    optimum = solve(vector, budget=tree.size, depth=depth).plan.expected_tokens
    rows = Acceptance.given(vector).rates
    assert expected_tokens(tree, rows) <= optimum * (1 + 1e-12)


def test_baselines_have_their_shapes():
    assert baseline("chain", 4, 9) == TokenTree.chain(4)
    assert baseline("chains:3", 7, 9).level_widths.tolist() == [1, 3, 3]
    assert baseline("k-ary:2", 7, 3).level_widths.tolist() == [1, 2, 4]
    assert baseline("specinfer:2,3", 99, 9).level_widths.tolist() == [1, 2, 6]
    for name in (
        "chains:0",
        "chains:x",
        "nothing",
        "k-ary:",
        "specinfer:2,,3",
        "chain:4",
    ):
        with pytest.raises(SequoiaPlanError, match="expected"):
            baseline(name, 8, 4)
