"""What it takes to judge a drawn tree and to keep what is accepted, for any tree: a sum fitted to the times of a few shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, Verification
from sequoia_plan.artifacts.cost import terms
from sequoia_plan.artifacts.latency import Rounds
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.draft.drafter import Growth
from sequoia_plan.runtime.models.vocabulary import vocabulary_size

SPIKE = 100.0
"""A logit so far above the others that nothing else is possible."""


def bushy(size: int, children: int, deepest: int | None = None) -> TokenTree:
    """A tree of `size` nodes in which every node has `children`, as far as they go: a chain, a binary tree, a ternary tree. More children
    where it would have more than `deepest` levels."""
    while True:
        tree = TokenTree.from_parents([-1, *((node - 1) // children for node in range(1, size))])
        if deepest is None or tree.depth <= max(deepest, 2):
            return tree
        children += 1


def shapes(largest: int, vocabulary: int, deepest: int | None = None) -> list[TokenTree]:
    """Trees to time, of at most `largest` nodes, `vocabulary` children and `deepest` levels: in them rounds, parents and children grow apart
    from each other."""
    chains = [TokenTree.chain(size) for size in sorted({min(size, deepest or size) for size in (1, 2, 4, 12)})]
    stars = [TokenTree.star(children) for children in (3, 12)]
    wide = [bushy(size, children, deepest) for size in (8, 32, 128, 512) for children in (2, 3)]
    return [tree for tree in (*chains, *stars, *wide) if tree.size <= largest and tree.branching <= vocabulary]


def order_of_rounds(decoder: SequoiaDecoder, sampling: Sampling) -> Rounds:
    """`Verification.rounds` of what the decoder runs under a setting: only `traversal` judges a node after its parent, and only kernels on
    the device look at nothing but the accepted path."""
    traversal = sampling.verifier == "traversal" and not sampling.greedy
    if decoder.fuses(sampling):
        return "path" if traversal else "walk"
    return "level" if traversal else "tree"


def certain_acceptance(tree: TokenTree) -> list[float]:
    """p of each rank when a walk is timed: down the whole of a chain, in other trees past all of the root's children."""
    return [1.0 if tree.branching == 1 else 0.0]


class ShapeTimer:
    """Judges one tree again and again: random logits with drawn children, no pass of a model. Where one draft pass gives the laws of all
    levels, children are drawn again each time as well: what that takes depends on the tree, not on the pass.

    What a walk down the accepted path takes depends on what is accepted: its logits leave no choice, see `certain_acceptance`.

    Args:
        decoder: of the tree, its sequence prefilled with room for it.
        samplings: settings to judge it under; those that draw alike judge the same children.
    """

    def __init__(self, decoder: SequoiaDecoder, samplings: Sequence[Sampling]) -> None:
        self.decoder, self.length = decoder, decoder.sequence.length.clone()
        self.random = torch.Generator(decoder.device).manual_seed(0)
        self.logits = self._normal(decoder.tree.size, vocabulary_size(decoder.target.model))
        nothing = decoder.sequence.tokens[:0]
        drawn_at_once = decoder.drafter is not None and decoder.passes and not decoder.drafter.drafting.by_level
        self.seen = self._normal(decoder.inner, decoder.drafter.vocabulary) if decoder.drafter and drawn_at_once else None
        drawn: dict[Hashable, Growth] = {}
        self.given: dict[Sampling, tuple[Tensor, Growth]] = {}
        for sampling in samplings:
            alike = sampling.drawing, sampling.temperature, sampling.draft_temperature
            if alike not in drawn:
                drawn[alike] = self._draw(sampling) if decoder.drafter and decoder.passes else Growth(nothing, nothing)
            walks = order_of_rounds(decoder, sampling) == "walk"
            self.given[sampling] = self._steered(self._tokens(drawn[alike]), sampling) if walks else self.logits, drawn[alike]

    def prepare(self, sampling: Sampling) -> None:
        """Put the sequence as it is once the tree was drafted, as far as judging reads it."""
        self.restore()
        if order_of_rounds(self.decoder, sampling) != "walk":
            return  # tokens make no difference
        slots = self.length + self.decoder.structure.nodes
        self.decoder.sequence.tokens[slots[1:]] = self._tokens(self.given[sampling][1])

    def run(self, sampling: Sampling) -> Tensor:
        """Judge and keep; what a step returns. The sequence is then longer: `restore` puts that right."""
        if self.seen is not None:
            self.decoder.refill_random_numbers(sampling)
            self.decoder.replayed("drawing", partial(self._draw_again, sampling), sampling)
        return self.decoder.run_verification(*self.given[sampling], sampling)

    def _draw_again(self, sampling: Sampling) -> tuple[Tensor, Tensor]:
        assert self.seen is not None
        return sampling.children(self.seen, self.decoder.tree.branching, self.decoder.random_bits(sampling))

    def restore(self) -> None:
        """Put the sequence's length back."""
        self.decoder.sequence.length.copy_(self.length)

    def _normal(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.random, device=self.decoder.device).to(self.decoder.target.model.dtype)

    def _draw(self, sampling: Sampling) -> Growth:
        assert self.decoder.drafter is not None
        laws = sampling.draft(self._normal(self.decoder.inner, self.decoder.drafter.vocabulary))
        return Growth(laws, sampling.drawing(laws, self.decoder.tree.branching, self.random))

    def _tokens(self, growth: Growth) -> Tensor:
        """int64 [size - 1]: the target's token of each node but the root."""
        tree, drafter = self.decoder.tree, self.decoder.drafter
        if tree.size == 1 or drafter is None:
            return growth.drawn
        row = np.searchsorted(np.flatnonzero(tree.child_count), tree.parents[1:])
        drawn = growth.drawn[torch.as_tensor(row), torch.as_tensor(tree.ranks[1:].astype(np.int64) - 1)]
        return drawn if drafter.covered is None else drafter.covered[drawn]

    def _steered(self, tokens: Tensor, sampling: Sampling) -> Tensor:
        """Logits under which the first child of every node of a chain is certain, and no child of any other tree is possible."""
        tree, logits = self.decoder.tree, torch.zeros_like(self.logits)
        certain = certain_acceptance(tree)[0] == 1.0
        for node in range(tree.size):
            first, count = int(tree.first_child[node]), int(tree.child_count[node])
            theirs = tokens[first - 1 : first - 1 + count].tolist()
            chosen = theirs[:1] if certain else [token for token in range(count + 1) if token not in theirs]
            logits[node, (chosen or [0])[0]] = SPIKE * max(1.0, sampling.temperature)
        return logits


def fit(trees: Sequence[TokenTree], seconds: Sequence[float], rounds: Rounds) -> Verification:
    """The sum that fits the times of `trees` best, relative errors squared, no term negative; and its residual standard error.

    Args:
        seconds: each tree's time.
        rounds: what counts as a round, see `Verification`.
    """
    a = np.array([terms(tree, rounds, certain_acceptance(tree)) for tree in trees]) / np.array(seconds)[:, None]
    found = non_negative_least_squares(a, np.ones(len(trees)))
    freedom = max(1, len(trees) - np.count_nonzero(found))
    error = math.sqrt(np.square(a @ np.array(found) - 1).sum() / freedom)
    return Verification(*found, rounds, round(error, 4))


def non_negative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """x >= 0 with the least |a x - b|, by solving for every choice of the four columns."""
    best, least = np.zeros(a.shape[1]), float(np.square(b).sum())
    for chosen in itertools.product([False, True], repeat=a.shape[1]):
        if any(chosen):
            x = np.zeros(a.shape[1])
            x[list(chosen)] = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            left = float(np.square(a @ x - b).sum())
            if x.min() >= 0 and left < least:
                best, least = x, left
    first, second, third, fourth = map(float, best)
    return first, second, third, fourth
