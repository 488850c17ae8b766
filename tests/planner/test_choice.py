"""The fastest tree for the hardware, the bound that proves it, and searches wrong on purpose."""

from __future__ import annotations

import numpy as np
import pytest
from brute_force import DFLASH, EAGLE, TREES, max_speed
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from strategies import acceptance_vectors, latencies, level_rows, rows_by_class

from sequoia_plan.artifacts import (
    LANGUAGE_MODEL,
    Acceptance,
    Latency,
    Profile,
    StreamCost,
    TokenTree,
)
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import frontier, solve
from sequoia_plan.planner.solving import best_first, concave_envelope, fastest, relaxation
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.fastest import fastest_tree

TINY = Profile(
    Acceptance.given((0.5, 0.3, 0.1, 0.05)),
    latency=Latency(
        {n: 0.04 + 0.0005 * n for n in range(1, 8)}, {1: 0.002, 2: 0.012, 5: 0.02}, 0.001, 0
    ),
)
"""Draft passes of two nodes cost six times those of one."""


@settings(max_examples=120)
@given(level_rows(non_increasing=True), latencies(), st.integers(2, 7), st.integers(2, 6))
def test_the_fastest_tree_is_found_and_proven(rows, latency, budget, depth):
    """Brute force over all trees finds none that is faster, and the plan says so.

    This holds for any rows that do not increase, and for any curves.
    """
    solution = solve(
        Profile(Acceptance.given(tuple(rows[0])), latency=latency), budget=budget, depth=depth
    )
    times, table = StepTime(latency), Acceptance.given(rows[0]).at_depth(depth)
    best = max_speed(table, times, min(budget, times.largest_size()))
    speed = solution.plan.expected_tokens / solution.plan.step_seconds
    assert speed == pytest.approx(best, rel=1e-12)
    assert solution.plan.gap < 1e-9
    for drafting in (LANGUAGE_MODEL, DFLASH, EAGLE):
        times = StepTime(latency, drafting)
        table = Acceptance.given(rows).at_depth(min(depth, drafting.max_depth or depth))
        chosen = fastest_tree(Acceptance.given(rows).at_depth(depth), budget, times)
        best = max_speed(table, times, min(budget, times.largest_size()))
        assert chosen.speed == pytest.approx(best, rel=1e-12)
        assert chosen.gap < 1e-9


@settings(max_examples=120)
@given(
    rows_by_class(non_increasing=True, favouring=True),
    latencies(),
    st.integers(2, 7),
    st.integers(2, 6),
)
def test_the_fastest_tree_is_found_and_proven_with_classes(rows, latency, budget, depth):
    table = Acceptance.given(rows).at_depth(depth)
    assert best_first.favours_spine(table)
    for drafting in (LANGUAGE_MODEL, DFLASH):
        times = StepTime(latency, drafting)
        table = Acceptance.given(rows).at_depth(min(depth, drafting.max_depth or depth))
        chosen = fastest_tree(Acceptance.given(rows).at_depth(depth), budget, times)
        best = max_speed(table, times, min(budget, times.largest_size()))
        assert chosen.speed == pytest.approx(best, rel=1e-12)
        assert chosen.gap < 1e-9


@settings(max_examples=120)
@given(
    rows_by_class(non_increasing=True) | rows_by_class(),
    latencies(),
    st.integers(2, 7),
    st.integers(2, 6),
)
def test_the_bound_on_speed_holds_with_any_classes(rows, latency, budget, depth):
    times, table = StepTime(latency), Acceptance.given(rows).at_depth(depth)
    best = max_speed(table, times, min(budget, times.largest_size()))
    for max_work in (fastest.MAX_WORK, -1):
        chosen = fastest_tree(table, budget, times, max_work=max_work)
        assert chosen.speed <= best * (1 + 1e-12)
        assert best <= chosen.bound * (1 + 1e-12)


def test_best_first_is_trusted_only_where_rows_favour_the_spine(monkeypatch):
    """The control: rows that do not favour the spine, treated as if they did, give a wrong bound.

    Off the spine a child is likelier here, so the most valuable nodes of a level need not have the
    most valuable children.
    """
    rows = Acceptance.given(
        [[[0.33, 0.32, 0.3], [0.4, 0.36, 0.1]], [[0.44, 0.23, 0.06], [0.41, 0.39, 0.06]]]
    ).at_depth(3)
    times = StepTime(
        Latency(
            {1: 0.04, 3: 0.041, 5: 0.043, 7: 0.045},
            {1: 0.002, 2: 0.0057990024098245625, 3: 0.012, 7: 0.02},
            0.001,
            0,
        )
    )
    best = max_speed(rows, times, 7)
    assert best_first.is_non_increasing(rows) and not best_first.favours_spine(rows)
    assert fastest_tree(rows, 7, times).bound >= best
    monkeypatch.setattr(best_first, "favours_spine", lambda rows: True)
    assert fastest_tree(rows, 7, times).bound < best * 0.999


def test_of_equally_valuable_nodes_the_one_on_the_spine_has_children_first():
    """Level 2 has two nodes of value 0.25, of which one may have children.

    The subtree below the one on the spine is worth more.
    """
    rows = Acceptance.given(
        [[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]], [[0.9, 0.1], [0.2, 0.1]]]
    ).at_depth(4)
    value = best_first.most_valuable_nodes_within(
        rows, 8, np.array([1, 2, 1]), np.array([2, 2, 2]), 99
    )[1]
    assert value.sum() == pytest.approx(1 + 2 * 0.5 + 4 * 0.25 + 0.25 * 0.9)


@settings(max_examples=120)
@given(level_rows(non_increasing=False), latencies(), st.integers(2, 7), st.integers(2, 6))
def test_the_bound_on_speed_holds_where_rows_increase(rows, latency, budget, depth):
    times, table = StepTime(latency), Acceptance.given(rows).at_depth(depth)
    max_size = min(budget, times.largest_size())
    chosen = fastest_tree(table, budget, times)
    assert chosen.speed <= chosen.bound * (1 + 1e-12)
    assert max_speed(table, times, max_size) <= chosen.bound * (1 + 1e-12)
    # The narrowest tree of a size and depth may be a different one than the recursion's.
    for values in concave_envelope.frontier(table, max_size)[1:]:
        for size in range(1, len(values) + 1):
            tree = TokenTree(concave_envelope.parents(table, size))
            speed = expected_tokens(tree, table) / times.step_seconds(tree)
            assert chosen.speed >= speed * (1 - 1e-12)
    without_work = fastest_tree(table, budget, times, max_work=-1)
    assert max_speed(table, times, max_size) <= without_work.bound * (1 + 1e-12)


def test_a_search_that_forgets_the_stream_is_noticed(monkeypatch):
    """The control: without the time that weights take to arrive, a slower tree is chosen.

    It is smaller than the fastest one, and its predicted speed-up is too high.
    """
    latency = structs.replace(TINY.latency, stream=StreamCost(0.08, 1000))
    times, rows, right = (
        StepTime(latency),
        TINY.acceptance.at_depth(5),
        fastest.cost_tables,
    )
    best = max_speed(rows, times, 7)
    assert fastest_tree(rows, 7, times).speed == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(
        fastest, "cost_tables", lambda *arguments: right(*arguments)._replace(min_step_seconds=0.0)
    )
    assert fastest_tree(rows, 7, times).speed < best * 0.999


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


@pytest.mark.parametrize("seed", range(12))
def test_the_fastest_tree_of_twenty_nodes(seed):
    """An enumeration of all widths on five levels, without bounds."""
    rng = np.random.default_rng(seed)
    rows = -np.sort(-rng.dirichlet([2, 1, 0.5, 0.3, 0.5], 3)[:, :4], axis=1)
    target = {n: 0.02 + rng.uniform(0.0001, 0.002) * n for n in (1, 3, 6, 8, 12, 16, 20)}
    draft = {n: rng.uniform(0.0002, 0.002) + 0.0001 * n for n in (1, 2, 3, 4, 5, 7)}
    times, table = (
        StepTime(Latency(target, draft, 0.001, 0)),
        Acceptance.given(rows.tolist()).at_depth(5),
    )
    chosen = fastest_tree(table, 20, times)
    assert chosen.speed == pytest.approx(fastest_by_widths(table, times, 20, 7), rel=1e-12)
    assert chosen.gap < 1e-9


def test_a_wrong_price_of_draft_passes_is_noticed(monkeypatch):
    """The control: wrong costs give a wrong bound, or a slower tree.

    With costs above the real ones, the bound falls below a real tree. With one cost for all widths,
    a slower tree is chosen.
    """
    times, rows = StepTime(TINY.latency), TINY.acceptance.at_depth(5)
    best, right = max_speed(rows, times, 7), fastest.cost_tables
    assert fastest_tree(rows, 7, times).speed == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(
        fastest,
        "cost_tables",
        lambda *arguments: right(*arguments)._replace(draft=right(*arguments).draft * 50),
    )
    assert fastest_tree(rows, 7, times).bound < best * 0.999
    flat = np.r_[0.0, np.full(7, 0.002)]
    monkeypatch.setattr(
        fastest, "cost_tables", lambda *arguments: right(*arguments)._replace(draft=flat)
    )
    assert fastest_tree(rows, 7, times).speed < best * 0.999


@settings(max_examples=60)
@given(
    level_rows(non_increasing=False) | rows_by_class(),
    latencies(),
    st.lists(st.floats(0, 0.3), min_size=6, max_size=6),
    st.floats(0, 0.2),
    st.floats(5, 80),
)
def test_no_tree_gains_more_than_its_relaxation(rows, latency, prices, floor, rate):
    """F - rate x step of every tree of two to seven nodes is at most the bound, for any prices."""
    table = Acceptance.given(rows).at_depth(6)
    times = StepTime(latency)
    max_size = times.largest_size()
    if max_size < 2:
        return
    prices = np.array(prices[: len(table)])
    prices[0] += floor
    bound = relaxed(table, times, max_size, prices, floor, rate)
    for tree in TREES:
        fits = 2 <= tree.size <= max_size and tree.branching <= table.shape[-1] and tree.depth <= 6
        if fits and np.isfinite(times.step_seconds(tree)):
            gain = expected_tokens(tree, table) - rate * times.step_seconds(tree)
            assert gain <= bound + 1e-12


def relaxed(rows, times, max_size, prices, floor, rate):
    """The bound over all trees of 2 to `max_size` nodes, whatever the rows."""
    costs, levels = fastest.cost_tables(times, max_size, len(rows) + 1), len(rows)
    scopes = levels if costs.round_order == relaxation.LEVEL else 1
    high = np.full(levels, costs.draft_stair_ends[-1])
    high[0] = max_size
    low = np.r_[2, np.zeros(levels - 1, int)]
    max_ranks = rows.shape[-1] * (levels if costs.round_order == relaxation.PATH else 1)
    box = relaxation.Box(low, high, np.ones(scopes, int), np.full(scopes, max_ranks))
    nodes = relaxation.candidate_nodes(rows, floor, costs.by_visit, costs.by_rejection)
    tree = relaxation.RelaxedTree(
        np.zeros(levels, int),
        np.zeros(levels, int),
        np.ones(scopes, int),
        np.zeros(scopes),
        np.zeros(len(nodes.values), int),
        np.zeros(1),
    )
    siblings_never_add_more = (
        best_first.is_non_increasing(rows)
        and best_first.favours_spine(rows)
        and costs.by_rejection == 0
    )
    return relaxation.relax(nodes, costs, box, prices, rate, siblings_never_add_more, tree)[0]


def test_a_node_left_out_must_cost_what_it_may_be_worth():
    """The control: nodes below the floor are left out, which only their price allows."""
    times, rows = StepTime(TINY.latency), TINY.acceptance.at_depth(4)
    free = np.zeros(3)
    star = TokenTree.star(4)
    gain = expected_tokens(star, rows) - times.step_seconds(star)
    assert relaxed(rows, times, 7, free, 0.0, 1.0) >= gain
    assert relaxed(rows, times, 7, free, 0.3, 1.0) < gain


@settings(max_examples=40)
@given(level_rows(non_increasing=False), latencies(), st.integers(2, 7))
def test_the_upper_bound_is_the_optimum_of_that_size(rows, latency, depth):
    chosen = solve(
        Profile(Acceptance.given(tuple(rows[0])), latency=latency), budget=7, depth=depth
    )
    optimum = solve(rows[0], budget=chosen.tree.size, depth=depth if chosen.tree.size > 1 else 1)
    assert chosen.plan.upper_bound == pytest.approx(optimum.plan.expected_tokens, rel=1e-12)
    assert optimum.plan.upper_bound == optimum.plan.expected_tokens


def test_the_fastest_tree_may_have_fewer_tokens_than_its_size_allows():
    """Where width costs, expected tokens of the tree chosen are no bound for its size."""
    chosen = solve(TINY, budget=7, depth=5)
    assert chosen.plan.upper_bound > chosen.plan.expected_tokens * 1.001
    optimum = solve(TINY, budget=chosen.tree.size, depth=5, objective="tokens")
    assert chosen.plan.upper_bound == pytest.approx(optimum.plan.expected_tokens)


def test_the_profile_search_beats_the_trees_of_most_tokens():
    """The trees of most tokens draft more nodes than pays, as wide passes cost ten times more."""
    latency = Latency({1: 0.04, 32: 0.05}, {1: 0.002, 2: 0.002, 3: 0.02, 32: 0.03}, 0.0, 0)
    acceptance = (0.5, 0.2, 0.1, 0.05)
    times = StepTime(latency)
    optima = frontier(acceptance, 32, 10)
    speed_of_optima = max(
        values[n - 1] / times.step_seconds(optima.tree(n, d))
        for d, values in enumerate(optima.values, 1)
        for n in range(1, len(values) + 1)
    )
    solution = solve(Profile(Acceptance.given(acceptance), latency=latency), budget=32, depth=10)
    speed = solution.plan.expected_tokens / solution.plan.step_seconds
    assert speed > speed_of_optima * 1.001


@given(acceptance_vectors(longest=6))
def test_isotonic(acceptance):
    smoothed = isotonic(np.array([acceptance]))[0]
    assert (np.diff(smoothed) <= 0).all()
    assert smoothed.sum() == pytest.approx(sum(acceptance))
    if acceptance == sorted(acceptance, reverse=True):
        assert smoothed == pytest.approx(acceptance)
    assert isotonic(np.array([[0.3, 0.05, 0.5]]))[0] == pytest.approx([0.3, 0.275, 0.275])
