"""Intervals of the prediction: how the noise of the measurements changes expected tokens and speed.

Delta method. With n observations of an accepted node's children, the counts are multinomial, so F(p) has the variance g' S g / n, where g is
F's gradient and S = diag(p) - p p'; levels add up. The ends of the interval are the likeliest vectors at that distance, p +- z S g / n / sd(F);
F is recomputed at them, not extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import Floats, StepTime, node_values

Z95 = 1.959964


def gradient(tree: TokenTree, rows: Floats) -> Floats:
    """float64 [levels, ranks]: dF / dp[level][k], from the tree alone; the last of `rows` holds for all deeper levels."""
    below = np.ones(tree.size)  # F of the subtree under each node, the node counted as 1
    p = np.pad(rows, ((0, 0), (0, max(0, tree.branching - rows.shape[1]))))
    at = np.minimum(tree.position_ids[tree.parents[1:]], len(rows) - 1)  # each node's row
    offsets = tree.level_offsets
    for level in range(tree.depth - 1, 0, -1):
        nodes = np.arange(offsets[level], offsets[level + 1])
        np.add.at(below, tree.parents[nodes], p[at[nodes - 1], tree.ranks[nodes] - 1] * below[nodes])
    slope = np.zeros_like(p)
    np.add.at(slope, (at, tree.ranks[1:] - 1), node_values(tree, rows)[tree.parents[1:]] * below[1:])
    return slope[:, : rows.shape[1]]


def ends(tree: TokenTree, rows: Floats, trials: Sequence[float], z: float = Z95) -> tuple[Floats, Floats]:
    """The likeliest acceptance at which F(tree) is z standard errors below and above; float64 [levels, ranks] each.

    Args:
        rows: float64 [levels, ranks], p[level][k]; the last holds for all deeper levels.
        trials: independent observations behind each.
    """
    slope, n = gradient(tree, rows), np.maximum(np.asarray(trials, float), 1)[:, None]
    spread = rows * (slope - (rows * slope).sum(1, keepdims=True)) / n
    variance = max(float((slope * spread).sum()), 0.0)
    step = z * spread / math.sqrt(variance) if variance > 0 else np.zeros_like(rows)
    low, high = (np.clip(rows + sign * step, 0, 1) for sign in (-1, 1))
    return low / np.maximum(1.0, low.sum(1, keepdims=True)), high / np.maximum(1.0, high.sum(1, keepdims=True))


def step_time_error(tree: TokenTree, times: StepTime) -> float:
    """Standard error of log(step time / plain step time), from each size's quartiles and samples; 0 if the latencies have none.

    A normal law's quartiles are 1.349 standard deviations apart, and a median's standard error is 1.2533 times a mean's.
    """
    latency = times.latency

    def variance(curve: str, size: int) -> float:
        known = latency.quartiles.get(curve, {})
        n = min((n for n in known if n >= size), default=0)
        first, third = known.get(n, (0.0, 0.0))
        return (1.2533 * (third - first) / 1.349) ** 2 / latency.samples.get(n, 1)

    step = variance("target", tree.size) + sum(variance("draft", width) for width in times.drafting.widths(tree.parents_by_level))
    return math.sqrt(step / times.step(tree) ** 2 + variance("target", 1) / times.plain() ** 2)
