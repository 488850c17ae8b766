"""The fastest tree for the hardware, the bound that proves it, and searches wrong on purpose."""

import numpy as np
import pytest
from brute_force import DFLASH, EAGLE, fitting, max_speed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import at_depth, latencies, rates

from sequoia_plan.artifacts import LANGUAGE_MODEL, Latency, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import frontier
from sequoia_plan.planner.solving.problem import MAX_WORK, Problem, SpeedProblem
from sequoia_plan.planner.solving.speed import fastest, relaxation
from sequoia_plan.planner.solving.speed.fastest import fastest_tree
from sequoia_plan.planner.solving.tokens import best_first
from sequoia_plan.planner.solving.tokens.best_first import isotonic
from sequoia_plan.planner.solving.tokens.frontier import best_tree

TINY = Latency({n: 0.04 + 0.0005 * n for n in range(1, 8)}, {1: 0.002, 2: 0.012, 5: 0.02}, 0.001, 0)
"""Draft passes of two nodes cost six times those of one."""
DRAFTINGS = st.sampled_from([LANGUAGE_MODEL, DFLASH, EAGLE])
LIMITS = latencies(), st.integers(2, 7), st.integers(2, 6), DRAFTINGS


TINY_ROWS = at_depth([0.5, 0.3, 0.1, 0.05], 5)


def by_brute_force(rates, times, budget, depth):
    """The highest speed of any tree that the search may take."""
    rows = at_depth(rates, min(depth, times.drafting.max_depth or depth))
    return max_speed(rows, times, min(budget, times.largest_size()))


@settings(max_examples=120)
@given(rates(non_increasing=True, favouring=True), *LIMITS)
def test_the_fastest_tree_is_found_and_proven(rates, latency, budget, depth, drafting):
    """Brute force over all trees finds none that is faster, whatever the curves."""
    rows, times = at_depth(rates, depth), StepTime(latency, drafting)
    assert best_first.is_non_increasing(rows) and best_first.favours_spine(rows)
    chosen = fastest_tree(SpeedProblem(rows, budget, times))
    assert chosen.speed == pytest.approx(by_brute_force(rates, times, budget, depth), rel=1e-12)
    assert chosen.bound == pytest.approx(chosen.speed, rel=1e-9)
    tokens = expected_tokens(chosen.tree, rates)
    assert chosen.speed == pytest.approx(tokens / times.step_seconds(chosen.tree), rel=1e-12)


@settings(max_examples=120)
@given(rates() | rates(non_increasing=True), *LIMITS)
def test_the_bound_on_speed_holds_for_any_acceptance(rates, latency, budget, depth, drafting):
    """And no tree of most tokens of a size and depth is faster than the tree that is taken."""
    rows, times = at_depth(rates, depth), StepTime(latency, drafting)
    best = by_brute_force(rates, times, budget, depth)
    for max_work in (-1, MAX_WORK):
        chosen = fastest_tree(SpeedProblem(rows, budget, times, max_work=max_work))
        assert chosen.tree.depth <= min(depth, drafting.max_depth or depth)
        assert chosen.speed <= best * (1 + 1e-12)
        assert best <= chosen.bound * (1 + 1e-12)
    optima = frontier(rates, min(budget, times.largest_size()), depth)
    for max_depth, values in enumerate(optima[: drafting.max_depth], 1):
        for size in range(1, len(values) + 1):
            tree = best_tree(Problem(rows[: max_depth - 1], size))
            speed = expected_tokens(tree, rates) / times.step_seconds(tree)
            assert chosen.speed >= speed * (1 - 1e-12)


def test_best_first_is_trusted_only_where_rows_favour_the_spine(monkeypatch):
    """The control: rows that do not favour the spine, treated as if they did, give a wrong bound.

    Off the spine a child is likelier here, so the most valuable nodes of a level need not have the
    most valuable children.
    """
    rows = at_depth(
        [[[0.33, 0.32, 0.3], [0.4, 0.36, 0.1]], [[0.44, 0.23, 0.06], [0.41, 0.39, 0.06]]], 3
    )
    times = StepTime(
        Latency(
            {1: 0.04, 3: 0.041, 5: 0.043, 7: 0.045},
            {1: 0.002, 2: 0.0057990024098245625, 3: 0.012, 7: 0.02},
            0.001,
        )
    )
    best = max_speed(rows, times, 7)
    assert best_first.is_non_increasing(rows) and not best_first.favours_spine(rows)
    assert fastest_tree(SpeedProblem(rows, 7, times)).bound >= best
    monkeypatch.setattr(best_first, "favours_spine", lambda rows: True)
    assert fastest_tree(SpeedProblem(rows, 7, times)).bound < best * 0.999


def test_of_equally_valuable_nodes_the_one_on_the_spine_has_children_first():
    """Level 2 has two nodes of value 0.25, of which one may have children."""
    level = [[0.5, 0.5], [0.5, 0.5]]
    rows = at_depth([level, level, [[0.9, 0.1], [0.2, 0.1]]], 4)
    value = best_first.most_valuable_nodes_within(rows, 8, np.array([1, 2, 1]))[1]
    assert value.sum() == pytest.approx(1 + 2 * 0.5 + 4 * 0.25 + 0.25 * 0.9)


def fastest_by_widths(rows, times, max_size, max_width):
    """The highest speed over every choice of widths up to `max_width`.

    The most valuable nodes of each level have children, and the rest are the best leaves.
    """
    best = 1 / times.plain_seconds()

    def deepen(values, candidates, widths):
        nonlocal best
        level = len(widths)
        children = np.sort((values[:, None] * rows[level - 1, 0]).ravel())[::-1][:max_size]
        candidates = np.concatenate([candidates, children])
        taken = np.sort(candidates)[::-1][: max_size - 1]
        tokens, sizes = 1 + np.cumsum(taken), 2 + np.arange(taken.size)
        draft_seconds = times.draft_seconds(np.array(LANGUAGE_MODEL.pass_widths(widths))).sum()
        step_seconds = times.target_seconds(sizes) + draft_seconds + times.latency.overhead
        best = max(best, (tokens / step_seconds).max())
        if level < len(rows):
            for width in range(1, min(max_width, children.size) + 1):
                deepen(children[:width], candidates, [*widths, width])

    deepen(np.ones(1), np.empty(0), [1])
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_tree_of_twenty_nodes(seed):
    """An enumeration of all widths on five levels, without bounds."""
    rng = np.random.default_rng(seed)
    rows = -np.sort(-rng.dirichlet([2, 1, 0.5, 0.3, 0.5], 3)[:, :4], axis=1)
    target = {n: 0.02 + rng.uniform(0.0001, 0.002) * n for n in (1, 3, 6, 8, 12, 16, 20)}
    draft = {n: rng.uniform(0.0002, 0.002) + 0.0001 * n for n in (1, 2, 3, 4, 5, 7)}
    times, rows = StepTime(Latency(target, draft, 0.001)), at_depth(rows, 5)
    chosen = fastest_tree(SpeedProblem(rows, 20, times))
    assert chosen.speed == pytest.approx(fastest_by_widths(rows, times, 20, 7), rel=1e-12)
    assert chosen.bound == pytest.approx(chosen.speed, rel=1e-9)


@settings(max_examples=60)
@given(
    rates(),
    latencies(),
    st.lists(st.floats(0, 0.3), min_size=6, max_size=6),
    st.floats(0, 0.2),
    st.floats(5, 80),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_tree_gains_more_than_its_relaxation(rates, latency, prices, floor, rate, share):
    """F - rate x step of every tree of two to seven nodes is at most the bound, for any prices."""
    rows, times = at_depth(rates, 6), StepTime(latency)
    prices = np.array(prices[: len(rows)])
    prices[0] += floor
    bound = relaxed(rows, times, prices, floor, rate, share)
    for tree in fitting(rows, times.largest_size()):
        if tree.size > 1 and np.isfinite(times.step_seconds(tree)):
            gain = expected_tokens(tree, rows) - rate * times.step_seconds(tree)
            assert gain <= bound + 1e-12


def relaxed(rows, times, prices, floor, rate, share=0.0):
    """The bound over all trees of two nodes or more, whatever the rows."""
    max_size, levels = max(2, times.largest_size()), len(rows)
    costs = fastest.cost_tables(SpeedProblem(rows, max_size, times))
    low, high = np.r_[2, np.zeros(levels - 1, int)], np.full(levels, costs.draft_stair_ends[-1])
    high[0] = max_size
    nodes = relaxation.candidate_nodes(rows, floor)
    is_ordered = SpeedProblem(rows, max_size, times).is_ordered
    search = relaxation.Search(rows, rows, is_ordered, nodes, floor, costs)
    tree = relaxation.RelaxedTree(*np.zeros((2, levels), int), np.zeros(len(nodes.values), int))
    return relaxation.relax(search, relaxation.Box(low, high), prices, rate, share, tree)[0]


def test_a_node_left_out_must_cost_what_it_may_be_worth():
    """The control: nodes below the floor are left out, which only their price allows."""
    times, rows = StepTime(TINY), TINY_ROWS[:3]
    gain = expected_tokens(TokenTree.star(4), rows) - times.step_seconds(TokenTree.star(4))
    assert relaxed(rows, times, np.zeros(3), 0.0, 1.0) >= gain
    assert relaxed(rows, times, np.zeros(3), 0.3, 1.0) < gain


def test_the_answer_may_be_no_speculation_or_a_chain():
    slow_draft = StepTime(Latency({1: 0.04, 8: 0.05}, {1: 0.04, 8: 0.05}))
    assert fastest_tree(SpeedProblem(at_depth([0.4, 0.1], 5), 8, slow_draft)).tree.size == 1
    target = {n: 0.04 * n for n in range(1, 9)} | {2: 0.041, 3: 0.042}
    steep_target = StepTime(Latency(target, {1: 0.0001, 8: 0.0002}))
    problem = SpeedProblem(at_depth([0.9, 0.01], 8), 8, steep_target)
    assert fastest_tree(problem).tree == TokenTree.chain(3)


def test_no_tree_leaves_what_was_measured():
    times = StepTime(Latency({1: 0.04, 8: 0.04}, {1: 1e-6, 4: 1e-6}))
    tree = fastest_tree(SpeedProblem(at_depth([0.5, 0.3], 20), 768, times)).tree
    assert tree.size <= 8 and max(LANGUAGE_MODEL.pass_widths(tree.num_parents_by_level)) <= 4


@given(rates(6))
def test_isotonic_rows_never_increase_and_keep_their_sums(rates):
    # the mean of two subnormal numbers may round to 0
    assume(not ((rates > 0) & (rates < np.finfo(float).tiny)).any())
    smoothed = isotonic(rates)
    assert (np.diff(smoothed) <= 0).all()
    np.testing.assert_allclose(smoothed.sum(-1), rates.sum(-1))
    is_kept = (np.diff(rates) < 0).all(-1)
    np.testing.assert_array_equal(smoothed[is_kept], rates[is_kept])
    assert isotonic(np.array([0.3, 0.05, 0.5])) == pytest.approx([0.3, 0.275, 0.275])
