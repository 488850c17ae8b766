"""Hull-guided (max,+): exact for any acceptance, and fast wherever the optimum is nearly concave in size, as it is for measured vectors.

    best[l][c][n] = most expected tokens of a subtree of exactly n nodes whose root lies on level l and is of class c
                  = max over b of T[l][c][b][n],    T[l][c][0][1] = 1
    T[l][c][b][n] = max over m of T[l][c][b-1][n-m] + p[l][c][b] * best[l+1][c'][m]              (Sequoia, arXiv 2402.12374, App. F.1)

c' is the class of the child of rank b: on the spine (class 0) if b is 1 and c is on it, else off it. Where no classes are told apart there
is one. The first child is alone, so only the others' T[l][c][b] is a convolution, of two almost concave sequences (convolution.py). Only one
level's T is ever held: splits are found again on the way down, where at most the first node of a level is on the spine.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
from numpy.typing import NDArray

from sequoia_plan.planner.solving.convolution import by_remainder, convolve, envelope, step_width

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


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
        found.append(best[0])
    return found


def parents(rows: Floats, size: int) -> Ints:
    """The best tree of exactly `size` nodes, breadth-first.

    First comes the tree that the concave envelopes suggest. Where its value attains their bound, as is usual with measured vectors, it is the best.
    """
    suggested, attained = _suggested(rows, size)
    return suggested if attained else _solved(rows, size)


def _suggested(rows: Floats, size: int) -> tuple[Ints, bool]:
    """A tree that splits sizes as the recursion on envelopes does, and whether it attains that recursion's bound, so that no tree is better."""
    above = _relaxed_chain(rows, size)
    found, sizes, values, start = [np.array([-1], np.int32)], np.array([size], np.int32), np.ones(1), 0
    tokens, spine = 1.0, True
    for level in range(len(rows)):
        if sizes.max() == 1:
            break
        below, parts = above[level + 1], []
        for kind, which in _of_each_class(len(sizes), rows.shape[1], spine):
            parts.append(_split_relaxed(rows[level, kind], below[kind], below[-1], sizes[which], values[which], start + which.start))
        spine &= sizes[0] > 1
        start += len(sizes)
        parents, sizes, values = map(np.concatenate, zip(*parts, strict=True))
        found.append(parents)
        tokens += values.sum()
    return np.concatenate(found), tokens >= above[0][0][size - 1] * (1 - 1e-12)


def _solved(rows: Floats, size: int) -> Ints:
    """By the recursion itself. Splits are found again level by level: no [levels, ranks, size] table."""
    below = [np.empty((0, 0)), *_chain(rows[1:], size)]
    found, sizes, start, spine = [np.array([-1], np.int32)], np.array([size], np.int32), 0, True
    for level in range(len(rows)):
        largest = int(sizes.max())
        if largest == 1:
            break
        table = _table(rows, largest)
        best = _level(rows[level], below[level + 1], largest, table)
        parts = []
        for kind, which in _of_each_class(len(sizes), rows.shape[1], spine):
            parts.append(_split(rows[level, kind], below[level + 1][-1], best[kind], table[kind], sizes[which], start + which.start))
        spine &= sizes[0] > 1
        start += len(sizes)
        above, sizes = map(np.concatenate, zip(*parts, strict=True))
        found.append(above)
    return np.concatenate(found)


def _of_each_class(count: int, classes: int, spine: bool) -> list[tuple[int, slice]]:
    """Which of the `count` subtrees of a level are of which class; `spine` says whether the first is on the spine."""
    if not spine or classes == 1:
        return [(classes - 1, slice(0, count))]
    return [(0, slice(0, 1)), (1, slice(1, count))][: min(count, 2)]


def most_tokens(rows: Floats, size: int) -> float:
    """Expected tokens of the best tree of exactly `size` nodes, which must exist."""
    return float(_chain(rows, size)[0][0][size - 1])


def upper_bounds(rows: Floats, size: int) -> Floats:
    """No tree of 1, 2, ... nodes has more expected tokens: the same recursion on envelopes alone, where a convolution is a merge of slopes."""
    return _relaxed_chain(rows, size)[0][0]


def _relaxed_chain(rows: Floats, size: int) -> list[Floats]:
    """The bounds of subtrees that start on level 0, 1, ... len(rows), [classes, sizes] each."""
    return _from_below(rows, lambda row, below: _relaxed_level(row, below, size))


def _chain(rows: Floats, size: int) -> list[Floats]:
    """best[l], [classes, sizes], for l = 0 ... len(rows)."""
    table = _table(rows, size)
    return _from_below(rows, lambda row, below: _level(row, below, size, table))


def _from_below(rows: Floats, level_of: Callable[[Floats, Floats], Floats]) -> list[Floats]:
    """What `level_of` gives for each level's rows and the level below, from level 0 to len(rows), [classes, sizes] each.

    Once a level that repeats its rows repeats its values too, so do all above with those.
    """
    best = [np.ones((rows.shape[1], 1))]
    for level in range(len(rows) - 1, -1, -1):
        settled = len(best) > 2 and np.array_equal(best[-1], best[-2]) and np.array_equal(rows[level], rows[level + 1])
        best.append(best[-1] if settled else level_of(rows[level], best[-1]))
    return best[::-1]


def _level(rows: Floats, below: Floats, size: int, table: Floats) -> Floats:
    """best of a level, [classes, sizes]; `rows` are its own, [classes, ranks]."""
    off = below[-1]
    parts = by_remainder(off, 1), by_remainder(off, step_width(off))
    return np.stack([_fill(row, first, off, *parts, size, of_class) for row, first, of_class in zip(rows, below, table, strict=True)])


def _table(rows: Floats, size: int) -> Floats:
    return np.empty((rows.shape[1], min(rows.shape[2], max(size - 1, 0)) + 1, size))


@numba.njit(cache=True)
def _fill(row, first, below, whole, parts, size, table):  # type: ignore[no-untyped-def]
    """best[n - 1] of a level and class from those of the level below: of `first` for the first child, of `below` for the others.

    table[b, k] becomes the value with exactly b children and b + 1 + k nodes.
    """
    reach = 1
    for _ in range(len(row)):
        reach = min(size, reach + len(below))
    best = np.zeros(reach)
    best[0] = table[0, 0] = 1.0
    known = 1  # entries of table[b - 1]
    for rank in range(1, min(len(row), size - 1) + 1):
        grown = min(size - rank, known + len(below) - 1)
        if rank == 1:
            for k in range(grown):
                table[1, k] = 1.0 + row[0] * first[k]
        else:
            convolve(table[rank - 1][:known], below, whole, parts, row[rank - 1], table[rank][:grown])
        for k in range(grown):
            best[rank + k] = max(best[rank + k], table[rank, k])
        known = grown
    return best


@numba.njit(cache=True)
def _split(row, below, best, table, sizes, start):  # type: ignore[no-untyped-def]
    """Parents and sizes of the subtrees below the subtrees of `sizes`, all of one class, in order; nodes are numbered from `start`."""
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
def _merge(a, below, p, merged, shares):  # type: ignore[no-untyped-def]
    """merged[k] = max over i + j = k of a[i] + p * below[j] for concave a and below; shares[k] is the j."""
    i = j = 0
    for k in range(len(merged)):
        if k > 0:
            if j + 1 == len(below) or (i + 1 < len(a) and a[i + 1] - a[i] >= p * (below[j + 1] - below[j])):
                i += 1
            else:
                j += 1
        merged[k], shares[k] = a[i] + p * below[j], j


@numba.njit(cache=True)
def _merge_ranks(row, first, below, size):  # type: ignore[no-untyped-def]
    """For b = 0, 1, ... children: table[b, k] is the most expected tokens of b + 1 + k nodes for concave `first` (of the first child) and
    `below` (of the others); shares[b, k] is how many of the k the last child gets; known[b] is how many k there are."""
    ranks = min(len(row), size - 1)
    table, shares = np.empty((ranks + 1, size)), np.zeros((ranks + 1, size), np.int32)
    known = np.ones(ranks + 1, np.int64)
    table[0, 0] = 1.0
    for b in range(1, ranks + 1):
        known[b] = min(size - b, known[b - 1] + len(below) - 1)
        _merge(table[b - 1][: known[b - 1]], first if b == 1 else below, row[b - 1], table[b][: known[b]], shares[b][: known[b]])
    return table, shares, known


@numba.njit(cache=True)
def _relaxed_level(rows, below, size):  # type: ignore[no-untyped-def]
    """The concave envelopes, [classes, sizes], of the most expected tokens of 1, 2, ... nodes, for concave `below`."""
    reach = 1
    for b in range(1, min(rows.shape[1], size - 1) + 1):
        reach = min(size, max(reach, b + 1 + b * (below.shape[1] - 1)))
    found = np.empty((len(rows), reach))
    for kind in range(len(rows)):
        table, _, known = _merge_ranks(rows[kind], below[kind], below[-1], size)
        best = np.zeros(reach)
        best[0] = 1.0
        for b in range(1, len(known)):
            for k in range(known[b]):
                best[b + k] = max(best[b + k], table[b, k])
        envelope(best, found[kind])
    return found


@numba.njit(cache=True)
def _split_relaxed(row, first, below, sizes, values, start):  # type: ignore[no-untyped-def]
    """Parents, sizes and values of the subtrees below those of `sizes` and `values`, all of one class, in order; nodes are numbered from `start`."""
    largest = sizes.max()
    table, shares, known = _merge_ranks(row, first, below, largest)
    children = np.zeros(largest + 1, np.int64)  # of a subtree of n nodes
    total = 0
    for n in sizes:
        if children[n] == 0 and n > 1:
            most = -1.0
            for b in range(1, min(len(row), n - 1) + 1):
                if n - 1 - b < known[b] and table[b, n - 1 - b] > most:
                    most, children[n] = table[b, n - 1 - b], b
        total += children[n]
    parents, next_sizes, next_values = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total)
    at = 0
    for node in range(len(sizes)):
        k = sizes[node] - 1 - children[sizes[node]]
        for b in range(children[sizes[node]], 0, -1):
            parents[at + b - 1] = start + node
            next_sizes[at + b - 1] = 1 + shares[b, k]
            next_values[at + b - 1] = values[node] * row[b - 1]
            k -= shares[b, k]
        at += children[sizes[node]]
    return parents, next_sizes, next_values
