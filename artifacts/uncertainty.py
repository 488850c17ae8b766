"""Intervals of the predictions: how noise, and prompts of a new kind, change tokens and speed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts.cost import (
    Floats,
    StepTime,
    acceptance_table,
    child_probabilities,
    expected_tokens,
    node_values,
    parent_rows,
)
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.tree import TokenTree

Z95 = 1.959964
"""97.5 % quantile of the normal distribution."""
MEDIAN_ERROR_FACTOR = 1.2533
"""A median's standard error over that of the mean, for a normal distribution."""
QUARTILE_DISTANCE = 1.349
"""Standard deviations from the first quartile of a normal distribution to the third."""
MIN_KINDS = 4
"""Fewer kinds say too little of how kinds differ: for three, Student's quantile is 4.3 already."""


def gradient(tree: TokenTree, rows: Floats) -> Floats:
    """dF / dp, of the shape of `rows`, from the tree alone.

    F is the expected tokens of the tree. By the product rule, the derivative for one node is its
    parent's value (the probability that the parent is accepted) times the expected tokens of the
    subtree under the node; nodes that share a probability add up. `rows` float64 [levels, ranks].
    """
    probs = acceptance_table(rows)
    p, offsets = child_probabilities(tree, probs), tree.level_offsets
    subtree_tokens = np.ones(tree.size)  # F of the subtree under each node
    for level in range(tree.depth - 1, 0, -1):
        nodes = np.arange(offsets[level], offsets[level + 1])
        np.add.at(subtree_tokens, tree.parents[nodes], p[nodes - 1] * subtree_tokens[nodes])
    levels, classes, num_ranks = probs.shape
    slope = np.zeros((levels, classes, max(num_ranks, tree.branching)))
    # Level, class and rank of the probability of each node but the root. The slope has room for the
    # ranks beyond the rows' end, whose probability is a constant 0; they are cut off in the end.
    places = (*parent_rows(tree, probs), tree.ranks[1:] - 1)
    np.add.at(slope, places, node_values(tree, rows)[tree.parents[1:]] * subtree_tokens[1:])
    return slope[..., :num_ranks].reshape(rows.shape)


def acceptance_at_interval_ends(
    tree: TokenTree, rows: Floats, trials: Sequence[float] | Floats, z: float = Z95
) -> tuple[Floats, Floats]:
    """The likeliest acceptance at which F(tree) is z standard errors below, and above.

    F(tree) is the expected tokens of the tree. `rows` float64 [levels, ranks].
    """
    spread, variance = _propagated_noise(tree, rows, trials)
    step = z * spread / math.sqrt(variance) if variance > 0 else np.zeros_like(rows)
    low, high = (np.clip(rows + sign * step, 0, 1) for sign in (-1, 1))
    return _with_sums_up_to_1(low), _with_sums_up_to_1(high)


def _with_sums_up_to_1(rows: Floats) -> Floats:
    """Scale each vector of probabilities (the last axis) whose sum is larger than 1 down to 1."""
    return rows / np.maximum(1.0, rows.sum(-1, keepdims=True))


def _propagated_noise(
    tree: TokenTree, rows: Floats, trials: Sequence[float] | Floats
) -> tuple[Floats, float]:
    """S g / n, of the shape of `rows`, and the variance of F(tree), g' S g / n.

    Here F is the number of tokens that a step with the tree yields on average, g its gradient by p,
    n the number of observations, and S = diag(p) - p p' the covariance of a single one. `rows`
    float64 [levels, ranks]; `trials` [levels].
    """
    slope = gradient(tree, rows)
    n = np.maximum(np.asarray(trials, float), 1)[..., None]
    spread = rows * (slope - (rows * slope).sum(-1, keepdims=True)) / n
    return spread, max(float((slope * spread).sum()), 0.0)


def jackknife(
    tree: TokenTree, trials: NDArray[np.integer] | Floats, counts: Floats
) -> tuple[float, float]:
    """Standard error of F(tree), its expected tokens, by leaving out one group after the other.

    For each group, F is computed from the trials of all other groups together. The variance is
    (groups - 1) / groups times the sum of the squared deviations of these values from their mean.
    `trials` [groups, levels]; `counts` [ranks].
    """
    groups = len(trials)
    rest_trials, rest_counts = trials.sum(0) - trials, counts.sum(0) - counts
    rest_root_trials = rest_trials.reshape(*rest_trials.shape[:2], -1)[:, 0, 0]  # level and class 0
    if rest_root_trials.min() <= 0:
        return math.inf, 1.0
    tokens = np.array(
        [
            expected_tokens(tree, rates(trials_left, counts_left)[0])
            for trials_left, counts_left in zip(rest_trials, rest_counts, strict=True)
        ]
    )
    mean = tokens.mean()
    return math.sqrt((groups - 1) / groups * ((tokens - mean) ** 2).sum()), float(mean)


def trials_for_new_kind(
    tree: TokenTree, rows: Floats, trials: NDArray[np.integer] | Floats, counts: Floats
) -> Floats | None:
    """Independent observations that leave F(tree) as uncertain as a new kind of prompts does.

    `rows` float64 [levels, ranks]; `trials` [kinds, levels]; `counts` [ranks].
    """
    num_kinds = len(trials)
    if num_kinds < MIN_KINDS:
        return None
    standard_error, _ = jackknife(tree, trials, counts)
    # sqrt(K + 1) = sqrt(K) for s, times sqrt(1 + 1 / K); the interval will use the quantile Z95.
    error = standard_error * math.sqrt(num_kinds + 1) * student95(num_kinds - 1) / Z95
    _, observations = rates(trials.sum(0), counts.sum(0))
    _, variance = _propagated_noise(tree, rows, observations)
    return observations * min(1.0, variance / max(error, 1e-9) ** 2)


def student95(degrees_of_freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, within 0.2 % from three degrees of freedom on.

    The expansion about the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    z, n = Z95, degrees_of_freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def median_with_error(values: Floats) -> tuple[float, float]:
    """The median of repeated measurements, and its relative standard error; 0 for a single one."""
    median = float(np.median(values))
    if len(values) < 2:
        return median, 0.0
    deviation = float(values.std(ddof=1))
    return median, MEDIAN_ERROR_FACTOR * deviation / math.sqrt(len(values)) / median


def step_time_error(tree: TokenTree, times: StepTime) -> float:
    """Standard error of log(step time / plain step time).

    It follows from the quartiles and samples of each measured size, and from the relative error of
    the verification time; it is 0 if the latencies have neither. A pass that both steps make
    cancels.
    """
    # Derivative of the logarithm by each measured time: its curve, its size.
    slopes: defaultdict[tuple[str, int], float] = defaultdict(float)
    variance = 0.0
    plain_tree = TokenTree.chain(1)  # a plain step verifies no drafted node
    for sign, step_tree in ((1, tree), (-1, plain_tree)):
        seconds = times.step_seconds(step_tree)
        for curve, size in _passes(step_tree, times):
            quartiles = times.latency.quartiles.get(curve, ())
            # The pass is taken to cost as much as at the next larger measured size; 0 if none is.
            measured_size = min((n for n in quartiles if n >= size), default=0)
            slopes[curve, measured_size] += sign / seconds
        if times.latency.verification:
            error_seconds = times.latency.verification.error * times.verification_seconds(step_tree)
            variance += (error_seconds / seconds) ** 2
    for (curve, size), slope in slopes.items():
        low, high = times.latency.quartiles.get(curve, {}).get(size, (0.0, 0.0))
        median_deviation = MEDIAN_ERROR_FACTOR * (high - low) / QUARTILE_DISTANCE
        variance += slope**2 * median_deviation**2 / times.latency.samples.get(size, 1)
    return math.sqrt(variance)


def _passes(tree: TokenTree, times: StepTime) -> list[tuple[str, int]]:
    """The model passes of one step: which curve times each, and its number of nodes."""
    widths = times.drafting.pass_widths(tree.num_parents_by_level)
    return [("target", tree.size), *(("draft", width) for width in widths)]
