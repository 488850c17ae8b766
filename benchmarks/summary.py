"""How benchmarks summarise repeated measurements."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def spread(values: ArrayLike) -> list[float]:
    """Median, first and third quartile, rounded to three digits after the point."""
    quartiles = np.quantile(np.asarray(values, float), [0.5, 0.25, 0.75])
    return [round(float(quartile), 3) for quartile in quartiles]
