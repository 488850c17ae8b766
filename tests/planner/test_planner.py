"""The solvers are exact, and the speed objective picks the fastest tree there is."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import acceptance_vectors, all_trees, rows_by_class

from sequoia_plan.artifacts import (
    LANGUAGE_MODEL,
    Acceptance,
    ArgumentError,
    Latency,
    Profile,
    SequoiaPlanError,
    TokenTree,
)
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving import best_first, concave_envelope, dynamic_programming
from sequoia_plan.planner.solving.frontier import MAX_DEPTH, best_tree

LLAMA3 = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026]


def tokens_by_paths(tree, rows):
    """F by its definition, path by path.

    Args:
        rows: [level][class][rank]; the class follows from the ranks above on the path.
    """
    total = 0.0
    for node in range(tree.size):
        ranks = []
        while node:
            ranks.insert(0, int(tree.ranks[node]) - 1)
            node = int(tree.parents[node])
        total += math.prod(
            rows[min(level, len(rows) - 1)][any(ranks[:level])][rank]
            for level, rank in enumerate(ranks)
        )
    return total


def last(solver, rows, size):
    """The deepest optimum of exactly `size` nodes; NaN if there is none."""
    values = solver.frontier(rows, size)[-1]
    return values[size - 1] if len(values) == size else math.nan


def exhaustive(acceptance, size, depth):
    """The best expected tokens over every tree, or None if there is no tree."""
    ranks = len(acceptance[0]) if isinstance(acceptance[0], list) else len(acceptance)
    fits = [t for t in all_trees(size) if t.depth <= depth and t.branching <= ranks]
    return max((expected_tokens(t, Acceptance.given(acceptance).rates) for t in fits), default=None)


@settings(max_examples=60)
@given(acceptance_vectors(), st.integers(1, 8), st.integers(2, 6))
def test_dp_equals_exhaustive_enumeration(acceptance, size, depth):
    best = exhaustive(acceptance, size, depth)
    value = last(dynamic_programming, Acceptance.given(acceptance).at_depth(depth), size)
    if best is None:
        assert math.isnan(value)
    else:
        assert value == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("solver", ["best-first", "hull", "dp"])
def test_the_deepest_tree_is_built(solver):
    """A thousand levels are what the limits allow; Python's own stack has fewer."""
    rows = Acceptance.given([0.9]).at_depth(MAX_DEPTH)
    assert best_tree(rows, MAX_DEPTH, solver) == TokenTree.chain(MAX_DEPTH)


@settings(max_examples=40)
@given(
    st.lists(acceptance_vectors(longest=3), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(2, 5),
)
def test_dp_equals_exhaustive_enumeration_with_rows_per_level(rows, size, depth):
    rows = [row + [0.0] * (3 - len(row)) for row in rows]
    best = exhaustive(rows, size, depth)
    value = last(dynamic_programming, Acceptance.given(rows).at_depth(depth), size)
    assert math.isnan(value) if best is None else value == pytest.approx(best, rel=1e-12)


@settings(max_examples=100)
@given(acceptance_vectors(longest=6, non_increasing=True), st.integers(1, 60), st.integers(1, 9))
def test_all_solvers_agree_on_non_increasing_vectors(acceptance, size, depth):
    same_frontier(
        Acceptance.given(acceptance).at_depth(depth),
        size,
        best_first,
        concave_envelope,
        dynamic_programming,
    )


@settings(max_examples=150)
@given(
    st.lists(acceptance_vectors(longest=6), min_size=1, max_size=3),
    st.integers(1, 60),
    st.integers(1, 7),
)
def test_hull_equals_dp_on_any_rows(rows, size, depth):
    same_frontier(
        Acceptance.given([row + [0.0] * (6 - len(row)) for row in rows]).at_depth(depth),
        size,
        concave_envelope,
        dynamic_programming,
    )


@settings(max_examples=80)
@given(rows_by_class(), st.integers(1, 8), st.integers(2, 6))
def test_every_solver_equals_exhaustive_enumeration_with_classes(rows, size, depth):
    """Values and trees are optimal with classes of parents, by a definition of F of its own."""
    fits = [t for t in all_trees(size) if t.depth <= depth and t.branching <= len(rows[0][0])]
    table = Acceptance.given(rows).at_depth(depth)
    exact_solvers = [concave_envelope, dynamic_programming]
    if best_first.is_non_increasing(table):
        exact_solvers.append(best_first)
    for solver in exact_solvers:
        value = last(solver, table, size)
        if not fits:
            assert math.isnan(value)
            continue
        assert value == pytest.approx(max(tokens_by_paths(tree, rows) for tree in fits), rel=1e-12)
        tree = TokenTree.from_parents(solver.parents(table, size))
        tokens = pytest.approx(value, rel=1e-12)
        assert (
            tokens_by_paths(tree, rows)
            == tokens
            == expected_tokens(tree, Acceptance.given(rows).rates)
        )


@settings(max_examples=80)
@given(rows_by_class(longest=6), st.integers(1, 60), st.integers(1, 7))
def test_solvers_agree_with_classes(rows, size, depth):
    rates = Acceptance.given(rows).rates
    table = Acceptance.given(rows).at_depth(depth)
    same_frontier(table, size, concave_envelope, dynamic_programming)
    if len(last_values := dynamic_programming.frontier(table, size)[-1]) == size:
        exact = TokenTree(concave_envelope._tree_by_recursion(table, size))
        suggested = TokenTree(concave_envelope._tree_by_envelopes(table, size)[0])
        for tree in (exact, suggested):
            assert tree.size == size and tree.depth <= depth
            assert expected_tokens(tree, rates) <= last_values[-1] * (1 + 1e-12)
        assert expected_tokens(exact, rates) == pytest.approx(last_values[-1], rel=1e-12)


@settings(max_examples=80)
@given(rows_by_class(longest=6, non_increasing=True), st.integers(1, 60), st.integers(1, 9))
def test_best_first_is_exact_with_classes_whose_rows_do_not_increase(rows, size, depth):
    same_frontier(
        Acceptance.given(rows).at_depth(depth),
        size,
        best_first,
        concave_envelope,
        dynamic_programming,
    )


@given(rows_by_class(), st.integers(1, 30), st.integers(2, 6))
def test_equal_classes_are_one(rows, size, depth):
    two_classes = Acceptance.given([[spine, spine] for spine, _ in rows]).at_depth(depth)
    one_class = Acceptance.given([spine for spine, _ in rows]).at_depth(depth)
    for solver in (concave_envelope, dynamic_programming):
        frontiers = solver.frontier(two_classes, size), solver.frontier(one_class, size)
        for values_of_two, values_of_one in zip(*frontiers, strict=True):
            np.testing.assert_array_equal(values_of_two, values_of_one)


def test_a_solver_that_ignores_the_class_is_noticed():
    """The control: rows of the spine used for all nodes predict too much and give a worse tree."""
    rows = [[[0.5, 0.4], [0.0, 0.0]], [[0.8, 0.1], [0.2, 0.1]]]
    right = solve(rows, budget=6, depth=5)
    fits = [t for t in all_trees(6) if t.depth <= 5 and t.branching <= 2]
    optimum = max(tokens_by_paths(tree, rows) for tree in fits)
    assert right.plan.expected_tokens == pytest.approx(optimum)
    for solver in ("best-first", "hull", "dp"):
        on_spine = Acceptance.given([spine for spine, _ in rows])
        blind = best_tree(on_spine.at_depth(5), 6, solver)
        low = right.plan.expected_tokens * 0.95
        assert tokens_by_paths(blind, rows) < low < expected_tokens(blind, on_spine.rates) * 0.95


@pytest.mark.parametrize("rare", [0.0, 1e-4])
def test_hull_equals_dp_on_staircases(rare):
    """Only families of six pay: the scan gives up, and remainders (or all sums) take over."""
    vector = [rare * (1 + rank / 10) for rank in range(5)] + [0.9]
    same_frontier(Acceptance.given(vector).at_depth(6), 1500, concave_envelope, dynamic_programming)
    same_frontier(
        Acceptance.given([*vector, 0.05]).at_depth(4), 300, concave_envelope, dynamic_programming
    )


def same_frontier(rows, size, *solvers):
    expected, *frontiers = (solver.frontier(rows, size) for solver in solvers)
    assert len(expected) == len(rows) + 1
    for values_by_depth in frontiers:
        assert [len(values) for values in values_by_depth] == [len(values) for values in expected]
        for expected_values, values in zip(expected, values_by_depth, strict=True):
            np.testing.assert_allclose(expected_values, values, rtol=1e-12)


def test_best_first_is_wrong_on_a_rising_vector_and_solve_knows():
    """Negative control: the design's counterexample, 1.44 where 1.85 is optimal."""
    rising = [0.3, 0.05, 0.5]
    greedy = last(best_first, Acceptance.given(rising).at_depth(4), 4)
    assert greedy == pytest.approx(1.44)
    solution = solve(rising, budget=4, depth=4)
    assert (solution.plan.solver, solution.plan.expected_tokens) == ("hull", pytest.approx(1.85))
    with pytest.raises(ArgumentError, match="best-first is exact only where"):
        best_tree(Acceptance.given(rising).at_depth(4), 4, "best-first")


@settings(max_examples=80)
@given(
    acceptance_vectors(longest=5),
    st.integers(1, 40),
    st.integers(2, 8),
    st.sampled_from([None, 1, 2, 3]),
)
def test_the_tree_attains_the_tables_value(acceptance, size, depth, branching):
    rows = Acceptance.given(acceptance).at_depth(depth, branching)
    value = last(dynamic_programming, rows, size)
    if math.isnan(value):
        with pytest.raises(ArgumentError, match="no tree of"):
            solve(acceptance, budget=size, depth=depth, branching=branching)
        return
    tree = solve(acceptance, budget=size, depth=depth, branching=branching).tree
    assert tree.size == size
    assert tree.depth <= depth
    assert tree.branching <= rows.shape[-1]
    assert expected_tokens(tree, Acceptance.given(acceptance).rates) == pytest.approx(
        value, rel=1e-12
    )


@settings(max_examples=40)
@given(acceptance_vectors(longest=4))
def test_more_never_hurts(acceptance):
    rows = Acceptance.given(acceptance).at_depth(6)
    frontiers = [
        concave_envelope.frontier(np.ascontiguousarray(rows[..., :ranks]), 25)
        for ranks in range(1, len(acceptance) + 1)
    ]
    slack = 1 - 1e-12
    for values in itertools.chain(*frontiers):
        assert (values[1:] >= values[:-1] * slack).all()
    pairs = [pair for by_depth in frontiers for pair in itertools.pairwise(by_depth)]
    for narrow, wide in itertools.pairwise(frontiers):
        pairs += zip(narrow, wide, strict=True)
    for less, more in pairs:
        assert (more[: len(less)] >= less * slack).all()


def test_unreachable_sizes_are_refused_with_the_largest():
    with pytest.raises(
        ArgumentError, match=r"no tree of 14 nodes has depth 3 and branching 3: the largest has 13"
    ):
        solve([0.5, 0.2, 0.1], budget=14, depth=3)
    assert solve([0.5, 0.2, 0.1], budget=13, depth=3).tree.size == 13
    assert solve([1.0], budget=5, depth=5).tree == TokenTree.chain(5)


@pytest.mark.parametrize("acceptance", [[0.0], [0.0, 0.0, 0.0], [0.0, 1.0]])
def test_zeros(acceptance):
    for solver in ("dp", "hull", "best-first") if acceptance[-1] == 0 else ("dp", "hull"):
        size = 1 + len(acceptance)
        given_acceptance = Acceptance.given(acceptance)
        tree = best_tree(given_acceptance.at_depth(4), size, solver)
        assert expected_tokens(tree, given_acceptance.rates) == exhaustive(acceptance, size, 4)


STEEP = Latency(
    {1: 0.04, 4: 0.045, 8: 0.05, 32: 0.09, 64: 0.2},
    {1: 0.004, 2: 0.0042, 16: 0.008, 64: 0.02},
    0.001,
    128,
)


@settings(max_examples=25)
@given(acceptance_vectors(longest=3), st.floats(0.0001, 0.05), st.floats(0.0001, 0.05))
def test_speed_beats_every_optimal_tree_of_every_size_and_depth(acceptance, per_node, per_draft):
    latency = Latency(
        {n: 0.04 + per_node * (n - 1) for n in (1, 3, 7)},
        {1: per_draft, 7: 2 * per_draft},
        0.001,
        0,
    )
    solution = solve(Profile(Acceptance.given(acceptance), latency=latency), budget=7, depth=4)
    times = StepTime(latency)
    speed = solution.plan.expected_tokens / times.step_seconds(solution.tree)
    for depth in range(2, 5):
        rows = Acceptance.given(acceptance).at_depth(depth)
        for size, value in enumerate(dynamic_programming.frontier(rows, 7)[-1], 1):
            tree = TokenTree.from_parents(dynamic_programming.parents(rows, size))
            assert speed >= value / times.step_seconds(tree) * (1 - 1e-12)
    assert speed >= 1 / times.plain_seconds() * (1 - 1e-12)


def test_speed_can_say_no_speculation_and_chain():
    slow_draft = Latency({1: 0.04, 8: 0.05}, {1: 0.04, 8: 0.05}, 0.0, 0)
    profile = Profile(Acceptance.given((0.4, 0.1)), latency=slow_draft)
    assert solve(profile, budget=8, depth=5).tree.size == 1
    steep_target = Latency(
        {n: 0.04 * n for n in range(1, 9)} | {2: 0.041, 3: 0.042}, {1: 0.0001, 8: 0.0002}, 0.0, 0
    )
    profile = Profile(Acceptance.given((0.9, 0.01)), latency=steep_target)
    assert solve(profile, budget=8, depth=8).tree == TokenTree.chain(3)


def test_speed_prediction_is_tokens_over_time():
    solution = solve(Profile(Acceptance.given(tuple(LLAMA3)), latency=STEEP), budget=64, depth=10)
    times = StepTime(STEEP)
    assert solution.plan.predicted_speedup == pytest.approx(
        solution.plan.expected_tokens * (0.04 + 0.001) / times.step_seconds(solution.tree)
    )
    assert 1 < solution.tree.size <= 64


def test_step_time_never_invents_speed():
    times = StepTime(Latency({1: 0.04, 2: 0.09, 4: 0.05, 8: 0.10}, {1: 0.01}, 0.0, 0))
    assert times.target_seconds(2) == 0.05  # padding two nodes up to four
    # Between two measured sizes a pass takes as long as the next measured one.
    assert times.target_seconds(5) == times.target_seconds(8) == 0.10
    assert times.target_seconds(9) == math.inf
    assert times.draft_seconds(2) == math.inf


def test_speed_never_leaves_what_was_measured():
    free = Latency({1: 0.04, 8: 0.04}, {1: 1e-6, 4: 1e-6}, 0.0, 0)
    solution = solve(Profile(Acceptance.given((0.5, 0.3)), latency=free), budget=768, depth=20)
    assert solution.tree.size <= 8
    assert max(LANGUAGE_MODEL.pass_widths(solution.tree.num_parents_by_level)) <= 4


def test_tokens_objective_takes_exactly_the_budget_even_where_no_latency_is_known():
    solution = solve(
        Profile(Acceptance.given((0.5, 0.3)), latency=Latency({1: 0.04}, {2: 0.01}, 0.0, 0)),
        budget=12,
        depth=5,
        objective="tokens",
    )
    assert solution.tree.size == 12
    assert solution.plan.predicted_speedup is None


def test_the_plan_is_json_and_complete():
    models = {"target": {"name": "t"}}
    profile = Profile(Acceptance.given((0.5, 0.3)), 100, STEEP, {"temperature": 0.6}, models)
    plan = solve(profile, budget=16, depth=5).plan
    document = json.loads(json.dumps(plan.to_dict()))
    assert document["effective_trials"] == 100
    assert document["settings"] == {"temperature": 0.6}
    assert {
        "acceptance",
        "budget",
        "depth",
        "objective",
        "solver",
        "expected_tokens",
        "step_seconds",
        "predicted_speedup",
    } <= document.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5], 0, 3), "budget: found 0"),
        (([0.5], 10**12, 3), "no tree of|at most 1000000"),
        (([0.5], 4, 0), "depth: found 0"),
        (([0.5], 4, 10**6), "depth: found 1000000, expected at most"),
        (([0.5], 4, 1), "depth 1 is the root alone"),
        (([0.5], 4, 3, 0), "branching: found 0"),
        (([], 4, 3), "expected a list of probabilities"),
        (([0.6, 0.6], 4, 3), "sums to 1.2"),
        (([-0.1], 4, 3), r"p\[1\] is -0.1"),
        (([float("nan")], 4, 3), r"p\[1\] is nan"),
        (("0.5", 4, 3), "expected a list of probabilities"),
        (([[0.5, 0.1], [0.5]], 4, 3), "pad with zeros"),
        (([[0.5, 0.1], [0.5, 0.9]], 4, 3), "level 1: sums to 1.4"),
        (([[[0.5], [0.1]], [0.5]], 4, 3), "on the spine and off the spine"),
        (([[[0.5], [0.1], [0.1]]], 4, 3), "on the spine and off the spine"),
        (([[[0.5], [1.1]]], 4, 3), r"off the spine: p\[1\] is 1.1"),
        (([0.5], 4, 9, None, "speed"), "objective speed needs latencies"),
        (([0.5], 4, 9, None, "fun"), "objective: found 'fun'"),
    ],
)
def test_solve_refuses(arguments, message):
    acceptance, budget, depth, *more = arguments
    options = dict(zip(("branching", "objective"), more, strict=False))
    with pytest.raises(SequoiaPlanError, match=message):
        solve(acceptance, budget=budget, depth=depth, **options)
