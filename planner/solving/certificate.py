"""Why a tree is the best: an upper bound that does not come from the solver, and a check from the tree alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.cost import Acceptance, Floats, acceptance_rows, node_values
from sequoia_plan.artifacts.plan import check_rows
from sequoia_plan.planner.solving import best_first


@dataclass(frozen=True)
class Certificate:
    """What holds for a tree.

    Args:
        expected_tokens: F, recomputed from the tree alone.
        upper_bound: no tree of this size within these limits is worth more.
        argument: "best node left out" (it is worth no more than the least node taken, so no exchange gains), or "concave hull"
            (the recursion of the optimum, relaxed to concave envelopes).
        next_node: the most valuable single node that could be added: (parent, rank, value); None if the limits leave no room.
    """

    expected_tokens: float
    upper_bound: float
    argument: str
    next_node: tuple[int, int, float] | None

    @property
    def gap(self) -> float:
        """How much of the bound is not attained, relative to the bound."""
        return max(0.0, 1 - self.expected_tokens / self.upper_bound)


def check(tree: TokenTree, acceptance: Acceptance, depth: int | None = None, branching: int | None = None) -> Certificate:
    """Recompute what a tree is worth and bound what any could be.

    Args:
        acceptance: p[1..B], or one such row per level.
        depth, branching: the limits it was solved for; the tree's own depth, and the vector's length, if None.

    Raises:
        SequoiaPlanError: if the tree is no tree, or breaks the limits.
    """
    check_rows(acceptance, "acceptance")
    parents = tree.parents
    if parents[0] != -1 or (parents[1:] < 0).any() or (parents[1:] >= np.arange(1, tree.size)).any():
        raise SequoiaPlanError("token tree: a node comes before its parent")
    rows = acceptance_rows(acceptance, depth or tree.depth, branching)
    for name, found, limit in (("depth", tree.depth, len(rows) + 1), ("branching", tree.branching, rows.shape[1])):
        if found > limit:
            raise SequoiaPlanError(f"token tree: {name} {found}, expected at most {limit}")
    if len(rows) == 0:
        return Certificate(1.0, 1.0, "best node left out", None)
    values = node_values(tree, rows)
    tokens = float(values.sum())
    following = best_addition(tree, rows)
    if best_first.is_non_increasing(rows) and (following is None or following[2] <= values.min() * (1 + 1e-12)):
        return Certificate(tokens, tokens, "best node left out", following)
    from sequoia_plan.planner.solving import hull

    return Certificate(tokens, max(tokens, float(hull.upper_bounds(rows, tree.size)[-1])), "concave hull", following)


def best_addition(tree: TokenTree, rows: Floats) -> tuple[int, int, float] | None:
    """The most valuable single node that could be added within len(rows) + 1 levels and the rows' ranks: (parent, rank, value)."""
    nodes = np.flatnonzero((tree.child_count < rows.shape[1]) & (tree.position_ids < len(rows)))
    if not nodes.size:
        return None
    offered = node_values(tree, rows)[nodes] * rows[tree.position_ids[nodes], tree.child_count[nodes]]
    best = nodes[np.argmax(offered)]
    return int(best), int(tree.child_count[best]) + 1, float(offered.max())
