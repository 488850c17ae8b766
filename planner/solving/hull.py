"""Hull-guided (max,+): exact for any acceptance, and fast wherever values are nearly concave in size, as measured ones are.

    best[l][n] = most expected tokens of a subtree of exactly n nodes whose root lies on level l
               = max over b of T[l][b][n],    T[l][0][1] = 1
    T[l][b][n] = max over m of T[l][b-1][n-m] + p[l][b] * best[l+1][m]              (Sequoia, arXiv 2402.12374, App. F.1)

Each T[l][b] is a convolution of two almost concave sequences (convolution.py). Only one level's T is ever held: splits are found again
on the way down.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from sequoia_plan.planner.solving.convolution import by_remainder, convolve, envelope, step_width

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

LEAF = np.ones(1)


def frontier(rows: Floats, size: int) -> list[Floats]:
    """For each depth 1, 2, ..., len(rows) + 1: expected tokens of the best tree of 1, 2, ... nodes, up to the largest there is or `size`.

    A depth limit cuts the rows off at the end, so levels that share the last row share one recursion; the rows above it need one a depth.
    """
    levels = len(rows)
    shared = levels  # the first level from which on all rows are the same
    while shared > 0 and np.array_equal(rows[shared - 1], rows[-1]):
        shared -= 1
    deep = _chain(rows[shared:], size)[::-1]  # deep[r]: a subtree of r + 1 levels that starts at or below `shared`
    found, table = [], _table(rows, size)
    for last in range(levels + 1):
        best = deep[max(last - shared, 0)]
        for level in range(min(last, shared) - 1, -1, -1):
            best = _level(rows[level], best, size, table)
        found.append(best)
    return found


def parents(rows: Floats, size: int) -> Ints:
    """The best tree of exactly `size` nodes, breadth-first. Splits are found again level by level: no [levels, ranks, size] table."""
    below = [LEAF if len(rows) == 0 else np.empty(0), *_chain(rows[1:], size)]
    found, sizes, start = [np.array([-1], np.int32)], np.array([size], np.int32), 0
    for level in range(len(rows)):
        largest = int(sizes.max())
        if largest == 1:
            break
        table = _table(rows, largest)
        best = _level(rows[level], below[level + 1], largest, table)
        above, sizes_below = _split(rows[level], below[level + 1], best, table, sizes, start)
        found.append(above)
        start, sizes = start + len(sizes), sizes_below
    return np.concatenate(found)


def upper_bounds(rows: Floats, size: int) -> Floats:
    """No tree of 1, 2, ... nodes is worth more: the same recursion on envelopes alone, where a convolution is a merge of slopes."""
    best = LEAF
    for level in range(len(rows) - 1, -1, -1):
        best = _relaxed_level(rows[level], best, size)
    return best


def _chain(rows: Floats, size: int) -> list[Floats]:
    """best[l] for l = 0 ... len(rows). Once a level that repeats its row repeats its values too, so do all above with that row."""
    table = _table(rows, size)
    best = [LEAF]
    for level in range(len(rows) - 1, -1, -1):
        settled = len(best) > 2 and np.array_equal(best[-1], best[-2]) and np.array_equal(rows[level], rows[level + 1])
        best.append(best[-1] if settled else _level(rows[level], best[-1], size, table))
    return best[::-1]


def _level(row: Floats, below: Floats, size: int, table: Floats) -> Floats:
    return np.asarray(_fill(row, below, by_remainder(below, 1), by_remainder(below, step_width(below)), size, table))


def _table(rows: Floats, size: int) -> Floats:
    return np.empty((min(rows.shape[1], max(size - 1, 0)) + 1, size))


@numba.njit(cache=True)
def _fill(row, below, whole, parts, size, table):  # type: ignore[no-untyped-def]
    """best[n - 1] of a level from that of the level below. table[b, k] becomes the value with exactly b children and b + 1 + k nodes."""
    reach = 1
    for _ in range(len(row)):
        reach = min(size, reach + len(below))
    best = np.zeros(reach)
    best[0] = table[0, 0] = 1.0
    known = 1  # entries of table[b - 1]
    for rank in range(1, min(len(row), size - 1) + 1):
        grown = min(size - rank, known + len(below) - 1)
        convolve(table[rank - 1][:known], below, whole, parts, row[rank - 1], table[rank][:grown])
        for k in range(grown):
            best[rank + k] = max(best[rank + k], table[rank, k])
        known = grown
    return best


@numba.njit(cache=True)
def _split(row, below, best, table, sizes, start):  # type: ignore[no-untyped-def]
    """Parents and sizes of the subtrees below the subtrees of `sizes`, in order; nodes are numbered from `start`."""
    first = np.full(len(best) + 1, -1, np.int64)  # where the shares of a subtree of n nodes begin: equal sizes split alike
    count = np.zeros(len(best) + 1, np.int64)
    shares = np.empty(sizes.sum(), np.int32)
    used = total = 0
    for n in sizes:
        if first[n] < 0:
            children = 0
            for rank in range(1, min(len(row), n - 1) + 1):
                k = n - 1 - rank
                if k < len(below) * rank - rank + 1 and table[rank, k] >= best[n - 1]:
                    children = rank
                    break
            first[n], count[n] = used, children
            used += children
            k = n - 1 - children
            for rank in range(children, 0, -1):
                reach = 1 + (rank - 1) * (len(below) - 1)  # entries of table[rank - 1]
                top, share = -1.0, 0
                for j in range(max(0, k - reach + 1), min(k, len(below) - 1) + 1):
                    value = table[rank - 1, k - j] + row[rank - 1] * below[j]
                    if value > top:
                        top, share = value, j
                shares[first[n] + rank - 1] = share + 1
                k -= share
        total += count[n]
    above = np.empty(total, np.int32)
    next_sizes = np.empty(total, np.int32)
    at = 0
    for node in range(len(sizes)):
        n = sizes[node]
        for rank in range(count[n]):
            above[at] = start + node
            next_sizes[at] = shares[first[n] + rank]
            at += 1
    return above, next_sizes


@numba.njit(cache=True)
def _relaxed_level(row, below, size):  # type: ignore[no-untyped-def]
    """As _level, for concave `below`: the union of the first b children's slopes, largest first."""
    reach = 1
    for _ in range(len(row)):
        reach = min(size, reach + len(below))
    best = np.zeros(reach)
    best[0] = 1.0
    a = np.ones(1)
    for rank in range(1, min(len(row), size - 1) + 1):
        p = row[rank - 1]
        merged = np.empty(min(size - rank, len(a) + len(below) - 1))
        i = j = 0
        for k in range(len(merged)):
            if k > 0:
                if j + 1 == len(below) or (i + 1 < len(a) and a[i + 1] - a[i] >= p * (below[j + 1] - below[j])):
                    i += 1
                else:
                    j += 1
            merged[k] = a[i] + p * below[j]
            best[rank + k] = max(best[rank + k], merged[k])
        a = merged
    found = np.empty(reach)
    envelope(best, found)
    return found
