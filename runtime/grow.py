"""Growing the token tree: draft passes, level by level, and the drawing of children."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.forward import CachedModel
from sequoia_plan.runtime.sampling import Sampling


@dataclass(frozen=True)
class Level:
    """One draft pass. Rows number the token before the root 0 and node i of the tree i + 1, as in `TreeMask`.

    Args:
        rows: int64, what the pass reads: the nodes of a level that have children. The first pass also reads the token
            before the root again: if that was an accepted leaf, the draft has not seen it yet.
        expands: how many of them, the last ones, get children.
        children: the most children one of them gets.
        parent, rank: int64 [width of the next level], each child's parent among the expanded and its 0-based rank.
        below: the next level, as a slice of rows.
    """

    rows: Tensor
    expands: int
    children: int
    parent: Tensor
    rank: Tensor
    below: slice

    @classmethod
    def of(cls, tree: TokenTree, level: int, device: torch.device | str) -> Level:
        """The pass that expands `level`."""

        def tensor(values: object) -> Tensor:
            return torch.as_tensor(np.asarray(values, np.int64), device=device)

        nodes, first, end = tree.expanded(level), int(tree.level_offsets[level + 1]), int(tree.level_offsets[level + 2])
        return cls(
            rows=tensor([0, 1] if level == 0 else nodes + 1),
            expands=len(nodes),
            children=int(tree.child_count[nodes].max()),
            parent=tensor(np.searchsorted(nodes, tree.parents[first:end])),
            rank=tensor(tree.ranks[first:end] - 1),
            below=slice(first + 1, end + 1),
        )


@dataclass(frozen=True)
class Growth:
    """A drafted tree.

    Args:
        tokens: int64 [size], each node's token in the target's vocabulary.
        laws: float32 [inner, draft vocabulary], what the children of each inner node were drawn from.
        drawn: int64 [inner, branching], their indices in the draft's vocabulary.
    """

    tokens: Tensor
    laws: Tensor
    drawn: Tensor


def grow(draft: CachedModel, levels: list[Level], tokens: Tensor, length: Tensor, offsets: Tensor, mask: Tensor, sampling: Sampling, bits: Tensor) -> Growth:
    """Draft one tree. The last level is only drawn, never read.

    Args:
        tokens: int64 [2], the committed token before the root and the root.
        length: int64 [1], the root's position.
        offsets: int64 [size + 1], each row's position after the root; -1 for row 0.
        mask: [size + 1, extent] of `TreeMask`.
        bits: int32 [inner, columns], what the sampling's drawing needs.
    """
    rows = torch.cat([tokens, tokens.new_zeros(offsets.numel() - 2)])
    branching = max(level.children for level in levels)
    laws, drawn = [], []
    for level, thrown in zip(levels, bits.split([level.expands for level in levels]), strict=True):
        law, picks = expand(draft, level, rows, length, offsets, mask, sampling, thrown)
        laws.append(law)
        drawn.append(torch.nn.functional.pad(picks, (0, branching - level.children)))
    return Growth(rows[1:], torch.cat(laws), torch.cat(drawn))


def expand(
    draft: CachedModel, level: Level, rows: Tensor, length: Tensor, offsets: Tensor, mask: Tensor, sampling: Sampling, bits: Tensor
) -> tuple[Tensor, Tensor]:
    """One draft pass: read a level, draw its children and write their tokens into `rows`.

    Returns:
        law: float32 [expanded, draft vocabulary]; picks: int64 [expanded, children], indices in the draft's vocabulary.
    """
    return beget(draft, level, rows, read(draft, level, rows, length, offsets, mask), sampling, bits)


def read(draft: CachedModel, level: Level, rows: Tensor, length: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
    """The draft's logits [expanded, draft vocabulary] after the nodes of a level."""
    positions = (length + offsets[level.rows]).clamp(min=0)  # a prompt of one token has none before its root
    slots = (length + level.rows - 1).clamp(min=0)
    return draft(rows[level.rows], positions, slots, mask[level.rows], last=level.expands)


def beget(draft: CachedModel, level: Level, rows: Tensor, logits: Tensor, sampling: Sampling, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a level's children from the draft's logits; see `expand`."""
    law = sampling.draft(logits)
    picks = sampling.drawing.draw(law, level.children, bits)
    children = picks[level.parent, level.rank]
    rows[level.below] = children if draft.covered is None else draft.covered[children]
    return law, picks
