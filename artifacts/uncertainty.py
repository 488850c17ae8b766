"""What the noise of the measurements leaves open of expected tokens and step times."""

import math

import numpy as np

from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree import TokenTree

Z95 = 1.959964
"""97.5 % quantile of the normal distribution."""
MEDIAN_ERROR_FACTOR = 1.2533
"""A median's standard error over that of the mean, for a normal distribution."""
QUARTILE_DISTANCE = 1.349
"""Standard deviations from the first quartile of a normal distribution to the third."""


def jackknife_error(values: Floats) -> float:
    """Standard error of a figure from its values without one group after the other.

    The variance is (groups - 1) / groups times the sum of the squared deviations from their mean.
    """
    return math.sqrt((len(values) - 1) * values.var())


def median_with_error(values: Floats) -> tuple[float, float]:
    """The median of repeated measurements, and its relative standard error; 0 for a single one."""
    median = float(np.median(values))
    if len(values) < 2:
        return median, 0.0
    deviation = float(values.std(ddof=1))
    return median, MEDIAN_ERROR_FACTOR * deviation / math.sqrt(len(values)) / median


def step_time_error(tree: TokenTree, times: StepTime) -> float:
    """Standard error of log(step time / plain step time), as if all of both were target passes.

    It follows from the quartiles and samples of these passes; it is 0 without.
    """
    latency, variance = times.latency, 0.0
    quartiles = latency.quartiles.get("target", {})
    # a pass is taken to cost as much as at the next larger measured size
    for size in {1, min((n for n in latency.target if n >= tree.size), default=1)} & {*quartiles}:
        low, high = quartiles[size]
        deviation = (high - low) / QUARTILE_DISTANCE / latency.target[size]
        variance += (MEDIAN_ERROR_FACTOR * deviation) ** 2 / latency.samples.get(size, 1)
    return math.sqrt(variance)
