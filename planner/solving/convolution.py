"""(max,+) convolution of almost concave sequences: found[k] = max over i + j = k of a[i] + p * b[j], exactly.

Let A and B be the concave envelopes of a and b. Merging the slopes of A and B gives, for every total k, the split s that maximises
A[s] + p * B[k-s]. That bound is concave in s, so a scan outward from it may stop, on either side, as soon as the bound is no larger
than the best value found: nothing further out can win.

Far from concave sequences make the scan long. Those that trees give are then staircases (only whole families of children pay), whose
steps have one width w: every w-th entry is almost concave again, so the scan is repeated for each pair of remainders modulo w. If that
does not help or does not pay either, all sums are taken, in vector instructions.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def step_width(values: Floats) -> int:
    """The usual distance between corners of the concave envelope; 1 for an almost concave sequence."""
    above = np.empty_like(values)
    envelope(values, above)
    gaps = np.diff(np.flatnonzero(above == values))
    return int(np.sort(gaps)[gaps.size // 2]) if gaps.size > 2 else 1


@numba.njit(cache=True)
def envelope(values, found):  # type: ignore[no-untyped-def]
    """found becomes the least concave sequence that is nowhere below `values`."""
    corners = np.empty(len(values), np.int64)
    count = 0
    for i in range(len(values)):
        while count > 1:
            left, middle = corners[count - 2], corners[count - 1]
            if (values[middle] - values[left]) * (i - left) > (values[i] - values[left]) * (middle - left):
                break
            count -= 1
        corners[count] = i
        count += 1
    found[len(values) - 1] = values[len(values) - 1]
    for c in range(count - 1):
        left, right = corners[c], corners[c + 1]
        found[left] = values[left]
        for i in range(left + 1, right):
            found[i] = max(values[i], values[left] + (values[right] - values[left]) * (i - left) / (right - left))


@numba.njit(cache=True)
def convolve(a, b, whole, parts, p, found):  # type: ignore[no-untyped-def]
    """found[k] = max over i + j = k of a[i] + p * b[j]; `whole` and `parts` are b by remainders modulo 1 and modulo its step width."""
    for k in range(len(found)):
        found[k] = 0.0
    shorter = min(len(a), len(b))
    above = np.empty(len(a))
    envelope(a, above)
    if _scan(a, above, whole[0, 0], whole[0, 1], p, found, 0, 1, min(8, shorter // 10 + 1) * len(found)) >= 0:
        return
    stride = len(parts)
    patience = len(found) * shorter // 10  # a dense sum is about ten times cheaper than a scanned one
    if 40 * stride < shorter:
        part = np.empty((len(a) + stride - 1) // stride)
        for r in range(stride):
            length = (len(a) - r + stride - 1) // stride
            for i in range(length):
                part[i] = a[r + i * stride]
            envelope(part[:length], above[:length])
            for s in range(stride):
                count = (len(b) - s + stride - 1) // stride
                patience = _scan(part[:length], above[:length], parts[s, 0][:count], parts[s, 1][:count], p, found, r + s, stride, patience)
        if patience >= 0:
            return
    _convolve_densely(a, b, p, found)


@numba.njit(cache=True)
def _scan(a, above_a, b, above_b, p, found, first, stride, patience):  # type: ignore[no-untyped-def]
    """Raise found[first + stride * k] to max over i + j = k of a[i] + p * b[j]; what is left of `patience`, negative if it ran out."""
    i = j = 0
    for k in range(min(len(a) + len(b) - 1, (len(found) - first + stride - 1) // stride)):
        if k > 0:
            if j + 1 == len(b) or (i + 1 < len(a) and above_a[i + 1] - above_a[i] >= p * (above_b[j + 1] - above_b[j])):
                i += 1
            else:
                j += 1
        best = max(found[first + stride * k], a[i] + p * b[j])
        for way in (1, -1):
            s = i + way
            while 0 <= s < len(a) and 0 <= k - s < len(b):
                if above_a[s] + p * above_b[k - s] <= best * (1 + 4e-16):  # two units in the last place: ties are common
                    break
                best = max(best, a[s] + p * b[k - s])
                s += way
                patience -= 1
        found[first + stride * k] = best
        patience -= stride > 1
        if patience < 0:
            break
    return patience


@numba.njit(cache=True)
def by_remainder(b, stride):  # type: ignore[no-untyped-def]
    """[stride, 2, :]: b[r::stride] and its envelope, for each remainder r."""
    found = np.zeros((stride, 2, (len(b) + stride - 1) // stride))
    for r in range(min(stride, len(b))):
        count = (len(b) - r + stride - 1) // stride
        for i in range(count):
            found[r, 0, i] = b[r + i * stride]
        envelope(found[r, 0][:count], found[r, 1][:count])
    return found


@numba.njit(cache=True, fastmath={"nnan", "nsz"})
def _convolve_densely(a, b, p, found):  # type: ignore[no-untyped-def]
    """The same without bounds, four terms of b at a time, in vector instructions."""
    padded = np.empty(len(a) + 6)
    for i in range(len(padded)):
        padded[i] = a[i - 3] if 3 <= i < len(a) + 3 else -1.0
    for j in range(0, min(len(b), len(found)), 4):
        reach = min(len(a) + 3, len(found) - j)
        row = found[j : j + reach]
        x0, x1, x2, x3 = padded[3 : 3 + reach], padded[2 : 2 + reach], padded[1 : 1 + reach], padded[:reach]
        t0 = p * b[j]
        t1 = p * b[j + 1] if j + 1 < len(b) else -1.0
        t2 = p * b[j + 2] if j + 2 < len(b) else -1.0
        t3 = p * b[j + 3] if j + 3 < len(b) else -1.0
        for i in range(reach):
            row[i] = max(row[i], max(max(x0[i] + t0, x1[i] + t1), max(x2[i] + t2, x3[i] + t3)))


def isotonic(rows: Floats) -> Floats:
    """Rows (the last dimension) that never increase with rank, closest to `rows` in least squares: slopes of the concave envelope of their sums.

    A modelling choice (rarer ranks are not likelier), not a measurement: it changes F where the vector was right.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    sums = np.concatenate([np.zeros((len(flat), 1)), np.cumsum(flat, axis=1)], axis=1)
    above = np.empty_like(sums)
    for row, found in zip(sums, above, strict=True):
        envelope(row, found)
    return np.minimum.accumulate(np.maximum(np.diff(above, axis=1), 0.0), axis=1).reshape(rows.shape)
