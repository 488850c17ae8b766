"""The choice for the hardware, the certificate, the baselines and the intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import acceptance_vectors, all_trees, trees

from sequoia_plan.artifacts import Latency, LevelCounts, Profile, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.cost import StepTime, acceptance_rows, expected_tokens
from sequoia_plan.artifacts.uncertainty import ends, gradient, step_time_error
from sequoia_plan.planner import baseline, check, frontier, solve
from sequoia_plan.planner.solving import dynamic_programming, hull
from sequoia_plan.planner.solving.convolution import isotonic

TREES = [tree for size in range(1, 8) for tree in all_trees(size)]


@settings(max_examples=60, deadline=None)
@given(
    acceptance_vectors(longest=3, non_increasing=True),
    st.lists(st.floats(0.001, 0.02), min_size=7, max_size=7),
    st.lists(st.floats(0.0005, 0.02), min_size=5, max_size=5),
)
def test_the_profile_search_equals_brute_force(acceptance, target, draft):
    """Any non-increasing vector, any target and draft curve: the fastest of all trees of up to seven nodes."""
    latency = Latency({n: 0.02 + sum(target[:n]) for n in range(1, 8)}, {n: sum(draft[:n]) for n in range(1, 6)}, 0.001, 0)
    solution = solve(Profile(tuple(acceptance), latency=latency), 7, 5)
    times = StepTime(latency)
    fits = [t for t in TREES if t.depth <= 5 and t.branching <= len(acceptance)]
    best = max(expected_tokens(t, acceptance) / times.step(t) for t in fits)
    assert solution.expected_tokens / solution.step_seconds == pytest.approx(best, rel=1e-12)
    assert solution.speedup_bound >= solution.predicted_speedup * (1 - 1e-12)


def test_the_profile_search_beats_the_trees_of_most_tokens():
    """Wide draft passes cost four times narrow ones: the best trees of the table read more nodes than pays."""
    latency = Latency({1: 0.04, 32: 0.05}, {1: 0.002, 2: 0.002, 3: 0.02, 32: 0.03}, 0.0, 0)
    acceptance = (0.5, 0.2, 0.1, 0.05)
    times = StepTime(latency)
    known = frontier(acceptance, 32, 10)
    of_table = max(values[n - 1] / times.step(known.tree(n, d)) for d, values in enumerate(known.values, 1) for n in range(1, len(values) + 1))
    solution = solve(Profile(acceptance, latency=latency), 32, 10)
    assert solution.expected_tokens / solution.step_seconds > of_table * 1.001


def test_the_papers_objective_by_name():
    profile = Profile((0.7, 0.2, 0.05), latency=Latency({1: 0.05, 16: 0.06, 64: 0.2}, {1: 0.004, 64: 0.04}, 0.001, 0))
    paper, ours = (solve(profile, 64, 12, objective=name) for name in ("paper", "speed"))
    known = frontier(profile.acceptance, 64, 12)
    rates = [v / (StepTime(profile.latency).target(n) + d * 0.004) for d, values in enumerate(known.values, 1) for n, v in enumerate(values, 1)]
    assert paper.expected_tokens / (StepTime(profile.latency).target(paper.tree.size) + paper.tree.depth * 0.004) == pytest.approx(max(rates))
    assert ours.predicted_speedup >= paper.predicted_speedup


@settings(max_examples=60, deadline=None)
@given(st.lists(acceptance_vectors(longest=4), min_size=1, max_size=3), st.integers(1, 30), st.integers(2, 6))
def test_the_bound_holds_and_is_attained_on_non_increasing_rows(rows, size, depth):
    table = acceptance_rows([row + [0.0] * (4 - len(row)) for row in rows], depth)
    values = dynamic_programming.frontier(table, size)[-1]
    bounds = hull.upper_bounds(table, size)
    assert (bounds >= values * (1 - 1e-12)).all()
    assert (np.diff(bounds, 2) <= 1e-12 * bounds[-1]).all()  # concave
    if (np.diff(table, axis=1) <= 0).all():
        np.testing.assert_allclose(bounds, values, rtol=1e-12)  # then it is attained


def test_certificate():
    vector = [0.5, 0.2, 0.1]
    best = solve(vector, 10, 5)
    proof = check(best.tree, vector, 5)
    assert (proof.argument, proof.gap) == ("best node left out", 0.0)
    parent, rank, value = proof.next_node
    larger = TokenTree.from_parents([*best.tree.parents.tolist(), parent])
    assert best.tree.child_count[parent] + 1 == rank
    assert expected_tokens(larger, vector) == pytest.approx(best.expected_tokens + value)
    assert expected_tokens(larger, vector) == pytest.approx(solve(vector, 11, 5).expected_tokens)
    worse = check(TokenTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2]), vector, 5)
    assert worse.upper_bound == pytest.approx(best.expected_tokens)
    assert worse.gap > 0.01
    with pytest.raises(SequoiaPlanError, match="depth 4, expected at most 3"):
        check(TokenTree.chain(4), vector, 3)
    with pytest.raises(SequoiaPlanError, match="branching 3, expected at most 2"):
        check(TokenTree.star(3), vector, branching=2)


@settings(max_examples=40, deadline=None)
@given(acceptance_vectors(longest=5), st.integers(2, 30), st.integers(2, 7), st.sampled_from(["chain", "chains:3", "k-ary:2", "specinfer:3,1,2", "random:7"]))
def test_no_baseline_is_worth_more(acceptance, size, depth, name):
    tree = baseline(name, size, depth)
    assert tree.size <= size and tree.depth <= depth
    vector = acceptance + [0.0] * max(0, tree.branching - len(acceptance))
    assert expected_tokens(tree, vector) <= solve(vector, tree.size, depth).expected_tokens * (1 + 1e-12)


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
    for rows in (vector[None], np.array([vector, vector[::-1] * 0.8])):  # one vector; another one from the second level on
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
    assert by_level.tree.plan["acceptance"] == [[0.4, 0.15, 0.05], [0.6, 0.1, 0.02]]
    assert pooled.tree.plan["acceptance"] == [0.466667, 0.133333, 0.04]
    assert by_level.expected_tokens == solve([[0.4, 0.15, 0.05], [0.6, 0.1, 0.02]], 12, 6).expected_tokens
    for found in (by_level, pooled):
        low, high = found.interval["expected_tokens"]
        assert low < found.expected_tokens < high


def test_the_interval_covers_the_truth():
    assert covered(1.959964) == pytest.approx(0.95, abs=0.03)
    assert covered(1.0) < 0.80  # the control: a narrower one does not


def test_interval_of_a_profile():
    latency = Latency({1: 0.04, 8: 0.05, 32: 0.09}, {1: 0.004, 32: 0.01}, 0.001, 128)
    few, many = (solve(Profile((0.5, 0.2, 0.05), trials, latency), 32, 8).interval for trials in (100, 10_000))
    for ends_of in (few, many):
        assert ends_of["expected_tokens"][0] < ends_of["expected_tokens"][1]
        assert all(0 <= lost < 0.2 for lost in ends_of["lost"])
    assert np.ptp(many["predicted_speedup"]) < np.ptp(few["predicted_speedup"]) / 5
    assert solve(Profile((0.5, 0.2), 0, latency), 8, 4).interval is None


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
        return np.log(times.step(tree) / times.plain()), step_time_error(tree, latency)

    ratios, errors = np.array([measured() for _ in range(1_000)]).T
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)
    assert step_time_error(tree, Latency(**truth, overhead=0.0, context=0)) == 0
    sure, unsure = (Latency(**truth, overhead=0.0, context=0, samples={7: 5}, quartiles={"target": {7: (0.05 - d, 0.05 + d)}}) for d in (0.0, 0.01))
    wide, narrow = (solve(Profile((0.5, 0.3), 10_000, latency), 7, 4).interval["predicted_speedup"] for latency in (unsure, sure))
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
    found = solve(Profile((0.7, 0.15, 0.05, 0.02), 500), 70_000, 64).interval
    assert found["lost"] is None
    assert found["expected_tokens"][0] < found["expected_tokens"][1]
