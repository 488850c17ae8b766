"""The tree for this hardware: the most expected tokens a second, each draft pass at its width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving import best_first, concave_envelope
from sequoia_plan.planner.solving.branch_and_bound import search
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.frontier import MAX_BUDGET
from sequoia_plan.planner.solving.relaxation import (
    PATH,
    TREE,
    Costs,
    Ints,
    candidate_nodes,
)

MAX_WORK = 150_000_000
"""Nodes and stairs of cost curves that the search may look at: about a second."""
CANDIDATES_PER_NODE = 4
"""Nodes that the search looks at for each node that the largest tree may have.

Its bound covers all others by the largest of their values.
"""
MAX_REBUILT_NODES = 20_000
"""Nodes of trees of most expected tokens that may be rebuilt, where rows increase."""


class OtherSteps(NamedTuple):
    """Steps with other trees that come with each step of the tree that is solved for.

    The speed of a tree is then (F + tokens) / (step + seconds).
    """

    tokens: float = 0.0
    seconds: float = 0.0


NO_OTHER_STEPS = OtherSteps()


@dataclass(frozen=True)
class FastestTree:
    """The fastest tree that was found."""

    tree: TokenTree
    speed: float
    bound: float

    @property
    def gap(self) -> float:
        """How much faster another tree could be at most, as a share of the bound."""
        return max(0.0, 1 - self.speed / self.bound)


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
        rows: float64 [levels, classes, branching], the probability that a node's child of each
            rank is accepted, by the node's level and class (0: on the spine, that is the root,
            its first child, that node's first child, ...; 1: off it). A node has at most
            `branching` children.
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

    def score(tree: TokenTree) -> FastestTree:
        """The tree with its speed."""
        return with_speed(tree, rows, times, later_steps(other_steps, catch_up, tree, times))

    best = max(filter(None, (start, score(TokenTree.chain(1)))), key=lambda choice: choice.speed)
    bound = best.bound
    for depth in _depths_to_search(max_depth, times, catch_up):
        rows_of_depth = np.ascontiguousarray(rows[: depth - 1])
        candidate = fastest_up_to_depth(
            depth,
            rows_of_depth,
            max_size,
            times,
            best,
            max_work,
            later_steps(other_steps, catch_up, TokenTree.chain(depth), times),
            score,
        )
        bound = max(bound, candidate.bound)
        best = max(best, candidate, key=lambda choice: choice.speed)
    return FastestTree(best.tree, best.speed, max(bound, best.speed))


def _depths_to_search(max_depth: int, times: StepTime, catch_up: Sequence[float]) -> list[int]:
    """Return the deepest depth for each distinct time of the first draft pass, deepest first.

    The width of the first draft pass may depend on the depth that the draft is run for, and so may
    what the draft leaves unread: both times count.
    """
    depth_of_seconds: dict[tuple[float, float], int] = {}
    for depth in range(2, max_depth + 1):
        first_pass_seconds = times.draft_seconds(times.drafting.first_pass_width(depth))
        num_unread = times.drafting.num_unread(depth, depth - 1)
        later_seconds = catch_up[min(num_unread, len(catch_up) - 1)]
        depth_of_seconds[first_pass_seconds, later_seconds] = depth
    measured_depths = [
        depth for (seconds, _), depth in depth_of_seconds.items() if np.isfinite(seconds)
    ]
    return sorted(measured_depths, reverse=True)


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

    `rows` float64 [depth - 1, classes, branching].
    """
    costs = _with_other_steps(cost_tables(times, max_size, depth), other_steps)
    is_non_increasing = best_first.is_non_increasing(rows)
    # Whether no later sibling adds more to a tree than an earlier one.
    siblings_never_add_more = (
        is_non_increasing and best_first.favours_spine(rows) and costs.by_rejection == 0
    )
    best_first_is_exact = siblings_never_add_more and costs.round_order != PATH
    max_candidates = CANDIDATES_PER_NODE * max_size + 256
    sorted_rows = sort_by_value(rows)  # these give the values of all nodes in order
    candidate_values = best_first.most_valuable_nodes(sorted_rows, max_candidates)[1]
    has_all_nodes = candidate_values.size < max_candidates
    # No node that is left out of the search has a larger value than `floor`.
    floor = 0.0 if has_all_nodes else float(candidate_values[-1])
    parents, _, bound = search(
        candidate_nodes(rows, floor, costs.by_visit, costs.by_rejection),
        rows if is_non_increasing else isotonic(rows),
        rows,
        costs,
        floor,
        siblings_never_add_more,
        best_first_is_exact,
        best.speed,
        max_work,
    )
    if parents.size:
        candidate = score(TokenTree(best_first.number_breadth_first(parents)))
        best = max(best, candidate, key=lambda choice: choice.speed)
    is_proven = best_first_is_exact or best.speed >= bound * (1 - OPTIMALITY_TOLERANCE)
    if not is_proven and max_size <= MAX_BUDGET["hull"]:
        best, bound = _try_trees_of_most_tokens(
            best, bound, rows, max_size, times, other_steps, score
        )
    return FastestTree(best.tree, best.speed, max(bound, best.speed))


def sort_by_value(rows: Floats) -> Floats:
    """Sort each row so that best-first search takes all possible nodes by value.

    A node's value is the probability that it is accepted: the product of p along its path. Which
    rank has which probability changes no value of its descendants, except for the first child of a
    node on the spine, which is of another class than its siblings. It stays in its place. `rows`
    float64 [levels, classes, branching].
    """
    sorted_rows = -np.sort(-rows, axis=2)
    if rows.shape[1] > 1:
        first_children, siblings = rows[:, 0, :1], -np.sort(-rows[:, 0, 1:], axis=1)
        sorted_rows[:, 0] = np.concatenate([first_children, siblings], axis=1)
    return sorted_rows


def later_steps(
    other_steps: OtherSteps, catch_up: Sequence[float], tree: TokenTree, times: StepTime
) -> OtherSteps:
    """Other steps, with the seconds that the draft takes to catch up after a step with a tree."""
    seconds = catch_up[min(times.num_unread(tree), len(catch_up) - 1)]
    return other_steps._replace(seconds=other_steps.seconds + seconds)


def with_speed(
    tree: TokenTree, rows: Floats, times: StepTime, other_steps: OtherSteps = NO_OTHER_STEPS
) -> FastestTree:
    """Return a tree with its predicted speed, which is also its bound.

    `rows` float64 [levels, classes, branching].
    """
    tokens = expected_tokens(tree, rows) if tree.size > 1 else 1.0
    seconds = times.step_seconds(tree) + other_steps.seconds
    speed = (tokens + other_steps.tokens) / seconds
    return FastestTree(tree, speed, speed)


def _try_trees_of_most_tokens(
    best: FastestTree,
    bound: float,
    rows: Floats,
    max_size: int,
    times: StepTime,
    other_steps: OtherSteps,
    score: Score,
) -> tuple[FastestTree, float]:
    """Try the trees of most tokens of every size and depth, in the order of their speed bounds.

    No tree of a size and depth is faster than the most tokens divided by the least time. `rows`
    float64 [levels, classes, branching].
    """
    shapes, speed_bounds = [], []
    for depth, tokens in enumerate(concave_envelope.frontier(rows, max_size), 1):
        sizes = np.arange(1, len(tokens) + 1)
        min_seconds = times.min_step_seconds(sizes, depth) + other_steps.seconds
        speed_bounds.append((tokens + other_steps.tokens) / min_seconds)
        shapes += [(depth, size) for size in range(1, len(tokens) + 1)]
    bounds = np.concatenate(speed_bounds)
    nodes_left = MAX_REBUILT_NODES
    for i in np.argsort(-bounds, kind="stable"):
        depth, size = shapes[i]
        nodes_left -= size
        if bounds[i] <= best.speed or nodes_left < 0:
            break
        tree = TokenTree(concave_envelope.parents(rows[: depth - 1], size))
        best = max(best, score(tree), key=lambda choice: choice.speed)
    return best, min(bound, float(bounds.max()))


def cost_tables(times: StepTime, max_size: int, depth: int) -> Costs:
    """Return the seconds of a step, in the tables that the search reads.

    The ends of a curve's stairs are the largest
    numbers of nodes that cost the same time.
    """
    numbers = np.arange(max_size + 1)
    target = times.target_seconds(numbers)
    if times.drafting.drafts_by_level:
        draft = times.draft_seconds(numbers)
    else:
        draft = np.zeros(max_size + 1)
    draft[0] = 0.0
    widest = int(np.flatnonzero(np.isfinite(draft))[-1])  # beyond it nothing was measured: inf
    target_stair_ends = _stair_ends(target)
    draft_stair_ends = _stair_ends(draft[: widest + 1])
    first_pass_width = times.drafting.first_pass_width(depth)
    constant = times.draft_seconds(first_pass_width) + times.latency.overhead
    if verification := times.latency.verification:
        target = target + verification.by_node * (numbers - 1)
        constant += verification.base
    return Costs(
        target,
        target_stair_ends,
        draft,
        draft_stair_ends,
        by_round=0.0,
        round_order=TREE,
        constant=constant,
        by_visit=0.0,
        by_rejection=0.0,
        min_step_seconds=times.stream_seconds,
        other_tokens=0.0,
    )


def _with_other_steps(costs: Costs, other_steps: OtherSteps) -> Costs:
    """Return the costs of a step together with steps with other trees.

    The longer of two times, each with the same seconds added, is the longer one with these added.
    """
    return costs._replace(
        constant=costs.constant + other_steps.seconds,
        min_step_seconds=costs.min_step_seconds + other_steps.seconds,
        other_tokens=other_steps.tokens,
    )


def _stair_ends(cost: Floats) -> Ints:
    """Return the numbers of nodes, from 1 on, after which the cost rises, and the last number."""
    return np.append(np.flatnonzero(np.diff(cost[1:]) > 0) + 1, len(cost) - 1)
