"""The choice for the hardware, the certificate, the baselines and the intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from strategies import acceptance_vectors, all_trees, rows_by_class, trees

from sequoia_plan.artifacts import LANGUAGE_MODEL, Drafting, Latency, LevelCounts, Profile, SequoiaPlanError, Stream, TokenTree, Verification
from sequoia_plan.artifacts.cost import StepTime, acceptance_rows, expected_tokens
from sequoia_plan.artifacts.profile import Counts
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.uncertainty import ends, gradient, step_time_error
from sequoia_plan.planner import baseline, check, frontier, solve
from sequoia_plan.planner.solving import best_first, certificate, dynamic_programming, hull, relaxation
from sequoia_plan.planner.solving import fastest as choice
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.fastest import fastest

TREES = [tree for size in range(1, 8) for tree in all_trees(size)]
TINY = Profile((0.5, 0.3, 0.1, 0.05), latency=Latency({n: 0.04 + 0.0005 * n for n in range(1, 8)}, {1: 0.002, 2: 0.012, 5: 0.02}, 0.001, 0))
"""Draft passes of two nodes cost six times those of one."""


BLOCK = Drafting("block", first=2, by_level=False, deepest=4)
"""One pass gives the laws of all levels."""
FEATURES = Drafting("features", first=1, by_level=True, deepest=5, first_by_depth=True)
"""The first pass is as wide as the tree is deep."""


@st.composite
def latencies(draw, proven=False):
    """Curves that never decrease, for up to seven nodes, any kind of verification, and a target in memory or streamed.

    `proven`: verification of the kinds for which the search ends with a proof.
    """
    target, drafts = (np.cumsum(draw(st.lists(st.floats(0.0005, 0.02), min_size=7, max_size=7))).tolist() for _ in range(2))
    sizes, widths = {1, *draw(st.lists(st.integers(2, 7)))}, {2, *draw(st.lists(st.integers(1, 6)))}
    each = st.sampled_from([0.0, 0.0001, 0.002])
    costs = Verification(
        0.001, draw(each), draw(each), draw(each), draw(st.sampled_from(["tree", "level", "walk"] if proven else ["tree", "level", "walk", "path"]))
    )
    if proven and costs.rounds == "walk":
        costs = structs.replace(costs, by_round=0.0)  # greedy decoding: rejections cost nothing
    curves = {n: 0.02 + target[n - 1] for n in sorted(sizes)}, {n: drafts[n - 1] for n in sorted(widths)}
    stream = draw(st.sampled_from([None, *(Stream(seconds, 1000) for seconds in (0.01, 0.04, 0.06, 0.1, 1.0))]))
    return Latency(*curves, 0.001, 0, verification=draw(st.sampled_from([None, costs])), stream=stream)


@st.composite
def level_rows(draw, non_increasing):
    """One to three rows of up to four ranks."""
    rows = draw(st.lists(acceptance_vectors(longest=4, non_increasing=non_increasing), min_size=1, max_size=3))
    ranks = max(map(len, rows))
    return [row + [0.0] * (ranks - len(row)) for row in rows]


def most_speed(rows, times, most):
    """Of every tree of up to seven nodes within the limits."""
    fits = [t for t in TREES if t.size <= most and t.depth <= len(rows) + 1 and t.branching <= rows.shape[-1]]
    times = replace(times, acceptance=rows)
    return max(expected_tokens(t, rows) / times.step(t) for t in fits)


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
        assert found.gap < 1e-9


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


@settings(max_examples=60, deadline=None)
@given(level_rows(non_increasing=False), latencies(), st.integers(2, 7), st.integers(2, 6), st.sampled_from([BLOCK, FEATURES]))
def test_the_bound_on_speed_holds_for_every_kind_of_draft(rows, latency, budget, depth, drafting):
    times = StepTime(latency, drafting)
    table, most = acceptance_rows(rows, min(depth, drafting.deepest)), min(budget, times.largest())
    found = fastest(acceptance_rows(rows, depth), budget, times)
    assert found.tree.depth <= drafting.deepest and found.speed <= found.bound * (1 + 1e-12)
    assert most_speed(table, times, most) <= found.bound * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(latencies(), st.integers(2, 7))
def test_plans_keep_to_the_levels_that_a_draft_reaches(latency, budget):
    """Whatever the objective, and although the acceptance would pay for more."""
    for drafting in (BLOCK, FEATURES):
        profile = Profile((0.9, 0.05), latency=latency, drafting=drafting)
        for objective in ("speed", "tokens", "paper"):
            assert solve(profile, budget, 7, objective=objective).tree.depth <= drafting.deepest
        assert solve(profile, budget, 7, baseline="chain").tree.depth <= drafting.deepest


def test_the_paper_counts_one_pass_of_a_block_draft():
    """F / (t(n) + d1): with a pass for each level the deepest chain would not pay."""
    latency = Latency({n: 0.04 + 0.0001 * n for n in range(1, 8)}, {4: 0.03}, 0.0, 0)
    chain = solve(Profile((0.9,), latency=latency, drafting=Drafting("block", 4, False, 7)), 7, 7, objective="paper").tree
    assert chain.depth == 7
    assert solve(Profile((0.9,), latency=latency), 7, 7, objective="paper").tree.depth < 7


def test_a_first_pass_priced_as_if_it_did_not_widen_is_noticed(monkeypatch):
    """The control: a search that takes the first pass of two levels for any depth finds a tree that is slower than the best."""
    latency = Latency({n: 0.04 for n in range(1, 8)}, {1: 0.001, 2: 0.002, 3: 0.002, 4: 0.2, 5: 0.2}, 0.001, 0)
    times, rows = StepTime(latency, FEATURES), acceptance_rows([0.9, 0.05], 5)
    best = most_speed(rows, times, 7)
    assert fastest(rows, 7, times).speed == pytest.approx(best, rel=1e-12)
    monkeypatch.setattr(choice, "_depths_to_search", lambda deepest, times: [deepest])
    right = choice.costs_of
    monkeypatch.setattr(choice, "costs_of", lambda times, most, depth: right(times, most, 2))
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


@settings(max_examples=60, deadline=None)
@given(st.lists(acceptance_vectors(longest=4), min_size=1, max_size=3) | rows_by_class(longest=4), st.integers(1, 30), st.integers(2, 6))
def test_the_bound_holds_and_is_attained_on_non_increasing_rows(rows, size, depth):
    table = acceptance_rows(rows if isinstance(rows[0][0], list) else [row + [0.0] * (4 - len(row)) for row in rows], depth)
    values = dynamic_programming.frontier(table, size)[-1]
    bounds = hull.upper_bounds(table, size)
    assert (bounds >= values * (1 - 1e-12)).all()
    assert (np.diff(bounds, 2) <= 1e-12 * bounds[-1]).all()  # concave
    if best_first.is_non_increasing(table):
        np.testing.assert_allclose(bounds, values, rtol=1e-12)  # then it is attained


def test_certificate():
    vector = [0.5, 0.2, 0.1]
    best = solve(vector, 10, 5)
    proof = check(best.tree, vector, 5)
    assert (proof.argument, proof.gap) == ("best node left out", 0.0)
    parent, rank, value = proof.next_node
    larger = TokenTree.from_parents([*best.tree.parents.tolist(), parent])
    assert best.tree.child_count[parent] + 1 == rank
    assert expected_tokens(larger, vector) == pytest.approx(best.plan.expected_tokens + value)
    assert expected_tokens(larger, vector) == pytest.approx(solve(vector, 11, 5).plan.expected_tokens)
    worse = check(TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]), vector, 5)
    assert worse.upper_bound == pytest.approx(best.plan.expected_tokens)
    assert worse.gap > 0.01
    assert (worse.argument, worse.exact) == ("most valuable nodes", True)
    with pytest.raises(SequoiaPlanError, match="depth 4, expected at most 3"):
        check(TokenTree.chain(4), vector, 3)
    with pytest.raises(SequoiaPlanError, match="branching 3, expected at most 2"):
        check(TokenTree.star(3), vector, branching=2)


@settings(max_examples=60, deadline=None)
@given(rows_by_class(), st.integers(1, 7), st.integers(2, 5))
def test_the_certificate_knows_classes(rows, size, depth):
    """The bound is what enumeration finds, and the next node adds what it says."""
    fits = [t for t in TREES if t.size == size and t.depth <= depth and t.branching <= len(rows[0][0])]
    for tree in fits[:: max(1, len(fits) // 5)]:
        proof = check(tree, rows, depth, len(rows[0][0]))
        assert proof.upper_bound == pytest.approx(max(expected_tokens(t, rows) for t in fits), rel=1e-12)
        if proof.next_node:
            larger = TokenTree.from_parents([*tree.parents.tolist(), proof.next_node[0]])
            assert expected_tokens(larger, rows) == pytest.approx(proof.expected_tokens + proof.next_node[2])


def test_the_certificate_where_rows_increase(monkeypatch):
    rising = [0.05, 0.1, 0.7]
    optima = dynamic_programming.frontier(acceptance_rows(rising, 4), 13)[-1]
    for size, argument in ((13, "concave hull"), (12, "exact recursion")):
        proof = check(solve(rising, size, 4).tree, rising, 4)
        assert (proof.argument, proof.exact) == (argument, True)
        assert proof.upper_bound == pytest.approx(optima[size - 1], rel=1e-12)
    monkeypatch.setattr(certificate, "LARGEST_SOLVED", 11)
    too_large = check(solve(rising, 12, 4).tree, rising, 4)
    assert (too_large.argument, too_large.exact) == ("concave hull", False)
    assert too_large.upper_bound > optima[11] * 1.001


def test_the_tree_that_envelopes_suggest_is_taken_only_where_it_attains_their_bound():
    measured = acceptance_rows([0.77, 0.1, 0.04, 0.02, 0.013, 0.008, 0.0064, 0.0065, 0.003, 0.0035], 9)
    rising = acceptance_rows([0.3, 0.05, 0.5], 4)  # the control: what is suggested falls short of the optimum
    for rows, size, taken in ((measured, 100, True), (rising, 6, False)):
        tree, attained = hull._suggested(rows, size)
        optimum = dynamic_programming.frontier(rows, size)[-1][-1]
        assert attained == taken == (expected_tokens(TokenTree(tree), rows) > optimum * (1 - 1e-12))
        assert expected_tokens(TokenTree(hull.parents(rows, size)), rows) == pytest.approx(optimum, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(acceptance_vectors(longest=5), st.integers(2, 30), st.integers(2, 7), st.sampled_from(["chain", "chains:3", "k-ary:2", "specinfer:3,1,2", "random:7"]))
def test_no_baseline_is_worth_more(acceptance, size, depth, name):
    tree = baseline(name, size, depth)
    assert tree.size <= size and tree.depth <= depth
    vector = acceptance + [0.0] * max(0, tree.branching - len(acceptance))
    assert expected_tokens(tree, vector) <= solve(vector, tree.size, depth).plan.expected_tokens * (1 + 1e-12)


def test_baselines_have_their_shapes(tmp_path):
    assert baseline("chain", 4, 9) == TokenTree.chain(4)
    assert baseline("chains:3", 7, 9).level_widths.tolist() == [1, 3, 3]
    assert baseline("k-ary:2", 7, 3).level_widths.tolist() == [1, 2, 4]
    assert baseline("specinfer:2,3", 99, 9).level_widths.tolist() == [1, 2, 6]
    assert baseline("random:1", 20, 4) == baseline("random:1", 20, 4) != baseline("random:2", 20, 4)
    (tmp_path / "p.json").write_text("[-1, 0, 1, 0]")
    assert baseline(f"parents:{tmp_path / 'p.json'}", 4, 3).parents.tolist() == [-1, 0, 0, 1]
    for name in ("chains:0", "chains:x", "nothing", "k-ary:", "specinfer:2,,3", "chain:4", "parents:missing.json"):
        with pytest.raises(SequoiaPlanError, match="expected"):
            baseline(name, 8, 4)


@settings(max_examples=40, deadline=None)
@given(trees(12), acceptance_vectors(longest=4))
def test_gradient_is_the_derivative(tree, acceptance):
    vector = np.pad(np.array(acceptance) * 0.9, (0, max(0, tree.branching - len(acceptance))))
    other = np.array([vector, vector[::-1] * 0.8])
    for rows in (vector[None], other, np.stack([other, other[::-1] * 0.7], 1)):  # one vector; another one from the second level on; by class
        slopes = gradient(tree, rows)
        for place in np.ndindex(rows.shape):
            ahead, behind = (rows.copy() for _ in range(2))
            ahead[place] += 1e-6
            behind[place] -= 1e-6
            assert slopes[place] == pytest.approx((expected_tokens(tree, ahead) - expected_tokens(tree, behind)) / 2e-6, rel=1e-4, abs=1e-6)


def covered(z, repeats=600, trials=400):
    """How often the interval holds the truth; its binomial standard error is below 0.02."""
    truth = np.array([0.55, 0.15, 0.08, 0.02])
    tree = solve(truth.tolist(), 24, 8).tree
    value = expected_tokens(tree, truth)
    counts = np.random.default_rng(0).multinomial(trials, [*truth, 1 - truth.sum()], repeats)[:, :-1]
    bounds = [[expected_tokens(tree, end) for end in ends(tree, row[None] / trials, [trials], z)] for row in counts]
    return np.mean([low <= value <= high for low, high in bounds])


def test_the_interval_covers_the_truth_by_level():
    """Levels with their own vectors and trials; intervals from other trials (the control) do not cover as often."""
    truth, trials = np.array([[0.4, 0.15, 0.08], [0.5, 0.12, 0.05], [0.6, 0.1, 0.02]]), np.array([300, 150, 60])
    tree = solve(truth.tolist(), 24, 8).tree
    rng, value = np.random.default_rng(1), expected_tokens(tree, truth)
    draws = [np.array([rng.multinomial(n, [*p, 1 - p.sum()])[:-1] / n for p, n in zip(truth, trials, strict=True)]) for _ in range(400)]

    def covered_with(trials):
        bounds = [[expected_tokens(tree, end) for end in ends(tree, rows, trials)] for rows in draws]
        return np.mean([low <= value <= high for low, high in bounds])

    assert covered_with(trials) == pytest.approx(0.95, abs=0.035)
    assert covered_with(trials * 4) < 0.85


def test_levels_are_solved_for_unless_one_vector_is_asked_for():
    levels = (LevelCounts(600, (240.0, 90.0, 30.0)), LevelCounts(300, (180.0, 30.0, 6.0)))
    profile = Profile((0.466667, 0.133333, 0.04), 500, levels=levels)
    by_level, pooled = (solve(profile, 12, 6, objective="tokens", one_vector=one) for one in (False, True))
    assert by_level.plan.acceptance == ((0.4, 0.15, 0.05), (0.6, 0.1, 0.02))
    assert pooled.plan.acceptance == (0.466667, 0.133333, 0.04)
    assert by_level.plan.expected_tokens == solve([[0.4, 0.15, 0.05], [0.6, 0.1, 0.02]], 12, 6).plan.expected_tokens
    for found in (by_level, pooled):
        low, high = found.plan.interval.expected_tokens
        assert low < found.plan.expected_tokens < high


def test_classes_are_solved_for_where_they_were_counted():
    levels = (LevelCounts(900, (360.0, 180.0)), LevelCounts(800, (360.0, 80.0), Counts(400, (80.0, 40.0))))
    profile = Profile((0.423529, 0.152941), 500, levels=levels)
    by_class, by_level, one = (solve(profile, 12, 6, objective="tokens", **options) for options in ({}, {"classes": False}, {"one_vector": True}))
    assert np.array(by_class.plan.acceptance) == pytest.approx(np.array([[[0.4, 0.2], [0.4, 0.2]], [[0.7, 0.1], [0.2, 0.1]]]), abs=0.005)
    assert by_level.plan.acceptance == ((0.4, 0.2), (0.45, 0.1))
    assert one.plan.acceptance == profile.acceptance
    assert by_class.plan.expected_tokens == solve(by_class.plan.acceptance, 12, 6).plan.expected_tokens
    assert by_class.tree != by_level.tree
    for found in (by_class, by_level, one):
        low, high = found.plan.interval.expected_tokens
        assert low < found.plan.expected_tokens < high
    kinds = {str(n): (LevelCounts(225, (90.0, 45.0)), LevelCounts(200, (90.0 + 3 * n, 20.0), Counts(100, (20.0 + n, 10.0)))) for n in (-9, -3, 3, 9)}
    apart = solve(structs.replace(profile, kinds=kinds), 12, 6, objective="tokens").plan
    assert np.ptp(apart.interval_new_kind.expected_tokens) > np.ptp(apart.interval.expected_tokens)


@pytest.mark.parametrize("shared", [False, True])
def test_the_interval_covers_the_truth_by_class(shared):
    """With a vector of its own for each level off the spine, and with one that levels of few observations share: then it may be wider than
    it must be. Intervals from more trials (the control) do not cover as often."""
    truth = np.array([[[0.4, 0.15], [0.4, 0.15]], [[0.6, 0.12], [0.2, 0.1]], [[0.7, 0.1], [0.2, 0.1] if shared else [0.4, 0.05]]])
    trials = np.array([[3000, 0], [1500, 200 if shared else 700], [600, 80 if shared else 500]])
    tree = solve(truth.tolist(), 24, 8).tree
    rng, value = np.random.default_rng(1), expected_tokens(tree, truth)
    assert np.isin([1, 2], np.unique(tree.position_ids[tree.classes == 1])).all() and gradient(tree, truth)[1:, 1, 0].min() > 0

    def drawn():
        counts = [[rng.multinomial(n, [*p, 1 - p.sum()])[:-1] for n, p in zip(*each, strict=True)] for each in zip(trials, truth, strict=True)]
        return rates(trials, np.array(counts, float))

    draws = [drawn() for _ in range(400)]

    def covered_with(factor):
        bounds = [[expected_tokens(tree, end) for end in ends(tree, rows, behind * factor)] for rows, behind in draws]
        return np.mean([low <= value <= high for low, high in bounds])

    assert 0.915 <= covered_with(1) <= (1 if shared else 0.985)
    assert covered_with(4) < 0.85


def test_classes_differ_as_far_as_their_counts_do_by_more_than_noise():
    """Counts drawn from two laws, and from one: the second kind is nearly always told to be one, and the first one never."""
    rng = np.random.default_rng(0)
    trials = np.array([[1000, 0], [300, 150], [120, 60]])

    def of(spine, off):
        counts = [[rng.multinomial(n, [*p, 1 - sum(p)])[:-1] for n, p in zip(level, (spine, off), strict=True)] for level in trials]
        return rates(trials, np.array(counts, float))[0]

    apart = np.array([of((0.7, 0.1), (0.25, 0.1)) for _ in range(200)])
    alike = np.array([of((0.5, 0.1), (0.5, 0.1)) for _ in range(200)])
    assert apart.mean(0)[1:, 0, 0] == pytest.approx(0.7, abs=0.02) and apart.mean(0)[1:, 1, 0] == pytest.approx(0.25, abs=0.02)
    assert (alike[:, :, 0] == alike[:, :, 1]).all((1, 2)).mean() > 0.8
    assert np.abs(alike[:, 1, 1, 0] - 0.5).mean() < 0.75 * np.abs(rng.binomial(150, 0.5, 200) / 150 - 0.5).mean()  # better than its own counts
    assert (apart[:, 0, 0] == apart[:, 0, 1]).all()


def test_rates_of_few_observations_are_shared():
    trials = np.array([[500, 0], [3000, 4000], [0, 30], [1000, 10]])
    counts = np.array([[[250.0], [0.0]], [[2700.0], [400.0]], [[0.0], [9.0]], [[900.0], [3.0]]])
    p, behind = rates(trials, counts)
    assert p[:, 0, 0] == pytest.approx([0.5, 0.9, 0.3, 0.9], abs=0.01)
    assert p[:, 1, 0] == pytest.approx([0.5, 0.1, 0.3, 0.3], abs=0.01)
    assert behind.tolist() == [[500, 0], [3000, 4000], [0, 20], [1000, 20]]
    assert rates(np.array([500, 0, 100]), np.array([[250.0], [0.0], [90.0]]))[0][:, 0].tolist() == [0.5, 0.5, 0.9]  # as the level above
    alone = rates(np.array([[500, 0], [300, 0]]), counts[:2] * [[[1.0], [0.0]]] / 10)[0]
    assert np.array_equal(alone[:, 0], alone[:, 1])  # nothing is known off the spine


def test_the_interval_covers_the_truth():
    assert covered(1.959964) == pytest.approx(0.95, abs=0.03)
    assert covered(1.0) < 0.80  # the control: a narrower one does not


def test_interval_of_a_profile():
    latency = Latency({1: 0.04, 8: 0.05, 32: 0.09}, {1: 0.004, 32: 0.01}, 0.001, 128)
    few, many = (solve(Profile((0.5, 0.2, 0.05), trials, latency), 32, 8).plan.interval for trials in (100, 10_000))
    for ends_of in (few, many):
        assert ends_of.expected_tokens[0] < ends_of.expected_tokens[1]
        assert all(0 <= lost < 0.2 for lost in ends_of.lost)
    assert np.ptp(many.predicted_speedup) < np.ptp(few.predicted_speedup) / 5
    assert solve(Profile((0.5, 0.2), 0, latency), 8, 4).plan.interval is None


def test_the_error_of_step_times_is_their_spread():
    """Step times over plain ones, from normal timings drawn again and again, vary as much as each profile's quartiles say."""
    tree, rounds, rng = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3]), 25, np.random.default_rng(0)
    truth = {"target": {1: 0.04, 7: 0.05}, "draft": {1: 0.004, 2: 0.005, 7: 0.008}}

    def measured():
        samples = {name: {n: rng.normal(t, 0.05 * t, rounds) for n, t in curve.items()} for name, curve in truth.items()}
        medians = {name: {n: float(np.median(x)) for n, x in curve.items()} for name, curve in samples.items()}
        quartiles = {name: {n: tuple(np.quantile(x, [0.25, 0.75])) for n, x in curve.items()} for name, curve in samples.items()}
        latency = Latency(**medians, overhead=0.0, context=0, samples=dict.fromkeys((1, 2, 7), rounds), quartiles=quartiles)
        times = StepTime(latency)
        return np.log(times.step(tree) / times.plain()), step_time_error(tree, times)

    ratios, errors = np.array([measured() for _ in range(1_000)]).T
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)
    assert step_time_error(tree, StepTime(Latency(**truth, overhead=0.0, context=0))) == 0
    sure, unsure = (Latency(**truth, overhead=0.0, context=0, samples={7: 5}, quartiles={"target": {7: (0.05 - d, 0.05 + d)}}) for d in (0.0, 0.01))
    wide, narrow = (solve(Profile((0.5, 0.3), 10_000, latency), 7, 4).plan.interval.predicted_speedup for latency in (unsure, sure))
    assert np.ptp(wide) > 2 * np.ptp(narrow)


@given(acceptance_vectors(longest=6))
def test_isotonic(acceptance):
    found = isotonic(np.array([acceptance]))[0]
    assert (np.diff(found) <= 0).all()
    assert found.sum() == pytest.approx(sum(acceptance))
    if acceptance == sorted(acceptance, reverse=True):
        assert found == pytest.approx(acceptance)
    assert isotonic(np.array([[0.3, 0.05, 0.5]]))[0] == pytest.approx([0.3, 0.275, 0.275])


def test_a_million_nodes():
    solution = solve([0.7, 0.15, 0.05, 0.02], 1_000_000, 64)
    assert solution.tree.size == 1_000_000
    assert check(solution.tree, [0.7, 0.15, 0.05, 0.02], 64).gap == 0


def test_an_interval_beyond_what_can_be_solved_again():
    found = solve(Profile((0.7, 0.15, 0.05, 0.02), 500), 70_000, 64).plan.interval
    assert found.lost is None
    assert found.expected_tokens[0] < found.expected_tokens[1]
