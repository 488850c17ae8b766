"""Three exact solvers behind one function, which picks the fastest exact one for the acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Acceptance, ArgumentError, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.planner.solving import best_first, concave_envelope, dynamic_programming

SOLVERS = {"best-first": best_first, "hull": concave_envelope, "dp": dynamic_programming}
"""Each solver has `frontier(rows, size)` and `parents(rows, size)`."""
MAX_BUDGET = {"best-first": 1_000_000, "hull": 65_536, "dp": 4_096}
MAX_DEPTH = 1_000
MAX_TABLE_NUMBERS = 2**27
"""Numbers that a solver's tables may have.

They have about budget x (depth + branching) numbers, or budget x depth x branching for "dp".
"""


@dataclass(frozen=True)
class Frontier:
    """The optimum of every size and depth.

    Args:
        values: values[d - 1][n - 1] is F of the best tree of exactly n nodes and at most d levels,
            float64. A row ends at the largest size that depth and branching allow, or at the
            budget.
        rows: float64 [depth - 1, classes, branching], the probability that a node's child of each
            rank is accepted if the node is, by the node's level and class (0: on the spine, that is
            the root, its first child, that node's first child, ...; 1: off it).
        solver: the name of the solver that computed the values.
    """

    values: tuple[Floats, ...]
    rows: Floats
    solver: str

    def tree(self, size: int, depth: int) -> TokenTree:
        """Return a tree that attains values[depth - 1][size - 1].

        Raises:
            ArgumentError: if there is none.
        """
        if not 1 <= depth <= len(self.values):
            raise ArgumentError(
                f"depth: found {depth}, expected 1 to {len(self.values)}, "
                "what the frontier was solved for"
            )
        return best_tree(self.rows[: depth - 1], size, self.solver)


def frontier(
    acceptance: Acceptance | Any,
    budget: int,
    depth: int,
    branching: int | None = None,
    solver: str | None = None,
) -> Frontier:
    """Compute the exact optimum for every size <= budget and every depth <= depth, in one call.

    Args:
        acceptance: the acceptance, also as `Acceptance.given` takes it.
        budget: the largest size, the root included.
        depth: the most levels, the root's included.
        branching: the most children of a node; the length of the vectors if None.
        solver: "best-first", "hull" or "dp". None picks "best-first" where it is exact (p never
            increases with rank), else "hull".

    Raises:
        SequoiaPlanError: for impossible input.
    """
    check_limits(budget, depth, branching)
    rows = Acceptance.given(acceptance).at_depth(depth, branching)
    name = pick_solver(solver, rows, budget)
    return Frontier(tuple(SOLVERS[name].frontier(rows, budget)), rows, name)


def best_tree(rows: Floats, size: int, solver: str | None = None) -> TokenTree:
    """Find the tree of exactly `size` nodes with the most expected tokens.

    `rows` float64 [levels, classes, branching].
    """
    largest_size = _largest_tree_size(rows, size)
    if largest_size < size:
        raise ArgumentError(
            f"no tree of {size} nodes has depth {len(rows) + 1} and branching {rows.shape[2]}: "
            f"the largest has {largest_size}; lower the budget, or allow more depth or branching"
        )
    parents = SOLVERS[pick_solver(solver, rows, size)].parents(rows, size)
    # A list is in preorder and has to be numbered anew; an array is breadth-first already.
    return TokenTree.from_parents(parents) if isinstance(parents, list) else TokenTree(parents)


def pick_solver(solver: str | None, rows: Floats, size: int) -> str:
    """Return the name of the solver to use.

    `rows` float64 [levels, classes, branching].
    """
    is_best_first_exact = best_first.is_non_increasing(rows)
    name = solver or ("best-first" if is_best_first_exact else "hull")
    if name not in SOLVERS:
        raise ArgumentError(f"solver: found {name!r}, expected {', '.join(SOLVERS)}")
    if name == "best-first" and not is_best_first_exact:
        raise ArgumentError(
            "solver best-first is exact only where acceptance never grows with rank; use hull"
        )
    if size > MAX_BUDGET[name]:
        raise ArgumentError(
            f"budget: found {size}, expected at most {MAX_BUDGET[name]} for the solver {name}"
        )
    levels, classes, branching = rows.shape
    table_numbers = {
        "best-first": size,
        "hull": size * classes * (levels + branching),
        "dp": size * classes * (levels + 1) * (branching + 1),
    }
    if table_numbers[name] > MAX_TABLE_NUMBERS:
        raise ArgumentError(
            f"budget {size} with depth {levels + 1} and branching {branching} "
            f"needs too much memory for the solver {name}: lower one of them"
        )
    return name


def check_limits(budget: int, depth: int, branching: int | None) -> None:
    """Refuse limits that cannot be solved for."""
    for name, value in (("budget", budget), ("depth", depth), ("branching", branching)):
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if value is not None and (not is_integer or value < 1):
            raise ArgumentError(f"{name}: found {value!r}, expected a whole number >= 1")
    if budget > max(MAX_BUDGET.values()):
        raise ArgumentError(f"budget: found {budget}, expected at most {max(MAX_BUDGET.values())}")
    if depth > MAX_DEPTH:
        raise ArgumentError(f"depth: found {depth}, expected at most {MAX_DEPTH}")
    if depth == 1 and budget > 1:
        raise ArgumentError(
            f"depth 1 is the root alone and cannot hold a budget of {budget}: "
            "allow a depth of 2 or more, or set the budget to 1"
        )


def _largest_tree_size(rows: Floats, limit: int) -> int:
    """Count the nodes of the complete tree, in which each node has all children; at most `limit`.

    `rows` float64 [levels, classes, branching].
    """
    nodes = nodes_on_level = 1
    for _ in range(len(rows)):
        nodes_on_level *= rows.shape[2]
        nodes += nodes_on_level
        if nodes >= limit:
            return limit
    return nodes
