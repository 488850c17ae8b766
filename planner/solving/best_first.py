"""Best-first search: if p never increases with rank, the n most valuable nodes are the best tree.

The value of a node is then at most that of its predecessor (its left sibling, else its parent). So
the first n nodes in order of value always form a tree, and no other n nodes have a larger sum. One
heap pop a node gives the best trees of all sizes, each contained in the next. This holds for rows
by class as well, because siblings have a parent, and so a row, in common.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def is_non_increasing(rows: Floats) -> bool:
    """Return whether p never increases with rank, so that best-first search is exact.

    Level 0 holds the root alone, which is on the spine, so that level's row for nodes off the spine
    is ignored. `rows` float64 [levels, classes, branching].
    """
    increases = np.diff(rows, axis=2) > 0
    return not (increases[:, 0].any() or increases[1:, -1].any())


def favours_spine(rows: Floats) -> bool:
    """Return whether parents on the spine have the likeliest first b children, for every b.

    Let p be one row of `rows`: p[k] is the probability that the child of rank k = 1, 2, ... is
    accepted. The answer is True if, on every level below the root's and for every b, p[1] + ... +
    p[b] is at least as large in the row for the spine as in the row for other nodes. `rows` float64
    [levels, classes, branching].
    """
    cumulative = rows.cumsum(axis=2)
    return bool((cumulative[1:, 0] >= cumulative[1:, -1]).all())


def frontier(rows: Floats, size: int) -> list[Floats]:
    """Compute the expected tokens of the best tree of every size and depth.

        repeat `size` times, starting with the root on the heap:
            take the most valuable node off the heap and add it to the tree
            push its first child and its next sibling
        the expected tokens of the best n nodes are the sum of the first n values taken

    A node's value is the probability that it is accepted: the product of p along its path.

    Args:
        rows: float64 [levels, classes, branching], the probability that a node's child of each
            rank is accepted if the node is, by the node's level and class. Class 0 is the spine
            (the root, its first child, that node's first child, ...), class 1 all other nodes; a
            single class stands for all nodes.
            p never increases with rank.
        size: the most nodes of a tree.

    Returns:
        For each depth limit 1, 2, ..., levels + 1: float64, the expected tokens of the best tree of
        exactly 1, 2, ... nodes, up to `size` or the largest tree that the limit allows.
    """
    values_by_depth: list[Floats] = []
    deepest_level = 0  # of the best tree of `size` nodes for the last depth limit solved
    for num_levels in range(len(rows) + 1):  # levels below the root
        # The first two limits (the root alone, and one level below it) are always solved: before
        # them, no level could have been left empty.
        if len(values_by_depth) > 1 and deepest_level < num_levels - 1:
            # The best trees left the last added level empty, so they leave deeper ones empty too.
            values_by_depth.append(values_by_depth[-1])
            continue
        _, node_values, node_levels = most_valuable_nodes(rows[:num_levels], size)
        values_by_depth.append(np.cumsum(node_values))
        deepest_level = node_levels.max()
    return values_by_depth


def parents(rows: Floats, size: int) -> Ints:
    """Find the best tree of exactly `size` nodes: the `size` nodes likeliest to be accepted.

    `rows` float64 [levels, classes, branching]; returns int32 [size].
    """
    return np.asarray(number_breadth_first(most_valuable_nodes(rows, size)[0]))


def most_valuable_nodes(rows: Floats, size: int) -> tuple[Ints, Floats, Ints]:
    """Take the most valuable nodes, limited by the levels and ranks of `rows` alone.

    A node's value is the probability that it is accepted: the product of p along its path. `rows`
    float64 [levels, classes, branching].
    """
    levels, _, branching = rows.shape
    max_parents = np.full(levels, size)
    max_children = np.full(levels, branching)
    max_rank_sum = levels * branching  # no path has a larger sum of ranks
    return most_valuable_nodes_within(
        np.ascontiguousarray(rows), size, max_parents, max_children, max_rank_sum
    )


@numba.njit(cache=True)
def heap_push(heap, count, value, parent, rank):
    """Add an entry to a binary heap, in place; heap[0] is the entry of the largest value.

    `heap` float64 [capacity, 3].
    """
    position = count
    while position > 0:
        above = (position - 1) >> 1
        if heap[above, 0] >= value:
            break
        heap[position] = heap[above]
        position = above
    heap[position, 0], heap[position, 1], heap[position, 2] = value, parent, rank


@numba.njit(cache=True)
def heap_pop(heap, count):
    """Remove heap[0], the entry of the largest value, from a binary heap, in place.

    `heap` float64 [capacity, 3].
    """
    last = heap[count - 1].copy()
    position = 0
    while 2 * position + 1 < count - 1:
        below = 2 * position + 1
        if below + 1 < count - 1 and heap[below + 1, 0] > heap[below, 0]:
            below += 1
        if heap[below, 0] <= last[0]:
            break
        heap[position] = heap[below]
        position = below
    heap[position] = last


@numba.njit(cache=True)
def most_valuable_nodes_within(rows, size, max_parents, max_children, max_rank_sum):
    """Take the most valuable nodes within the limits, one after the other.

    `rows` float64 [levels, classes, branching]; `max_parents` int64 [levels]; `max_children` int64
    [levels].
    """
    off_spine = rows.shape[1] - 1
    parents, values, levels = np.empty(size, np.int64), np.empty(size), np.zeros(size, np.int64)
    classes, rank_sums = np.full(size, off_spine), np.zeros(size, np.int64)
    num_parents = np.zeros(len(max_parents), np.int64)
    # The heap holds value, parent and rank (0-based) of the next nodes off the spine. Each node
    # that is taken pushes at most two.
    heap = np.empty((size + 2, 3))
    heap_count = 0
    parents[0], values[0], classes[0] = -1, 1.0, 0
    num_taken = 1
    spine_end = 0  # the last node taken on the spine
    next_spine_value = -1.0  # of the first child of spine_end; negative if it may have no child
    if len(max_parents) > 0 and max_parents[0] > 0 and max_rank_sum > 0:
        next_spine_value = rows[0, 0, 0]
        if max_children[0] > 1 and max_rank_sum > 1:
            heap_push(heap, 0, rows[0, 0, 1], 0.0, 1.0)
            heap_count = 1
    for node in range(1, size):
        if next_spine_value >= 0 and (heap_count == 0 or next_spine_value >= heap[0, 0]):
            values[node], parent, rank = next_spine_value, spine_end, 0
            classes[node] = 0
            spine_end, next_spine_value = node, -1.0
        elif heap_count > 0:
            values[node], parent, rank = heap[0, 0], int(heap[0, 1]), int(heap[0, 2])
            heap_pop(heap, heap_count)
            heap_count -= 1
        else:
            break
        parents[node] = parent
        parent_level = levels[parent]
        level = parent_level + 1
        levels[node] = level
        rank_sums[node] = rank_sums[parent] + rank + 1
        num_taken += 1
        may_go_on = rank_sums[node] < max_rank_sum
        # The next sibling of a spine node is on the heap already: the parent has pushed it.
        if node != spine_end and rank + 1 < max_children[parent_level] and may_go_on:
            sibling_value = values[parent] * rows[parent_level, classes[parent], rank + 1]
            heap_push(heap, heap_count, sibling_value, float(parent), rank + 1.0)
            heap_count += 1
        if level < len(max_parents) and num_parents[level] < max_parents[level] and may_go_on:
            num_parents[level] += 1
            if node != spine_end:
                child_value = values[node] * rows[level, off_spine, 0]
                heap_push(heap, heap_count, child_value, float(node), 0.0)
                heap_count += 1
            else:
                next_spine_value = values[node] * rows[level, 0, 0]
                if max_children[level] > 1 and rank_sums[node] + 1 < max_rank_sum:
                    heap_push(heap, heap_count, values[node] * rows[level, 0, 1], float(node), 1.0)
                    heap_count += 1
    return parents[:num_taken], values[:num_taken], levels[:num_taken]


@numba.njit(cache=True)
def number_breadth_first(parents):
    """Number a tree's nodes breadth-first; siblings keep their order.

    `parents` int64 [size]; returns int32 [size].
    """
    size = len(parents)
    # children[first_child[node] : first_child[node + 1]] are the children of a node.
    first_child = np.zeros(size + 1, np.int64)
    for node in range(1, size):
        first_child[parents[node] + 1] += 1
    for node in range(size):
        first_child[node + 1] += first_child[node]
    children = np.empty(size, np.int64)
    num_children = np.zeros(size, np.int64)
    for node in range(1, size):
        parent = parents[node]
        children[first_child[parent] + num_children[parent]] = node
        num_children[parent] += 1
    new_parents = np.empty(size, np.int32)
    order = np.empty(size, np.int64)  # the old number of each node
    new_parents[0], order[0] = -1, 0
    num_ordered = 1
    for new_number in range(size):
        node = order[new_number]
        for i in range(first_child[node], first_child[node + 1]):
            new_parents[num_ordered], order[num_ordered] = new_number, children[i]
            num_ordered += 1
    return new_parents
