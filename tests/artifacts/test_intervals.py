"""Rates from counts, by level and class, and the intervals of the predictions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec import structs
from strategies import acceptance_vectors, trees

from sequoia_plan.artifacts import Acceptance, Latency, LevelCounts, Profile, TokenTree
from sequoia_plan.artifacts.counts import Counts
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.uncertainty import (
    acceptance_at_interval_ends,
    gradient,
    step_time_error,
)
from sequoia_plan.planner import solve


@settings(max_examples=40)
@given(trees(12), acceptance_vectors(longest=4))
def test_gradient_is_the_derivative(tree, acceptance):
    vector = np.pad(np.array(acceptance) * 0.9, (0, max(0, tree.branching - len(acceptance))))
    other = np.array([vector, vector[::-1] * 0.8])
    for rows in (
        vector[None],
        other,
        np.stack([other, other[::-1] * 0.7], 1),
    ):  # one vector; another one from the second level on; by class
        slopes = gradient(tree, rows)
        for place in np.ndindex(rows.shape):
            ahead, behind = (rows.copy() for _ in range(2))
            ahead[place] += 1e-6
            behind[place] -= 1e-6
            assert slopes[place] == pytest.approx(
                (
                    expected_tokens(tree, Acceptance.given(ahead).rates)
                    - expected_tokens(tree, Acceptance.given(behind).rates)
                )
                / 2e-6,
                rel=1e-4,
                abs=1e-6,
            )


def coverage(z, repeats=600, trials=400):
    """The share of intervals that hold the truth; its binomial standard error is below 0.02."""
    truth = np.array([0.55, 0.15, 0.08, 0.02])
    tree = solve(truth.tolist(), budget=24, depth=8).tree
    value = expected_tokens(tree, Acceptance.given(truth).rates)
    counts = np.random.default_rng(0).multinomial(trials, [*truth, 1 - truth.sum()], repeats)[
        :, :-1
    ]
    bounds = [
        [
            expected_tokens(tree, Acceptance.given(end).rates)
            for end in acceptance_at_interval_ends(tree, row[None] / trials, [trials], z)
        ]
        for row in counts
    ]
    return np.mean([low <= value <= high for low, high in bounds])


def test_the_interval_covers_the_truth():
    assert coverage(1.959964) == pytest.approx(0.95, abs=0.03)
    assert coverage(1.0) < 0.80  # the control: a narrower one does not


def test_the_interval_covers_the_truth_by_level():
    """Levels have vectors and trials of their own.

    The control: intervals from more trials do not cover as often.
    """
    truth, trials = (
        np.array([[0.4, 0.15, 0.08], [0.5, 0.12, 0.05], [0.6, 0.1, 0.02]]),
        np.array([300, 150, 60]),
    )
    tree = solve(truth.tolist(), budget=24, depth=8).tree
    rng, value = np.random.default_rng(1), expected_tokens(tree, Acceptance.given(truth).rates)
    draws = [
        np.array(
            [
                rng.multinomial(n, [*p, 1 - p.sum()])[:-1] / n
                for p, n in zip(truth, trials, strict=True)
            ]
        )
        for _ in range(400)
    ]

    def covered_with(trials):
        bounds = [
            [
                expected_tokens(tree, Acceptance.given(end).rates)
                for end in acceptance_at_interval_ends(tree, rows, trials)
            ]
            for rows in draws
        ]
        return np.mean([low <= value <= high for low, high in bounds])

    assert covered_with(trials) == pytest.approx(0.95, abs=0.035)
    assert covered_with(trials * 4) < 0.85


def test_levels_are_solved_for_unless_one_vector_is_asked_for():
    levels = (LevelCounts(600, (240.0, 90.0, 30.0)), LevelCounts(300, (180.0, 30.0, 6.0)))
    profile = Profile((0.466667, 0.133333, 0.04), 500, levels=levels)
    by_level, pooled = (
        solve(profile, budget=12, depth=6, objective="tokens", one_vector=one)
        for one in (False, True)
    )
    assert by_level.plan.acceptance == ((0.4, 0.15, 0.05), (0.6, 0.1, 0.02))
    assert pooled.plan.acceptance == (0.466667, 0.133333, 0.04)
    assert (
        by_level.plan.expected_tokens
        == solve([[0.4, 0.15, 0.05], [0.6, 0.1, 0.02]], budget=12, depth=6).plan.expected_tokens
    )
    for found in (by_level, pooled):
        low, high = found.plan.interval.expected_tokens
        assert low < found.plan.expected_tokens < high


def test_classes_are_solved_for_where_they_were_counted():
    levels = (
        LevelCounts(900, (360.0, 180.0)),
        LevelCounts(800, (360.0, 80.0), Counts(400, (80.0, 40.0))),
    )
    profile = Profile((0.423529, 0.152941), 500, levels=levels)
    by_class, by_level, one = (
        solve(profile, budget=12, depth=6, objective="tokens", **options)
        for options in ({}, {"classes": False}, {"one_vector": True})
    )
    assert np.array(by_class.plan.acceptance) == pytest.approx(
        np.array([[[0.4, 0.2], [0.4, 0.2]], [[0.7, 0.1], [0.2, 0.1]]]), abs=0.005
    )
    assert by_level.plan.acceptance == ((0.4, 0.2), (0.45, 0.1))
    assert one.plan.acceptance == profile.acceptance
    assert (
        by_class.plan.expected_tokens
        == solve(by_class.plan.acceptance, budget=12, depth=6).plan.expected_tokens
    )
    assert by_class.tree != by_level.tree
    for found in (by_class, by_level, one):
        low, high = found.plan.interval.expected_tokens
        assert low < found.plan.expected_tokens < high
    kinds = {
        str(n): (
            LevelCounts(225, (90.0, 45.0)),
            LevelCounts(200, (90.0 + 3 * n, 20.0), Counts(100, (20.0 + n, 10.0))),
        )
        for n in (-9, -3, 3, 9)
    }
    apart = solve(
        structs.replace(profile, kinds=kinds), budget=12, depth=6, objective="tokens"
    ).plan
    assert np.ptp(apart.interval_new_kind.expected_tokens) > np.ptp(apart.interval.expected_tokens)


@pytest.mark.parametrize("shared", [False, True])
def test_the_interval_covers_the_truth_by_class(shared):
    """Levels off the spine have a vector each; if `shared`, those of few observations share one.

    With a shared vector the interval may be wider than it must be. The control: intervals from
    more trials do not cover as often.
    """
    truth = np.array(
        [
            [[0.4, 0.15], [0.4, 0.15]],
            [[0.6, 0.12], [0.2, 0.1]],
            [[0.7, 0.1], [0.2, 0.1] if shared else [0.4, 0.05]],
        ]
    )
    trials = np.array([[3000, 0], [1500, 200 if shared else 700], [600, 80 if shared else 500]])
    tree = solve(truth.tolist(), budget=24, depth=8).tree
    rng, value = np.random.default_rng(1), expected_tokens(tree, Acceptance.given(truth).rates)
    assert (
        np.isin([1, 2], np.unique(tree.position_ids[tree.classes == 1])).all()
        and gradient(tree, truth)[1:, 1, 0].min() > 0
    )

    def drawn():
        counts = [
            [rng.multinomial(n, [*p, 1 - p.sum()])[:-1] for n, p in zip(*each, strict=True)]
            for each in zip(trials, truth, strict=True)
        ]
        return rates(trials, np.array(counts, float))

    draws = [drawn() for _ in range(400)]

    def covered_with(factor):
        bounds = [
            [
                expected_tokens(tree, Acceptance.given(end).rates)
                for end in acceptance_at_interval_ends(tree, rows, behind * factor)
            ]
            for rows, behind in draws
        ]
        return np.mean([low <= value <= high for low, high in bounds])

    assert 0.915 <= covered_with(1) <= (1 if shared else 0.985)
    assert covered_with(4) < 0.85


def test_classes_differ_as_far_as_their_counts_do_by_more_than_noise():
    """Counts of two classes are drawn from two distributions, and from a single one.

    Those from a single one mostly get one vector for both classes, those from two never do.
    """
    rng = np.random.default_rng(0)
    trials = np.array([[1000, 0], [300, 150], [120, 60]])

    def of(spine, off):
        counts = [
            [
                rng.multinomial(n, [*p, 1 - sum(p)])[:-1]
                for n, p in zip(level, (spine, off), strict=True)
            ]
            for level in trials
        ]
        return rates(trials, np.array(counts, float))[0]

    apart = np.array([of((0.7, 0.1), (0.25, 0.1)) for _ in range(200)])
    alike = np.array([of((0.5, 0.1), (0.5, 0.1)) for _ in range(200)])
    assert apart.mean(0)[1:, 0, 0] == pytest.approx(0.7, abs=0.02) and apart.mean(0)[
        1:, 1, 0
    ] == pytest.approx(0.25, abs=0.02)
    assert (alike[:, :, 0] == alike[:, :, 1]).all((1, 2)).mean() > 0.8
    assert (
        np.abs(alike[:, 1, 1, 0] - 0.5).mean()
        < 0.75 * np.abs(rng.binomial(150, 0.5, 200) / 150 - 0.5).mean()
    )  # better than its own counts
    assert (apart[:, 0, 0] == apart[:, 0, 1]).all()


def test_rates_of_few_observations_are_shared():
    trials = np.array([[500, 0], [3000, 4000], [0, 30], [1000, 10]])
    counts = np.array([[[250.0], [0.0]], [[2700.0], [400.0]], [[0.0], [9.0]], [[900.0], [3.0]]])
    p, behind = rates(trials, counts)
    assert p[:, 0, 0] == pytest.approx([0.5, 0.9, 0.3, 0.9], abs=0.01)
    assert p[:, 1, 0] == pytest.approx([0.5, 0.1, 0.3, 0.3], abs=0.01)
    assert behind.tolist() == [[500, 0], [3000, 4000], [0, 20], [1000, 20]]
    assert rates(np.array([500, 0, 100]), np.array([[250.0], [0.0], [90.0]]))[0][:, 0].tolist() == [
        0.5,
        0.5,
        0.9,
    ]  # as the level above
    alone = rates(np.array([[500, 0], [300, 0]]), counts[:2] * [[[1.0], [0.0]]] / 10)[0]
    assert np.array_equal(alone[:, 0], alone[:, 1])  # nothing is known off the spine


def test_interval_of_a_profile():
    latency = Latency({1: 0.04, 8: 0.05, 32: 0.09}, {1: 0.004, 32: 0.01}, 0.001, 128)
    few, many = (
        solve(
            Profile(Acceptance.given((0.5, 0.2, 0.05)), trials, latency), budget=32, depth=8
        ).plan.interval
        for trials in (100, 10_000)
    )
    for ends_of in (few, many):
        assert ends_of.expected_tokens[0] < ends_of.expected_tokens[1]
        assert all(0 <= lost < 0.2 for lost in ends_of.lost)
    assert np.ptp(many.predicted_speedup) < np.ptp(few.predicted_speedup) / 5
    assert (
        solve(Profile(Acceptance.given((0.5, 0.2)), 0, latency), budget=8, depth=4).plan.interval
        is None
    )


def test_the_error_of_step_times_is_their_spread():
    """Step times over plain ones vary as much as each profile's quartiles say.

    They are computed from normal timings that are drawn again and again.
    """
    tree, rounds, rng = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3]), 25, np.random.default_rng(0)
    truth = {"target": {1: 0.04, 7: 0.05}, "draft": {1: 0.004, 2: 0.005, 7: 0.008}}

    def measured():
        samples = {
            name: {n: rng.normal(t, 0.05 * t, rounds) for n, t in curve.items()}
            for name, curve in truth.items()
        }
        medians = {
            name: {n: float(np.median(x)) for n, x in curve.items()}
            for name, curve in samples.items()
        }
        quartiles = {
            name: {n: tuple(np.quantile(x, [0.25, 0.75])) for n, x in curve.items()}
            for name, curve in samples.items()
        }
        latency = Latency(
            **medians,
            overhead=0.0,
            context=0,
            samples=dict.fromkeys((1, 2, 7), rounds),
            quartiles=quartiles,
        )
        times = StepTime(latency)
        return np.log(times.step_seconds(tree) / times.plain_seconds()), step_time_error(
            tree, times
        )

    ratios, errors = np.array([measured() for _ in range(1_000)]).T
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.1)
    assert step_time_error(tree, StepTime(Latency(**truth, overhead=0.0, context=0))) == 0
    sure, unsure = (
        Latency(
            **truth,
            overhead=0.0,
            context=0,
            samples={7: 5},
            quartiles={"target": {7: (0.05 - d, 0.05 + d)}},
        )
        for d in (0.0, 0.01)
    )
    wide, narrow = (
        solve(
            Profile(Acceptance.given((0.5, 0.3)), 10_000, latency), budget=7, depth=4
        ).plan.interval.predicted_speedup
        for latency in (unsure, sure)
    )
    assert np.ptp(wide) > 2 * np.ptp(narrow)


def test_an_interval_beyond_what_can_be_solved_again():
    found = solve(
        Profile(Acceptance.given((0.7, 0.15, 0.05, 0.02)), 500), budget=70_000, depth=64
    ).plan.interval
    assert found.lost is None
    assert found.expected_tokens[0] < found.expected_tokens[1]
