"""The exact dynamic program: exact for any acceptance (Sequoia, arXiv 2402.12374, section 3.1 and App. F.1).

    T[l][c][b][n] = most expected tokens of a subtree of n nodes whose root lies on level l, is of class c and has exactly b children
                  = max over m of T[l][c][b-1][n-m] + p[l][c][b] * best[l+1][c'][m],    T[l][c][0][1] = 1
    best[l][c][n] = max over b of T[l][c][b][n]

c' is the class of the child of rank b: on the spine if b is 1 and c is on it, else off it. Where no classes are told apart there is one.

Reachable sizes are an interval for each (l, b), so loops run over lengths and no -inf is needed. O(N^2 B D).
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def frontier(rows: Floats, size: int) -> list[Floats]:
    """For each depth 1, 2, ..., len(rows) + 1: expected tokens of the best tree of 1, 2, ... nodes, up to the largest there is or `size`."""
    found = [_solve(np.ascontiguousarray(rows[:levels]), size)[0][0, 0, 1:] for levels in range(len(rows) + 1)]
    return [np.asarray(best[np.isfinite(best)]) for best in found]


def parents(rows: Floats, size: int) -> list[int]:
    """The best tree of exactly `size` nodes, in preorder."""
    _, last, children = _solve(np.ascontiguousarray(rows), size)
    found: list[int] = []
    off, waiting = rows.shape[1] - 1, [(0, 0, size, -1)]  # level, class, nodes and parent of subtrees, the next one last
    while waiting:
        level, kind, nodes, above = waiting.pop()
        node = len(found)
        found.append(above)
        for rank in range(int(children[level, kind, nodes]), 0, -1):  # the last child's share first, then what was left
            share = int(last[level, kind, rank, nodes])
            waiting.append((level + 1, kind if rank == 1 else off, share, node))
            nodes -= share
    return found


@numba.njit(cache=True)
def _solve(rows, size):  # type: ignore[no-untyped-def]
    """best[level, class, n], the last child's share at [level, class, b, n], and the number of children behind best[level, class, n]."""
    levels, classes, branching = rows.shape
    best = np.full((levels + 1, classes, size + 1), np.nan)
    last = np.zeros((levels + 1, classes, branching + 1, size + 1), np.int32)
    children = np.zeros((levels + 1, classes, size + 1), np.int32)
    best[:, :, 1] = 1.0
    below = reach = 1  # the largest subtree a level further down, capped at `size`
    table = np.empty((2, size + 1))
    for level in range(levels - 1, -1, -1):
        for kind in range(classes):
            previous, current = table[0], table[1]
            previous[1] = 1.0
            reach = 1
            for rank in range(1, branching + 1):
                p, child = rows[level, kind, rank - 1], kind if rank == 1 else classes - 1
                grown = min(size, reach + below)
                for n in range(rank + 1, grown + 1):
                    top, share = -1.0, 0
                    for m in range(max(1, n - reach), min(below, n - rank) + 1):
                        value = previous[n - m] + p * best[level + 1, child, m]
                        if value > top:
                            top, share = value, m
                    current[n] = top
                    last[level, kind, rank, n] = share
                    if children[level, kind, n] == 0 or top > best[level, kind, n]:
                        best[level, kind, n] = top
                        children[level, kind, n] = rank
                previous, current = current, previous
                reach = grown
                if rank + 1 >= size:
                    break
        below = reach
    return best, last, children
