"""The tree for this hardware: the most expected tokens per second of a step, every draft pass at its own width."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import Floats, StepTime, expected_tokens
from sequoia_plan.artifacts.plan import OPTIMAL
from sequoia_plan.planner.solving import best_first, hull
from sequoia_plan.planner.solving.branch_and_bound import search
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.frontier import LARGEST_BUDGET, Frontier
from sequoia_plan.planner.solving.relaxation import LEVEL, PATH, TREE, Costs, Ints, candidates

MOST_WORK = 150_000_000
"""Nodes, and steps of the cost curves, that the search may look at: about a second."""
CANDIDATES_PER_NODE = 4
"""The search looks at this many nodes for each that the largest tree may have; its bound covers all others by the largest of their values."""
MOST_REBUILT = 20_000
"""Nodes of trees of most tokens that may be rebuilt, where rows increase."""


@dataclass(frozen=True)
class Fastest:
    """The fastest tree found.

    Args:
        tree: the token tree.
        speed: its predicted tokens a second.
        bound: tokens a second that no tree within the limits exceeds.
    """

    tree: TokenTree
    speed: float
    bound: float

    @property
    def gap(self) -> float:
        """How much faster another tree could be at most, as a share of the bound."""
        return max(0.0, 1 - self.speed / self.bound)


def fastest(rows: Floats, budget: int, times: StepTime, most_work: int = MOST_WORK) -> Fastest:
    """The fastest tree of at most `budget` nodes and len(rows) + 1 levels, with as many children a node as the rows have ranks, at most.

    Where no row increases, and the rows favour the spine (`best_first.favours_spine`), the search ends with a proof unless it reaches its
    limit of work. Where rows increase, best-first growth goes by the closest rows that do not, while values and bounds are those of the rows
    themselves; the search may then end without a proof, and the trees of most tokens (the exact optimum of each size and depth) are tried as well.

    Args:
        rows: float64 [levels, classes, branching], p[level, class, rank].
    """
    most = min(budget, times.largest())
    times = replace(times, acceptance=rows if len(rows) else None)
    deepest = min(len(rows) + 1, most, times.drafting.deepest or most)  # n nodes have at most n levels
    best = Fastest(TokenTree.chain(1), 1 / times.plain(), 1 / times.plain())
    bound = best.bound
    for depth in _depths_to_search(deepest, times):
        found = _fastest_up_to(depth, np.ascontiguousarray(rows[: depth - 1]), most, times, best, most_work)
        best, bound = max(best, found, key=lambda each: each.speed), max(bound, found.bound)
    return Fastest(best.tree, best.speed, max(bound, best.speed))


def _depths_to_search(deepest: int, times: StepTime) -> list[int]:
    """Every tree is among those of at most one of these depths, deepest first, whose first draft pass takes as long as its own: most often
    the deepest is enough, and where the first pass is as wide as the tree is deep, it is one for each step of its curve."""
    found: dict[float, int] = {}
    for depth in range(2, deepest + 1):
        found[times.draft(times.drafting.first_pass(depth))] = depth
    return sorted((depth for seconds, depth in found.items() if np.isfinite(seconds)), reverse=True)


def _fastest_up_to(depth: int, rows: Floats, most: int, times: StepTime, known: Fastest, most_work: int) -> Fastest:
    """The fastest tree of at most `depth` levels, each with the first draft pass of that depth, or `known` if that is faster; a bound on those."""
    costs = costs_of(times, most, depth)
    room, non_increasing = CANDIDATES_PER_NODE * most + 256, best_first.is_non_increasing(rows)
    exact = non_increasing and best_first.favours_spine(rows) and costs.by_rejection == 0
    grows_best = exact and costs.order != PATH
    value = best_first.grow_freely(_by_value(rows), room)[1]
    floor = float(value[-1]) if value.size == room else 0.0
    order = rows if non_increasing else isotonic(rows)
    nodes = candidates(rows, floor, costs.by_visit, costs.by_rejection)
    parents, _, bound = search(nodes, order, rows, costs, floor, exact, grows_best, known.speed, most_work)
    best = known if parents.size == 0 else _timed(TokenTree(best_first.breadth_first(parents)), rows, times)
    if not grows_best and best.speed < bound * (1 - OPTIMAL) and most <= LARGEST_BUDGET["hull"]:
        best, bound = _with_most_tokens(best, bound, rows, most, times)
    return Fastest(best.tree, best.speed, max(bound, best.speed))


def _by_value(rows: Floats) -> Floats:
    """Rows whose growth finds the nodes of the endless tree by value: which rank has which probability matters only to the first child of a
    node on the spine, of another class than its siblings."""
    by_value = -np.sort(-rows, axis=2)
    if rows.shape[1] > 1:
        by_value[:, 0] = np.concatenate([rows[:, 0, :1], -np.sort(-rows[:, 0, 1:], axis=1)], axis=1)
    return by_value


def _timed(tree: TokenTree, rows: Floats, times: StepTime) -> Fastest:
    speed = expected_tokens(tree, rows) / times.step(tree)
    return Fastest(tree, speed, speed)


def _with_most_tokens(best: Fastest, bound: float, rows: Floats, most: int, times: StepTime) -> tuple[Fastest, float]:
    """Try the trees of most tokens of every size and depth, those that may be fastest first; a bound by them: most tokens / least time."""
    values = hull.frontier(rows, most)
    bounds = [tokens / times.steps_at_least(np.arange(1, len(tokens) + 1), depth) for depth, tokens in enumerate(values, 1)]
    where = [(depth, size) for depth, row in enumerate(bounds) for size in range(1, len(row) + 1)]
    flat, left = np.concatenate(bounds), MOST_REBUILT
    for index in np.argsort(-flat, kind="stable"):
        depth, size = where[index]
        left -= size
        if flat[index] <= best.speed or left < 0:
            break
        found = _timed(TokenTree(hull.parents(rows[:depth], size)), rows, times)
        best = max(best, found, key=lambda each: each.speed)
    return best, min(bound, float(flat.max()))


def costs_of(times: StepTime, most: int, depth: int) -> Costs:
    """The tables that the search reads, for trees of at most `most` nodes with the first draft pass of `depth` levels."""
    numbers = np.arange(most + 1)
    target, draft = times.targets(numbers), times.drafts(numbers) if times.drafting.by_level else np.zeros(most + 1)
    draft[0] = 0.0
    widest = int(np.flatnonzero(np.isfinite(draft))[-1])
    target_ends, draft_ends = _ends(target), _ends(draft[: widest + 1])
    constant = times.draft(times.drafting.first_pass(depth)) + times.latency.overhead
    by_round, order, by_visit, by_rejection = 0.0, TREE, 0.0, 0.0
    if (known := times.latency.verification) is not None:
        target = target + known.by_child * (numbers - 1)
        constant += known.base + known.by_parent
        if known.rounds == "walk":
            by_visit, by_rejection = known.by_parent, known.by_round
        else:
            by_round = known.by_round
            order = {"tree": TREE, "level": LEVEL, "path": PATH}[known.rounds] if by_round > 0 else TREE
            draft[1:] += known.by_parent * numbers[1:] + (by_round if order == LEVEL else 0.0)
            constant += by_round
    return Costs(target, target_ends, draft, draft_ends, by_round, order, constant, by_visit, by_rejection, times.least)


def _ends(cost: Floats) -> Ints:
    """The numbers from 1 on after which the cost rises, and the last one."""
    return np.append(np.flatnonzero(np.diff(cost[1:]) > 0) + 1, len(cost) - 1)


def fastest_by_the_paper(frontier: Frontier, times: StepTime) -> TokenTree:
    """max over (n, d) of F(n, d) / (t(n) + d c), c one draft pass of one token (Sequoia, arXiv 2402.12374, section 3.3); F / (t(n) + c) where
    one pass drafts all levels."""
    one, by_level = times.drafting.first_pass(1), times.drafting.by_level
    drafts = [d * times.draft(1) if by_level else times.draft(one) for d in range(1, len(frontier.values) + 1)]
    rates = [values / (times.targets(np.arange(1, len(values) + 1)) + c) for values, c in zip(frontier.values, drafts, strict=True)]
    depth = max(range(len(rates)), key=lambda d: rates[d].max())
    return frontier.tree(int(np.argmax(rates[depth])) + 1, depth + 1)
