"""The time of verification: a base and a slope by nodes, from the times of a few trees."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, VerificationCost
from sequoia_plan.profiler.timing import timed
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep

CHAIN_SIZES, WIDE_SIZES = (1, 8), (8, 64, 512)
"""Nodes of the trees that are timed."""


def bushy(size: int, max_depth: int | None = None, children: int = 3) -> TokenTree:
    """A tree of `size` nodes in which each node has so many children, until no nodes are left.

    Nodes are filled up breadth-first; more children where the tree would be too deep.
    """
    while True:
        parents = [-1, *((node - 1) // children for node in range(1, size))]
        tree = TokenTree.from_parents(parents)
        # no number of children makes a tree of several nodes flatter than two levels
        if max_depth is None or tree.depth <= max(max_depth, 2):
            return tree
        children += 1


def trees_to_time(
    max_nodes: int, max_children: int, max_depth: int | None = None
) -> list[TokenTree]:
    """Chains and wide trees."""
    chains = [TokenTree.chain(min(size, max_depth or size)) for size in CHAIN_SIZES]
    wide = [bushy(size, max_depth) for size in WIDE_SIZES]
    return [t for t in chains + wide if t.size <= max_nodes and t.branching <= max_children]


class VerificationTimer:
    """Verifies one drafted tree again and again."""

    def __init__(self, step: CapturedStep, sampling: Sampling, prompt: Tensor) -> None:
        step.prefill(prompt, step.tree.depth, seed=0)
        self.step, self.sampling, self.length = step, sampling, step.sequence.length.clone()
        extent = step.extent(prompt.numel() - 1)
        step.refill_random_numbers(sampling)
        self.drafted = step.draft(extent, sampling)
        self.logits = step.forward_target(extent)
        # where one draft pass serves all levels, drawing counts as verification
        self.draft_logits: Tensor | None = None
        if step.drafter and step.passes and not step.drafter.drafting.drafts_by_level:
            columns = step.tensors.columns(self.length, extent)
            output = step.drafter.forward(step.passes[0], step.sequence, columns)
            self.draft_logits = output.logits

    def run(self) -> float:
        """Seconds to verify the tree, and to commit a path, which is undone."""
        seconds = timed(self.step.device, self._verify)[1]
        self.step.sequence.length.copy_(self.length)
        return seconds

    def _verify(self) -> None:
        """Draw the children if drawing counts, verify and commit."""
        if self.draft_logits is not None:
            self.step.refill_random_numbers(self.sampling)
            branching, bits = self.step.tree.branching, self.step.random_bits(self.sampling)
            draw = partial(self.sampling.draw_children, self.draft_logits, branching, bits)
            self.step.replay("drawing", draw, self.sampling)
        self.step.run_verification(self.logits, self.drafted, self.sampling)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> VerificationCost:
    """The base and seconds a node, not negative, of least squared relative errors."""
    nodes = np.array(sizes) - 1.0
    # dividing by a tree's seconds makes 1 the value to predict, and errors relative
    terms = np.stack([np.ones_like(nodes), nodes], 1) / np.array(seconds)[:, None]
    costs, *_ = np.linalg.lstsq(terms, np.ones(len(nodes)), rcond=None)
    if min(costs) < 0:  # then the best solution without a negative one lacks it
        kept = int(np.argmax(costs))
        costs = np.zeros(2)
        costs[kept] = terms[:, kept].sum() / np.square(terms[:, kept]).sum()
    degrees_of_freedom = max(1, len(nodes) - np.count_nonzero(costs))
    error = math.sqrt(np.square(terms @ costs - 1).sum() / degrees_of_freedom)
    return VerificationCost(float(costs[0]), float(costs[1]), round(error, 4))
