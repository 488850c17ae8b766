"""Intervals of the predictions: how noise, and prompts of a new kind, change tokens and speed."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sequoia_plan.artifacts.acceptance import Acceptance, estimate
from sequoia_plan.artifacts.counts import Counts, Floats
from sequoia_plan.artifacts.expected_tokens import (
    child_probabilities,
    expected_tokens,
    node_values,
    parent_rows,
)
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree import TokenTree

Z95 = 1.959964
"""97.5 % quantile of the normal distribution."""
STUDENT95 = (1.5895341, 2.5558498, 2.8224987, 2.3722713, Z95)
"""Coefficients of the expansion of Student's 97.5 % quantile in 1 / degrees of freedom, the highest
power first (Abramowitz and Stegun, 26.7.5)."""
MEDIAN_ERROR_FACTOR = 1.2533
"""A median's standard error over that of the mean, for a normal distribution."""
QUARTILE_DISTANCE = 1.349
"""Standard deviations from the first quartile of a normal distribution to the third."""
MIN_KINDS = 4
"""Fewer kinds say too little of how kinds differ: for three, Student's quantile is 4.3 already."""


def gradient(tree: TokenTree, rates: Floats) -> Floats:
    """dF / dp, of the shape of `rates` (as in `Acceptance`), from the tree alone.

    F is the expected tokens of the tree. By the product rule, the derivative for one node is its
    parent's value (the probability that the parent is accepted) times the expected tokens of the
    subtree under the node; nodes that share a probability add up.
    """
    p, offsets = child_probabilities(tree, rates), tree.level_offsets
    subtree_tokens = np.ones(tree.size)  # F of the subtree under each node
    for level in range(tree.depth - 1, 0, -1):
        nodes = np.arange(offsets[level], offsets[level + 1])
        np.add.at(subtree_tokens, tree.parents[nodes], p[nodes - 1] * subtree_tokens[nodes])
    levels, classes, num_ranks = rates.shape
    slope = np.zeros((levels, classes, max(num_ranks, tree.branching)))
    # Level, class and rank of the probability of each node but the root. The slope has room for the
    # ranks beyond the rates' end, whose probability is a constant 0; they are cut off in the end.
    places = (*parent_rows(tree, rates), tree.ranks[1:] - 1)
    np.add.at(slope, places, node_values(tree, rates)[tree.parents[1:]] * subtree_tokens[1:])
    return slope[..., :num_ranks]


def rates_at_interval_ends(tree: TokenTree, rates: Floats, trials: Floats) -> tuple[Floats, Floats]:
    """The likeliest rates at the ends of the 95 % interval of F(tree).

    F(tree) is the expected tokens of the tree. `trials` float64 [levels, node classes] are
    independent observations.
    """
    spread, variance = _propagated_noise(tree, rates, trials)
    step = Z95 * spread / math.sqrt(variance) if variance > 0 else np.zeros_like(rates)
    ends = np.clip(np.stack([rates - step, rates + step]), 0, 1)
    low, high = ends / np.maximum(1.0, ends.sum(-1, keepdims=True))  # sums are at most 1
    return low, high


def _propagated_noise(tree: TokenTree, rates: Floats, trials: Floats) -> tuple[Floats, float]:
    """S g / n, of the shape of `rates`, and the variance of F(tree), g' S g / n.

    Here g is the gradient of F by p, n the number of observations, and S = diag(p) - p p' the
    covariance of a single one.
    """
    slope = gradient(tree, rates)
    n = np.maximum(trials, 1)[..., None]
    spread = rates * (slope - (rates * slope).sum(-1, keepdims=True)) / n
    return spread, max(float((slope * spread).sum()), 0.0)


def jackknife(tree: TokenTree, trials: Floats, accepted: Floats) -> tuple[float, float]:
    """Standard error of F(tree), its expected tokens, by leaving out one group after the other.

    For each group, F is computed from the trials of all other groups together.
    `trials` [groups, levels, node classes]; `accepted` [groups, levels, node classes, ranks].
    """
    rest_trials, rest_accepted = trials.sum(0) - trials, accepted.sum(0) - accepted
    if rest_trials[:, 0, 0].min() <= 0:
        return math.inf, 1.0
    tokens = np.array(
        [
            expected_tokens(tree, estimate(trials_left, accepted_left)[0])
            for trials_left, accepted_left in zip(rest_trials, rest_accepted, strict=True)
        ]
    )
    return jackknife_error(tokens), float(tokens.mean())


def jackknife_error(values: Floats) -> float:
    """Standard error of a figure from its values without one group after the other.

    The variance is (groups - 1) / groups times the sum of the squared deviations from their mean.
    """
    return math.sqrt((len(values) - 1) * values.var())


def trials_for_new_kind(
    tree: TokenTree, acceptance: Acceptance, kinds: Sequence[Counts]
) -> Floats | None:
    """Independent observations that leave F(tree) as uncertain as a new kind of prompts does.

    Returns float64 [levels, node classes] as the rates have; None for too few kinds.
    """
    num_kinds, observations = len(kinds), acceptance.trials
    if num_kinds < MIN_KINDS or observations is None:
        return None
    kinds = [kind.with_classes(observations.shape[1]) for kind in kinds]
    standard_error, _ = jackknife(
        tree,
        np.stack([kind.trials for kind in kinds]),
        np.stack([kind.accepted for kind in kinds]),
    )
    # sqrt(K + 1) = sqrt(K) for s, times sqrt(1 + 1 / K); the interval will use the quantile Z95.
    error = standard_error * math.sqrt(num_kinds + 1) * student95(num_kinds - 1) / Z95
    _, variance = _propagated_noise(tree, acceptance.rates, observations)
    return observations * min(1.0, variance / max(error, 1e-9) ** 2)


def student95(degrees_of_freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, to 0.2 % from three degrees of freedom on."""
    return float(np.polyval(STUDENT95, 1 / degrees_of_freedom))


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
    latency, variance = times.latency, 0.0
    # derivative of the logarithm by each measured time: its curve, its size
    slopes: defaultdict[tuple[str, int], float] = defaultdict(float)
    plain_tree = TokenTree.chain(1)  # a plain step verifies no drafted node
    for sign, step_tree in ((1, tree), (-1, plain_tree)):
        seconds = times.step_seconds(step_tree)
        for curve, size in _passes(step_tree, times):
            # a pass is taken to cost as much as at the next larger measured size; 0 if none is
            sizes = [n for n in latency.quartiles.get(curve, ()) if n >= size]
            slopes[curve, min(sizes, default=0)] += sign / seconds
        if cost := latency.verification:
            error_seconds = cost.error * times.verification_seconds(step_tree.size)
            variance += (error_seconds / seconds) ** 2
    for (curve, size), slope in slopes.items():
        if size:
            low, high = latency.quartiles[curve][size]
            median_deviation = MEDIAN_ERROR_FACTOR * (high - low) / QUARTILE_DISTANCE
            variance += (slope * median_deviation) ** 2 / latency.samples.get(size, 1)
    return math.sqrt(variance)


def _passes(tree: TokenTree, times: StepTime) -> list[tuple[str, int]]:
    """The model passes of one step: which curve times each, and its number of nodes."""
    widths = times.drafting.pass_widths(tree.num_parents_by_level)
    return [("target", tree.size), *(("draft", width) for width in widths)]
