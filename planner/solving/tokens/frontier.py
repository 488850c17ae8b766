"""Two exact solvers behind one function: best-first where it is exact, else the dynamic program."""

import math
from types import ModuleType
from typing import Any

from sequoia_plan.artifacts import Acceptance, ArgumentError, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.planner.solving.problem import Problem
from sequoia_plan.planner.solving.tokens import best_first, dynamic_programming

MAX_BUDGET = 1_000_000
MAX_RISING_BUDGET = 4_096
"""The largest budget where p increases with rank. It is the largest tree that is decoded with."""
MAX_DEPTH = 1_000
MAX_TABLE_NUMBERS = 2**27
"""Numbers that the tables of the dynamic program may have."""


def frontier(
    acceptance: Acceptance | Any, budget: int, depth: int, branching: int | None = None
) -> list[Floats]:
    """Compute the exact optimum for every size <= budget and every depth <= depth, in one call.

    Args:
        acceptance: the acceptance, also as `Acceptance.given` takes it.
        budget: the largest size, the root included.
        depth: the most levels, the root's included.
        branching: the most children of a node; the length of the vectors if None.

    Returns:
        values[d - 1][n - 1] is F of the best tree of exactly n nodes and at most d levels, float64.
        A row ends at the largest size that depth and branching allow, or at the budget.

    Raises:
        SequoiaPlanError: for impossible input.
    """
    check_limits(budget, depth, branching)
    problem = Problem(Acceptance.given(acceptance).at_depth(depth, branching), budget)
    return pick_solver(problem).frontier(problem.rates, budget)


def best_tree(problem: Problem) -> TokenTree:
    """Find the tree of exactly as many nodes as the budget with the most expected tokens."""
    rates, size = problem.rates, problem.budget
    solver = pick_solver(problem)
    ranks = rates.shape[2]
    largest_size = sum(ranks**level for level in range(len(rates) + 1))
    if largest_size < size:
        raise ArgumentError(
            f"no tree of {size} nodes has depth {len(rates) + 1} with {ranks} children a node, as "
            f"many as the acceptance has ranks and branching allows: the largest has "
            f"{largest_size}; lower the budget, or allow more"
        )
    return TokenTree.from_parents(solver.parents(rates, size))


def pick_solver(problem: Problem) -> ModuleType:
    """Return the module of the solver to use, `best_first` or `dynamic_programming`."""
    if problem.is_non_increasing:
        return best_first
    limit = max_rising_budget(problem.rates)
    if problem.budget > limit:
        raise ArgumentError(
            f"budget: found {problem.budget}, expected at most {limit} where acceptance increases "
            f"with rank (depth {len(problem.rates) + 1}, branching {problem.rates.shape[2]})"
        )
    return dynamic_programming


def most_tokens(problem: Problem, size: int) -> float:
    """Expected tokens that no tree of exactly so many nodes exceeds.

    if p never increases with rank: the sum of the highest values that so many nodes can have
    else: the optimum; of too many nodes to solve for, that sum as well, without a tree
    """
    rates = problem.rates
    if not problem.is_non_increasing and size <= max_rising_budget(rates):
        return float(dynamic_programming.most_tokens(rates, size)[-1])
    return math.fsum(best_first.highest_values(rates, size))


def max_rising_budget(rates: Floats) -> int:
    """Return the largest size that is solved for where p increases with rank.

    `rates` float64 [levels, node classes, ranks].
    """
    levels, classes, ranks = rates.shape
    return min(MAX_RISING_BUDGET, MAX_TABLE_NUMBERS // ((levels + 1) * classes * (ranks + 1)))


def check_limits(budget: int, depth: int, branching: int | None) -> None:
    """Refuse limits that cannot be solved for."""
    for name, value, limit in (("budget", budget, MAX_BUDGET), ("depth", depth, MAX_DEPTH)):
        if not 1 <= value <= limit:
            raise ArgumentError(f"{name}: found {value!r}, expected 1 to {limit}")
    if branching is not None and branching < 1:
        raise ArgumentError(f"branching: found {branching!r}, expected 1 or more")
