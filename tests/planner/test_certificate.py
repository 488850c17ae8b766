"""The certificate, its bounds, and the baselines, none of which has more expected tokens."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import TREES
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import acceptance_vectors, padded, rows_by_class

from sequoia_plan.artifacts import Acceptance, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.planner import baseline, check, solve
from sequoia_plan.planner.solving import (
    best_first,
    certificate,
    concave_envelope,
    dynamic_programming,
)


@settings(max_examples=60)
@given(
    st.lists(acceptance_vectors(longest=4), min_size=1, max_size=3) | rows_by_class(longest=4),
    st.integers(1, 30),
    st.integers(2, 6),
)
def test_the_bound_holds_and_is_attained_on_non_increasing_rows(rows, size, depth):
    if not isinstance(rows[0][0], list):
        rows = [padded(row, 4) for row in rows]
    table = Acceptance.given(rows).at_depth(depth)
    values = dynamic_programming.frontier(table, size)[-1]
    bounds = concave_envelope.upper_bounds(table, size)
    assert (bounds >= values * (1 - 1e-12)).all()
    assert (np.diff(bounds, 2) <= 1e-12 * bounds[-1]).all()  # concave
    if best_first.is_non_increasing(table):
        np.testing.assert_allclose(bounds, values, rtol=1e-12)  # then it is attained


def test_certificate():
    vector = [0.5, 0.2, 0.1]
    rates = Acceptance.given(vector).rates
    best = solve(vector, budget=10, depth=5)
    proof = check(best.tree, vector, 5)
    assert (proof.argument, proof.gap) == ("best node left out", 0.0)
    parent, rank, value = proof.next_node
    larger = TokenTree.from_parents([*best.tree.parents.tolist(), parent])
    assert best.tree.child_count[parent] + 1 == rank
    tokens = expected_tokens(larger, rates)
    assert tokens == pytest.approx(best.plan.expected_tokens + value)
    best_larger = solve(vector, budget=11, depth=5)
    assert tokens == pytest.approx(best_larger.plan.expected_tokens)
    worse = check(TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]), vector, 5)
    assert worse.upper_bound == pytest.approx(best.plan.expected_tokens)
    assert worse.gap > 0.01
    assert (worse.argument, worse.exact) == ("most valuable nodes", True)
    with pytest.raises(SequoiaPlanError, match="depth 4, expected at most 3"):
        check(TokenTree.chain(4), vector, 3)
    with pytest.raises(SequoiaPlanError, match="branching 3, expected at most 2"):
        check(TokenTree.star(3), vector, branching=2)


@settings(max_examples=60)
@given(rows_by_class(), st.integers(1, 7), st.integers(2, 5))
def test_the_certificate_knows_classes(rows, size, depth):
    """The bound is the enumerated optimum, and the next node adds the value that it is said to."""
    ranks, rates = len(rows[0][0]), Acceptance.given(rows).rates
    fits = [t for t in TREES if t.size == size and t.depth <= depth and t.branching <= ranks]
    for tree in fits[:: max(1, len(fits) // 5)]:
        proof = check(tree, rows, depth, ranks)
        optimum = max(expected_tokens(t, rates) for t in fits)
        assert proof.upper_bound == pytest.approx(optimum, rel=1e-12)
        if proof.next_node:
            parent, _, value = proof.next_node
            larger = TokenTree.from_parents([*tree.parents.tolist(), parent])
            assert expected_tokens(larger, rates) == pytest.approx(proof.expected_tokens + value)


def test_the_certificate_where_rows_increase(monkeypatch):
    rising = [0.05, 0.1, 0.7]
    optima = dynamic_programming.frontier(Acceptance.given(rising).at_depth(4), 13)[-1]
    for size, argument in ((13, "concave hull"), (12, "exact recursion")):
        proof = check(solve(rising, budget=size, depth=4).tree, rising, 4)
        assert (proof.argument, proof.exact) == (argument, True)
        assert proof.upper_bound == pytest.approx(optima[size - 1], rel=1e-12)
    monkeypatch.setattr(certificate, "MAX_SOLVED_NODES", 11)
    too_large = check(solve(rising, budget=12, depth=4).tree, rising, 4)
    assert (too_large.argument, too_large.exact) == ("concave hull", False)
    assert too_large.upper_bound > optima[11] * 1.001


def test_the_tree_that_envelopes_suggest_is_taken_only_where_it_attains_their_bound():
    measured = Acceptance.given(
        [0.77, 0.1, 0.04, 0.02, 0.013, 0.008, 0.0064, 0.0065, 0.003, 0.0035]
    ).at_depth(9)
    # The control: the suggested tree falls short of the optimum.
    rising = Acceptance.given([0.3, 0.05, 0.5]).at_depth(4)
    for rows, size, is_taken in ((measured, 100, True), (rising, 6, False)):
        suggested, is_attained = concave_envelope._tree_by_envelopes(rows, size)
        optimum = dynamic_programming.frontier(rows, size)[-1][-1]
        is_optimal = expected_tokens(TokenTree(suggested), rows) > optimum * (1 - 1e-12)
        assert is_attained == is_taken == is_optimal
        tree = TokenTree(concave_envelope.parents(rows, size))
        assert expected_tokens(tree, rows) == pytest.approx(optimum, rel=1e-12)


def test_a_million_nodes():
    solution = solve([0.7, 0.15, 0.05, 0.02], budget=1_000_000, depth=64)
    assert solution.tree.size == 1_000_000
    assert check(solution.tree, [0.7, 0.15, 0.05, 0.02], 64).gap == 0


@settings(max_examples=40)
@given(
    acceptance_vectors(longest=5),
    st.integers(2, 30),
    st.integers(2, 7),
    st.sampled_from(["chain", "chains:3", "k-ary:2", "specinfer:3,1,2", "random:7"]),
)
def test_no_baseline_is_worth_more(acceptance, size, depth, name):
    tree = baseline(name, size, depth)
    assert tree.size <= size and tree.depth <= depth
    vector = acceptance + [0.0] * max(0, tree.branching - len(acceptance))
    optimum = solve(vector, budget=tree.size, depth=depth).plan.expected_tokens
    assert expected_tokens(tree, Acceptance.given(vector).rates) <= optimum * (1 + 1e-12)


def test_baselines_have_their_shapes(tmp_path):
    assert baseline("chain", 4, 9) == TokenTree.chain(4)
    assert baseline("chains:3", 7, 9).level_widths.tolist() == [1, 3, 3]
    assert baseline("k-ary:2", 7, 3).level_widths.tolist() == [1, 2, 4]
    assert baseline("specinfer:2,3", 99, 9).level_widths.tolist() == [1, 2, 6]
    assert baseline("random:1", 20, 4) == baseline("random:1", 20, 4) != baseline("random:2", 20, 4)
    (tmp_path / "p.json").write_text("[-1, 0, 1, 0]")
    assert baseline(f"parents:{tmp_path / 'p.json'}", 4, 3).parents.tolist() == [-1, 0, 0, 1]
    for name in (
        "chains:0",
        "chains:x",
        "nothing",
        "k-ary:",
        "specinfer:2,,3",
        "chain:4",
        "parents:missing.json",
    ):
        with pytest.raises(SequoiaPlanError, match="expected"):
            baseline(name, 8, 4)
