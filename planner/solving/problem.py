"""What a tree is solved for: made once from a profile, and handed down to every solver."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.tokens import best_first

MAX_WORK = 150_000_000
"""Nodes and stairs of cost curves that a search may look at: about a second."""


class FastestTree(NamedTuple):
    """A tree, its tokens a second, and the speed that no tree of its problem exceeds."""

    tree: TokenTree
    speed: float
    bound: float


@dataclass(frozen=True, eq=False)
class Problem:
    """The tree of most expected tokens is asked for.

    Args:
        rates: float64 [depth - 1, node classes, branching], the rates of each level that may have
            children, as in `Acceptance`.
        budget: the most nodes of a tree, the root included.
    """

    rates: Floats
    budget: int

    @cached_property
    def is_non_increasing(self) -> bool:
        """Whether p never increases with rank, so that best-first search is exact."""
        return best_first.is_non_increasing(self.rates)


@dataclass(frozen=True, eq=False)
class SpeedProblem(Problem):
    """The fastest tree is asked for, alone or beside steps with other trees.

    The speed of a tree is (F + other_tokens) / (step + other_seconds + catching up).

    Args:
        times: the step times.
        other_tokens: expected tokens of the steps with other trees that come with each of its own.
        other_seconds: seconds of these steps.
        catch_up: how many seconds a step takes longer if the draft may not have read 0, 1, 2, ...
            of its tokens; the last one holds for more. It never decreases.
        max_work: how many nodes and stairs of cost curves one search may look at.
    """

    times: StepTime
    other_tokens: float = 0.0
    other_seconds: float = 0.0
    catch_up: tuple[float, ...] = (0.0,)
    max_work: int = MAX_WORK

    @property
    def max_size(self) -> int:
        """The most nodes of a tree that is within the budget and has a known step time."""
        return min(self.budget, self.times.largest_size())

    @cached_property
    def is_ordered(self) -> bool:
        """Whether no sibling adds more to a tree than an earlier one, so that searches prove."""
        return self.is_non_increasing and best_first.favours_spine(self.rates)

    def step_seconds(self, tree: TokenTree) -> float:
        """Seconds of a step with a tree, of the other steps, and of catching up after it."""
        return self.times.step_seconds(tree) + self.seconds_beside(tree)

    def seconds_beside(self, tree: TokenTree) -> float:
        """Seconds of the other steps, and of catching up after a step with a tree."""
        num_unread = min(self.times.num_unread(tree), len(self.catch_up) - 1)
        return self.other_seconds + self.catch_up[num_unread]

    def first_pass_seconds(self) -> dict[int, float]:
        """Seconds of the first draft pass by the levels of the tree, where they are measured.

        The width of that pass may depend on the depth that the draft is run for.
        """
        drafting, max_size = self.times.drafting, self.max_size
        # A tree of n nodes has at most n levels.
        max_depth = min(len(self.rates) + 1, max_size, drafting.max_depth or max_size)
        depths = range(2, max_depth + 1)
        widths = np.array([drafting.first_pass_width(depth) for depth in depths], int)
        by_depth = zip(depths, self.times.draft_seconds(widths).tolist(), strict=True)
        return {depth: seconds for depth, seconds in by_depth if np.isfinite(seconds)}

    def up_to(self, depth: int) -> SpeedProblem:
        """The same for trees of so many levels, each of which leaves unread what a chain does."""
        return replace(
            self,
            rates=self.rates[: depth - 1],
            other_seconds=self.seconds_beside(TokenTree.chain(depth)),
            catch_up=(0.0,),
        )

    def evaluate(self, tree: TokenTree) -> FastestTree:
        """A tree with its predicted speed, which is also its bound."""
        speed = (expected_tokens(tree, self.rates) + self.other_tokens) / self.step_seconds(tree)
        return FastestTree(tree, speed, speed)

    def speed_bounds(self, tokens: Floats, least_depth: int) -> Floats:
        """Tokens a second of 1, 2, ... nodes with these expected tokens, in the least step time.

        `tokens` float64 [sizes]; returns float64 [sizes].
        """
        seconds = self.times.min_step_seconds(np.arange(1, len(tokens) + 1), least_depth)
        return (tokens + self.other_tokens) / (seconds + self.other_seconds)

    def quick_bound(self, least_depth: int) -> float:
        """Tokens a second that no tree of at least so many levels exceeds.

        The most valuable nodes, whether or not they form a tree, are divided by the least time.
        """
        tokens = np.cumsum(best_first.highest_values(self.rates, self.max_size))
        return float(self.speed_bounds(tokens, least_depth).max())


def proven_bound(speed: float, bound: float) -> float:
    """A bound on the speed of all trees, which is at least that of a tree found.

    Raises:
        AssertionError: if it is lower by more than rounding: the solver is wrong.
    """
    if bound < speed * (1 - OPTIMALITY_TOLERANCE):
        raise AssertionError(
            f"bound on the speed of all trees: found {bound!r}, expected at least {speed!r}, the "
            "speed of one of them; this is an error of sequoia-plan: report it with the profile"
        )
    return max(bound, speed)
