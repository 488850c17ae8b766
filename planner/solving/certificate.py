"""Why a tree is the best: its expected tokens from the tree alone, and a bound for its size."""

import math
from typing import Any, NamedTuple

from sequoia_plan.artifacts import Acceptance, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.planner.solving.problem import Problem
from sequoia_plan.planner.solving.tokens import best_first, dynamic_programming
from sequoia_plan.planner.solving.tokens.frontier import max_rising_budget


class Certificate(NamedTuple):
    """What is proven of a tree.

    Args:
        expected_tokens: F, computed from the tree alone.
        upper_bound: no tree of this size within these limits has more expected tokens. It is the
            optimum, except for a tree of more nodes than the dynamic program solves for, where rows
            increase.
    """

    expected_tokens: float
    upper_bound: float


def check(
    tree: TokenTree,
    acceptance: Acceptance | Any,
    depth: int | None = None,
    branching: int | None = None,
) -> Certificate:
    """Compute a tree's expected tokens, and prove a bound for all trees of its size.

    Args:
        tree: the token tree.
        acceptance: the acceptance, also as `Acceptance.given` takes it.
        depth: the most levels that the tree was solved for; its own depth if None.
        branching: the most children of a node that it was solved for; the length of the vectors if
            None.

    Returns:
        The expected tokens and the bound.

    Raises:
        SequoiaPlanError: if the tree exceeds the limits.
    """
    rows = Acceptance.given(acceptance).at_depth(depth or tree.depth, branching)
    limits = (("depth", tree.depth, len(rows) + 1), ("branching", tree.branching, rows.shape[2]))
    for name, value, limit in limits:
        if value > limit:
            raise SequoiaPlanError(f"token tree: {name} {value}, expected at most {limit}")
    tokens = expected_tokens(tree, rows)
    return Certificate(tokens, max(tokens, most_tokens(Problem(rows, tree.size), tree.size)))


def most_tokens(problem: Problem, size: int) -> float:
    """Expected tokens that no tree of exactly so many nodes exceeds.

    if p never increases with rank: the sum of the highest values that so many nodes can have
    else: the optimum; of too many nodes to solve for, that sum as well, without a tree
    """
    rows = problem.rows
    if not problem.is_non_increasing and size <= max_rising_budget(rows):
        return float(dynamic_programming.most_tokens(rows, size)[-1])
    return math.fsum(best_first.highest_values(rows, size))
