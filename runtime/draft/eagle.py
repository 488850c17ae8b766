"""Drafting with EAGLE: one pass for each level that has children."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base.cache import TreeCache
from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.models.layers.split_keys import splits_keys
from sequoia_plan.models.loaded_model import ForwardOutput
from sequoia_plan.runtime.draft.drafter import (
    DraftPass,
    HiddenStateDrafter,
    distinct_slots,
    passes_by_level,
)
from sequoia_plan.runtime.sequence import SequenceState


class EagleDrafter(HiddenStateDrafter):
    """An EAGLE draft as a drafter (see `Drafter`)."""

    def passes(self, tree: TokenTree, tensors: TreeTensors) -> tuple[DraftPass, ...]:
        """One pass for each level that has children, over the nodes that have them.

        The first reads as many committed tokens as there are passes and one more, the root last.
        """
        first, *deeper = passes_by_level(tree, tensors)
        # relative to the root's slot: -(depth - 1), ..., -1, 0 in a tree that is drafted whole
        slots = torch.arange(-tree.num_drafted_levels, 1, device=tensors.nodes.device)
        return (replace(first, input_slots=slots, offsets=slots, later=tuple(deeper)), *deeper)

    def representative_pass(self, tensors: TreeTensors) -> tuple[DraftPass, ForwardOutput | None]:
        """See `Drafter`; the pass before is one row of zeros, the feature of every node."""
        width, device = self.model.feature_width, tensors.nodes.device
        features = torch.zeros(1, width, dtype=self.backend.feature_dtype, device=device)
        previous = ForwardOutput(features[:, :0], features)
        return super().representative_pass(tensors)[0], previous

    def new_cache(self, capacity: int) -> TreeCache:
        """A cache of so many slots, with memory for a feature of each token.

        `features` [capacity + 1, width], which are made of the target's hidden states: row s
        has that of the token before slot s, with which the token in slot s is read.
        """
        window = self.model.window
        windowed = window is not None and window < capacity
        cache = self.backend.new_cache(capacity, counts_positions=windowed)
        shape = (capacity + 1, self.model.feature_width)
        cache.features = torch.zeros(
            shape, dtype=self.backend.feature_dtype, device=self.model.device
        )
        return cache

    def forward(
        self,
        draft_pass: DraftPass,
        sequence: SequenceState,
        columns: Tensor,
        previous: ForwardOutput | None = None,
    ) -> ForwardOutput:
        """Each token is read together with the feature of the token before it.

        The first pass reads committed tokens, whose features are recorded, and later passes read
        nodes, whose features are the hidden states of their parents in the previous pass.
        """
        cache, inputs_by_pass = sequence.draft, previous.later if previous else ()
        if not inputs_by_pass:  # made at once for all passes of a step, in the first
            inputs_by_pass = self._inputs(draft_pass, sequence, columns, previous is None)
        (read_slots, *inputs), *later = inputs_by_pass
        if previous is None:
            features = cache.features[read_slots]
        else:
            assert previous.hidden_states is not None
            features = previous.hidden_states[draft_pass.parent_rows]
        tokens = sequence.tokens[read_slots]
        logits, outputs = self.backend.read(cache, tokens, features, inputs, draft_pass.num_parents)
        return ForwardOutput(logits[:, : self.vocabulary], outputs, later)

    def _inputs(
        self, first: DraftPass, sequence: SequenceState, columns: Tensor, reads_committed: bool
    ) -> list[Sequence[Tensor]]:
        """Of each pass, the slots whose tokens it reads, then `rows` of `HiddenStateDraft.read`.

        `reads_committed`: `first` reads committed tokens, the root last; other passes read nodes.
        """
        passes = (first, *first.later)
        widths = [draft_pass.input_slots.numel() for draft_pass in passes]
        slots = sequence.length + torch.cat([draft_pass.input_slots for draft_pass in passes])
        positions = sequence.length + torch.cat([draft_pass.offsets for draft_pass in passes])
        # short texts have fewer committed tokens than the first pass reads: token 0 stands for them
        read_slots, slots = slots.clamp(min=0), distinct_slots(sequence.length, slots)
        masks = []
        if reads_committed:
            slots_of_first = read_slots[: widths[0]]
            masks.append(_mask_of_committed(slots_of_first, columns.numel(), first.mask.dtype))
        if node_masks := [draft_pass.mask for draft_pass in passes[reads_committed:]]:
            columns[0] = first.mask.shape[1] - 1  # visible to no node: token 0 has no feature
            masks += torch.cat(node_masks).index_select(1, columns).split(widths[reads_committed:])
        return self._split_by_pass(masks, widths, read_slots, slots, positions)

    def _split_by_pass(
        self, masks: Sequence[Tensor], widths: list[int], *rows: Tensor
    ) -> list[Sequence[Tensor]]:
        """Of each pass: slices of `rows`, its mask, cosines and sines; `widths`: tokens of each."""
        # a row takes the feature of the token before it, and that one's position, as in the engines
        *slots, positions = rows
        positions = (positions - 1).clamp(min=0)
        angles = self.model.rotary_emb(next(self.model.parameters()), positions[None])
        splits = (tensor.split(widths, -1) for tensor in (*slots, positions))
        return [*zip(*splits, masks, *(angle.split(widths, 1) for angle in angles), strict=True)]

    def splits_keys(self, tokens: int) -> bool:
        model = self.model
        return not isinstance(model.cache_layout(), int) and splits_keys(
            model.device, model.dtype, model.config.head_dim, tokens
        )

    def catch_up(self, sequence: SequenceState, slots: Tensor, extent: int) -> None:
        """Read the committed tokens in `slots` (int64 [tokens]) with their recorded features."""
        cache, mask = sequence.draft, _mask_of_committed(slots, extent, self.model.dtype)
        (rows,) = self._split_by_pass([mask], [slots.numel()], slots, slots)
        self.backend.read(cache, sequence.tokens[slots], cache.features[slots], rows, 1)

    def keep_hidden_states(self, cache: TreeCache, slots: Tensor, hidden_states: Tensor) -> None:
        """Record the features of hidden states; the next first pass reads these tokens again."""
        features = self.backend.features_of(hidden_states)
        cache.features[:, : features.shape[1]].index_copy_(0, slots + 1, features)


def _mask_of_committed(slots: Tensor, extent: int, dtype: torch.dtype) -> Tensor:
    """The mask of committed tokens in `slots`: each sees the slots from 1 to its own.

    No token is before the one in slot 0, so that one has no feature, and the others do not see it.
    It sees itself: a row that saw nothing would attend to whatever the cache holds.
    """
    all_slots, own_slots = torch.arange(extent, device=slots.device), slots[:, None]
    return additive_mask((own_slots.clamp(max=1) <= all_slots) & (all_slots <= own_slots), dtype)
