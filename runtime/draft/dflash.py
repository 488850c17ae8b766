"""Drafting with DFlash, DFlash 2 and DSpark: one pass gives the logits of all levels.

DFlash's are known before anything is drawn. In DFlash 2 and DSpark they also depend on the parent's
token, so children are drawn level after level. Each node's children are drawn separately: one draw
for all nodes of a level is not exact with every verifier
(tests/runtime/test_hidden_state_decoding.py).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base.cache import TreeCache
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.models.layers.attention import attending
from sequoia_plan.models.loaded_model import ForwardOutput
from sequoia_plan.runtime.draft.dflash_model import DFlashModel
from sequoia_plan.runtime.draft.drafter import DraftPass, HiddenStateDrafter, children_to_draw
from sequoia_plan.runtime.sequence import SequenceState


class DFlashDrafter(HiddenStateDrafter):
    """A DFlash draft as a drafter (see `Drafter`)."""

    model: DFlashModel

    def passes(self, tree: TokenTree, tensors: TreeTensors) -> tuple[DraftPass, ...]:
        """The one pass, with a row of logits for each node that has children.

        Where logits depend on the parent's token, it is an entry for each level, so that a level's
        tokens are drawn before the next one's logits; only the first entry runs the model.
        """
        parents_of_draws = [*map(tree.nodes_with_children, range(tree.num_drafted_levels))]
        if not self.model.path_head:
            parents_of_draws = [np.concatenate(parents_of_draws)]
        passes = list[DraftPass]()
        for parents in parents_of_draws:
            nodes = torch.as_tensor(parents, dtype=torch.long, device=tensors.nodes.device)
            fields = children_to_draw(tree, parents, nodes.device)
            if passes:
                fields["input_slots"] = nodes
            passes.append(self.block_pass(tensors, tensors.offsets[nodes], **fields))
        return tuple(passes)

    def block_pass(self, tensors: TreeTensors, logit_rows: Tensor, **fields: Any) -> DraftPass:
        """A pass over a block, the root and mask tokens; `logit_rows`: its parents' levels."""
        block = torch.arange(self.model.block.size, device=tensors.nodes.device)
        # `forward` makes the mask of a block
        fields = {"input_slots": block, "mask": tensors.mask[:0], **fields}
        return DraftPass(offsets=block, logit_rows=logit_rows, **fields)

    def representative_pass(self, tensors: TreeTensors) -> tuple[DraftPass, ForwardOutput | None]:
        """A pass to be timed, which takes as long with every tree; it reads no earlier pass (None).

        It draws no children: their time counts as verification's.
        """
        nothing = tensors.nodes[:0]
        draft_pass = self.block_pass(
            tensors,
            logit_rows=torch.arange(self.model.block.levels, device=nothing.device),
            num_parents=1,
            draw_index=nothing,
            new_nodes=nothing,
        )
        return draft_pass, None

    def new_cache(self, capacity: int) -> TreeCache:
        """A cache of so many slots, and of those of a block after the last token."""
        return self.model.new_cache(capacity + self.model.block.size, counts_positions=False)

    def forward(
        self,
        draft_pass: DraftPass,
        sequence: SequenceState,
        columns: Tensor,
        previous: ForwardOutput | None = None,
    ) -> ForwardOutput:
        """The logits of the pass's children; the model runs only if there is no `previous`."""
        head, length, block = self.model.path_head, sequence.length, self.model.block
        if previous:
            (by_level,) = previous.later
        else:
            slots, extent = length + draft_pass.offsets, columns.numel() + block.size
            is_root = draft_pass.offsets == 0
            tokens = torch.where(is_root, sequence.tokens[length], block.mask_token)[None]
            masks = self.model.block_masks(length, extent)
            with attending(self.model.config):
                cache = sequence.draft.at(slots, extent)
                hidden_states = self.model(tokens, slots[None], masks, cache)[0]
            logits = self.model.head(hidden_states)[:, : self.vocabulary]
            by_level = head.prepare(logits, hidden_states) if head else (logits,)
        by_parent = [tensor[draft_pass.logit_rows] for tensor in by_level]
        if not head:
            return ForwardOutput(by_parent[0])
        # the first of a block is the root, the one parent of the first level
        parents = sequence.tokens[length + draft_pass.input_slots[: draft_pass.num_parents]]
        return ForwardOutput(head(parents, *by_parent), later=(by_level,))

    def keep_hidden_states(self, cache: TreeCache, slots: Tensor, hidden_states: Tensor) -> None:
        """Cache the target's hidden states [tokens, width] of the committed tokens in `slots`."""
        positions = slots[None]  # committed tokens: a slot is a position
        self.model.cache_context(hidden_states[None], positions, cache.at(slots, cache.extent))
