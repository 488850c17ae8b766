"""The plain dynamic program, exact for any acceptance (Sequoia, arXiv 2402.12374, 3.1, App. F.1).

    T[l][c][b][n] = most expected tokens of a subtree of n nodes
                    whose root lies on level l, is of class c and has exactly b children
                  = max over m of T[l][c][b-1][n-m] + p[l][c][b] * best[l+1][c'][m]
    T[l][c][0][1] = 1
    best[l][c][n] = max over b of T[l][c][b][n]

c' is the class of the child of rank b: on the spine if b is 1 and c is on the spine, else off the
spine. Rows without classes have a single class.

Reachable sizes form an interval for each (l, b), so the loops run over lengths and need no -inf.
The time is O(N^2 B D) for N nodes, B ranks and D levels.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def frontier(rows: Floats, size: int) -> list[Floats]:
    """Compute the expected tokens of the best tree of every size and depth.

        for each depth:
            for level = depth - 1 ... 0, b = 1 ... branching, n = b + 1 ... size:
                T[level][b][n] = max over m of T[level][b-1][n-m] + p[level][b] * best[level+1][m]
                best[level][n] = max(best[level][n], T[level][b][n])
            the values of this depth are best[0]

    best[level][n] is the most expected tokens of a subtree of n nodes whose root lies on the level;
    T is the same with exactly b children of that root. Classes are left out.

    Args:
        rows: float64 [levels, classes, branching], the probability that a node's child of each
            rank is accepted, by the node's level and class (0: on the spine, that is the root,
            its first child, that node's first child, ...; 1: off it).
        size: the most nodes of a tree.

    Returns:
        For each depth limit 1, 2, ..., levels + 1: float64, the expected tokens of the best tree of
        exactly 1, 2, ... nodes, up to `size` or the largest tree that the limit allows.
    """
    values_by_depth = []
    for num_levels in range(len(rows) + 1):  # levels below the root
        best, _, _ = _solve(np.ascontiguousarray(rows[:num_levels]), size)
        values = best[0, 0, 1:]  # level 0 and class 0: the root's; there is no tree of 0 nodes
        values_by_depth.append(np.asarray(values[np.isfinite(values)]))
    return values_by_depth


def parents(rows: Floats, size: int) -> list[int]:
    """Find the best tree of exactly `size` nodes, by the recursion in `frontier`.

    `rows` float64 [levels, classes, branching].
    """
    _, last_share, num_children = _solve(np.ascontiguousarray(rows), size)
    off_spine = rows.shape[1] - 1
    tree_parents: list[int] = []
    subtrees = [(0, 0, size, -1)]  # a stack of level, class, nodes and parent
    while subtrees:
        level, node_class, nodes, parent = subtrees.pop()
        node = len(tree_parents)
        tree_parents.append(parent)
        # last_share holds the nodes of the last child's subtree; the rest belongs to the children
        # before it. The last child is pushed first, so the first child is popped first.
        for rank in range(int(num_children[level, node_class, nodes]), 0, -1):
            share = int(last_share[level, node_class, rank, nodes])
            child_class = node_class if rank == 1 else off_spine
            subtrees.append((level + 1, child_class, share, node))
            nodes -= share
    return tree_parents


@numba.njit(cache=True)
def _solve(rows, size):
    """Fill the tables of the recursion; sizes that no tree has are NaN or 0.

    T[level, class, b, n] is the most expected tokens of a subtree of n nodes whose root lies on the
    level, is of the class and has exactly b children; best is its maximum over b. `rows` float64
    [levels, classes, branching]; returns float64 [levels + 1, classes, size + 1].
    """
    levels, classes, branching = rows.shape
    best = np.full((levels + 1, classes, size + 1), np.nan)
    last_share = np.zeros((levels + 1, classes, branching + 1, size + 1), np.int32)
    num_children = np.zeros((levels + 1, classes, size + 1), np.int32)
    best[:, :, 1] = 1.0
    largest_child = 1  # nodes of the largest subtree on the level below, at most `size`
    largest = 1  # nodes of the largest subtree on this level with the ranks so far
    table = np.empty((2, size + 1))
    for level in range(levels - 1, -1, -1):
        for node_class in range(classes):
            previous, current = table[0], table[1]  # T of rank - 1 and of rank
            previous[1] = 1.0
            largest = 1
            for rank in range(1, branching + 1):
                p = rows[level, node_class, rank - 1]
                child_class = node_class if rank == 1 else classes - 1
                next_largest = min(size, largest + largest_child)
                for n in range(rank + 1, next_largest + 1):
                    max_tokens, best_share = -1.0, 0
                    for m in range(max(1, n - largest), min(largest_child, n - rank) + 1):
                        tokens = previous[n - m] + p * best[level + 1, child_class, m]
                        if tokens > max_tokens:
                            max_tokens, best_share = tokens, m
                    current[n] = max_tokens
                    last_share[level, node_class, rank, n] = best_share
                    is_first = num_children[level, node_class, n] == 0
                    if is_first or max_tokens > best[level, node_class, n]:
                        best[level, node_class, n] = max_tokens
                        num_children[level, node_class, n] = rank
                previous, current = current, previous
                largest = next_largest
                if rank + 1 >= size:
                    break
        largest_child = largest
    return best, last_share, num_children
