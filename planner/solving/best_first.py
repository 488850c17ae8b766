"""Best-first: when no rank is likelier than the one before it, the n most valuable nodes are the optimal tree.

The value of a node is then at most that of its predecessor (left sibling, else parent), so the first n nodes in order of value are always
a tree, and no other n nodes have a larger sum. One heap pop a node gives the optima of all sizes, each contained in the next. That holds for
rows by class as well, because siblings have a parent, and so a row, in common.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def is_non_increasing(rows: Floats) -> bool:
    """Whether no row of p[level, class, rank] increases with rank, so that best-first is exact. No parent is off the spine on level 0."""
    rises = np.diff(rows, axis=2) > 0
    return not (rises[:, 0].any() or rises[1:, -1].any())


def favours_spine(rows: Floats) -> bool:
    """Whether, on every level and for every b, the first b children of a node on the spine are as likely together as those of a node off it.

    With rows that do not increase, no node of a level is then worth more than the one on the spine, whatever hangs below it: its value is
    the highest, and sum over k of p[k] f[k] is at least as large with its row for any f[1] >= f[2] >= ... >= 0.
    """
    sums = rows.cumsum(axis=2)
    return bool((sums[1:, 0] >= sums[1:, -1]).all())


def frontier(rows: Floats, size: int) -> list[Floats]:
    """For each depth 1, 2, ..., len(rows) + 1: expected tokens of the best tree of 1, 2, ... nodes, up to the largest there is or `size`."""
    found: list[Floats] = []
    deepest = 0
    for levels in range(len(rows) + 1):
        if len(found) > 1 and deepest < levels - 1:
            found.append(found[-1])  # the level added last was not used: no deeper one will be
            continue
        _, value, level = grow_freely(rows[:levels], size)
        found.append(np.cumsum(value))
        deepest = level.max()
    return found


def parents(rows: Floats, size: int) -> Ints:
    """The best tree of exactly `size` nodes, breadth-first."""
    return np.asarray(breadth_first(grow_freely(rows, size)[0]))


def grow_freely(rows: Floats, size: int) -> tuple[Ints, Floats, Ints]:
    """`grow` without limits."""
    levels, _, branching = rows.shape
    return grow(np.ascontiguousarray(rows), size, np.full(levels, size), np.full(levels, branching), levels * branching)


@numba.njit(cache=True)
def push(heap, count, value, parent, rank):  # type: ignore[no-untyped-def]
    """Add an entry to a heap of `count` entries."""
    at = count
    while at > 0:
        above = (at - 1) >> 1
        if heap[above, 0] >= value:
            break
        heap[at] = heap[above]
        at = above
    heap[at, 0], heap[at, 1], heap[at, 2] = value, parent, rank


@numba.njit(cache=True)
def pop(heap, count):  # type: ignore[no-untyped-def]
    """Drop the top of a heap of `count` entries."""
    last = heap[count - 1].copy()
    at = 0
    while 2 * at + 1 < count - 1:
        below = 2 * at + 1
        if below + 1 < count - 1 and heap[below + 1, 0] > heap[below, 0]:
            below += 1
        if heap[below, 0] <= last[0]:
            break
        heap[at] = heap[below]
        at = below
    heap[at] = last


@numba.njit(cache=True)
def grow(rows, size, widths, ranks, longest):  # type: ignore[no-untyped-def]
    """Parents, values and levels of the first `size` nodes by value, of those that the limits allow, or of all if there are fewer.

    Level l may have widths[l] nodes with children, at most ranks[l] each; rows[l, class] holds p of those children. With non-increasing rows
    that favour the spine the first n are the best tree of n nodes within these limits: the most valuable nodes of a level have the most
    valuable children, and of equally valuable ones the node on the spine comes first. That need not be so where `longest` limits the sum of
    ranks along each path, too.
    """
    heap = np.empty((size + 2, 3))  # value, parent, rank (0-based) of nodes off the spine: each node taken pushes at most two
    parent, value, level = np.empty(size, np.int64), np.empty(size), np.zeros(size, np.int64)
    off, spine, taken, count = rows.shape[1] - 1, 0, 1, 0
    kind, wide, ranks_so_far = np.full(size, off), np.zeros(len(widths), np.int64), np.zeros(size, np.int64)
    parent[0], value[0], kind[0] = -1, 1.0, 0
    following = -1.0  # the value of the last spine node's first child; negative if it may have none
    if len(widths) > 0 and widths[0] > 0 and longest > 0:
        following = rows[0, 0, 0]
        if ranks[0] > 1 and longest > 1:
            push(heap, 0, rows[0, 0, 1], 0.0, 1.0)
            count = 1
    for node in range(1, size):
        if following >= 0 and (count == 0 or following >= heap[0, 0]):
            value[node], above, rank = following, spine, 0
            kind[node], spine, following = 0, node, -1.0
        elif count > 0:
            value[node], above, rank = heap[0, 0], int(heap[0, 1]), int(heap[0, 2])
            pop(heap, count)
            count -= 1
        else:
            break
        here = level[above]
        parent[node], level[node] = above, here + 1
        ranks_so_far[node] = ranks_so_far[above] + rank + 1
        taken += 1
        if spine != node and rank + 1 < ranks[here] and ranks_so_far[node] < longest:
            push(heap, count, value[above] * rows[here, kind[above], rank + 1], float(above), rank + 1.0)
            count += 1
        if here + 1 < len(widths) and wide[here + 1] < widths[here + 1] and ranks_so_far[node] < longest:
            wide[here + 1] += 1
            if spine != node:
                push(heap, count, value[node] * rows[here + 1, off, 0], float(node), 0.0)
                count += 1
            else:
                following = value[node] * rows[here + 1, 0, 0]
                if ranks[here + 1] > 1 and ranks_so_far[node] + 1 < longest:
                    push(heap, count, value[node] * rows[here + 1, 0, 1], float(node), 1.0)
                    count += 1
    return parent[:taken], value[:taken], level[:taken]


@numba.njit(cache=True)
def breadth_first(parent):  # type: ignore[no-untyped-def]
    """The same tree, numbered breadth-first; siblings keep their order."""
    size = len(parent)
    first = np.zeros(size + 1, np.int64)  # where the children of a node begin
    for node in range(1, size):
        first[parent[node] + 1] += 1
    for node in range(size):
        first[node + 1] += first[node]
    child = np.empty(size, np.int64)
    filled = np.zeros(size, np.int64)
    for node in range(1, size):
        above = parent[node]
        child[first[above] + filled[above]] = node
        filled[above] += 1
    found = np.empty(size, np.int32)
    order = np.empty(size, np.int64)
    found[0], order[0] = -1, 0
    known = 1
    for position in range(size):
        node = order[position]
        for at in range(first[node], first[node + 1]):
            found[known], order[known] = position, child[at]
            known += 1
    return found
