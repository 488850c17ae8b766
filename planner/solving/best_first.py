"""Best-first: when no rank is likelier than the one before it, the n most valuable nodes are the optimal tree.

The value of a node is then at most that of its predecessor (left sibling, else parent), so the first n nodes in order of value are always
a tree, and no other n nodes have a larger sum. One heap pop a node gives the optima of all sizes, each contained in the next.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def is_non_increasing(rows: Floats) -> bool:
    """Whether no row of p[level, rank] increases with rank, so that best-first is exact."""
    return bool((np.diff(rows, axis=1) <= 0).all())


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
    levels, branching = rows.shape
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

    Level l may have widths[l] nodes with children, at most ranks[l] each; rows[l] holds p of those children. With non-increasing rows the
    first n are the best tree of n nodes within these limits: the most valuable nodes of a level have the most valuable children. That need
    not be so where `longest` limits the sum of ranks along each path, too.
    """
    heap = np.empty((size + 2, 3))  # value, parent, rank (0-based): each pop pushes at most two
    parent, value, level = np.empty(size, np.int64), np.empty(size), np.zeros(size, np.int64)
    wide, ranks_so_far = np.zeros(len(widths), np.int64), np.zeros(size, np.int64)
    parent[0], value[0] = -1, 1.0
    count, taken = 0, 1
    if len(widths) > 0 and widths[0] > 0 and longest > 0:
        push(heap, 0, rows[0, 0], 0.0, 0.0)
        count = 1
    for node in range(1, size):
        if count == 0:
            break
        value[node] = heap[0, 0]
        above, rank = int(heap[0, 1]), int(heap[0, 2])
        pop(heap, count)
        count -= 1
        here = level[above]
        parent[node], level[node] = above, here + 1
        ranks_so_far[node] = ranks_so_far[above] + rank + 1
        taken += 1
        if rank + 1 < ranks[here] and ranks_so_far[node] < longest:
            push(heap, count, value[above] * rows[here, rank + 1], float(above), rank + 1.0)
            count += 1
        if here + 1 < len(widths) and wide[here + 1] < widths[here + 1] and ranks_so_far[node] < longest:
            wide[here + 1] += 1
            push(heap, count, value[node] * rows[here + 1, 0], float(node), 0.0)
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
