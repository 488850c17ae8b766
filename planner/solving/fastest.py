"""The tree for this hardware: the most expected tokens per second of a step, every draft pass at its own width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import Floats, StepTime, expected_tokens
from sequoia_plan.planner.solving import best_first
from sequoia_plan.planner.solving.branch_and_bound import MOST_WORK, Costs, Ints, offered, search
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.frontier import Frontier

OFFERED_PER_NODE = 4
"""The search prices this many nodes for each that the largest tree may have; the bound covers all others by their largest value."""
MOST_REBUILT = 64


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


def speed(tree: TokenTree, rows: Floats, times: StepTime) -> float:
    """Predicted tokens a second."""
    return (expected_tokens(tree, rows) if len(rows) else 1.0) / times.step(tree)


def fastest(rows: Floats, budget: int, times: StepTime) -> Fastest:
    """The fastest tree of at most `budget` nodes and len(rows) + 1 levels: of p[level, rank] at most as many ranks as rows have.

    Where no row increases, the search ends with a proof, unless it reaches its limit of work. Where rows increase, best-first growth goes
    by the closest rows that do not, and what it finds has its real value; the bound is of the real rows, too.
    """
    most = min(budget, times.largest())
    rows = rows[: max(0, min(most, times.drafting.deepest or most) - 1)]  # n nodes have at most n levels
    plain = Fastest(TokenTree.chain(1), 1 / times.plain(), 1 / times.plain())
    if len(rows) == 0 or not np.isfinite(times.draft(times.drafting.first)):
        return plain
    costs = costs_of(times, most)
    largest, room = -np.sort(-rows, axis=1), OFFERED_PER_NODE * most + 256
    value = best_first.grow_freely(largest, room)[1]
    floor = float(value[-1]) if value.size == room else 0.0
    order = isotonic(rows)
    exact = best_first.is_non_increasing(rows)
    found = search(offered(rows, floor), order, rows, costs, floor, exact, plain.speed, MOST_WORK)
    if found.parents.size == 0:
        return Fastest(plain.tree, plain.speed, found.bound)
    tree = TokenTree(best_first.breadth_first(found.parents))
    return Fastest(tree, speed(tree, rows, times), found.bound)


def costs_of(times: StepTime, most: int) -> Costs:
    """The tables that the search reads, for trees of at most `most` nodes."""
    numbers = np.arange(most + 1)
    known, overhead = times.latency.verification, times.latency.overhead
    target, draft = times.targets(numbers), times.drafts(numbers)
    if not times.drafting.by_level:
        draft = np.zeros(most + 1)
    draft[0] = 0.0
    widest = int(np.flatnonzero(np.isfinite(draft))[-1])
    target_ends, draft_ends = _ends(target), _ends(draft[: widest + 1])
    constant = times.draft(times.drafting.first) + overhead
    by_round, by_level = 0.0, False
    if known is not None:
        by_round, by_level = known.by_round, known.by_round > 0 and known.rounds == "level"
        target = target + known.by_child * (numbers - 1)
        draft[1:] += known.by_parent * numbers[1:] + (by_round if by_level else 0.0)
        constant += known.base + known.by_parent + by_round
    return Costs(target, target_ends, draft, draft_ends, by_round, by_level, constant)


def _ends(cost: Floats) -> Ints:
    """The numbers from 1 on after which the cost jumps, and the last one."""
    return np.append(np.flatnonzero(np.diff(cost[1:]) > 0) + 1, len(cost) - 1)


def fastest_by_the_paper(frontier: Frontier, times: StepTime) -> TokenTree:
    """max over (n, d) of F(n, d) / (t(n) + d c), c one draft pass of one token (Sequoia, arXiv 2402.12374, section 3.3)."""
    rates = [values / (times.targets(np.arange(1, len(values) + 1)) + d * times.draft(1)) for d, values in enumerate(frontier.values, 1)]
    depth = max(range(len(rates)), key=lambda d: rates[d].max())
    return frontier.tree(int(np.argmax(rates[depth])) + 1, depth + 1)
