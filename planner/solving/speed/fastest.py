"""The tree for this hardware: the most expected tokens a second, each draft pass at its width."""

from collections.abc import Callable
from operator import attrgetter

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE
from sequoia_plan.planner.solving.problem import FastestTree, Problem, SpeedProblem, proven_bound
from sequoia_plan.planner.solving.speed.branch_and_bound import find_fastest
from sequoia_plan.planner.solving.speed.costs import cost_tables
from sequoia_plan.planner.solving.speed.relaxation import Search, candidate_nodes
from sequoia_plan.planner.solving.tokens import best_first
from sequoia_plan.planner.solving.tokens.frontier import best_tree, max_rising_budget, pick_solver

CANDIDATES_PER_NODE = 4
"""Nodes that the search looks at for each node that the largest tree may have.

Its bound covers all others by the largest of their values.
"""
MAX_REBUILT_NODES = 20_000
"""Nodes of trees of most expected tokens that may be rebuilt, where rates increase."""

Evaluate = Callable[[TokenTree], FastestTree]
"""Gives the tree that a tree of the search stands for, with its speed."""
by_speed = attrgetter("speed")
"""The key by which trees are compared; of equally fast ones `max` takes the first."""


def fastest_tree(problem: SpeedProblem, start: FastestTree | None = None) -> FastestTree:
    """Find the fastest tree of at most `budget` nodes and len(rates) + 1 levels.

        best = no speculation
        for each depth whose first draft pass (and catching up) has a time of its own:
            best = max(best, branch and bound over all trees of at most this depth)
            if rates increase: best = max(best, the trees of most tokens of each size and depth)
        the bound is the largest bound of these searches

    If the rates are ordered (`SpeedProblem.is_ordered`), the search ends with a proof unless it
    reaches its limit of work. If rates increase with rank, its best-first searches order nodes by
    the closest rates that do not, while values and bounds are those of the rates themselves. The
    search may then end without a proof, and the trees of most tokens (the exact optimum of each
    size and depth) are tried as well.

    Args:
        problem: acceptance, limits and step times.
        start: a tree with its speed, which is returned if no tree is faster; None starts from no
            speculation.
    """
    best = max(filter(None, (start, problem.evaluate(TokenTree.chain(1)))), key=by_speed)
    bound = best.bound
    for depth in _depths_to_search(problem):
        best, bound_up_to_depth = search(problem.up_to(depth), best, problem.evaluate)
        bound = max(bound, bound_up_to_depth)
    return best._replace(bound=proven_bound(best.speed, bound))


def _depths_to_search(problem: SpeedProblem) -> list[int]:
    """Return the deepest depth for each distinct time of the first draft pass, deepest first.

    What the draft leaves unread may depend on the depth as well: both times count.
    """
    depths = {
        (seconds, problem.seconds_beside(TokenTree.chain(depth))): depth
        for depth, seconds in problem.first_pass_seconds().items()
    }
    return sorted(depths.values(), reverse=True)


def search(
    problem: SpeedProblem, best: FastestTree, evaluate: Evaluate
) -> tuple[FastestTree, float]:
    """Find the fastest tree whose first draft pass is that of the deepest trees of a problem.

    Returns the fastest tree, and the speed that none of these trees and `best` exceeds.
    """
    start, rates, max_size = best, problem.rates, problem.max_size
    max_candidates = CANDIDATES_PER_NODE * max_size + 256
    values = best_first.highest_values(rates, max_candidates)
    # No node that is left out of the search has a larger value than `floor`.
    floor = 0.0 if values.size < max_candidates else float(values[-1])
    parents, bound = find_fastest(
        Search(
            rates=rates,
            smoothed_rates=rates if problem.is_non_increasing else best_first.isotonic(rates),
            is_ordered=problem.is_ordered,
            nodes=candidate_nodes(rates, floor),
            floor=floor,
            costs=cost_tables(problem),
        ),
        start.speed,
        problem.max_work,
    )
    if parents.size:
        best = max(best, evaluate(TokenTree.from_parents(parents)), key=by_speed)
    if not problem.is_ordered and best.speed < bound * (1 - OPTIMALITY_TOLERANCE):
        tokens = np.cumsum(values)[:max_size]
        best, tokens_bound = _try_trees_of_most_tokens(problem, best, tokens, evaluate)
        bound = min(bound, tokens_bound)
    return best, max(bound, start.speed)


def _try_trees_of_most_tokens(
    problem: SpeedProblem, best: FastestTree, highest_tokens: Floats, evaluate: Evaluate
) -> tuple[FastestTree, float]:
    """Try the trees of most tokens of every size and depth, in the order of their speed bounds.

    Returns the fastest tree, and the speed that neither `best` nor any other tree exceeds.
    `highest_tokens` float64, no tree of 1, 2, ... nodes has more.
    """
    rates, ruled_out_above = problem.rates, best.speed
    # Only sizes and depths that these tokens do not rule out need a solver.
    is_possible = np.array(
        [
            problem.speed_bounds(highest_tokens, depth) > best.speed
            for depth in range(1, len(rates) + 2)
        ]
    )
    if not is_possible.any():
        return best, best.speed
    max_levels, max_index = (int(indices.max()) for indices in np.nonzero(is_possible))
    possible = Problem(rates[:max_levels], max_index + 1)
    if not possible.is_non_increasing and possible.budget > max_rising_budget(possible.rates):
        return best, np.inf
    shapes, bounds = [], []
    optima = pick_solver(possible).frontier(possible.rates, possible.budget)
    for depth, tokens in enumerate(optima, 1):
        bounds.append(problem.speed_bounds(tokens, depth))
        shapes += [(depth, size) for size in range(1, len(tokens) + 1)]
    all_bounds = np.concatenate(bounds)
    nodes_left = MAX_REBUILT_NODES
    for i in np.argsort(-all_bounds, kind="stable"):
        depth, size = shapes[i]
        nodes_left -= size
        if all_bounds[i] <= best.speed or nodes_left < 0:  # the bound holds for those left out
            break
        best = max(best, evaluate(best_tree(Problem(rates[: depth - 1], size))), key=by_speed)
    return best, max(ruled_out_above, float(all_bounds.max()))
