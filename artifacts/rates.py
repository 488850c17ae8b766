"""From counts to probabilities: p[level][class][rank], and the observations behind each vector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MIN_TRIALS = 300
"""Accepted nodes off the spine; levels with fewer are taken together."""
FIRST_DEEP_LEVEL = 3
"""Levels from this one on resemble each other, and the deeper, the fewer trials they have."""
DEEP_TRIALS = 100
"""What the deep levels have in common counts as much on each of them as so many trials."""
OVERDISPERSION = 2.0
"""Variance of counts within one text over that of independent ones, about."""


def rates(trials: NDArray[np.integer] | Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Estimate acceptance probabilities from counts.

    A node's class is 0 on the spine (the root, its first child, that node's first child, ...) and 1
    off it. `trials` [levels]; `counts` [levels, ranks].
    """
    num_levels = len(trials)
    observations = np.array(trials, float).reshape(num_levels, -1)
    accepted = np.array(counts, float).reshape(num_levels, -1, counts.shape[-1])
    num_classes = observations.shape[1]
    level_probs = _level_probs(*_with_deep_trials(observations.sum(1), accepted.sum(1)))
    probs: Floats = np.repeat(level_probs[:, None], num_classes, 1)
    if num_classes > 1:
        signal = _share_beyond_noise(observations, accepted, level_probs)
        is_rare = observations[:, 1] < MIN_TRIALS
        is_rare[0] = False  # no parent is off the spine there
        num_rare = max(is_rare.sum(), 1)
        accepted[is_rare, 1] = accepted[is_rare, 1].sum(0) / num_rare
        observations[is_rare, 1] = observations[is_rare, 1].sum() / num_rare
        class_trials, class_counts = _with_deep_trials(observations, accepted)
        is_observed = class_trials > 0
        class_probs = class_counts / np.where(is_observed, class_trials, 1)[..., None]
        class_probs = np.where(is_observed[..., None], class_probs, probs)
        probs += signal * (class_probs - probs)
    return probs.reshape(counts.shape), observations.reshape(trials.shape)


def _with_deep_trials(trials: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Trials and counts, with `DEEP_TRIALS` more on each level below `FIRST_DEEP_LEVEL`.

    The further trials are accepted as those of all levels from `FIRST_DEEP_LEVEL` on together.
    `trials` float64 [levels]; `counts` [ranks].
    """
    deep_trials = trials[FIRST_DEEP_LEVEL:].sum(0)
    deep_probs = counts[FIRST_DEEP_LEVEL:].sum(0) / np.maximum(deep_trials, 1)[..., None]
    further = np.zeros_like(trials)
    further[FIRST_DEEP_LEVEL + 1 :] = np.where(deep_trials > 0, DEEP_TRIALS, 0)
    return trials + further, counts + further[..., None] * deep_probs


def _level_probs(trials: Floats, counts: Floats) -> Floats:
    """p of both classes together, float64 [levels, ranks].

    A level without trials has the probabilities of the level above it. `trials` float64 [levels];
    `counts` float64 [levels, ranks].
    """
    levels = np.arange(len(trials))
    source_levels = np.maximum.accumulate(np.where(trials > 0, levels, 0))
    probs: Floats = (counts / np.maximum(trials, 1)[:, None])[source_levels]
    return probs


def _share_beyond_noise(observations: Floats, accepted: Floats, level_probs: Floats) -> float:
    """The share of the squared difference between two classes of nodes that noise does not explain.

    `observations` float64 [levels, 2]; `accepted` float64 [levels, 2, ranks]; `level_probs` float64
    [levels, ranks].
    """
    # Where both classes accept alike and observations are independent, a level's squared difference
    # times this weight has the expectation sum over ranks of p (1 - p).
    weights = observations.prod(1) / np.maximum(observations.sum(1), 1)
    variances = (level_probs * (1 - level_probs)).sum(1)
    # OVERDISPERSION is the variance of counts within a text over that of independent ones.
    noise = OVERDISPERSION * ((weights > 0) * variances).sum()
    class_probs = accepted / np.maximum(observations, 1)[..., None]
    squared_differences = ((class_probs[:, 1] - class_probs[:, 0]) ** 2).sum(1)
    difference = (weights * squared_differences).sum()
    return max(0.0, 1 - noise / difference) if difference > 0 else 0.0
