"""Both solvers for the most expected tokens are exact."""

import functools

import numpy as np
import pytest
from brute_force import fitting, tokens_by_paths
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import refusal
from strategies import at_depth, rates

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.planner import frontier
from sequoia_plan.planner.solving.problem import Problem
from sequoia_plan.planner.solving.tokens import best_first, dynamic_programming
from sequoia_plan.planner.solving.tokens.frontier import MAX_DEPTH, best_tree, pick_solver


def recursion(rows, size):
    """The optimum of 1, 2, ... nodes by the recursion as the paper writes it; 0 where none is."""

    @functools.cache
    def with_children(level, node_class, num_children, nodes):
        if num_children == 0:
            return 1.0 if nodes == 1 else 0.0
        child_class = node_class if num_children == 1 else rows.shape[1] - 1
        p, most = rows[level, node_class, num_children - 1], 0.0
        for share in range(1, nodes):
            siblings = with_children(level, node_class, num_children - 1, nodes - share)
            child = best(level + 1, child_class, share)
            if siblings and child:
                most = max(most, siblings + p * child)
        return most

    @functools.cache
    def best(level, node_class, nodes):
        ranks = rows.shape[2] if level < len(rows) else 0
        return max(with_children(level, node_class, b, nodes) for b in range(ranks + 1))

    return np.array([best(0, 0, nodes) for nodes in range(1, size + 1)])


@settings(max_examples=120)
@given(rates() | rates(non_increasing=True), st.integers(1, 7), st.integers(2, 6))
def test_both_solvers_equal_exhaustive_enumeration(rates, size, depth):
    """Values and trees are optimal, by a definition of F of its own."""
    rows = at_depth(rates, depth)
    trees = [tree for tree in fitting(rows, size) if tree.size == size]
    solvers = [dynamic_programming]
    if best_first.is_non_increasing(rows):
        solvers.append(best_first)
    for solver in solvers:
        values = solver.most_tokens(rows, size)
        assert len(values) == size or not trees
        if trees:
            optimum = max(tokens_by_paths(tree, rows) for tree in trees)
            assert values[-1] == pytest.approx(optimum, rel=1e-12)
            tree = TokenTree.from_parents(solver.parents(rows, size))
            assert tree.size == size and tree.depth <= depth and tree.branching <= rows.shape[2]
            assert tokens_by_paths(tree, rows) == pytest.approx(optimum, rel=1e-12)
            assert expected_tokens(tree, rows) == pytest.approx(optimum, rel=1e-12)


@settings(max_examples=40)
@given(rates(), st.integers(8, 40), st.integers(2, 5))
@example([0.0, 0.0, 1e-4, 0.9], 90, 4)  # only whole families pay
@example([[[0.0, 1.0], [1.0, 0.0]]], 30, 6)  # a chain below the second child
@example([[0.2, 0.1], [0.1, 0.6], [0.9, 0.0]], 60, 6)
def test_the_dynamic_program_is_the_recursion(rates, size, depth):
    rows = at_depth(rates, depth)
    optima = recursion(rows, size)
    values = dynamic_programming.most_tokens(rows, size)
    np.testing.assert_allclose(values, optima[optima > 0], rtol=1e-12)
    tree = TokenTree.from_parents(dynamic_programming.parents(rows, len(values)))
    assert tree.size == len(values) and tree.depth <= len(rows) + 1
    assert expected_tokens(tree, rows) == pytest.approx(values[-1], rel=1e-12)


@settings(max_examples=100)
@given(rates(6, non_increasing=True), st.integers(1, 60), st.integers(1, 9))
def test_both_solvers_agree_on_rows_that_do_not_increase(rates, size, depth):
    rows = at_depth(rates, depth)
    for values, expected in zip(
        frontier(rates, size, max(depth, 2)),
        dynamic_programming.frontier(at_depth(rates, max(depth, 2)), size),
        strict=True,
    ):
        np.testing.assert_allclose(values, expected, rtol=1e-12)
    assert pick_solver(Problem(rows, size)) is best_first


def test_best_first_is_wrong_on_a_rising_vector_and_is_not_picked():
    """The control: 1.44 where 1.85 is optimal."""
    rows = at_depth([0.3, 0.05, 0.5], 4)
    assert best_first.most_tokens(rows, 4)[-1] == pytest.approx(1.44)
    assert pick_solver(Problem(rows, 4)) is dynamic_programming
    assert dynamic_programming.most_tokens(rows, 4)[-1] == pytest.approx(1.85)
    with refusal("expected at most 4096 where acceptance increases", ArgumentError):
        best_tree(Problem(rows, 5000))


@settings(max_examples=40)
@given(rates(), st.integers(1, 25), st.integers(2, 6), st.sampled_from([None, 1, 2]))
def test_trees_attain_the_frontier_and_more_never_hurts(rates, size, depth, branching):
    optima, slack = frontier(rates, size, depth, branching), 1 - 1e-12
    wider = frontier(rates, size, depth)
    rows = at_depth(rates, depth, branching)
    for number, values in enumerate(optima):
        assert (values[1:] >= values[:-1] * slack).all()
        for more in (*optima[number : number + 2], wider[number]):
            assert (more[: len(values)] >= values * slack).all()
        tree = best_tree(Problem(rows[:number], len(values)))
        assert tree.size == len(values) and tree.depth <= number + 1
        assert tree.branching <= (branching or 4)
        assert expected_tokens(tree, rates) == pytest.approx(values[-1], rel=1e-12)


def test_sizes_that_no_tree_has_are_refused_with_the_largest():
    rows = at_depth([0.5, 0.2, 0.1], 3)
    with refusal(r"depth 3 with 3 children .* largest has 13", ArgumentError):
        best_tree(Problem(rows, 14))
    assert best_tree(Problem(rows, 13)).size == 13


@pytest.mark.parametrize("vector", [[0.9], [0.0], [0.1, 0.9]])
def test_the_deepest_tree_is_built(vector):
    """A thousand levels are what the limits allow; Python's own stack has fewer."""
    rows = at_depth(vector, MAX_DEPTH)[..., :1]
    chain = TokenTree.chain(MAX_DEPTH)
    assert best_tree(Problem(np.ascontiguousarray(rows), MAX_DEPTH)) == chain
    assert TokenTree.from_parents(dynamic_programming.parents(rows, MAX_DEPTH)) == chain
