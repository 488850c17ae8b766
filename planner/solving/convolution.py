"""(max,+) convolution of almost concave sequences, exactly.

    result[k] = max over i + j = k of a[i] + p * b[j]

Let A and B be the concave envelopes of a and b. Merging the slopes of A and B gives, for every
total k, the split s that maximises A[s] + p * B[k-s]. That bound is concave in s, so a scan outward
from it may stop, on either side, as soon as the bound is no larger than the best value so far:
no split further out is better.

Sequences that are far from concave make the scan long. Those of token trees are then staircases
(only whole families of children pay), whose stairs have a single width w. Every w-th entry is
almost concave again, so the scan is repeated for each pair of remainders modulo w. If the scan is
still too long, all sums are computed, in vector instructions.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def stair_width(values: Floats) -> int:
    """Return the median distance between corners of the concave envelope of `values`.

    A corner is an entry that the envelope, the least concave sequence above `values`, equals. The
    distance is 1 for an almost concave sequence, and the width of the stairs for a staircase.
    """
    enveloped = np.empty_like(values)
    envelope(values, enveloped)
    distances = np.diff(np.flatnonzero(enveloped == values))
    return int(np.sort(distances)[distances.size // 2]) if distances.size > 2 else 1


@numba.njit(cache=True)
def envelope(values, result):
    """Write the least concave sequence that is nowhere below `values` to `result`."""
    # A corner is removed if it lies on or below the line from the corner before it to entry i.
    corners = np.empty(len(values), np.int64)
    count = 0
    for i in range(len(values)):
        while count > 1:
            first, middle = corners[count - 2], corners[count - 1]
            rise_to_middle = (values[middle] - values[first]) * (i - first)
            rise_to_i = (values[i] - values[first]) * (middle - first)
            if rise_to_middle > rise_to_i:
                break
            count -= 1
        corners[count] = i
        count += 1
    result[len(values) - 1] = values[len(values) - 1]
    for c in range(count - 1):
        start, end = corners[c], corners[c + 1]
        result[start] = values[start]
        for i in range(start + 1, end):
            line = values[start] + (values[end] - values[start]) * (i - start) / (end - start)
            result[i] = max(values[i], line)


@numba.njit(cache=True)
def convolve(a, b, b_whole, b_parts, p, result):
    """Write max over i + j = k of a[i] + p * b[j] to result[k].

        scan a and b outward from the merged slopes of their envelopes
        if that takes too long: scan a and b by remainders modulo the stair width
        if that takes too long: compute all sums

    Args:
        a, b: float64, expected tokens by nodes, of any lengths.
        b_whole: float64 [1, 2, len(b)], b and its concave envelope (`split_by_remainder` with
            stride 1).
        b_parts: float64 [width, 2, ...], every width-th entry of b from each start, and the
            envelope of these entries (`split_by_remainder` with the stair width of b).
        p: a probability.
        result: float64 of at most len(a) + len(b) - 1 entries.
    """
    for k in range(len(result)):
        result[k] = 0.0
    shorter = min(len(a), len(b))
    a_envelope = np.empty(len(a))
    envelope(a, a_envelope)
    max_scanned = min(8, shorter // 10 + 1) * len(result)
    if _scan(a, a_envelope, b_whole[0, 0], b_whole[0, 1], p, result, 0, 1, max_scanned) >= 0:
        return
    width = len(b_parts)
    # A scanned sum takes about ten times as long as one of all sums.
    scans_left = len(result) * shorter // 10
    if 40 * width < shorter:
        a_part = np.empty((len(a) + width - 1) // width)
        for r in range(width):
            a_count = (len(a) - r + width - 1) // width
            for i in range(a_count):
                a_part[i] = a[r + i * width]
            envelope(a_part[:a_count], a_envelope[:a_count])
            for s in range(width):
                b_count = (len(b) - s + width - 1) // width
                scans_left = _scan(
                    a_part[:a_count],
                    a_envelope[:a_count],
                    b_parts[s, 0][:b_count],
                    b_parts[s, 1][:b_count],
                    p,
                    result,
                    r + s,
                    width,
                    scans_left,
                )
        if scans_left >= 0:
            return
    _convolve_densely(a, b, p, result)


@numba.njit(cache=True)
def _scan(a, a_envelope, b, b_envelope, p, result, start, stride, scans_left):
    """Raise result[start + stride * k] to max over i + j = k of a[i] + p * b[j].

    For each k the scan starts from the i that maximises the sum of the envelopes, and goes outward
    on both sides, until that sum is no larger than the best a[i] + p * b[j] so far.
    """
    i = j = 0  # the split of k that maximises the sum of the envelopes
    num_results = min(len(a) + len(b) - 1, (len(result) - start + stride - 1) // stride)
    for k in range(num_results):
        if k > 0:
            if j + 1 == len(b) or (
                i + 1 < len(a)
                and a_envelope[i + 1] - a_envelope[i] >= p * (b_envelope[j + 1] - b_envelope[j])
            ):
                i += 1
            else:
                j += 1
        best = max(result[start + stride * k], a[i] + p * b[j])
        for direction in (1, -1):
            s = i + direction
            while 0 <= s < len(a) and 0 <= k - s < len(b):
                # The factor is two units in the last place: ties are common.
                if a_envelope[s] + p * b_envelope[k - s] <= best * (1 + 4e-16):
                    break
                best = max(best, a[s] + p * b[k - s])
                s += direction
                scans_left -= 1
        result[start + stride * k] = best
        scans_left -= stride > 1  # in a part, the first sum of each k counts as well
        if scans_left < 0:
            break
    return scans_left


@numba.njit(cache=True)
def split_by_remainder(b, stride):
    """Return b[r::stride] and its concave envelope for each remainder r = 0 ... stride - 1.

    Returns float64 [stride, 2, ceil(len(b) / stride)].
    """
    parts = np.zeros((stride, 2, (len(b) + stride - 1) // stride))
    for r in range(min(stride, len(b))):
        count = (len(b) - r + stride - 1) // stride
        for i in range(count):
            parts[r, 0, i] = b[r + i * stride]
        envelope(parts[r, 0][:count], parts[r, 1][:count])
    return parts


@numba.njit(cache=True, fastmath={"nnan", "nsz"})
def _convolve_densely(a, b, p, result):
    """Raise result[k] to max over i + j = k of a[i] + p * b[j], from all sums.

    Four entries of b are taken at a time, so that the compiler uses vector instructions.
    """
    # `a` with three entries of -1 on either side, which no maximum takes: x1, x2 and x3 are `a`
    # shifted by 1, 2 and 3 entries.
    padded = np.empty(len(a) + 6)
    for i in range(len(padded)):
        padded[i] = a[i - 3] if 3 <= i < len(a) + 3 else -1.0
    for j in range(0, min(len(b), len(result)), 4):
        count = min(len(a) + 3, len(result) - j)
        sums = result[j : j + count]
        x0, x1 = padded[3 : 3 + count], padded[2 : 2 + count]
        x2, x3 = padded[1 : 1 + count], padded[:count]
        t0 = p * b[j]
        t1 = p * b[j + 1] if j + 1 < len(b) else -1.0
        t2 = p * b[j + 2] if j + 2 < len(b) else -1.0
        t3 = p * b[j + 3] if j + 3 < len(b) else -1.0
        for i in range(count):
            sums[i] = max(sums[i], max(max(x0[i] + t0, x1[i] + t1), max(x2[i] + t2, x3[i] + t3)))


def isotonic(rows: Floats) -> Floats:
    """Return the probabilities closest to `rows` in least squares that never increase with rank.

    They are the slopes of the concave envelope of the rows' cumulative sums. Using them is a
    modelling choice (rarer ranks are not likelier), not a measurement: it changes F where the
    vector was right. `rows` float64 [..., ranks].
    """
    flat = rows.reshape(-1, rows.shape[-1])
    cumulative = np.concatenate([np.zeros((len(flat), 1)), np.cumsum(flat, axis=1)], axis=1)
    enveloped = np.empty_like(cumulative)
    for row, row_envelope in zip(cumulative, enveloped, strict=True):
        envelope(row, row_envelope)
    slopes = np.maximum(np.diff(enveloped, axis=1), 0.0)
    return np.minimum.accumulate(slopes, axis=1).reshape(rows.shape)
