"""Why a tree is the best: its expected tokens from the tree alone, and a bound for its size."""

import math
from typing import Any, NamedTuple

import numpy as np

from sequoia_plan.artifacts import Acceptance, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import node_values
from sequoia_plan.planner.solving.tokens import best_first, dynamic_programming
from sequoia_plan.planner.solving.tokens.frontier import max_budget


class Certificate(NamedTuple):
    """What is proven of a tree.

    Args:
        expected_tokens: F, computed from the tree alone.
        upper_bound: no tree of this size within these limits has more expected tokens. It is the
            optimum, except for a tree of more nodes than the dynamic program solves for, where rows
            increase.
        next_node: the most valuable single node that could be added: (parent, rank, value); None
            if the limits leave no room.
    """

    expected_tokens: float
    upper_bound: float
    next_node: tuple[int, int, float] | None


def check(
    tree: TokenTree,
    acceptance: Acceptance | Any,
    depth: int | None = None,
    branching: int | None = None,
    optimum: float | None = None,
) -> Certificate:
    """Compute a tree's expected tokens, and prove a bound for all trees of its size.

        if p never increases with rank:
            no node that could be added has a higher value than a node of the tree: it is optimal
            else the bound is the sum of the highest values that so many nodes can have
        else:
            the bound is the optimum, given or solved for

    A node's value is the probability that it is accepted: the product of p along its path.

    Args:
        tree: the token tree.
        acceptance: the acceptance, also as `Acceptance.given` takes it.
        depth: the most levels that the tree was solved for; its own depth if None.
        branching: the most children of a node that it was solved for; the length of the vectors if
            None.
        optimum: the expected tokens that an exact solver found for this size and these limits.
            If None and no other proof applies, `check` solves for it itself.

    Returns:
        The expected tokens, the bound, and the best node to add.

    Raises:
        SequoiaPlanError: if the tree exceeds the limits.
    """
    rows = Acceptance.given(acceptance).at_depth(depth or tree.depth, branching)
    limits = (("depth", tree.depth, len(rows) + 1), ("branching", tree.branching, rows.shape[2]))
    for name, value, limit in limits:
        if value > limit:
            raise SequoiaPlanError(f"token tree: {name} {value}, expected at most {limit}")
    values = node_values(tree, rows)
    tokens = math.fsum(values)
    next_node = best_addition(tree, rows)
    is_non_increasing = best_first.is_non_increasing(rows)
    if is_non_increasing:
        value_left_out = next_node[2] if next_node else 0.0  # of (parent, rank, value)
        if value_left_out <= values.min() * (1 + 1e-12):
            return Certificate(tokens, tokens, next_node)
    elif optimum is None and tree.size <= max_budget(rows):
        optimum = float(dynamic_programming.most_tokens(rows, tree.size)[-1])
    if is_non_increasing or optimum is None:
        sorted_rows = best_first.sort_by_value(rows)
        optimum = math.fsum(best_first.most_valuable_nodes(sorted_rows, tree.size)[1])
    return Certificate(tokens, max(tokens, optimum), next_node)


def best_addition(tree: TokenTree, rows: Floats) -> tuple[int, int, float] | None:
    """Find the most valuable single node that could be added to a tree.

    `rows` float64 [levels, classes, branching].
    """
    has_room = (tree.child_count < rows.shape[2]) & (tree.position_ids < len(rows))
    parents = np.flatnonzero(has_room)
    if not parents.size:
        return None
    levels, next_ranks = tree.position_ids[parents], tree.child_count[parents]
    parent_classes = np.minimum(tree.classes[parents], rows.shape[1] - 1)
    values = node_values(tree, rows)[parents] * rows[levels, parent_classes, next_ranks]
    parent = parents[np.argmax(values)]
    return int(parent), int(tree.child_count[parent]) + 1, float(values.max())
