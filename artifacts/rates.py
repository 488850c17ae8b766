"""From counts to probabilities: p[level][class][rank], and how many observations are behind each vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sequoia_plan.artifacts.profile import LevelCounts

Floats = NDArray[np.float64]
FEW = 300
"""Accepted nodes off the spine of a level; levels with fewer are taken together."""


def rates(trials: NDArray[np.integer] | Floats, counts: Floats) -> tuple[Floats, Floats]:
    """p, of the shape of `counts`, and the observations behind each of its vectors, of the shape of `trials`.

    On the spine each level has its own vector; one without trials is as the level above. Off it, where there are few, all levels with fewer
    than `FEW` share one vector. They share its observations in equal parts, so that a variance in which levels count as independent is at
    least the shared vector's: (sum of g)^2 / N <= sum of g^2 / (N / n). Without any trial off the spine the classes are alike.

    Args:
        trials: [levels] or [levels, classes], accepted nodes observed.
        counts: [..., ranks], how many of their children of each rank were accepted.
    """
    seen, n = np.array(trials, float).reshape(len(trials), -1), np.array(counts, float).reshape(len(trials), -1, counts.shape[-1])
    if seen.shape[1] > 1:
        few = seen[:, 1] < FEW
        few[0] = False  # no parent is off the spine there
        if seen[few, 1].any():
            n[few, 1] = n[few, 1].mean(0)
            seen[few, 1] = seen[few, 1].mean()
    at = np.maximum.accumulate(np.where(seen > 0, np.arange(len(seen))[:, None], 0), 0), np.arange(seen.shape[1])
    found = (n / np.where(seen > 0, seen, 1)[..., None])[at]
    if seen.shape[1] > 1:
        unknown = seen[:, 1].cumsum() == 0
        found[unknown, 1] = found[unknown, 0]
    return found.reshape(counts.shape), seen.reshape(trials.shape)


def told_apart(levels: Sequence[LevelCounts]) -> bool:
    """Whether counts say of every level below the root's which part of them is off the spine."""
    return bool(levels) and levels[0].trials > 0 and any(level.off for level in levels) and all(level.off or not level.trials for level in levels[1:])


def tally(levels: Sequence[LevelCounts], classes: int) -> tuple[Floats, Floats]:
    """Trials [levels, classes] and counts [levels, classes, ranks], as `rates` takes them; with one class those of all nodes together."""
    trials, counts = np.array([level.trials for level in levels], float), np.array([level.counts for level in levels], float)
    if classes == 1:
        return trials[:, None], counts[:, None]
    off = np.array([level.off.trials if level.off else 0 for level in levels], float)
    off_counts = np.array([level.off.counts if level.off else np.zeros(counts.shape[1]) for level in levels], float)
    return np.stack([trials - off, off], 1), np.stack([np.maximum(counts - off_counts, 0), off_counts], 1)
