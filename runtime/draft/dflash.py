"""Drafting with DFlash: one pass gives the probabilities of all levels.

A level's probabilities do not depend on the tokens above it, so they are known before anything is
drawn. Each node's children are drawn from them separately: one draw for all nodes of a level would
not be exact with every verifier (tests/runtime/test_hidden_state_decoding.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree, dflash_draft
from sequoia_plan.runtime.base.cache import TreeCache
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.base.tree_tensors import TreeTensors
from sequoia_plan.runtime.draft.dflash_model import DFlashModel
from sequoia_plan.runtime.draft.drafter import DraftPass, children_to_draw
from sequoia_plan.runtime.models.forward import ForwardOutput, compiling_many_shapes


class DFlashDrafter:
    """A DFlash draft as a drafter (see `Drafter`)."""

    def __init__(
        self, model: DFlashModel, vocabulary: int, d2t: Tensor | None = None, backend: Any = None
    ) -> None:
        self.model, self.vocabulary, self.d2t = model, vocabulary, d2t
        self.aux_hidden_state_layers = model.aux_hidden_state_layers
        self.drafting = dflash_draft(model.block.size, model.block.levels)
        self.compiled: Any = None
        if backend is not None:
            self.compiled = torch.compile(model, dynamic=False, backend=backend)

    def passes(self, tree: TokenTree, tensors: TreeTensors) -> tuple[DraftPass, ...]:
        """The one pass, with a row of logits for each node that has children."""
        if not tree.num_drafted_levels:
            return ()
        device = tensors.nodes.device
        parents = np.flatnonzero(tree.child_count)
        parents = parents[tree.position_ids[parents] < tree.num_drafted_levels]
        children = children_to_draw(tree, parents)
        draft_pass = self.block_pass(
            tensors,
            num_parents=len(parents),
            max_children=children.max_children,
            draw_index=torch.as_tensor(children.draw_index, device=device),
            new_nodes=torch.as_tensor(children.nodes, device=device),
            logit_rows=torch.as_tensor(tree.position_ids[parents].astype(np.int64), device=device),
        )
        return (replace(draft_pass, looked_up=children.looked_up),)

    def block_pass(
        self,
        tensors: TreeTensors,
        num_parents: int,
        max_children: int,
        draw_index: Tensor,
        new_nodes: Tensor,
        logit_rows: Tensor | None,
    ) -> DraftPass:
        """A pass over one block, which is the root's token and mask tokens after it."""
        block = torch.arange(self.model.block.size, device=tensors.nodes.device)
        no_mask = tensors.mask[:0]  # `forward` makes the mask of a block
        return DraftPass(
            block,
            block,
            no_mask,
            num_parents,
            max_children,
            draw_index,
            new_nodes,
            logit_rows=logit_rows,
        )

    def new_cache(self, capacity: int) -> TreeCache:
        """A cache of so many slots, and of those of a block after the last token."""
        slots = capacity + self.model.block.size
        return TreeCache(self.model.cache_layout(), slots, self.model.device)

    def prefill(self, cache: TreeCache, tokens: Tensor) -> None:
        """Start a sequence. The draft gets the prompt only in `prefill_hidden_states`."""
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
        """Run the one pass, over the root's token and the mask tokens after it.

        `columns` int64 [extent].
        """
        cache, length, block = sequence.draft, sequence.length, self.model.block
        slots, extent = length + draft_pass.offsets, columns.numel() + block.size
        root = sequence.tokens[length]
        tokens = torch.where(draft_pass.offsets == 0, root, block.mask_token)
        masks = self.model.block_masks(length, extent)
        model = self.model if self.compiled is None else self.compiled
        with self.model.attending(), compiling_many_shapes(model is not self.model):
            logits = model(tokens[None], slots[None], masks, cache.at(slots, extent))
        logits = logits[0, 0, :, : self.vocabulary]  # one sequence, one block
        cache.finite.logical_and_(logits.amax(-1).isfinite().all())
        if draft_pass.logit_rows is not None:
            logits = logits.index_select(0, draft_pass.logit_rows)
        return ForwardOutput(logits)

    def splits_keys(self, tokens: int) -> bool:
        """No: a block attends to the hidden states before it by other masks."""
        return False

    def num_read_again(self, tree: TokenTree) -> int:
        """None."""
        return 0

    def max_unread(self, tree: TokenTree) -> int:
        """None: `commit` caches what the draft needs of every accepted token."""
        return 0

    def catch_up(self, sequence: SequenceState, slots: Tensor, extent: int) -> None:
        """Nothing is ever left unread."""

    def commit(self, sequence: SequenceState, path: Tensor) -> None:
        """Cache keys and values made of the target's hidden states of the nodes in `path`."""
        slots = sequence.length + torch.arange(path.numel(), device=path.device)
        hidden_states = sequence.aux_hidden_states.index_select(0, path)
        self.keep_hidden_states(sequence.draft, slots, hidden_states)

    def keep_hidden_states(self, cache: TreeCache, slots: Tensor, hidden_states: Tensor) -> None:
        """Cache the target's hidden states [tokens, width] of the committed tokens in `slots`."""
        positions = slots[None]  # committed tokens: a slot is a position
        self.model.cache_context(hidden_states[None], positions, cache.at(slots, cache.extent))
