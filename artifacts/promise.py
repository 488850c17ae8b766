"""Promised speed-ups: what bench will measure on prompts of given kinds, from profiled prompts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.uncertainty import Z95

STUDENT95 = (1.5895341, 2.5558498, 2.8224987, 2.3722713, Z95)
"""Coefficients of the expansion of Student's 97.5 % quantile in 1 / degrees of freedom, the highest
power first (Abramowitz and Stegun, 26.7.5)."""
MIN_KINDS = 4
"""Fewer kinds say too little of how kinds differ: for three, Student's quantile is 4.3 already."""
RESAMPLES = 2_000
"""Samples that are drawn for an interval."""
MIN_PROMPTS = 8
"""Fewer prompts of a kind are taken to differ as those of all kinds do from their kinds."""
Values = Mapping[str, Sequence[float]]
"""Predicted for each profiled prompt, by kind: its speed-up, or its tokens a step."""
Ends = tuple[float, float]


def promise(values: Values, kinds: Sequence[str]) -> tuple[float, Ends | None]:
    """The predicted median over prompts, and a 95 % interval for the median that is measured.

    `values`: of the profiled prompts, by kind; `kinds`: the kind of each measured prompt. The
    interval covers the choice of the profiled and of the measured prompts (a bootstrap), not errors
    of step times. It is None if fewer than `MIN_PROMPTS` have others of their kind to differ from.
    """
    logs = {kind: np.log(of_kind) for kind, of_kind in values.items()}
    # a sample lies nearer to its own median than to the true one, by about this factor
    deviations = {
        kind: (x - np.median(x)) * math.sqrt(x.size / (x.size - 1))
        for kind, x in logs.items()
        if x.size > 1
    }
    num_measured, all_deviations = Counter(kinds), np.concatenate([[], *deviations.values()])
    weights = np.array(
        [n / logs[kind].size for kind, n in num_measured.items() for _ in logs[kind]]
    )
    median = float(weighted_median(np.concatenate([logs[kind] for kind in num_measured]), weights))
    if all_deviations.size < MIN_PROMPTS:
        return math.exp(median), None
    rng = np.random.default_rng(0)

    def resample(kind: str, count: int) -> Floats:
        """Logarithms of the values of `count` prompts, drawn anew, float64 [RESAMPLES, count]."""
        few = logs[kind].size < MIN_PROMPTS
        chosen = rng.choice(all_deviations if few else deviations[kind], (RESAMPLES, count))
        return chosen + np.median(logs[kind])

    profiled = np.hstack([resample(kind, logs[kind].size) for kind in num_measured])
    measured = np.hstack([resample(kind, count) for kind, count in num_measured.items()])
    errors = np.median(measured, 1) - weighted_median(profiled, weights)
    low, high = np.exp(median + np.quantile(errors, [0.025, 0.975])).tolist()
    return math.exp(median), (low, high)


def interval_of_new_kind(values: Values) -> Ends | None:
    """The 95 % interval of the median of a kind that was not profiled; None for too few kinds."""
    medians = np.array([np.median(np.log(of_kind)) for of_kind in values.values()])
    if medians.size < MIN_KINDS:
        return None
    error = medians.std(ddof=1) * math.sqrt(1 + 1 / medians.size) * student95(medians.size - 1)
    return math.exp(medians.mean() - error), math.exp(medians.mean() + error)


def weighted_median(values: Floats, weights: Floats) -> Floats:
    """The median of weighted values, or the mean of two between which it lies.

    `values` float64 [..., n]; `weights` float64 [n].
    """
    order = np.argsort(values, -1)
    shares = np.cumsum(weights[order], -1) / weights.sum()
    # the first values with half of the weight up to them; two where it is exactly half
    ranks = np.stack([(shares < half).sum(-1) for half in (0.5 - 1e-9, 0.5 + 1e-9)], -1)
    return np.take_along_axis(np.take_along_axis(values, order, -1), ranks, -1).mean(-1)


def student95(degrees_of_freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, to 0.2 % from three degrees of freedom on."""
    return float(np.polyval(STUDENT95, 1 / degrees_of_freedom))
