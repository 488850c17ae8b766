"""From counts to probabilities: p[level][class][rank], and how many observations are behind each vector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FEW = 300
"""Accepted nodes off the spine of a level; levels with fewer are taken together."""
NOISE = 2.0
"""Counts of positions of one text vary about this many times as much as those of independent ones."""


def rates(trials: NDArray[np.integer] | Floats, counts: Floats) -> tuple[Floats, Floats]:
    """p, of the shape of `counts`, and the observations behind each of its vectors, of the shape of `trials`.

    A level without trials is as the one above it. The vectors of the two classes differ as far as their counts differ by more than noise: they
    are moved towards the level's own vector by the share of the squared difference, over all levels, that noise explains (a positive-part
    James-Stein estimate). Levels with fewer than `FEW` trials off the spine share that class's vector. They share its observations in
    equal parts: a variance in which levels count as independent is then at least the shared vector's, (sum of g)^2 / N <= sum of g^2 / (N / n).

    Args:
        trials: [levels] or [levels, classes], accepted nodes observed.
        counts: [..., ranks], how many of their children of each rank were accepted.
    """
    seen, n = np.array(trials, float).reshape(len(trials), -1), np.array(counts, float).reshape(len(trials), -1, counts.shape[-1])
    total = seen.sum(1)
    at = np.maximum.accumulate(np.where(total > 0, np.arange(len(total)), 0))
    found: Floats = np.repeat((n.sum(1) / np.maximum(total, 1)[:, None])[at][:, None], seen.shape[1], 1)
    if seen.shape[1] > 1:
        share = _share(seen, n, found[:, 0])
        few = seen[:, 1] < FEW
        few[0] = False  # no parent is off the spine there
        n[few, 1], seen[few, 1] = n[few, 1].sum(0) / max(few.sum(), 1), seen[few, 1].sum() / max(few.sum(), 1)
        apart = np.where(seen[..., None] > 0, n / np.where(seen > 0, seen, 1)[..., None], found)
        found += share * (apart - found)
    return found.reshape(counts.shape), seen.reshape(trials.shape)


def _share(seen: Floats, n: Floats, together: Floats) -> float:
    """How much of the difference between the classes of each level is more than noise."""
    weight = seen.prod(1) / np.maximum(seen.sum(1), 1)  # the squared difference of a level, times this, has this expectation by noise:
    noise = NOISE * ((weight > 0) * (together * (1 - together)).sum(1)).sum()
    rate = n / np.maximum(seen, 1)[..., None]
    difference = (weight * ((rate[:, 1] - rate[:, 0]) ** 2).sum(1)).sum()
    return max(0.0, 1 - noise / difference) if difference > 0 else 0.0
