"""The time of verification for any tree: base and slope, fitted to the times of a few shapes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, VerificationCost
from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.drafter import DraftedTree
from sequoia_plan.runtime.models.vocabulary import vocabulary_size

SPIKE = 100.0
"""A logit so far above the others that no other token is possible."""


def bushy(size: int, children: int, max_depth: int | None = None) -> TokenTree:
    """A tree of `size` nodes in which each node has `children` children, until no nodes are left.

    Nodes are filled up breadth-first: 1 child each gives a chain, 2 a binary tree, 3 a ternary
    tree.
    """
    while True:
        parents = [-1, *((node - 1) // children for node in range(1, size))]
        tree = TokenTree.from_parents(parents)
        # no number of children makes a tree of several nodes flatter than two levels
        if max_depth is None or tree.depth <= max(max_depth, 2):
            return tree
        children += 1


def shapes_to_time(
    max_nodes: int, vocabulary: int, max_depth: int | None = None
) -> list[TokenTree]:
    """Trees to time verification with: chains, one-level trees and bushy ones of several sizes.

    So base and seconds a node hold for trees of any shape.
    """
    chain_sizes = sorted({min(size, max_depth or size) for size in (1, 2, 4, 12)})
    chains = [TokenTree.chain(size) for size in chain_sizes]
    stars = [TokenTree.star(children) for children in (3, 12)]
    wide = [bushy(size, children, max_depth) for size in (8, 32, 128, 512) for children in (2, 3)]
    return [
        tree
        for tree in (*chains, *stars, *wide)
        if tree.size <= max_nodes and tree.branching <= vocabulary
    ]


def walks_down(step: CapturedStep, sampling: Sampling) -> bool:
    """Whether verification looks at the nodes of the accepted path alone, as fused kernels do.

    `traversal` verifies all nodes in any case.
    """
    is_traversal = sampling.verifier == "traversal" and not sampling.greedy
    return step.verifier.uses_kernels(sampling) and not is_traversal


def steered_acceptance(tree: TokenTree) -> list[float]:
    """The acceptance probability of each rank while verification is timed.

    A walk down the accepted path takes as long as the path, so what is accepted is chosen: a chain
    whole, of other trees no child of any node.
    """
    return [1.0 if tree.branching == 1 else 0.0]


class ShapeTimer:
    """Verifies one tree again and again, with random logits and drawn children, without a model."""

    def __init__(self, step: CapturedStep, samplings: Sequence[Sampling]) -> None:
        self.step, self.length = step, step.sequence.length.clone()
        self.generator = torch.Generator(step.device).manual_seed(0)
        self.logits = self._random_logits(step.tree.size, vocabulary_size(step.target.model))
        nothing = step.sequence.tokens[:0]  # an empty tensor for trees without drafted nodes
        self.draft_logits: Tensor | None = None
        if step.drafter and step.passes and not step.drafter.drafting.drafts_by_level:
            vocabulary = step.drafter.vocabulary
            self.draft_logits = self._random_logits(step.num_parents, vocabulary)
        drafted_trees: dict[Hashable, DraftedTree] = {}
        self.inputs: dict[Sampling, tuple[Tensor, DraftedTree]] = {}
        for sampling in samplings:
            key = sampling.drawing, sampling.temperature, sampling.draft_temperature
            if key not in drafted_trees:
                drafts = step.drafter and step.passes
                drafted = self._draw(sampling) if drafts else DraftedTree(nothing, nothing)
                drafted_trees[key] = drafted
            drafted, logits = drafted_trees[key], self.logits
            if walks_down(step, sampling):
                logits = self._steered_logits(self._node_tokens(drafted), sampling)
            self.inputs[sampling] = logits, drafted

    def prepare(self, sampling: Sampling) -> None:
        """Put the sequence into the state in which verification finds it after drafting."""
        self.restore()
        if not walks_down(self.step, sampling):
            return  # other verifiers read no tokens
        slots = self.length + self.step.tensors.nodes
        tokens = self._node_tokens(self.inputs[sampling][1])
        self.step.sequence.tokens[slots[1:]] = tokens

    def run(self, sampling: Sampling) -> Tensor:
        """Verify the tree and commit the accepted path; returns what a decoding step returns.

        Call `prepare` before and `restore` after.
        """
        if self.draft_logits is not None:
            self.step.refill_random_numbers(sampling)
            self.step.replay("drawing", partial(self._draw_again, sampling), sampling)
        return self.step.run_verification(*self.inputs[sampling], sampling)

    def restore(self) -> None:
        """Reset the sequence's length, which undoes what `run` committed."""
        self.step.sequence.length.copy_(self.length)

    def _draw_again(self, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Draw children from the random draft logits, as a step does; only the time matters."""
        assert self.draft_logits is not None
        branching, bits = self.step.tree.branching, self.step.random_bits(sampling)
        return sampling.draw_children(self.draft_logits, branching, bits)

    def _random_logits(self, num_nodes: int, vocabulary: int) -> Tensor:
        """Normally distributed logits [num_nodes, vocabulary] in the target's dtype."""
        shape = (num_nodes, vocabulary)
        logits = torch.randn(shape, generator=self.generator, device=self.step.device)
        return logits.to(self.step.target.model.dtype)

    def _draw(self, sampling: Sampling) -> DraftedTree:
        """Children of all inner nodes, drawn from random logits."""
        assert self.step.drafter is not None
        logits = self._random_logits(self.step.num_parents, self.step.drafter.vocabulary)
        probs = sampling.draft_probs(logits)
        drawn = sampling.drawing(probs, self.step.tree.branching, self.generator)
        return DraftedTree(probs, drawn)

    def _node_tokens(self, drafted: DraftedTree) -> Tensor:
        """int64 [size - 1]: the token of each node but the root, in the target's vocabulary."""
        tree, drafter = self.step.tree, self.step.drafter
        if tree.size == 1 or drafter is None:
            return drafted.drawn
        # drawn: [inner nodes, branching], by the parent's index among the inner nodes, and rank - 1
        parent_index = np.searchsorted(np.flatnonzero(tree.child_count), tree.parents[1:])
        rank_index = torch.as_tensor(tree.ranks[1:].astype(np.int64) - 1)
        tokens = drafted.drawn[torch.as_tensor(parent_index), rank_index]
        return tokens if drafter.d2t is None else drafter.d2t[tokens]

    def _steered_logits(self, tokens: Tensor, sampling: Sampling) -> Tensor:
        """Logits [size, vocabulary] that accept a chain whole, and no child of any other tree.

        At each node they make one token certain: the child's in a chain, else one that no child
        has. `tokens` int64 [size - 1].
        """
        tree, logits = self.step.tree, torch.zeros_like(self.logits)
        is_chain = steered_acceptance(tree)[0] == 1.0  # then the first child is always accepted
        for node in range(tree.size):
            first, count = int(tree.first_child[node]), int(tree.child_count[node])
            children = tokens[first - 1 : first - 1 + count].tolist()  # `tokens` lacks the root
            if is_chain:
                candidates = children[:1]
            else:
                # of count + 1 tokens, at least one is not a child
                candidates = [token for token in range(count + 1) if token not in children]
            chosen = candidates[0] if candidates else 0
            logits[node, chosen] = SPIKE * max(1.0, sampling.temperature)
        return logits


def fit(trees: Sequence[TokenTree], seconds: Sequence[float]) -> VerificationCost:
    """Fit the cost of verification to the times of `trees`.

    Base and seconds a node are not negative, and minimise the squares of the relative errors.
    """
    sizes, times = np.array([tree.size for tree in trees], float), np.array(seconds)
    # dividing by a tree's seconds makes 1 the value to predict, and errors relative
    relative_terms = np.stack([np.ones_like(sizes), sizes - 1], 1) / times[:, None]
    candidates = np.zeros((3, 2))  # base alone, seconds a node alone, both
    candidates[0, 0] = _slope(relative_terms[:, 0])
    candidates[1, 1] = _slope(relative_terms[:, 1])
    candidates[2] = np.linalg.lstsq(relative_terms, np.ones(len(trees)), rcond=None)[0]
    possible = candidates[candidates.min(1) >= 0]
    squared_errors = np.square(possible @ relative_terms.T - 1).sum(1)
    best = int(np.argmin(squared_errors))
    degrees_of_freedom = max(1, len(trees) - np.count_nonzero(possible[best]))
    base, by_node = map(float, possible[best])
    return VerificationCost(
        base, by_node, round(math.sqrt(squared_errors[best] / degrees_of_freedom), 4)
    )


def _slope(x: NDArray[np.float64]) -> float:
    """The factor that brings `x` [n] closest to 1."""
    return float(x.sum() / max((x @ x), 1e-300))
