"""Intervals of the prediction: how the noise of the measurements, and prompts of another kind, change expected tokens and speed.

Delta method. With n observations of an accepted node's children, the counts are multinomial, so F(p) has the variance g' S g / n, where g is
F's gradient and S = diag(p) - p p'; levels add up. The ends of the interval are the likeliest vectors at that distance, p +- z S g / n / sd(F);
F is recomputed at them, not extrapolated.

Positions of one text are alike, and so are prompts of one kind. The first is told by how a profile's prompts differ (its effective sample
size), the second by how its kinds of prompts differ: a kind that was not measured lies as far from the measured ones as these from each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts import Lift, TokenTree
from sequoia_plan.artifacts.cost import Floats, StepTime, by_class, child_probabilities, expected_tokens, node_values, parents_rows
from sequoia_plan.artifacts.rates import rates

Z95 = 1.959964
OF_MEDIAN = 1.2533
"""A median's standard error over that of the mean, for a normal law."""
QUARTILES_APART = 1.349
"""Standard deviations from the first quartile of a normal law to the third."""
LEAST_KINDS = 4
"""Fewer say too little about how kinds differ: for three of them the quantile of Student's law is 4.3 already."""


def gradient(tree: TokenTree, rows: Floats) -> Floats:
    """dF / dp, of the shape of `rows`, from the tree alone.

    Args:
        rows: float64 [levels, ranks] or [levels, classes, ranks], p[level][class][k]; the last level holds for all deeper ones.
    """
    below = np.ones(tree.size)  # F of the subtree under each node, the node counted as 1
    p, offsets = child_probabilities(tree, by_class(rows)), tree.level_offsets
    for level in range(tree.depth - 1, 0, -1):
        nodes = np.arange(offsets[level], offsets[level + 1])
        np.add.at(below, tree.parents[nodes], p[nodes - 1] * below[nodes])
    levels, classes, ranks = by_class(rows).shape
    slope = np.zeros((levels, classes, max(ranks, tree.branching)))
    np.add.at(slope, (*parents_rows(tree, by_class(rows)), tree.ranks[1:] - 1), node_values(tree, rows)[tree.parents[1:]] * below[1:])
    return slope[..., :ranks].reshape(rows.shape)


def ends(tree: TokenTree, rows: Floats, trials: Sequence[float] | Floats, z: float = Z95) -> tuple[Floats, Floats]:
    """The likeliest acceptance at which F(tree) is z standard errors below and above; of the shape of `rows` each.

    Args:
        rows: as `gradient` takes them.
        trials: independent observations behind each of their vectors, [levels] or [levels, classes].
    """
    spread, variance = _propagated(tree, rows, trials)
    step = z * spread / math.sqrt(variance) if variance > 0 else np.zeros_like(rows)
    low, high = (np.clip(rows + sign * step, 0, 1) for sign in (-1, 1))
    return low / np.maximum(1.0, low.sum(-1, keepdims=True)), high / np.maximum(1.0, high.sum(-1, keepdims=True))


def _propagated(tree: TokenTree, rows: Floats, trials: Sequence[float] | Floats) -> tuple[Floats, float]:
    """S g / n, of the shape of `rows`, and the variance of F, g' S g / n."""
    slope, n = gradient(tree, rows), np.maximum(np.asarray(trials, float), 1)[..., None]
    spread = rows * (slope - (rows * slope).sum(-1, keepdims=True)) / n
    return spread, max(float((slope * spread).sum()), 0.0)


def jackknife(tree: TokenTree, trials: NDArray[np.integer], counts: Floats) -> tuple[float, float]:
    """Standard error of F(tree), and F, from groups of trials of which one after the other is left out: inf if one holds all of the root's.

    Args:
        trials: [groups, levels] or [groups, levels, classes], accepted nodes observed.
        counts: float64 [..., ranks], how many of their children of each rank were accepted.
    """
    groups = len(trials)
    n, accepted = trials.sum(0) - trials, counts.sum(0) - counts
    if n.reshape(*n.shape[:2], -1)[:, 0, 0].min() <= 0:
        return math.inf, 1.0
    without = np.array([expected_tokens(tree, rates(*each)[0]) for each in zip(n, accepted, strict=True)])
    return math.sqrt((groups - 1) / groups * ((without - without.mean()) ** 2).sum()), float(without.mean())


def trials_of_a_new_kind(tree: TokenTree, rows: Floats, trials: NDArray[np.integer], counts: Floats) -> Floats | None:
    """Of the shape [levels] or [levels, classes] of each kind's trials: how many independent observations would leave F(tree) as open as a
    kind of prompts that was not measured does.

    Of K kinds with the variance s^2 of F the mean has the variance s^2 / K, which is the jackknife's, and a further kind's distance from that
    mean s^2 (1 + 1 / K). As s^2 is known from K kinds only, Student's law takes the normal one's place. s^2 holds the noise of each kind's
    own prompts: the interval is that of the average over as many prompts of the new kind as there were of each, and so holds the
    expectation more often than it says. Taking that noise out made it hold less often, since few prompts do not tell how large it is.

    Args:
        rows: p of all kinds together, as `gradient` takes them.
        trials, counts: of each kind, as `jackknife` takes groups. None is returned for fewer than `LEAST_KINDS`.
    """
    kinds = len(trials)
    if kinds < LEAST_KINDS:
        return None
    error = jackknife(tree, trials, counts)[0] * math.sqrt(kinds + 1) * student95(kinds - 1) / Z95
    seen = rates(trials.sum(0), counts.sum(0))[1]
    return seen * min(1.0, _propagated(tree, rows, seen)[1] / max(error, 1e-9) ** 2)


def student95(freedom: int) -> float:
    """The 97.5 % quantile of Student's law, from three degrees of freedom on within 0.2 %: the expansion about the normal law's (Abramowitz
    and Stegun, 26.7.5)."""
    z, n = Z95, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def median(values: Floats) -> tuple[float, float]:
    """The median of repeated measurements, and its relative standard error; 0 for a single one."""
    middle = float(np.median(values))
    return middle, OF_MEDIAN * float(values.std(ddof=1)) / math.sqrt(len(values)) / middle if len(values) > 1 else 0.0


def step_time_error(tree: TokenTree, times: StepTime) -> float:
    """Standard error of log(step time / plain step time)."""
    return step_ratio_error((tree, times), (TokenTree.chain(1), times))


def step_ratio_error(first: tuple[TokenTree, StepTime], second: tuple[TokenTree, StepTime]) -> float:
    """Standard error of log(one step time / another), of the same models on the same machine: from each size's quartiles and samples, and from
    how far verification is off its shapes; 0 if the latencies have none of it. What both steps take alike cancels."""
    slopes: defaultdict[tuple[str, int], float] = defaultdict(float)  # of the logarithm, by the passes that were measured
    variance = 0.0
    for sign, (tree, times) in zip((1, -1), (first, second), strict=True):
        passes = [("target", tree.size), *(("draft", width) for width in times.drafting.widths(tree.parents_by_level))]
        for curve, size in passes:
            known = min((n for n in times.latency.quartiles.get(curve, ()) if n >= size), default=0)
            slopes[curve, known] += sign / times.step(tree)
        judged = times.latency.verification
        variance += (judged.error * times.verification(tree) / times.step(tree)) ** 2 if judged else 0.0
    latency = first[1].latency
    for (curve, size), slope in slopes.items():
        low, high = latency.quartiles.get(curve, {}).get(size, (0.0, 0.0))
        variance += slope**2 * (OF_MEDIAN * (high - low) / QUARTILES_APART) ** 2 / latency.samples.get(size, 1)
    return math.sqrt(variance)


def lift_error(tree: TokenTree, rows: Floats, counts: Floats, trials: Floats, lift: Lift) -> float:
    """Standard error of log F(tree) with `traversal`, from how sure its acceptance is relative to that of `sequoia`.

    Args:
        rows: float64 [levels, ranks] or [levels, classes, ranks], or one row for all levels. Classes are lifted alike.
        counts, trials: of `traversal`, [levels, ranks] and [levels]; rows are their quotients, or that of their sums.
    """
    if not lift.covariance:
        return math.inf
    slope, levels = gradient(tree, rows), min(len(lift.ratio), len(counts))
    by_level = len(rows) > 1
    change = np.zeros(len(lift.ratio))
    for level in range(levels):
        known = slice(0, lift.ranks[level])
        if rows.ndim > 2:
            change[level] = (slope[level, :, known] * rows[level, :, known]).sum()
            continue
        seen = trials[level] if by_level else trials.sum()
        change[level] = slope[level if by_level else 0, known] @ counts[level, known] / max(seen, 1)
    covariance = np.array(lift.covariance)
    return math.sqrt(max(float(change @ covariance @ change), 0.0)) / expected_tokens(tree, rows)


def token_ratio_error(first: tuple[TokenTree, Floats], second: tuple[TokenTree, Floats], trials: Sequence[float] | Floats) -> float:
    """Standard error of log(F of one tree / F of another), each with its own acceptance of the same trials, the ratio of the two acceptances given.

    Args:
        first, second: tree and p as `gradient` takes it, of one shape.
        trials: independent observations behind each vector.
    """
    (a, mine), (b, theirs) = first, second
    ratio = np.divide(mine, theirs, out=np.ones_like(mine), where=theirs > 0)
    slope = gradient(a, mine) * ratio / expected_tokens(a, mine) - gradient(b, theirs) / expected_tokens(b, theirs)
    spread = theirs * (slope - (theirs * slope).sum(-1, keepdims=True)) / np.maximum(np.asarray(trials, float), 1)[..., None]
    return math.sqrt(max(float((slope * spread).sum()), 0.0))
