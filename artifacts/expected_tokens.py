"""F(T), the expected tokens of a step with a tree: the sum of its nodes' values.

In this module, `rates` are as in `Acceptance`: float64 [levels, node classes, ranks].
"""

import heapq
import math
from itertools import pairwise

import numpy as np

from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.tree import TokenTree


def child_probabilities(tree: TokenTree, rates: Floats) -> Floats:
    """Probability that each node but the root is accepted, given that its parent is accepted.

    A rank beyond the end of the rates has the probability 0. Returns float64 [size - 1].
    """
    num_ranks = rates.shape[2]
    parents = tree.parents[1:]
    level = np.minimum(tree.position_ids[parents], len(rates) - 1)
    node_class = np.minimum(tree.classes[parents], rates.shape[1] - 1)
    rank = tree.ranks[1:] - 1
    probability = rates[level, node_class, np.minimum(rank, num_ranks - 1)]
    return np.where(rank < num_ranks, probability, 0.0)


def node_values(tree: TokenTree, rates: Floats) -> Floats:
    """Probability that each node is accepted: the product of the probabilities along its path.

    Returns float64 [size].
    """
    values = np.append(1.0, child_probabilities(tree, rates))
    for start, stop in pairwise(tree.level_offsets[1:].tolist()):
        values[start:stop] *= values[tree.parents[start:stop]]
    return values


def expected_tokens(tree: TokenTree, rates: Floats) -> float:
    """Expected tokens a step (mean acceptance length): the sum of the node values.

    This is F(T) of Sequoia, arXiv 2402.12374, section 3.1.
    """
    return math.fsum(node_values(tree, rates))  # exactly rounded: equal on every machine


def max_expected_tokens(rates: Floats, size: int) -> float:
    """Upper bound on the expected tokens of all trees of `size` nodes.

    It is the sum of the `size` largest node values of the infinite tree.
    """
    return sum(value for value, _ in most_valuable_nodes(rates, size))


def most_valuable_nodes(
    rates: Floats, size: int, depth: float = math.inf
) -> list[tuple[float, int]]:
    """The nodes of the largest values within so many levels: pairs of a value and the parent.

    The parent is an index into the result, -1 for the root. A child's value is at most its
    parent's, so a heap that starts with the root yields the values in decreasing order.
    """
    table, nodes = rates.tolist(), list[tuple[float, int]]()
    off_spine = len(table[0]) - 1
    # -value, level, node class and parent of nodes whose parent is there already
    heap = [(-1.0, 0, 0, -1)]
    while heap and len(nodes) < size:
        negative_value, level, node_class, parent = heapq.heappop(heap)
        nodes.append((-negative_value, parent))
        if level + 1 < depth:
            for rank, p in enumerate(table[min(level, len(table) - 1)][node_class]):
                child_class = node_class if rank == 0 else off_spine
                heapq.heappush(heap, (negative_value * p, level + 1, child_class, len(nodes) - 1))
    return nodes
