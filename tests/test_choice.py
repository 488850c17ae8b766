"""The choice for the hardware: the fastest tree, the bound that proves it, and searches that are wrong on purpose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from brute_force import BLOCK, FEATURES, TREES, most_speed
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from strategies import acceptance_vectors, has_proof, latencies, level_rows, rows_by_class

from sequoia_plan.artifacts import LANGUAGE_MODEL, Latency, Profile, Stream, TokenTree, Verification
from sequoia_plan.artifacts.cost import StepTime, acceptance_rows, expected_tokens
from sequoia_plan.planner import frontier, solve
from sequoia_plan.planner.solving import best_first, hull, relaxation
from sequoia_plan.planner.solving import fastest as choice
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.fastest import fastest

TINY = Profile((0.5, 0.3, 0.1, 0.05), latency=Latency({n: 0.04 + 0.0005 * n for n in range(1, 8)}, {1: 0.002, 2: 0.012, 5: 0.02}, 0.001, 0))
"""Draft passes of two nodes cost six times those of one."""


@settings(max_examples=120, deadline=None)
@given(level_rows(non_increasing=True), latencies(proven=True), st.integers(2, 7), st.integers(2, 6))
def test_the_fastest_tree_is_found_and_proven(rows, latency, budget, depth):
    """Any rows that do not increase, any curves: brute force over all trees finds none that is faster, and the plan says so."""
    solution = solve(Profile(tuple(rows[0]), latency=latency), budget, depth)
    times, table = StepTime(latency), acceptance_rows(rows[0], depth)
    best = most_speed(table, times, min(budget, times.largest()))
    assert solution.plan.expected_tokens / solution.plan.step_seconds == pytest.approx(best, rel=1e-12)
    assert solution.plan.gap < 1e-9
    for drafting in (LANGUAGE_MODEL, BLOCK, FEATURES):
        times, table = StepTime(latency, drafting), acceptance_rows(rows, min(depth, drafting.deepest or depth))
        found = fastest(acceptance_rows(rows, depth), budget, times)
        assert found.speed == pytest.approx(most_speed(table, times, min(budget, times.largest())), rel=1e-12)
        assert found.gap < 1e-9


@settings(max_examples=120, deadline=None)
@given(rows_by_class(non_increasing=True, favouring=True), latencies(), st.integers(2, 7), st.integers(2, 6))
def test_the_fastest_tree_is_found_and_proven_with_classes(rows, latency, budget, depth):
    table = acceptance_rows(rows, depth)
    assert best_first.favours_spine(table)
    for drafting in (LANGUAGE_MODEL, BLOCK):
        times, table = StepTime(latency, drafting), acceptance_rows(rows, min(depth, drafting.deepest or depth))
        found = fastest(acceptance_rows(rows, depth), budget, times)
        assert found.speed == pytest.approx(most_speed(table, times, min(budget, times.largest())), rel=1e-12)
        assert found.gap < (1e-9 if has_proof(latency.verification) else 0.1)


@settings(max_examples=120, deadline=None)
@given(rows_by_class(non_increasing=True) | rows_by_class(), latencies(), st.integers(2, 7), st.integers(2, 6))
def test_the_bound_on_speed_holds_with_any_classes(rows, latency, budget, depth):
    times, table = StepTime(latency), acceptance_rows(rows, depth)
    most = most_speed(table, times, min(budget, times.largest()))
    for work in (choice.MOST_WORK, -1):
        found = fastest(table, budget, times, most_work=work)
        assert found.speed <= most * (1 + 1e-12)
        assert most <= found.bound * (1 + 1e-12)


def test_growth_is_trusted_only_where_rows_favour_the_spine(monkeypatch):
    """The control: off the spine a child is likelier here, so the most valuable nodes of a level need not have the most valuable children."""
    rows = acceptance_rows([[[0.33, 0.32, 0.3], [0.4, 0.36, 0.1]], [[0.44, 0.23, 0.06], [0.41, 0.39, 0.06]]], 3)
    times = StepTime(Latency({1: 0.04, 3: 0.041, 5: 0.043, 7: 0.045}, {1: 0.002, 2: 0.0057990024098245625, 3: 0.012, 7: 0.02}, 0.001, 0))
    best = most_speed(rows, times, 7)
    assert best_first.is_non_increasing(rows) and not best_first.favours_spine(rows)
    assert fastest(rows, 7, times).bound >= best
    monkeypatch.setattr(best_first, "favours_spine", lambda rows: True)
    assert fastest(rows, 7, times).bound < best * 0.999


def test_of_equally_valuable_nodes_the_one_on_the_spine_has_children_first():
    """Two nodes of value .25 on level 2, room for one with children there: below the one on the spine hangs more."""
    rows = acceptance_rows([[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]], [[0.9, 0.1], [0.2, 0.1]]], 4)
    value = best_first.grow(rows, 8, np.array([1, 2, 1]), np.array([2, 2, 2]), 99)[1]
    assert value.sum() == pytest.approx(1 + 2 * 0.5 + 4 * 0.25 + 0.25 * 0.9)


@settings(max_examples=120, deadline=None)
@given(level_rows(non_increasing=False), latencies(), st.integers(2, 7), st.integers(2, 6))
def test_the_bound_on_speed_holds_where_rows_increase(rows, latency, budget, depth):
    times, table = StepTime(latency), acceptance_rows(rows, depth)
    most = min(budget, times.largest())
    found = fastest(table, budget, times)
    assert found.speed <= found.bound * (1 + 1e-12)
    assert most_speed(table, times, most) <= found.bound * (1 + 1e-12)
    for values in hull.frontier(table, most)[1:]:  # of each depth; the narrowest tree of one size and depth may differ
        for size in range(1, len(values) + 1):
            tree, times = TokenTree(hull.parents(table, size)), replace(times, acceptance=table)
            assert found.speed >= expected_tokens(tree, table) / times.step(tree) * (1 - 1e-12)
    without_work = fastest(table, budget, times, most_work=-1)
    assert most_speed(table, times, most) <= without_work.bound * (1 + 1e-12)


@pytest.mark.parametrize("rounds", ["path", "walk"])
def test_the_fastest_tree_is_found_where_kernels_judge(rounds):
    """No proof is promised there, but brute force finds nothing faster in any of a hundred cases; and the bound is nearly attained."""
    rng, gaps = np.random.default_rng(0), []
    for _ in range(100):
        rows = acceptance_rows(-np.sort(-rng.dirichlet(np.full(5, rng.choice([0.5, 1.0, 3.0])), 6)[:, :4], axis=1), 7)
        target, drafts = (np.cumsum(rng.uniform(0.0005, 0.02, 7)) for _ in range(2))
        costs = Verification(0.001, *rng.choice([0.0, 0.0001, 0.002, 0.01], 3).tolist(), rounds)
        curves = {n: 0.02 + target[n - 1] for n in range(1, 8)}, {n: drafts[n - 1] for n in range(1, 7)}
        times = StepTime(Latency(*curves, 0.001, 0, verification=costs))
        found = fastest(rows, 7, times)
        assert found.speed == pytest.approx(most_speed(rows, times, 7), rel=1e-12)
        gaps.append(found.gap)
    assert np.mean(np.array(gaps) < 1e-9) > 0.9 and max(gaps) < 0.1


def test_a_search_that_forgets_the_rounds_is_noticed(monkeypatch):
    """The control: a search that charges rounds by level where a node begins once its parent has judged it takes a slower tree."""
    rows = acceptance_rows([0.5, 0.3, 0.1], 6)
    times = StepTime(Latency({1: 0.05, 7: 0.051}, {1: 0.0001, 7: 0.0001}, verification=Verification(0.0, 0.02, 0.0, 0.0, "path")))
    best, right = most_speed(rows, times, 7), choice.costs_of
    assert fastest(rows, 7, times).speed == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(choice, "costs_of", lambda *given: right(*given)._replace(by_round=0.0, order=relaxation.TREE))
    assert fastest(rows, 7, times).speed < best * 0.999


def test_a_search_that_forgets_the_stream_is_noticed(monkeypatch):
    """The control: without the time that weights take to arrive, a smaller tree is chosen and its speed-up is promised too high."""
    latency = structs.replace(TINY.latency, stream=Stream(0.08, 1000))
    times, rows, right = StepTime(latency), acceptance_rows(TINY.acceptance, 5), choice.costs_of
    best = most_speed(rows, times, 7)
    assert fastest(rows, 7, times).speed == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(choice, "costs_of", lambda *given: right(*given)._replace(least=0.0))
    assert fastest(rows, 7, times).speed < best * 0.999


def fastest_by_widths(rows, times, most, widest):
    """Of every choice of widths up to `widest`: the most valuable nodes of each level have children, the rest are the best leaves."""
    best = 1 / times.plain()

    def deepen(values, offered, widths):
        nonlocal best
        level = len(widths)
        children = np.sort((values[:, None] * rows[level - 1, 0]).ravel())[::-1][:most]
        taken = np.sort(np.concatenate([offered, children]))[::-1][: most - 1]
        tokens, sizes = 1 + np.cumsum(taken), 2 + np.arange(taken.size)
        drafts = times.drafts(np.array(LANGUAGE_MODEL.widths(widths))).sum()
        best = max(best, (tokens / (times.targets(sizes) + drafts + times.latency.overhead)).max())
        if level < len(rows):
            for width in range(1, min(widest, children.size) + 1):
                deepen(children[:width], np.concatenate([offered, children]), [*widths, width])

    deepen(np.ones(1), np.empty(0), [1])
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_fastest_tree_of_twenty_nodes(seed):
    """An enumeration of all widths on five levels, without bounds."""
    rng = np.random.default_rng(seed)
    rows = -np.sort(-rng.dirichlet([2, 1, 0.5, 0.3, 0.5], 3)[:, :4], axis=1)
    target = {n: 0.02 + rng.uniform(0.0001, 0.002) * n for n in (1, 3, 6, 8, 12, 16, 20)}
    draft = {n: rng.uniform(0.0002, 0.002) + 0.0001 * n for n in (1, 2, 3, 4, 5, 7)}
    times, table = StepTime(Latency(target, draft, 0.001, 0)), acceptance_rows(rows.tolist(), 5)
    found = fastest(table, 20, times)
    assert found.speed == pytest.approx(fastest_by_widths(table, times, 20, 7), rel=1e-12)
    assert found.gap < 1e-9


def test_a_wrong_price_of_draft_passes_is_noticed(monkeypatch):
    """The control: with passes dearer than they are, the bound falls below a real tree; with one price for all widths, a slower tree is chosen."""
    times, rows = StepTime(TINY.latency), acceptance_rows(TINY.acceptance, 5)
    best, right = most_speed(rows, times, 7), choice.costs_of
    assert fastest(rows, 7, times).speed == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(choice, "costs_of", lambda *given: right(*given)._replace(draft=right(*given).draft * 50))
    assert fastest(rows, 7, times).bound < best * 0.999
    flat = np.r_[0.0, np.full(7, 0.002)]
    monkeypatch.setattr(choice, "costs_of", lambda *given: right(*given)._replace(draft=flat))
    assert fastest(rows, 7, times).speed < best * 0.999


@settings(max_examples=60, deadline=None)
@given(
    level_rows(non_increasing=False) | rows_by_class(), latencies(), st.lists(st.floats(0, 0.3), min_size=6, max_size=6), st.floats(0, 0.2), st.floats(5, 80)
)
def test_no_tree_gains_more_than_its_relaxation(rows, latency, prices, floor, rate):
    """For whatever prices: F - rate x step of every tree of two to seven nodes is at most the bound."""
    table = acceptance_rows(rows, 6)
    times = StepTime(latency, acceptance=table)
    most = times.largest()
    if most < 2:
        return
    bound = relaxed(table, times, most, np.array(prices[: len(table)]) + np.eye(len(table))[0] * floor, floor, rate)
    fits = [t for t in TREES if 2 <= t.size <= most and t.branching <= table.shape[-1] and t.depth <= 6 and np.isfinite(times.step(t))]
    assert max((expected_tokens(t, table) - rate * times.step(t) for t in fits), default=-np.inf) <= bound + 1e-12


def relaxed(rows, times, most, price, floor, rate):
    """The bound over all trees of 2 to `most` nodes, whatever the rows."""
    costs, levels = choice.costs_of(times, most, len(rows) + 1), len(rows)
    ranks = levels if costs.order == relaxation.LEVEL else 1
    high = np.full(levels, costs.draft_ends[-1])
    high[0] = most
    low = np.r_[2, np.zeros(levels - 1, int)]
    box = relaxation.Box(low, high, np.ones(ranks, int), np.full(ranks, rows.shape[-1] * (levels if costs.order == relaxation.PATH else 1)))
    nodes = relaxation.candidates(rows, floor, costs.by_visit, costs.by_rejection)
    use = relaxation.Use(np.zeros(levels, int), np.zeros(levels, int), np.ones(ranks, int), np.zeros(ranks), np.zeros(len(nodes.value), int), np.zeros(1))
    exact = best_first.is_non_increasing(rows) and best_first.favours_spine(rows) and costs.by_rejection == 0
    return relaxation.relax(nodes, costs, box, price, rate, exact, use)[0]


def test_a_node_left_out_must_cost_what_it_may_be_worth():
    """The control: nodes below the floor are left out, which only their price allows."""
    times, rows = StepTime(TINY.latency), acceptance_rows(TINY.acceptance, 4)
    free = np.zeros(3)
    star = TokenTree.star(4)
    assert relaxed(rows, times, 7, free, 0.0, 1.0) >= expected_tokens(star, rows) - times.step(star)
    assert relaxed(rows, times, 7, free, 0.3, 1.0) < expected_tokens(star, rows) - times.step(star)


@settings(max_examples=40, deadline=None)
@given(level_rows(non_increasing=False), latencies(), st.integers(2, 7))
def test_the_upper_bound_is_the_optimum_of_that_size(rows, latency, depth):
    chosen = solve(Profile(tuple(rows[0]), latency=latency), 7, depth)
    most = solve(rows[0], chosen.tree.size, depth if chosen.tree.size > 1 else 1)
    assert chosen.plan.upper_bound == pytest.approx(most.plan.expected_tokens, rel=1e-12)
    assert most.plan.upper_bound == most.plan.expected_tokens


def test_the_fastest_tree_may_have_fewer_tokens_than_its_size_allows():
    """Where width costs, expected tokens of the tree chosen are no bound for its size."""
    chosen = solve(TINY, 7, 5)
    assert chosen.plan.upper_bound > chosen.plan.expected_tokens * 1.001
    assert chosen.plan.upper_bound == pytest.approx(solve(TINY, chosen.tree.size, 5, objective="tokens").plan.expected_tokens)


def test_the_profile_search_beats_the_trees_of_most_tokens():
    """Wide draft passes cost four times narrow ones: the best trees of the table read more nodes than pays."""
    latency = Latency({1: 0.04, 32: 0.05}, {1: 0.002, 2: 0.002, 3: 0.02, 32: 0.03}, 0.0, 0)
    acceptance = (0.5, 0.2, 0.1, 0.05)
    times = StepTime(latency)
    known = frontier(acceptance, 32, 10)
    of_table = max(values[n - 1] / times.step(known.tree(n, d)) for d, values in enumerate(known.values, 1) for n in range(1, len(values) + 1))
    solution = solve(Profile(acceptance, latency=latency), 32, 10)
    assert solution.plan.expected_tokens / solution.plan.step_seconds > of_table * 1.001


def test_the_papers_objective_by_name():
    profile = Profile((0.7, 0.2, 0.05), latency=Latency({1: 0.05, 16: 0.06, 64: 0.2}, {1: 0.004, 64: 0.04}, 0.001, 0))
    paper, ours = (solve(profile, 64, 12, objective=name) for name in ("paper", "speed"))
    known = frontier(profile.acceptance, 64, 12)
    rates = [v / (StepTime(profile.latency).target(n) + d * 0.004) for d, values in enumerate(known.values, 1) for n, v in enumerate(values, 1)]
    assert paper.plan.expected_tokens / (StepTime(profile.latency).target(paper.tree.size) + paper.tree.depth * 0.004) == pytest.approx(max(rates))
    assert ours.plan.predicted_speedup >= paper.plan.predicted_speedup


@given(acceptance_vectors(longest=6))
def test_isotonic(acceptance):
    found = isotonic(np.array([acceptance]))[0]
    assert (np.diff(found) <= 0).all()
    assert found.sum() == pytest.approx(sum(acceptance))
    if acceptance == sorted(acceptance, reverse=True):
        assert found == pytest.approx(acceptance)
    assert isotonic(np.array([[0.3, 0.05, 0.5]]))[0] == pytest.approx([0.3, 0.275, 0.275])
