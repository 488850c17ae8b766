"""Best-first search: if p never increases with rank, the n most valuable nodes are the best tree.

The value of a node is then at most that of its predecessor (its left sibling, else its parent). So
the first n nodes in order of value always form a tree, and no other n nodes have a larger sum. One
heap pop a node gives the best trees of all sizes, each contained in the next. This holds for rates
by class as well, because siblings have a parent, and so a row, in common.
"""

from heapq import heappop, heappush

import numpy as np

from sequoia_plan.artifacts.counts import Floats, Ints
from sequoia_plan.planner.solving.compiled import compiled

NAME = "best-first"


def is_non_increasing(rates: Floats) -> bool:
    """Return whether p never increases with rank, so that best-first search is exact.

    Level 0 holds the root alone, so its row for nodes off the spine is ignored. `rates` float64
    [levels, node classes, ranks].
    """
    increases = np.diff(rates, axis=2) > 0
    return not (increases[:, 0].any() or increases[1:, -1].any())


def favours_spine(rates: Floats) -> bool:
    """Return whether parents on the spine have the likeliest first b children, for every b.

    The sums p[1] + ... + p[b] are compared, on every level below the root's. `rates` float64
    [levels, node classes, ranks].
    """
    cumulative = rates.cumsum(axis=2)
    return bool((cumulative[1:, 0] >= cumulative[1:, -1]).all())


def highest_values(rates: Floats, count: int) -> Floats:
    """The highest values that nodes can have, whether or not these nodes form a tree.

    Which rank has which probability changes no value below it, except for the first child of a node
    on the spine, whose class differs from its siblings'. So each row is sorted but for that child.
    `rates` float64 [levels, node classes, ranks]; returns float64 [at most `count`], descending.
    """
    sorted_rates = -np.sort(-rates, axis=2)
    if rates.shape[1] > 1:
        sorted_rates[:, 0, :1] = rates[:, 0, :1]
        sorted_rates[:, 0, 1:] = -np.sort(-rates[:, 0, 1:], axis=1)
    return most_valuable_nodes(sorted_rates, count)[1]


def most_tokens(rates: Floats, size: int) -> Floats:
    """Compute the expected tokens of the best tree of 1, 2, ... nodes.

    `rates` float64 [levels, node classes, ranks]; returns float64 [sizes], up to `size` or the
    largest tree.
    """
    return np.cumsum(most_valuable_nodes(rates, size)[1])


def frontier(rates: Floats, size: int) -> list[Floats]:
    """Compute `most_tokens` for each depth limit 1, 2, ..., levels + 1.

    `rates` float64 [levels, node classes, ranks].
    """
    return [most_tokens(rates[:num_levels], size) for num_levels in range(len(rates) + 1)]


def parents(rates: Floats, size: int) -> Ints:
    """Find the best tree of exactly `size` nodes, in the order in which it grows.

    `rates` float64 [levels, node classes, ranks]; returns int64 [size].
    """
    return most_valuable_nodes(rates, size)[0]


def most_valuable_nodes(rates: Floats, size: int) -> tuple[Ints, Floats, Ints]:
    """Take the most valuable nodes, limited by the levels and ranks of `rates` alone.

    `rates` float64 [levels, node classes, ranks]; returns parents, values and levels, each [size].
    """
    no_limits = np.full(len(rates), size)
    return most_valuable_nodes_within(np.ascontiguousarray(rates), size, no_limits)


@compiled
def most_valuable_nodes_within(rates, size, max_parents):
    """Take the most valuable nodes, one after the other, with so many parents a level at most.

        repeat `size` times, starting with the root on the heap:
            take the most valuable node off the heap and add it to the tree
            push its first child and its next sibling

    Of equally valuable nodes, the one on the spine is taken first: its subtree is worth more.
    `rates` float64 [levels, node classes, ranks], class 0 on the spine; `max_parents` int64
    [levels]. Returns parents int64, values float64 and levels int64, all [nodes taken].
    """
    num_levels, classes, ranks = rates.shape
    parents, values, levels = np.empty(size, np.int64), np.empty(size), np.zeros(size, np.int64)
    node_classes = np.full(size, classes - 1)
    num_parents = np.zeros(num_levels, np.int64)
    # The heap holds -value and parent * ranks + rank (from 0) of the next nodes off the spine. The
    # next node on the spine waits beside it.
    heap = [(0.0, 0) for _ in range(0)]  # of this type
    next_spine_value = -1.0  # negative if the spine's last node has no child yet to come
    spine_end = 0  # the last node taken on the spine
    parents[0], values[0], node_classes[0] = -1, 1.0, 0
    node, parent, rank = 0, -1, 0
    while True:
        # The siblings of a node on the spine are pushed by its parent.
        if node != spine_end and rank + 1 < ranks:
            value = values[parent] * rates[levels[parent], node_classes[parent], rank + 1]
            heappush(heap, (-value, parent * ranks + rank + 1))
        level = levels[node]
        if level < num_levels and num_parents[level] < max_parents[level]:
            num_parents[level] += 1
            first_pushed = 0
            if node == spine_end:
                next_spine_value, first_pushed = values[node] * rates[level, 0, 0], 1
            if first_pushed < ranks:
                value = values[node] * rates[level, node_classes[node], first_pushed]
                heappush(heap, (-value, node * ranks + first_pushed))
        node += 1
        if node == size:
            break
        if next_spine_value >= 0 and (not heap or next_spine_value >= -heap[0][0]):
            values[node], parent, rank = next_spine_value, spine_end, 0
            node_classes[node] = 0
            spine_end, next_spine_value = node, -1.0
        elif heap:
            negative_value, item = heappop(heap)
            values[node], parent, rank = -negative_value, item // ranks, item % ranks
        else:
            break
        parents[node], levels[node] = parent, levels[parent] + 1
    return parents[:node], values[:node], levels[:node]


def isotonic(rates: Floats) -> Floats:
    """Return the probabilities closest to `rates` in least squares that never increase with rank.

    Adjacent ranks that increase are replaced by their mean until none do. `rates` float64
    [..., ranks].
    """
    smoothed = [_isotonic_row(row) for row in rates.reshape(-1, rates.shape[-1]).tolist()]
    return np.array(smoothed).reshape(rates.shape)


def _isotonic_row(row: list[float]) -> Floats:
    """As `isotonic`, of one row: float64 [ranks]."""
    # of each group of adjacent ranks that have one mean
    sums: list[float] = []
    counts: list[int] = []
    for p in row:
        total, count = p, 1
        while sums and sums[-1] * count <= total * counts[-1]:
            total, count = total + sums.pop(), count + counts.pop()
        sums.append(total)
        counts.append(count)
    return np.repeat(np.array(sums) / counts, counts)
