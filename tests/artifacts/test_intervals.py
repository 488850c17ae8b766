"""Rates from counts, by level and class, and the intervals of the predictions."""

import numpy as np
import pytest

from sequoia_plan.artifacts.acceptance import estimate


def drawn_counts(rng, truth, trials):
    """Counts of each level and node class, drawn from their true rates."""
    counts = [
        rng.multinomial(n, [*p, max(0.0, 1 - p.sum())])[:-1]
        for n, p in zip(trials.ravel(), truth.reshape(-1, truth.shape[-1]), strict=True)
    ]
    return np.reshape(counts, truth.shape).astype(float)


def test_classes_differ_as_far_as_their_counts_do_by_more_than_noise():
    """Counts of two classes are drawn from two distributions, and from a single one.

    Those from a single one mostly get one vector for both classes, those from two never do.
    """
    rng = np.random.default_rng(0)
    trials = np.array([[1000.0, 0], [300, 150], [120, 60]])

    def rates_of(spine, off):
        truth = np.array([[spine, off]] * 3)
        return [estimate(trials, drawn_counts(rng, truth, trials)) for _ in range(200)]

    apart = np.array(rates_of((0.7, 0.1), (0.25, 0.1)))
    assert apart.mean(0)[1:, 0, 0] == pytest.approx(0.7, abs=0.02)
    assert apart.mean(0)[1:, 1, 0] == pytest.approx(0.25, abs=0.02)
    assert (apart[:, 0, 0] == apart[:, 0, 1]).all()
    alike = rates_of((0.5, 0.1), (0.5, 0.1))
    assert np.mean([rates.shape[1] == 1 for rates in alike]) > 0.8
    errors = [abs(rates[1, -1, 0] - 0.5) for rates in alike]
    assert np.mean(errors) < 0.75 * np.abs(rng.binomial(150, 0.5, 200) / 150 - 0.5).mean()


def test_rates_of_few_observations_are_shared():
    trials = np.array([[500.0, 0], [3000, 4000], [0, 30], [1000, 10]])
    accepted = np.array([[[250.0], [0.0]], [[2700.0], [400.0]], [[0.0], [9.0]], [[900.0], [3.0]]])
    rates = estimate(trials, accepted)
    assert rates[:, 0, 0] == pytest.approx([0.5, 0.9, 0.3, 0.9], abs=0.01)
    assert rates[:, 1, 0] == pytest.approx([0.5, 0.1, 0.3, 0.3], abs=0.01)
    one_class = np.array([[500.0], [0], [100]]), np.array([[[250.0]], [[0.0]], [[90.0]]])
    assert estimate(*one_class).ravel().tolist() == [0.5, 0.5, 0.9]  # as the level above
    off_unknown = estimate(np.array([[500.0, 0], [300, 0]]), accepted[:2] * [[[1.0], [0.0]]] / 10)
    assert off_unknown.shape == (2, 1, 1)
