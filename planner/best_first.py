"""Best-first: when no rank is likelier than the one before it, the n most valuable nodes are the optimal tree.

Every node is then worth at most its predecessor (left sibling, else parent), so taking nodes in order of value always
leaves a tree, and no other n nodes are worth more. One heap pop a node gives the optima of all sizes, nested.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def is_non_increasing(rows: Floats) -> bool:
    """Does every row of p[level, rank] allow best-first?"""
    return bool((np.diff(rows, axis=1) <= 0).all())


def values(rows: Floats, size: int) -> Floats:
    """float64 [size]: expected tokens of the optimal tree of 1, 2, ... nodes; NaN where no such tree exists."""
    return np.cumsum(_grow(np.ascontiguousarray(rows), size)[1])


def parents(rows: Floats, size: int) -> list[int]:
    """The optimal tree of exactly `size` nodes: parents in the order the nodes were taken."""
    return _grow(np.ascontiguousarray(rows), size)[0].tolist()


@numba.njit(cache=True)
def _push(heap, count, value, parent, level, rank):  # type: ignore[no-untyped-def]
    at = count
    while at > 0:
        above = (at - 1) >> 1
        if heap[above, 0] >= value:
            break
        heap[at] = heap[above]
        at = above
    heap[at, 0], heap[at, 1], heap[at, 2], heap[at, 3] = value, parent, level, rank


@numba.njit(cache=True)
def _pop(heap, count):  # type: ignore[no-untyped-def]
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
def _grow(rows, size):  # type: ignore[no-untyped-def]
    """Parents and node values of the first `size` nodes by value; rows[l] holds p of the children of level l."""
    levels, branching = rows.shape
    heap = np.empty((size + 2, 4))  # value, parent, level of the parent, rank (0-based): each pop pushes at most two
    parent = np.full(size, -1, np.int64)
    value = np.full(size, np.nan)
    value[0] = 1.0
    count = 0
    if levels > 0:
        _push(heap, count, rows[0, 0], 0.0, 0.0, 0.0)
        count = 1
    for node in range(1, size):
        if count == 0:
            break
        worth, above = heap[0, 0], int(heap[0, 1])
        level, rank = int(heap[0, 2]), int(heap[0, 3])
        _pop(heap, count)
        count -= 1
        parent[node], value[node] = above, worth
        if rank + 1 < branching:
            _push(heap, count, value[above] * rows[level, rank + 1], above, level, rank + 1)
            count += 1
        if level + 1 < levels:
            _push(heap, count, worth * rows[level + 1, 0], node, level + 1, 0)
            count += 1
    return parent, value
