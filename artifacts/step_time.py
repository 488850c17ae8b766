"""Seconds of one decoding step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.drafting import LANGUAGE_MODEL, Drafting
from sequoia_plan.artifacts.latency import Latency
from sequoia_plan.artifacts.tree import TokenTree


@dataclass(frozen=True)
class StepTime:
    """Seconds of one decoding step, from measured latencies."""

    latency: Latency
    drafting: Drafting = LANGUAGE_MODEL
    looks_up: bool = False
    """Does each step look for the match of the text?"""

    @cached_property
    def target_seconds(self) -> Callable[[Any], Any]:
        """Gives the seconds of the target's pass over each number of nodes."""
        return _step_function(self.latency.target)

    @cached_property
    def draft_seconds(self) -> Callable[[Any], Any]:
        """Gives the seconds of a draft pass over each number of nodes."""
        return _step_function(self.latency.draft)

    def verification_seconds(self, sizes: int | NDArray[np.integer]) -> Any:
        """Seconds of a step besides its passes; 0 where the target's times include them."""
        cost = self.latency.verification
        if not cost:
            return 0.0
        return cost.base + cost.by_node * (sizes - 1) + cost.lookup * self.looks_up

    def largest_size(self) -> int:
        """Nodes of the largest tree whose step time is known."""
        return max(self.latency.target)

    @property
    def stream_seconds(self) -> float:
        """Seconds in which a streamed target's weights arrive; 0 if all of them are in memory."""
        return self.latency.stream.seconds if self.latency.stream else 0.0

    def step_seconds(self, tree: TokenTree) -> float:
        """Seconds of a step with `tree`.

        The weights of a streamed target arrive while the step does its work, so the longer of the
        two counts.
        """
        return max(self.stream_seconds, self.work_seconds(tree))

    def work_seconds(self, tree: TokenTree) -> float:
        """Seconds of a step's passes, its verification and its overhead."""
        if tree.size == 1 and self.latency.plain and not self.looks_up:
            return self.latency.plain
        widths = self.drafting.pass_widths(tree.num_parents_by_level)
        draft_passes = self.draft_seconds(np.array(widths, int))
        target_pass = float(self.target_seconds(tree.size))
        verification = self.verification_seconds(tree.size)
        return math.fsum([target_pass, *draft_passes, verification, self.latency.overhead])

    def min_step_seconds(self, sizes: NDArray[np.integer], depth: int) -> Floats:
        """float64 [sizes]: a lower bound on the step time of trees of these sizes and this depth.

        Draft passes are as narrow as can be, and a streamed target's weights arrive meanwhile.
        """
        widths = self.drafting.pass_widths([1] * (depth - 1))  # of a chain
        draft_passes = self.draft_seconds(np.array(widths, int)).sum()
        work = self.target_seconds(sizes) + draft_passes + self.verification_seconds(sizes)
        return np.maximum(self.stream_seconds, work + self.latency.overhead)

    def num_unread(self, tree: TokenTree) -> int:
        """How many of the last tokens the draft may not have read after a step with `tree`."""
        return self.drafting.num_unread(tree.depth, tree.num_drafted_levels)

    def catch_up_seconds(self, num_unread: int, num_passes: int) -> float:
        """Seconds in which the draft reads unread tokens before a step of so many draft passes."""
        width = self.drafting.catch_up_width(num_unread, num_passes)
        return float(self.draft_seconds(min(width, max(self.latency.draft)))) if width else 0.0

    def plain_seconds(self) -> float:
        """Seconds a token of decoding without speculation, with the same engine."""
        return replace(self, looks_up=False).step_seconds(TokenTree.chain(1))


def _step_function(points: Mapping[int, float]) -> Callable[[Any], Any]:
    """Gives the cheapest time measured at a size or above it, and inf beyond the largest one."""
    sizes = np.array(sorted(points), float)
    seconds_from_largest = [points[size] for size in sizes[::-1]]
    seconds = np.append(np.minimum.accumulate(seconds_from_largest)[::-1], np.inf)
    return lambda numbers: seconds[np.searchsorted(sizes, numbers)]
