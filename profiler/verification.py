"""The time of verification: a base and a slope by nodes, from the times of a few trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, VerificationCost
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.drafter import DraftedTree
from sequoia_plan.runtime.models.vocabulary import vocabulary_size

CHAIN_SIZES, WIDE_SIZES = (1, 8), (8, 64, 512)
"""Nodes of the trees that are timed; nodes of wide ones have three children each."""


def bushy(size: int, children: int, max_depth: int | None = None) -> TokenTree:
    """A tree of `size` nodes in which each node has `children` children, until no nodes are left.

    Nodes are filled up breadth-first; more children where the tree would be too deep.
    """
    while True:
        parents = [-1, *((node - 1) // children for node in range(1, size))]
        tree = TokenTree.from_parents(parents)
        # no number of children makes a tree of several nodes flatter than two levels
        if max_depth is None or tree.depth <= max(max_depth, 2):
            return tree
        children += 1


def trees_to_time(max_nodes: int, vocabulary: int, max_depth: int | None = None) -> list[TokenTree]:
    """Chains and wide trees."""
    chains = {size: TokenTree.chain(min(size, max_depth or size)) for size in CHAIN_SIZES}
    wide = [bushy(size, 3, max_depth) for size in WIDE_SIZES]
    return [
        tree
        for tree in (*chains.values(), *wide)
        if tree.size <= max_nodes and tree.branching <= vocabulary
    ]


class VerificationTimer:
    """Verifies one tree again and again, with random logits and drawn children, without a model."""

    def __init__(self, step: CapturedStep, samplings: Sequence[Sampling]) -> None:
        self.step, self.length = step, step.sequence.length.clone()
        self.generator = torch.Generator(step.device).manual_seed(0)
        self.logits = self._random_logits(step.tree.size, vocabulary_size(step.target.model))
        nothing = step.sequence.tokens[:0]  # an empty tensor for trees without drafted nodes
        self.draft_logits: Tensor | None = None
        self.draws = False
        if step.drafter and step.passes:
            self.draft_logits = self._random_logits(step.num_parents, step.drafter.vocabulary)
            # where one draft pass serves all levels, drawing counts as verification
            self.draws = not step.drafter.drafting.drafts_by_level
        self.drafted: dict[Sampling, DraftedTree] = {}
        for sampling in samplings:
            if self.draft_logits is None:
                self.drafted[sampling] = DraftedTree(nothing, nothing)
                continue
            probs = sampling.draft_probs(self.draft_logits)
            drawn = sampling.drawing(probs, step.tree.branching, self.generator)
            self.drafted[sampling] = DraftedTree(probs, drawn)

    def run(self, sampling: Sampling) -> Tensor:
        """Verify the tree and commit the accepted path; returns what a decoding step returns.

        The sequence must be as long as before: call `restore` afterwards.
        """
        if self.draws:
            self.step.refill_random_numbers(sampling)
            self.step.replay("drawing", partial(self._draw, sampling), sampling)
        return self.step.run_verification(self.logits, self.drafted[sampling], sampling)

    def restore(self) -> None:
        """Reset the sequence's length, which undoes what `run` committed."""
        self.step.sequence.length.copy_(self.length)

    def _draw(self, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Draw children as a step does; only the time matters."""
        assert self.draft_logits is not None
        branching, bits = self.step.tree.branching, self.step.random_bits(sampling)
        return sampling.draw_children(self.draft_logits, branching, bits)

    def _random_logits(self, num_nodes: int, vocabulary: int) -> Tensor:
        """Normally distributed logits [num_nodes, vocabulary] in the target's dtype."""
        shape = (num_nodes, vocabulary)
        logits = torch.randn(shape, generator=self.generator, device=self.step.device)
        return logits.to(self.step.target.model.dtype)


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
