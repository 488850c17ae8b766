"""Standard errors of figures from repeated measurements."""

import math

import numpy as np

from sequoia_plan.artifacts.counts import Floats

Z95 = 1.959964
"""97.5 % quantile of the normal distribution."""
MEDIAN_ERROR_FACTOR = 1.2533
"""A median's standard error over that of the mean, for a normal distribution."""


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
