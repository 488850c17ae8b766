"""What it takes to judge a drawn tree and to keep what is accepted, for any tree: a sum fitted to the times of a few shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, Verification
from sequoia_plan.artifacts.cost import rounds as rounds_of
from sequoia_plan.artifacts.profile import Rounds
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.draft.drafter import Growth, draw_children
from sequoia_plan.runtime.models.vocabulary import vocabulary_size


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


def order_of_rounds(sampling: Sampling) -> Rounds:
    """`Verification.rounds` of a setting: only `traversal` judges one level after the other."""
    return "level" if sampling.verifier == "traversal" and not sampling.greedy else "tree"


class ShapeTimer:
    """Judges one tree again and again: random logits with drawn children, no pass of a model. Where one draft pass gives the laws of all
    levels, it draws them again and again as well: what that takes depends on the tree, not on the pass.

    Args:
        decoder: of `tree`, its sequence prefilled with room for it.
    """

    def __init__(self, decoder: SequoiaDecoder, sampling: Sampling) -> None:
        self.decoder, self.sampling, self.length = decoder, sampling, decoder.sequence.length.clone()
        generator = torch.Generator(decoder.device).manual_seed(0)

        def random(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator, device=decoder.device).to(decoder.target.model.dtype)

        self.logits = random(decoder.tree.size, vocabulary_size(decoder.target.model))
        nothing = decoder.sequence.tokens[:0]
        self.growth = Growth(nothing, nothing)
        self.drafter = decoder.drafter if decoder.drafter and decoder.passes and not decoder.drafter.drafting.by_level else None
        if decoder.drafter and decoder.passes:
            self.seen = random(decoder.inner, decoder.drafter.vocabulary)
            laws = sampling.draft(self.seen)
            self.growth = Growth(laws, sampling.drawing(laws, decoder.tree.branching, generator))

    def run(self) -> Tensor:
        """Judge and keep; what a step returns. The sequence is then longer: `restore` puts that right."""
        if self.drafter:
            self.decoder.refill_random_numbers(self.sampling)
            self.growth = self.decoder.replayed("shape", self._drawn, self.sampling)
        return self.decoder.run_verification(self.logits, self.growth, self.sampling)

    def _drawn(self) -> Growth:
        """The tree drawn from the random logits."""
        assert self.drafter is not None
        (step,) = self.decoder.passes
        laws, drawn = draw_children(self.drafter, step, self.seen, self.decoder.sequence, self.sampling, self.decoder.random_bits(self.sampling))
        return Growth(laws[:0] if self.sampling.greedy else laws, drawn)

    def restore(self) -> None:
        """Put the sequence's length back."""
        self.decoder.sequence.length.copy_(self.length)


def fit(trees: Sequence[TokenTree], seconds: Sequence[float], rounds: Rounds) -> Verification:
    """The sum that fits the times of `trees` best, relative errors squared, no term negative.

    Args:
        seconds: each tree's time.
        rounds: what counts as a round, see `Verification`.
    """
    terms = np.array([[1, rounds_of(tree, rounds), np.count_nonzero(tree.child_count), tree.size - 1] for tree in trees], float)
    return Verification(*non_negative_least_squares(terms / np.array(seconds)[:, None], np.ones(len(trees))), rounds)


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
