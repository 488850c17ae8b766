"""Why a tree is the best: its expected tokens from the tree alone, and the most that any tree of its size can have."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.cost import Acceptance, Floats, acceptance_rows, node_values
from sequoia_plan.artifacts.plan import check_rows
from sequoia_plan.planner.solving import best_first

ATTAINED = 1 - 1e-12
LARGEST_SOLVED = 16_384
"""Nodes: up to this size `check` solves for the optimum where no shorter argument gives it (seconds at most)."""


@dataclass(frozen=True)
class Certificate:
    """What holds for a tree.

    Args:
        expected_tokens: F, recomputed from the tree alone.
        upper_bound: no tree of this size within these limits has more expected tokens. It is the optimum, unless `exact` is false.
        argument: what proves the bound.
            "best node left out": no row of p increases and no node left out has a higher value than one taken, so no exchange gains.
            "most valuable nodes": no row increases, and the bound is the sum of the highest values that so many nodes can have.
            "concave hull": the recursion of the optimum with concave envelopes in place of its values, which can only raise them.
            "exact recursion": the recursion itself.
        exact: is the bound attained by some tree; false only for "concave hull" where this tree does not attain it.
        next_node: the most valuable single node that could be added: (parent, rank, value); None if the limits leave no room.
    """

    expected_tokens: float
    upper_bound: float
    argument: str
    exact: bool
    next_node: tuple[int, int, float] | None

    @property
    def gap(self) -> float:
        """How much of the bound is not attained, relative to the bound."""
        return max(0.0, 1 - self.expected_tokens / self.upper_bound)


def check(tree: TokenTree, acceptance: Acceptance, depth: int | None = None, branching: int | None = None, optimum: float | None = None) -> Certificate:
    """Compute a tree's expected tokens, and the most that a tree of its size can have.

    Args:
        acceptance: p[1..B], or one such row per level, or one for each class of parents per level.
        depth, branching: the limits it was solved for; the tree's own depth, and the vector's length, if None.
        optimum: what an exact solver found for this size and these limits, if it was asked already; None solves again if need be,
            up to LARGEST_SOLVED nodes.

    Raises:
        SequoiaPlanError: if the tree is no tree, or breaks the limits.
    """
    check_rows(acceptance, "acceptance")
    parents = tree.parents
    if parents[0] != -1 or (parents[1:] < 0).any() or (parents[1:] >= np.arange(1, tree.size)).any():
        raise SequoiaPlanError("token tree: a node comes before its parent")
    rows = acceptance_rows(acceptance, depth or tree.depth, branching)
    for name, found, limit in (("depth", tree.depth, len(rows) + 1), ("branching", tree.branching, rows.shape[2])):
        if found > limit:
            raise SequoiaPlanError(f"token tree: {name} {found}, expected at most {limit}")
    if len(rows) == 0:
        return Certificate(1.0, 1.0, "best node left out", True, None)
    values = node_values(tree, rows)
    tokens = math.fsum(values)
    following = best_addition(tree, rows)
    if best_first.is_non_increasing(rows):
        if following is None or following[2] <= values.min() * (1 + 1e-12):
            return Certificate(tokens, tokens, "best node left out", True, following)
        most = math.fsum(best_first.grow_freely(rows, tree.size)[1])
        return Certificate(tokens, max(tokens, most), "most valuable nodes", True, following)
    from sequoia_plan.planner.solving import hull

    relaxed = max(tokens, float(hull.upper_bounds(rows, tree.size)[-1]))
    if tokens >= relaxed * ATTAINED:
        return Certificate(tokens, tokens, "concave hull", True, following)
    if optimum is None and tree.size <= LARGEST_SOLVED:
        optimum = hull.most_tokens(rows, tree.size)
    if optimum is None:
        return Certificate(tokens, relaxed, "concave hull", False, following)
    return Certificate(tokens, max(tokens, optimum), "exact recursion", True, following)


def best_addition(tree: TokenTree, rows: Floats) -> tuple[int, int, float] | None:
    """The most valuable single node that could be added within len(rows) + 1 levels and the rows' ranks: (parent, rank, value)."""
    nodes = np.flatnonzero((tree.child_count < rows.shape[2]) & (tree.position_ids < len(rows)))
    if not nodes.size:
        return None
    kind = np.minimum(tree.classes[nodes], rows.shape[1] - 1)
    offered = node_values(tree, rows)[nodes] * rows[tree.position_ids[nodes], kind, tree.child_count[nodes]]
    best = nodes[np.argmax(offered)]
    return int(best), int(tree.child_count[best]) + 1, float(offered.max())
