"""What a tree is worth: expected tokens, seconds a step, and their quotient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts import Latency, TokenTree

Floats = NDArray[np.float64]


def acceptance_rows(acceptance: Sequence[float] | Sequence[Sequence[float]], depth: int, branching: int | None = None) -> Floats:
    """float64 [depth - 1, ranks]: p[level][rank] for parents on each level; one vector holds for all levels.

    Given rows run out at the last one, which then holds for all deeper levels.
    """
    rows = np.atleast_2d(np.asarray(acceptance, np.float64))
    levels = np.minimum(np.arange(depth - 1), len(rows) - 1)
    return rows[levels, : branching or rows.shape[1]]


def node_values(tree: TokenTree, acceptance: Sequence[float] | Sequence[Sequence[float]]) -> Floats:
    """float64 [size]: the probability that each node is accepted, the product of p along its path, from the tree alone.

    A rank beyond the vector's end is worth nothing.
    """
    rows = acceptance_rows(acceptance, max(tree.depth, 2))
    rows = np.pad(rows, ((0, 0), (0, max(0, tree.branching - rows.shape[1]))))
    value = np.ones(tree.size)
    for level in range(1, tree.depth):
        nodes = slice(tree.level_offsets[level], tree.level_offsets[level + 1])
        value[nodes] = value[tree.parents[nodes]] * rows[level - 1, tree.ranks[nodes] - 1]
    return value


def expected_tokens(tree: TokenTree, acceptance: Sequence[float] | Sequence[Sequence[float]]) -> float:
    """F(T) of Sequoia, arXiv 2402.12374, section 3.1: the sum of the node values."""
    return math.fsum(node_values(tree, acceptance))  # exactly rounded: the same bits on every machine


@dataclass(frozen=True)
class StepTime:
    """Seconds of one decoding step, from measured latencies.

    Between measurements the curves are linear; a smaller pass never costs more than a larger one (it can be padded);
    beyond the largest measurement nothing is known, so such trees are not considered.
    """

    latency: Latency

    def target(self, size: int) -> float:
        """The target's pass over `size` nodes; inf beyond what was measured."""
        return _curve(self.latency.target, size)

    def draft(self, width: int) -> float:
        """One draft pass of `width` nodes; inf beyond what was measured."""
        return _curve(self.latency.draft, width)

    def largest(self) -> int:
        """The largest tree a step time is known for."""
        return max(self.latency.target)

    def step(self, tree: TokenTree) -> float:
        """One step with `tree`: every draft pass at its width, the target's pass, the measured rest."""
        return math.fsum([self.target(tree.size), *map(self.draft, tree.draft_widths()), self.latency.overhead])

    def step_at_least(self, size: int, depth: int) -> float:
        """No tree of this size and depth takes less: its draft passes are as narrow as passes can be."""
        narrow = self.draft(2) + (depth - 2) * self.draft(1) if depth > 1 else 0.0
        return self.target(size) + narrow + self.latency.overhead

    def plain(self) -> float:
        """Seconds a token without speculation, by the same engine."""
        return self.target(1) + self.latency.overhead


def _curve(points: Mapping[int, float], tokens: int) -> float:
    measured = sorted(points)
    if tokens > measured[-1]:
        return float("inf")
    seconds = np.minimum.accumulate([points[n] for n in measured][::-1])[::-1]
    return float(np.interp(tokens, measured, seconds))
