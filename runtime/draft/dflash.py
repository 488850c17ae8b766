"""Drafting with DFlash: one pass gives the probabilities of all levels.

A level's probabilities do not depend on the tokens above it, so they are known before anything is
drawn. Each node's children are drawn from them separately: one draw for all nodes of a level would
not be exact with every verifier (tests/runtime/test_hidden_state_decoding.py).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, dflash_draft
from sequoia_plan.runtime.base.cache import TreeCache
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.base.tree_tensors import TreeTensors
from sequoia_plan.runtime.draft.dflash_model import DFlashModel
from sequoia_plan.runtime.draft.drafter import DraftPass, HiddenStateDrafter, children_to_draw
from sequoia_plan.runtime.models.forward import ForwardOutput


class DFlashDrafter(HiddenStateDrafter):
    """A DFlash draft as a drafter (see `Drafter`)."""

    def __init__(self, model: DFlashModel, vocabulary: int, d2t: Tensor | None = None) -> None:
        super().__init__(model, vocabulary, d2t)
        self.drafting = dflash_draft(model.block.size, model.block.levels)

    def passes(self, tree: TokenTree, tensors: TreeTensors) -> tuple[DraftPass, ...]:
        """The one pass, with a row of logits for each node that has children."""
        if not tree.num_drafted_levels:
            return ()
        parents = np.flatnonzero(tree.child_count)
        parents = parents[tree.position_ids[parents] < tree.num_drafted_levels]
        device = tensors.nodes.device
        levels = torch.as_tensor(tree.position_ids[parents].astype(np.int64), device=device)
        return (self.block_pass(tensors, levels, **children_to_draw(tree, parents, device)),)

    def block_pass(
        self, tensors: TreeTensors, logit_rows: Tensor | None, **children: Any
    ) -> DraftPass:
        """A pass over one block, which is the root's token and mask tokens after it."""
        block = torch.arange(self.model.block.size, device=tensors.nodes.device)
        no_mask = tensors.mask[:0]  # `forward` makes the mask of a block
        return DraftPass(block, block, no_mask, logit_rows=logit_rows, **children)

    def new_cache(self, capacity: int) -> TreeCache:
        """A cache of so many slots, and of those of a block after the last token."""
        slots = capacity + self.model.block.size
        return TreeCache(self.model.cache_layout(), slots, self.model.device)

    def prefill(self, cache: TreeCache, tokens: Tensor, start: int) -> None:
        """The draft gets the prompt only in `prefill_hidden_states`."""
        cache.finite.fill_(True)

    def prefill_hidden_states(
        self, cache: TreeCache, tokens: Tensor, slots: Tensor, mask: Tensor, hidden_states: Tensor
    ) -> None:
        """Cache keys and values made of the target's hidden states of a part of the prompt."""
        self.keep_hidden_states(cache, slots, hidden_states)

    def forward(
        self,
        draft_pass: DraftPass,
        sequence: SequenceState,
        columns: Tensor,
        previous: ForwardOutput | None = None,
    ) -> ForwardOutput:
        """Run the one pass. `columns` int64 [extent]."""
        cache, length, block = sequence.draft, sequence.length, self.model.block
        slots, extent = length + draft_pass.offsets, columns.numel() + block.size
        tokens = torch.where(draft_pass.offsets == 0, sequence.tokens[length], block.mask_token)
        masks = self.model.block_masks(length, extent)
        cache = cache.at(slots, extent)
        with self.model.attending():
            logits = self.model(tokens[None], slots[None], masks, cache)
        logits = logits[0, 0, :, : self.vocabulary]  # one sequence, one block
        if draft_pass.logit_rows is not None:
            logits = logits.index_select(0, draft_pass.logit_rows)
        return ForwardOutput(logits)

    def keep_hidden_states(self, cache: TreeCache, slots: Tensor, hidden_states: Tensor) -> None:
        """Cache the target's hidden states [tokens, width] of the committed tokens in `slots`."""
        positions = slots[None]  # committed tokens: a slot is a position
        self.model.cache_context(hidden_states[None], positions, cache.at(slots, cache.extent))
