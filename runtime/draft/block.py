"""The drafter of a block draft: one pass gives the laws of all levels.

A level's law is the same whatever stands above it, so it is known before anything is drawn. Each node's children are drawn from it by
themselves: one draw for all nodes of a level would not be exact with every verifier (tests/test_tapped_decoding.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, block_draft
from sequoia_plan.runtime.cache import TreeCache
from sequoia_plan.runtime.draft.block_model import BlockModel
from sequoia_plan.runtime.draft.drafter import Pass, read_steps
from sequoia_plan.runtime.models.forward import Reading, many_shapes
from sequoia_plan.runtime.sequence import Sequence
from sequoia_plan.runtime.structure import Structure


class BlockDrafter:
    """A block draft as drafter (see `Drafter`).

    Args:
        model: the draft.
        vocabulary, covered, backend: as for `LanguageModelDrafter`.
    """

    def __init__(self, model: BlockModel, vocabulary: int, covered: Tensor | None = None, backend: Any = None) -> None:
        self.model, self.vocabulary, self.covered, self.taps = model, vocabulary, covered, model.taps
        self.drafting = block_draft(model.block.size, model.block.levels)
        self.compiled = None if backend is None else torch.compile(model, dynamic=False, backend=backend)

    def passes(self, tree: TokenTree, structure: Structure) -> tuple[Pass, ...]:
        """The one pass, and a row of logits for each node that has children."""
        if tree.size == 1:
            return ()
        inner = np.flatnonzero(tree.child_count)
        drawn = np.searchsorted(inner, tree.parents[1:]) * tree.branching + tree.ranks[1:] - 1
        device = structure.nodes.device
        rows, places = (torch.as_tensor(np.asarray(each, np.int64), device=device) for each in (tree.position_ids[inner], drawn))
        return (self._pass(structure, len(inner), tree.branching, places, structure.nodes[1:], rows),)

    def trial(self, structure: Structure) -> tuple[Pass, Reading | None]:
        """The same for every tree; drawing is timed with the tree (see `profiler.verification`)."""
        nothing = structure.nodes[:0]
        return self._pass(structure, self.model.block.levels, 1, nothing, nothing, None), None

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.model.new_layout(), capacity + self.model.block.size, self.model.device)

    def prefill(self, cache: TreeCache, tokens: Tensor) -> None:
        """There is nothing to read before the target has."""
        cache.finite.fill_(True)

    def watch(self, cache: TreeCache, tokens: Tensor, slots: Tensor, mask: Tensor, features: Tensor) -> None:
        self._remember(features, cache, slots)

    def read(self, step: Pass, sequence: Sequence, columns: Tensor, before: Reading | None = None) -> Reading:
        cache, length, block = sequence.draft, sequence.length, self.model.block
        slots = length + step.offsets
        tokens = torch.where(step.offsets == 0, sequence.tokens[length], block.mask)
        masks = self.model.block_masks(length, columns.numel() + block.size)
        run = self.model if self.compiled is None else self.compiled
        with self.model.attending(), many_shapes(run is not self.model):
            logits = run(tokens[None], slots[None], masks, cache.at(slots, columns.numel() + block.size))[0, 0, :, : self.vocabulary]
        cache.finite.logical_and_(logits.amax(-1).isfinite().all())
        return Reading(logits if step.parents is None else logits.index_select(0, step.parents))

    def read_text(self, sequence: Sequence, here: Tensor, levels: Several[int], features: Tensor | None) -> Tensor:
        """As a step reads it: a block from each root."""
        assert features is not None
        known, chain = features, TokenTree.chain(self.model.block.levels + 1)

        def watch(start: int, end: int) -> None:
            self._remember(known[start:end], sequence.draft, here[start:end])

        return read_steps(self, chain, Structure.of(chain, here.device, self.model.dtype), sequence, here, levels, watch)

    def keep(self, sequence: Sequence, path: Tensor) -> None:
        slots = sequence.length + torch.arange(path.numel(), device=path.device)
        self._remember(sequence.features.index_select(0, path), sequence.draft, slots)

    def _remember(self, features: Tensor, cache: TreeCache, slots: Tensor) -> None:
        """The target's hidden states [tokens, taps * width] of the tokens in `slots`, which are their positions."""
        self.model.remember(features[None], slots[None], cache.at(slots, cache.extent))

    def _pass(self, structure: Structure, expands: int, children: int, drawn: Tensor, nodes: Tensor, rows: Tensor | None) -> Pass:
        block = torch.arange(self.model.block.size, device=structure.nodes.device)
        return Pass(block, block, structure.mask[:0], expands, children, drawn, nodes, rows)
