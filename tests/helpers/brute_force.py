"""Every small tree: what no solver may exceed, for any type of draft."""

import math

from strategies import all_trees

from sequoia_plan.artifacts import Drafting
from sequoia_plan.artifacts.expected_tokens import expected_tokens

TREES = [tree for size in range(1, 8) for tree in all_trees(size)]
DFLASH = Drafting("block", first_width=2, drafts_by_level=False, max_depth=4)
"""One pass gives the probabilities of all levels."""
EAGLE = Drafting(
    "features", first_width=1, drafts_by_level=True, max_depth=5, first_width_is_per_level=True
)
"""The first pass is as wide as the tree is deep."""


def fitting(rows, max_size):
    """The trees of up to `max_size` (at most seven) nodes within the levels and ranks of `rows`."""
    return [
        tree
        for tree in TREES
        if tree.size <= max_size and tree.depth <= len(rows) + 1 and tree.branching <= rows.shape[2]
    ]


def max_speed(rows, times, max_size):
    """Tokens a second of the fastest tree of up to seven nodes within the limits."""
    return max(
        expected_tokens(tree, rows) / times.step_seconds(tree) for tree in fitting(rows, max_size)
    )


def tokens_by_paths(tree, rows):
    """F by its definition, path by path; the node class follows from the ranks above on the path.

    `rows` float64 [levels, node classes, ranks].
    """
    total = 0.0
    for node in range(tree.size):
        ranks = []
        while node:
            ranks.insert(0, int(tree.ranks[node]) - 1)
            node = int(tree.parents[node])
        total += math.prod(
            rows[level, any(ranks[:level]) * (rows.shape[1] - 1), rank]
            for level, rank in enumerate(ranks)
        )
    return total
