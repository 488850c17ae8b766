"""The closest rows that never increase with rank: the order in which best-first takes nodes."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def isotonic(rows: Floats) -> Floats:
    """Return the probabilities closest to `rows` in least squares that never increase with rank.

    Adjacent ranks that increase are replaced by their mean until none do. `rows` float64
    [..., ranks].
    """
    smoothed = [_isotonic_row(row) for row in rows.reshape(-1, rows.shape[-1]).tolist()]
    return np.array(smoothed).reshape(rows.shape)


def _isotonic_row(row: list[float]) -> Floats:
    """Pool adjacent ranks of one row."""
    sums: list[float] = []
    counts: list[int] = []
    for p in row:
        total, count = p, 1
        while sums and sums[-1] * count <= total * counts[-1]:
            total, count = total + sums.pop(), count + counts.pop()
        sums.append(total)
        counts.append(count)
    return np.repeat(np.array(sums) / counts, counts)
