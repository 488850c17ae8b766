"""The dynamic program, exact for any acceptance (Sequoia, arXiv 2402.12374, 3.1 and App. F.1).

    T[l][c][b][n] = most expected tokens of a subtree of n nodes
                    whose root lies on level l, is of node class c and has exactly b children
                  = max over m of T[l][c][b-1][n-m] + p[l][c][b] * best[l+1][c'][m]
    T[l][c][0][1] = 1
    best[l][c][n] = max over b of T[l][c][b][n]

p are the `rates`. c' is the node class of the child of rank b: on the spine if b is 1 and c is on
the spine, else off the spine. Where classes are not told apart, there is one. For each b the sizes
that a subtree can have are an interval from b + 1 on. So T[l][c][b] is stored from that size on,
and needs no value for sizes that no tree has. The time is O(N^2 B D) for N nodes, B ranks and D
levels.
"""

from functools import partial

import numpy as np

from sequoia_plan.artifacts.counts import Floats, Ints
from sequoia_plan.planner.solving.compiled import compiled

Solved = dict[tuple[bytes, bytes], tuple[Floats, Floats]]
"""The rates of a level and best of the level below it -> best and T of the level."""
NAME = "dynamic program"


def most_tokens(rates: Floats, size: int) -> Floats:
    """Compute the expected tokens of the best tree of 1, 2, ... nodes.

    `rates` float64 [levels, node classes, ranks]; returns float64 [sizes], up to `size` or the
    largest tree.
    """
    return _solve(rates, size, {})[0][0][0]


def frontier(rates: Floats, size: int) -> list[Floats]:
    """Compute `most_tokens` for each depth limit 1, 2, ..., levels + 1.

    `rates` float64 [levels, node classes, ranks].
    """
    solved: Solved = {}
    limits = range(len(rates) + 1)
    return [_solve(rates[:n], size, solved, keeps_tables=False)[0][0][0] for n in limits]


def parents(rates: Floats, size: int) -> Ints:
    """Find the tree of `size` nodes, which must exist, with the most expected tokens.

    `rates` float64 [levels, node classes, ranks]; returns each node's parent, int64 [size],
    breadth-first, -1 for the root.
    """
    levels = _solve(rates, size, {})  # best and T of each
    off_spine = rates.shape[1] - 1  # the last class, or the only one
    child_sizes_of: dict[tuple[int, int, int], list[int]] = {}  # nodes of each child's own subtree
    subtrees = [(0, 0, size)]  # level, class and nodes of the subtree of each node
    tree_parents = [-1]
    for node, subtree in enumerate(subtrees):  # grows in the loop
        level, node_class, nodes = subtree
        if nodes == 1:
            continue
        if subtree not in child_sizes_of:
            (_, tables), (best_below, _) = levels[level : level + 2]
            child_rates, table = rates[level, node_class], tables[node_class]
            child_sizes_of[subtree] = _split(child_rates, best_below[off_spine], table, nodes)
        for rank, child_size in enumerate(child_sizes_of[subtree]):
            subtrees.append((level + 1, node_class if rank == 0 else off_spine, child_size))
            tree_parents.append(node)
    return np.array(tree_parents)


def _split(child_rates: Floats, below: Floats, table: Floats, nodes: int) -> list[int]:
    """How many nodes each child's subtree has in the best subtree of `nodes` nodes, in all.

    `child_rates` float64 [ranks]: of the root's children; `below` float64 [sizes]: most expected
    tokens of a subtree of i + 1 nodes off the spine; `table` float64 [ranks + 1, sizes]: those of
    the root with k children, and i nodes beyond one for it and one for each.
    """
    num_children = np.arange(1, min(len(table), nodes))
    rank = 1 + int(np.argmax(table[num_children, nodes - 1 - num_children]))
    shares = []
    left = nodes - 1 - rank  # beyond one node for the root and for each child
    for b in range(rank, 1, -1):
        extra = min(left, len(below) - 1)
        sums = table[b - 1, left - extra : left + 1][::-1] + child_rates[b - 1] * below[: extra + 1]
        shares.append(int(np.argmax(sums)) + 1)
        left -= shares[-1] - 1
    return [left + 1, *shares[::-1]]  # the first child has the rest


def _solve(
    rates: Floats, size: int, solved: Solved, keeps_tables: bool = True
) -> list[tuple[Floats, Floats]]:
    """Compute best and T of each level (see `_solve_level`), the root's level first.

    `rates` float64 [levels, node classes, ranks]. Levels with the same rates and the
    same best below them have the same of both, so these are computed once and kept in `solved`.
    Without `keeps_tables` T, which is large, is empty.
    """
    # The last level first. Its nodes have no children: a subtree is one node.
    levels = [(np.ones((rates.shape[1], 1)), np.empty(0))]
    for level_rates in rates[::-1]:
        below = levels[-1][0]
        key = level_rates.tobytes(), below.tobytes()
        if key not in solved:
            best, table = _solve_level(level_rates, below, size)
            solved[key] = best, table if keeps_tables else np.empty(0)
        levels.append(solved[key])
    return levels[::-1]


@compiled
def _solve_level(level_rates, below, size):
    """Compute best and T of one level from best of the level below, for subtrees up to `size`.

    `level_rates` float64 [node classes, ranks]; `below` float64 [node classes, sizes]. Returns
    best, float64 [node classes, sizes], and T, float64 [node classes, children + 1, sizes], whose
    last index is 0 for the smallest size with so many children: T[c, b, i] is of b + 1 + i nodes.
    """
    num_classes, ranks = level_rates.shape
    max_children = min(ranks, size - 1)
    largest_child = below.shape[1]
    best = np.zeros((num_classes, min(size, 1 + max_children * largest_child)))
    table = np.full((num_classes, max_children + 1, size), -np.inf)
    best[:, 0] = table[:, 0, 0] = 1.0
    for node_class in range(num_classes):
        num_sizes = 1  # sizes that a subtree of b - 1 children can have
        for b in range(1, max_children + 1):
            next_num_sizes = min(size - b, num_sizes + largest_child - 1)
            child_class = node_class if b == 1 else num_classes - 1
            result = table[node_class, b, :next_num_sizes]
            fewer_children = table[node_class, b - 1, :num_sizes]
            _convolve(fewer_children, below[child_class], level_rates[node_class, b - 1], result)
            for i in range(next_num_sizes):  # an assignment of arrays takes seconds to compile
                best[node_class, b + i] = max(best[node_class, b + i], result[i])
            num_sizes = next_num_sizes
    return best, table


@partial(compiled, fastmath={"nnan", "nsz"})
def _convolve(a, b, p, result):
    """Raise result[k] to max over i + j = k of a[i] + p * b[j]."""
    for j in range(min(len(b), len(result))):
        value = p * b[j]
        sums = result[j : j + len(a)]
        for i in range(len(sums)):
            sums[i] = max(sums[i], a[i] + value)
