"""Three exact solvers behind one function: it picks the fastest that is exact for the given acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.artifacts.cost import Acceptance, Floats, acceptance_rows
from sequoia_plan.artifacts.plan import check_rows
from sequoia_plan.planner.solving import best_first, dynamic_programming, hull

SOLVERS = {"best-first": best_first, "hull": hull, "dp": dynamic_programming}
LARGEST_BUDGET = {"best-first": 1_000_000, "hull": 65_536, "dp": 4_096}
LARGEST_DEPTH = 1_000
LARGEST_TABLE = 2**27
"""Numbers a solver may hold: what it needs is budget x (depth + branching), for the dynamic program budget x depth x branching."""


@dataclass(frozen=True)
class Frontier:
    """The optimum of every size and depth.

    Args:
        values: values[d - 1][n - 1] is F of the best tree of exactly n nodes and at most d levels, float64; a row ends at the
            largest size that depth and branching allow, or at the budget.
        rows: float64 [depth - 1, classes, branching], p[level][class][rank].
        solver: who found it.
    """

    values: tuple[Floats, ...]
    rows: Floats
    solver: str

    def tree(self, size: int, depth: int) -> TokenTree:
        """A tree that attains values[depth - 1][size - 1].

        Raises:
            ArgumentError: if there is none.
        """
        if not 1 <= depth <= len(self.values):
            raise ArgumentError(f"depth: found {depth}, expected 1 to {len(self.values)}, what the frontier was solved for")
        return best_tree(self.rows[: depth - 1], size, self.solver)


def frontier(acceptance: Acceptance, budget: int, depth: int, branching: int | None = None, solver: str | None = None) -> Frontier:
    """The exact optimum for every size <= budget and every depth <= depth, in one call.

    Args:
        acceptance: p[1..B], or one such row per level (the last holds for all deeper levels), or one for each class of parents per level.
        solver: "best-first", "hull" or "dp"; None picks best-first where it is exact, else hull.

    Raises:
        SequoiaPlanError: for impossible input.
    """
    check_input(acceptance, budget, depth, branching)
    rows = acceptance_rows(acceptance, depth, branching)
    name = pick(solver, rows, budget)
    return Frontier(tuple(SOLVERS[name].frontier(rows, budget)), rows, name)


def best_tree(rows: Floats, size: int, solver: str) -> TokenTree:
    """The tree of exactly `size` nodes with the most expected tokens.

    Raises:
        ArgumentError: if no tree of that size fits the depth and branching; names the largest that does.
    """
    reachable = _largest_reachable(rows, size)
    if reachable < size:
        raise ArgumentError(
            f"no tree of {size} nodes has depth {len(rows) + 1} and branching {rows.shape[2]}: the largest has {reachable}; "
            "lower the budget, or allow more depth or branching"
        )
    found = SOLVERS[solver].parents(rows, size)
    return TokenTree.from_parents(found) if isinstance(found, list) else TokenTree(found)


def pick(solver: str | None, rows: Floats, size: int) -> str:
    """The solver to use.

    Raises:
        ArgumentError: if the one asked for is unknown, not exact for these rows, or if the problem is too large for it.
    """
    exact = best_first.is_non_increasing(rows)
    name = solver or ("best-first" if exact else "hull")
    if name not in SOLVERS:
        raise ArgumentError(f"solver: found {name!r}, expected {', '.join(SOLVERS)}")
    if name == "best-first" and not exact:
        raise ArgumentError("solver best-first is exact only where acceptance never grows with rank; use hull")
    if size > LARGEST_BUDGET[name]:
        raise ArgumentError(f"budget: found {size}, expected at most {LARGEST_BUDGET[name]} for the solver {name}")
    depth, classes, branching = rows.shape
    held = {"best-first": size, "hull": size * classes * (depth + branching), "dp": size * classes * (depth + 1) * (branching + 1)}[name]
    if held > LARGEST_TABLE:
        raise ArgumentError(f"budget {size} with depth {depth + 1} and branching {branching} needs too much memory for the solver {name}: lower one of them")
    return name


def check_input(acceptance: Any, budget: int, depth: int, branching: int | None) -> None:
    """Refuse what cannot be solved.

    Raises:
        SequoiaPlanError: with one line that says why.
    """
    for name, value in (("budget", budget), ("depth", depth), ("branching", branching)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
            raise ArgumentError(f"{name}: found {value!r}, expected a whole number >= 1")
    if budget > max(LARGEST_BUDGET.values()):
        raise ArgumentError(f"budget: found {budget}, expected at most {max(LARGEST_BUDGET.values())}")
    if depth > LARGEST_DEPTH:
        raise ArgumentError(f"depth: found {depth}, expected at most {LARGEST_DEPTH}")
    if depth == 1 and budget > 1:
        raise ArgumentError(f"depth 1 is the root alone and cannot hold a budget of {budget}: allow a depth of 2 or more, or set the budget to 1")
    check_rows(acceptance, "acceptance")


def _largest_reachable(rows: Floats, cap: int) -> int:
    """Nodes of the complete tree, counted up to `cap`."""
    nodes = level = 1
    for _ in range(len(rows)):
        level *= rows.shape[2]
        nodes += level
        if nodes >= cap:
            return cap
    return nodes
