"""How sure the promise is: what the measurements' noise does to expected tokens and speed.

Delta method. With n observations of an accepted node's children, the counts are multinomial, so F(p) has the variance g' S g / n, where g is
F's gradient and S = diag(p) - p p'. The ends of the interval are the likeliest vectors at that distance, p +- z S g / sqrt(n g' S g);
F is recomputed at them, not extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sequoia_plan.artifacts import Latency, TokenTree
from sequoia_plan.planner.objective import Floats, StepTime, node_values

Z95 = 1.959964


def gradient(tree: TokenTree, vector: Floats) -> Floats:
    """float64 [B]: dF / dp[k] for a vector that holds on every level, from the tree alone."""
    below = np.ones(tree.size)  # F of the subtree under each node, the node counted as 1
    p = np.pad(vector, (0, max(0, tree.branching - vector.size)))
    offsets = tree.level_offsets
    for level in range(tree.depth - 1, 0, -1):
        nodes = np.arange(offsets[level], offsets[level + 1])
        np.add.at(below, tree.parents[nodes], p[tree.ranks[nodes] - 1] * below[nodes])
    reached = node_values(tree, vector)[tree.parents[1:]]
    return np.bincount(tree.ranks[1:] - 1, reached * below[1:], minlength=p.size)[: vector.size].astype(np.float64)


def ends(tree: TokenTree, vector: Sequence[float], trials: int, z: float = Z95) -> tuple[Floats, Floats]:
    """The likeliest acceptance vectors at which F(tree) is z standard errors below and above; float64 [B] each."""
    p = np.asarray(vector, float)
    slope = gradient(tree, p)
    spread = p * (slope - p @ slope)
    variance = max(float(slope @ spread), 0.0)
    step = z * spread / math.sqrt(trials * variance) if variance > 0 else np.zeros_like(p)
    low, high = (np.clip(p + sign * step, 0, 1) for sign in (-1, 1))
    return low / max(1.0, low.sum()), high / max(1.0, high.sum())


def step_time_error(tree: TokenTree, latency: Latency) -> float:
    """Standard error of log(step time / plain step time), from each size's quartiles and rounds; 0 if the profile has none.

    A normal law's quartiles are 1.349 standard deviations apart, and a median's standard error is 1.2533 times a mean's.
    """

    def variance(curve: str, size: int) -> float:
        known = latency.quartiles.get(curve, {})
        first, third = known.get(min((n for n in known if n >= size), default=0), (0.0, 0.0))
        return (1.2533 * (third - first) / 1.349) ** 2 / max(latency.rounds, 1)

    times = StepTime(latency)
    step = variance("target", tree.size) + sum(variance("draft", width) for width in tree.draft_widths())
    return math.sqrt(step / times.step(tree) ** 2 + variance("target", 1) / times.plain() ** 2)
