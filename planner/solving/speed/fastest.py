"""The tree for this hardware: the most expected tokens a second, each draft pass at its width."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.speed.branch_and_bound import search
from sequoia_plan.planner.solving.speed.costs import NO_OTHER_STEPS, OtherSteps, cost_tables
from sequoia_plan.planner.solving.speed.relaxation import Problem, candidate_nodes
from sequoia_plan.planner.solving.tokens import best_first
from sequoia_plan.planner.solving.tokens.frontier import (
    best_tree,
    max_budget,
    pick_solver,
)

MAX_WORK = 150_000_000
"""Nodes and stairs of cost curves that the search may look at: about a second."""
CANDIDATES_PER_NODE = 4
"""Nodes that the search looks at for each node that the largest tree may have.

Its bound covers all others by the largest of their values.
"""
MAX_REBUILT_NODES = 20_000
"""Nodes of trees of most expected tokens that may be rebuilt, where rows increase."""


@dataclass(frozen=True)
class FastestTree:
    """The fastest tree of a search, in tokens a second, and the speed that no tree exceeds."""

    tree: TokenTree
    speed: float
    bound: float


Score = Callable[[TokenTree], FastestTree]
"""Gives the tree that a tree of the search stands for, with its speed, which is its bound, too."""


def fastest_tree(
    rows: Floats,
    budget: int,
    times: StepTime,
    max_work: int = MAX_WORK,
    other_steps: OtherSteps = NO_OTHER_STEPS,
    start: FastestTree | None = None,
    catch_up: Sequence[float] = (0.0,),
) -> FastestTree:
    """Find the fastest tree of at most `budget` nodes and len(rows) + 1 levels.

        best = no speculation
        for each depth whose first draft pass (and catching up) has a time of its own:
            best = max(best, branch and bound over all trees of at most this depth)
            if rows increase: best = max(best, the trees of most tokens of each size and depth)
        the bound is the largest bound of these searches

    If no row increases (p never increases with rank), and the rows favour the spine
    (`best_first.favours_spine`), the search ends with a proof unless it reaches its limit of work.
    If rows increase, its best-first searches order nodes by the closest rows that do not increase,
    while values and bounds are those of the rows themselves. The search may then end without a
    proof, and the trees of most tokens (the exact optimum of each size and depth) are tried as
    well.

    Args:
        rows: float64 [levels, classes, ranks], the acceptance, as in `Acceptance`.
        budget: the most nodes of a tree, the root included.
        times: the measured latencies.
        max_work: how many nodes and stairs of cost curves one search may look at.
        other_steps: tokens and seconds of steps with other trees, which count as well.
        start: a tree with its speed, which is returned if no tree is faster; None starts from no
            speculation.
        catch_up: how many seconds a step takes longer if the draft may not have read 0, 1, 2, ...
            of its tokens; the last one holds for more. It never decreases.
    """
    max_size = min(budget, times.largest_size())
    # A tree of n nodes has at most n levels.
    max_depth = min(len(rows) + 1, max_size, times.drafting.max_depth or max_size)
    score = partial(with_speed, rows=rows, times=times, other_steps=other_steps, catch_up=catch_up)
    best = max(filter(None, (start, score(TokenTree.chain(1)))), key=_speed)
    bound = best.bound
    for depth in _depths_to_search(max_depth, times, catch_up):
        candidate = fastest_up_to_depth(
            depth,
            np.ascontiguousarray(rows[: depth - 1]),
            max_size,
            times,
            best,
            max_work,
            later_steps(other_steps, catch_up, TokenTree.chain(depth), times),
            score,
        )
        bound = max(bound, candidate.bound)
        best = max(best, candidate, key=_speed)
    return FastestTree(best.tree, best.speed, max(bound, best.speed))


def _speed(candidate: FastestTree) -> float:
    """The key by which trees are compared; of equally fast ones the first is taken."""
    return candidate.speed


def _depths_to_search(max_depth: int, times: StepTime, catch_up: Sequence[float]) -> list[int]:
    """Return the deepest depth for each distinct time of the first draft pass, deepest first.

    The width of the first draft pass may depend on the depth that the draft is run for, and so may
    what the draft leaves unread: both times count.
    """
    depths = {}
    for depth in range(2, max_depth + 1):
        seconds = float(times.draft_seconds(times.drafting.first_pass_width(depth)))
        steps = later_steps(NO_OTHER_STEPS, catch_up, TokenTree.chain(depth), times)
        if np.isfinite(seconds):
            depths[seconds, steps] = depth
    return sorted(depths.values(), reverse=True)


def fastest_up_to_depth(
    depth: int,
    rows: Floats,
    max_size: int,
    times: StepTime,
    best: FastestTree,
    max_work: int,
    other_steps: OtherSteps,
    score: Score,
) -> FastestTree:
    """Find the fastest tree of at most `depth` levels with the first draft pass of that depth.

    `rows` float64 [depth - 1, classes, ranks].
    """
    is_non_increasing = best_first.is_non_increasing(rows)
    is_ordered = is_non_increasing and best_first.favours_spine(rows)
    max_candidates = CANDIDATES_PER_NODE * max_size + 256
    # These are the values of all nodes in order, whether or not the nodes form a tree.
    values = best_first.most_valuable_nodes(best_first.sort_by_value(rows), max_candidates)[1]
    # No node that is left out of the search has a larger value than `floor`.
    floor = 0.0 if values.size < max_candidates else float(values[-1])
    problem = Problem(
        rows=rows,
        smoothed_rows=rows if is_non_increasing else best_first.isotonic(rows),
        is_ordered=is_ordered,
        nodes=candidate_nodes(rows, floor),
        floor=floor,
        costs=cost_tables(times, max_size, depth, other_steps),
    )
    parents, bound = search(problem, best.speed, max_work)
    if parents.size:
        best = max(best, score(TokenTree.from_parents(parents)), key=_speed)
    if not is_ordered and best.speed < bound * (1 - OPTIMALITY_TOLERANCE):
        best, tokens_bound = _try_trees_of_most_tokens(
            best, rows, np.cumsum(values)[:max_size], times, other_steps, score
        )
        bound = min(bound, tokens_bound)
    return FastestTree(best.tree, best.speed, max(bound, best.speed))


def later_steps(
    other_steps: OtherSteps, catch_up: Sequence[float], tree: TokenTree, times: StepTime
) -> OtherSteps:
    """Other steps, with the seconds that the draft takes to catch up after a step with a tree."""
    seconds = catch_up[min(times.num_unread(tree), len(catch_up) - 1)]
    return other_steps._replace(seconds=other_steps.seconds + seconds)


def with_speed(
    tree: TokenTree,
    rows: Floats,
    times: StepTime,
    other_steps: OtherSteps = NO_OTHER_STEPS,
    catch_up: Sequence[float] = (0.0,),
) -> FastestTree:
    """Return a tree with its predicted speed, which is also its bound.

    `rows` float64 [levels, classes, ranks].
    """
    tokens = expected_tokens(tree, rows) if tree.size > 1 else 1.0
    seconds = times.step_seconds(tree) + later_steps(other_steps, catch_up, tree, times).seconds
    speed = (tokens + other_steps.tokens) / seconds
    return FastestTree(tree, speed, speed)


def _try_trees_of_most_tokens(
    best: FastestTree,
    rows: Floats,
    highest_tokens: Floats,
    times: StepTime,
    other_steps: OtherSteps,
    score: Score,
) -> tuple[FastestTree, float]:
    """Try the trees of most tokens of every size and depth, in the order of their speed bounds.

    Returns the fastest tree, and the speed that no tree but the fastest so far exceeds. `rows`
    float64 [levels, classes, ranks]; `highest_tokens` float64, no tree of 1, 2, ... nodes has more.
    """
    # Only sizes and depths that these tokens do not rule out need a solver.
    is_possible = np.array(
        [
            speed_bounds(highest_tokens, depth, times, other_steps) > best.speed
            for depth in range(1, len(rows) + 2)
        ]
    )
    if not is_possible.any():
        return best, best.speed
    max_levels, max_size = (int(indices.max()) for indices in np.nonzero(is_possible))
    rows, max_size = rows[:max_levels], max_size + 1
    if max_size > max_budget(rows):
        return best, np.inf
    shapes, bounds = [], []
    for depth, tokens in enumerate(pick_solver(rows, max_size).frontier(rows, max_size), 1):
        bounds.append(speed_bounds(tokens, depth, times, other_steps))
        shapes += [(depth, size) for size in range(1, len(tokens) + 1)]
    all_bounds = np.concatenate(bounds)
    nodes_left = MAX_REBUILT_NODES
    for i in np.argsort(-all_bounds, kind="stable"):
        depth, size = shapes[i]
        nodes_left -= size
        if all_bounds[i] <= best.speed or nodes_left < 0:
            break
        best = max(best, score(best_tree(rows[: depth - 1], size)), key=_speed)
    return best, float(all_bounds.max())


def speed_bounds(
    tokens: Floats, least_depth: int, times: StepTime, other_steps: OtherSteps
) -> Floats:
    """Tokens a second of 1, 2, ... nodes with these expected tokens, in the least time of a step.

    `tokens` float64 [sizes]; returns float64 [sizes].
    """
    seconds = times.min_step_seconds(np.arange(1, len(tokens) + 1), least_depth)
    bounds: Floats = (tokens + other_steps.tokens) / (seconds + other_steps.seconds)
    return bounds


def quick_bound(
    rows: Floats, least_depth: int, max_size: int, times: StepTime, other_steps: OtherSteps
) -> float:
    """Tokens a second that no tree of `least_depth` to len(rows) + 1 levels exceeds.

    The most valuable nodes, whether or not they form a tree, are divided by the least time. `rows`
    float64 [levels, classes, ranks].
    """
    values = best_first.most_valuable_nodes(best_first.sort_by_value(rows), max_size)[1]
    return float(speed_bounds(np.cumsum(values), least_depth, times, other_steps).max())
