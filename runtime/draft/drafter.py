"""What a drafter is: it declares its passes, makes them, and says what it must be shown of accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sequoia_plan.artifacts import Drafting, TokenTree
from sequoia_plan.runtime.cache import TreeCache
from sequoia_plan.runtime.models.forward import Reading
from sequoia_plan.runtime.sampling import Sampling
from sequoia_plan.runtime.sequence import Sequence
from sequoia_plan.runtime.structure import Structure


@dataclass(frozen=True)
class Pass:
    """One pass of a draft model, and the children that are drawn from what it returns.

    Args:
        reads: int64 [width], the slots it reads, from the root's slot on; -1 is the committed token before the root.
        offsets: int64 [width], their positions, from the root's on.
        mask: [width, size + 2], what they see; see `Structure`.
        expands: how many of them, the last ones, get children.
        children: the most children one of them gets.
        drawn: int64 [new nodes], each new node's place in the flattened draws [expands, children].
        nodes: int64 [new nodes], the nodes that are drawn.
    """

    reads: Tensor
    offsets: Tensor
    mask: Tensor
    expands: int
    children: int
    drawn: Tensor
    nodes: Tensor


@dataclass(frozen=True)
class Growth:
    """What the nodes of a drafted tree were drawn from. The tokens themselves are in the sequence, each in its node's slot.

    Args:
        laws: float32 [inner, draft vocabulary], what the children of each inner node were drawn from, in the order of the nodes; empty
            if greedy, where nobody reads them.
        drawn: int64 [inner, branching], the children as indices into the draft's vocabulary, in draw order.
    """

    laws: Tensor
    drawn: Tensor


class Drafter(Protocol):
    """A way to propose the tokens of a tree.

    Attributes:
        drafting: the passes it declares; what is measured and planned goes by it.
        vocabulary: how many tokens it can propose.
        covered: int64 [vocabulary], the target's token for each of them; None if they are the same.
    """

    drafting: Drafting
    vocabulary: int
    covered: Tensor | None

    def passes(self, tree: TokenTree, structure: Structure) -> tuple[Pass, ...]:
        """The passes of a step with `tree`, as wide as `drafting` declares."""

    def new_cache(self, capacity: int) -> TreeCache:
        """What it remembers of a sequence of up to `capacity` slots."""

    def prefill(self, cache: TreeCache, tokens: Tensor) -> None:
        """Start a sequence with `tokens` (int64 [n])."""

    def read(self, step: Pass, sequence: Sequence, columns: Tensor) -> Reading:
        """One pass: logits [expands, vocabulary]. `columns` are those of `Structure.columns`."""

    def read_text(self, cache: TreeCache, tokens: Tensor, slots: Tensor, mask: Tensor) -> Reading:
        """Logits [tokens, vocabulary] after known tokens (int64 [tokens], in `slots`), attending by the additive mask [tokens, extent]."""

    def draw_children(self, step: Pass, logits: Tensor, sequence: Sequence, sampling: Sampling, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a pass's children and write their tokens into the sequence.

        Args:
            bits: int32 [expands, columns], what the sampling's drawing needs.

        Returns:
            float32 [expands, vocabulary], the laws (the logits if greedy); int64 [expands, children], indices into the vocabulary.
        """

    def keep(self, cache: TreeCache, slots: Tensor, start: Tensor) -> None:
        """Learn which nodes were accepted: those in `slots` (int64 [depth]) are now in start, start + 1, ... (int64 [1])."""


def grow(drafter: Drafter, passes: Several[Pass], sequence: Sequence, columns: Tensor, sampling: Sampling, bits: Tensor) -> Growth:
    """Draft one tree. The last level is only drawn, never read.

    Args:
        columns: int64 [extent], see `Structure.columns`.
        bits: int32 [inner, columns], what the sampling's drawing needs.
    """
    branching = max(step.children for step in passes)
    laws, drawn = [], []
    for step, mine in zip(passes, bits.split([step.expands for step in passes]), strict=True):
        logits = drafter.read(step, sequence, columns).logits
        law, children = drafter.draw_children(step, logits, sequence, sampling, mine)
        laws.append(law[:0] if sampling.greedy else law)
        drawn.append(torch.nn.functional.pad(children, (0, branching - step.children)))
    return Growth(torch.cat(laws), torch.cat(drawn))
