"""What a drafter is: it declares its passes, makes them, and says what it must be shown of accepted tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
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
        expands: how many rows of logits it returns, one for each node that gets children.
        children: the most children one of them gets.
        drawn: int64 [new nodes], each new node's place in the flattened draws [expands, children].
        nodes: int64 [new nodes], the nodes that are drawn.
        parents: int64, by node that it reads, the row of the node's parent among those of the pass before; or by row of logits, the
            level of its law. As the drafter needs it.
    """

    reads: Tensor
    offsets: Tensor
    mask: Tensor
    expands: int
    children: int
    drawn: Tensor
    nodes: Tensor
    parents: Tensor | None = None


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
        taps: the target's hidden states that it reads, numbered as in taps.py; none for a language model.
    """

    drafting: Drafting
    vocabulary: int
    covered: Tensor | None
    taps: tuple[int, ...]

    def passes(self, tree: TokenTree, structure: Structure) -> tuple[Pass, ...]:
        """The passes of a step with `tree`, as wide as `drafting` declares."""

    def trial(self, structure: Structure) -> tuple[Pass, Reading | None]:
        """A pass over as many tokens as the structure has nodes, or over what every pass has, and what it takes from the pass before: it is
        what a meter times. It draws a child of each into the slots after the tree, or none where drawing is no part of a pass's time."""

    def new_cache(self, capacity: int) -> TreeCache:
        """What it remembers of a sequence of up to `capacity` slots."""

    def prefill(self, cache: TreeCache, tokens: Tensor) -> None:
        """Start a sequence with `tokens` (int64 [n])."""

    def watch(self, cache: TreeCache, tokens: Tensor, slots: Tensor, mask: Tensor, features: Tensor) -> None:
        """The target has read committed `tokens` in `slots`, consecutive ones, seeing each other by `mask`: its hidden states `taps` are
        `features` [tokens, width]. Follows `prefill`, as often as the target reads a part of the prompt."""

    def read(self, step: Pass, sequence: Sequence, columns: Tensor, before: Reading | None = None) -> Reading:
        """One pass: logits [expands, vocabulary]. `columns` are those of `Structure.columns`; `before` is what the pass before returned."""

    def read_text(self, sequence: Sequence, here: Tensor, levels: Several[int], features: Tensor | None) -> Tensor:
        """Logits [positions, vocabulary] after the known tokens in the consecutive slots `here`, each as in a tree.

        Args:
            levels: of each position, how far it is from the root of its step; positions of one step follow each other from 0 on.
                Negative: its logits are not needed, and have no meaning.
            features: the target's for `here`, [positions, width].
        """

    def keep(self, sequence: Sequence, path: Tensor) -> None:
        """Learn which nodes were accepted, before the sequence's length moves on: those of `path` (int64 [depth]), in this order; how
        many of them is not known here, and what follows them is overwritten later."""


def passes_by_level(tree: TokenTree, structure: Structure) -> tuple[Pass, ...]:
    """A pass for each level that has children, over the nodes that have them."""

    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int64), device=structure.nodes.device)

    def expansion(level: int) -> Pass:
        parents, first, end = tree.expanded(level), int(tree.level_offsets[level + 1]), int(tree.level_offsets[level + 2])
        nodes, children = tensor(parents), int(tree.child_count[parents].max())
        return Pass(
            reads=nodes,
            offsets=structure.offsets[nodes],
            mask=structure.mask[nodes],
            expands=len(parents),
            children=children,
            drawn=tensor(np.searchsorted(parents, tree.parents[first:end]) * children + tree.ranks[first:end] - 1),
            nodes=structure.nodes[first:end],
            parents=tensor(np.searchsorted(tree.expanded(level - 1), tree.parents[parents])) if level else None,
        )

    return tuple(expansion(level) for level in range(tree.depth - 1))


def pass_over_all(structure: Structure) -> Pass:
    """A pass that reads every node and draws one child of each, into the slots after the tree."""
    nodes = structure.nodes
    return Pass(nodes, structure.offsets, structure.mask, nodes.numel(), 1, drawn=nodes, nodes=nodes + nodes.numel(), parents=torch.zeros_like(nodes))


def draw_children(drafter: Drafter, step: Pass, logits: Tensor, sequence: Sequence, sampling: Sampling, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a pass's children and write their tokens into the sequence.

    Args:
        bits: int32 [expands, columns], what the sampling's drawing needs.

    Returns:
        float32 [expands, vocabulary], the laws (the logits if greedy); int64 [expands, children], indices into the vocabulary.
    """
    law, picks = sampling.children(logits, step.children, bits)
    children = picks.flatten()[step.drawn]
    sequence.tokens.index_copy_(0, sequence.length + step.nodes, children if drafter.covered is None else drafter.covered[children])
    return law, picks


def grow(drafter: Drafter, passes: Several[Pass], sequence: Sequence, columns: Tensor, sampling: Sampling, bits: Tensor) -> Growth:
    """Draft one tree. The last level is only drawn, never read.

    Args:
        columns: int64 [extent], see `Structure.columns`.
        bits: int32 [inner, columns], what the sampling's drawing needs.
    """
    branching = max(step.children for step in passes)
    laws, drawn = [], []
    reading: Reading | None = None
    for step, mine in zip(passes, bits.split([step.expands for step in passes]), strict=True):
        reading = drafter.read(step, sequence, columns, reading)
        law, children = draw_children(drafter, step, reading.logits, sequence, sampling, mine)
        laws.append(law[:0] if sampling.greedy else law)
        drawn.append(torch.nn.functional.pad(children, (0, branching - step.children)))
    return Growth(torch.cat(laws), torch.cat(drawn))


def read_steps(
    drafter: Drafter, chain: TokenTree, structure: Structure, sequence: Sequence, here: Tensor, levels: Several[int], watch: Callable[[int, int], None]
) -> Tensor:
    """`Drafter.read_text` step by step: each is drafted as a chain whose tokens are known.

    Args:
        chain, structure: as many levels as have laws, and one more.
        watch: is told a range of `here` once its steps are drafted: their tokens are committed.
    """
    length, passes, rows = sequence.length.clone(), drafter.passes(chain, structure), []
    start = 0
    while start < len(levels):
        end = start + 1
        while end < len(levels) and levels[end] == levels[end - 1] + 1 > 0:
            end += 1
        laws = torch.zeros(end - start, drafter.vocabulary, device=here.device)
        if levels[start] == 0:
            sequence.length.copy_(here[start : start + 1])
            columns = structure.columns(sequence.length, sequence.tokens.numel())
            found: list[Tensor] = []
            reading: Reading | None = None
            for step in passes:
                if sum(map(len, found)) < end - start:
                    reading = drafter.read(step, sequence, columns, reading)
                    found.append(reading.logits.float())
            known = torch.cat(found)[: end - start]
            laws[: len(known)] = known
        rows.append(laws)
        watch(start, end)
        start = end
    sequence.length.copy_(length)
    return torch.cat(rows)
