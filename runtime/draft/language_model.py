"""Drafting with a language model, one pass a level, with a KV cache of its own."""

from dataclasses import replace

import torch
from torch import Tensor

from sequoia_plan.artifacts import LANGUAGE_MODEL, SequoiaPlanError, TokenTree
from sequoia_plan.models.base.architecture import model_type
from sequoia_plan.models.base.cache import TreeCache
from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.models.loaded_model import ForwardOutput, LoadedModel
from sequoia_plan.runtime.draft.drafter import Drafter, DraftPass, distinct_slots, passes_by_level
from sequoia_plan.runtime.sequence import SequenceState


class LanguageModelDrafter(Drafter):
    """A transformers causal LM as a drafter (see `Drafter`)."""

    drafting = LANGUAGE_MODEL

    def __init__(self, model: LoadedModel, vocabulary: int, d2t: Tensor | None) -> None:
        try:
            model.backend.prepare(())
        except SequoiaPlanError as error:
            raise SequoiaPlanError(f"draft: {error}") from error
        self.model, self.vocabulary, self.d2t = model, vocabulary, d2t
        self.backend = model.backend
        if model.traits.chains_only:
            raise SequoiaPlanError(
                f"draft: {model_type(model)} has layers with a recurrent state, expected attention "
                "alone, because a draft reads tokens again; name another draft, or none"
            )

    def new_cache(self, capacity: int) -> TreeCache:
        """The model's cache."""
        return self.model.new_cache(capacity)

    def splits_keys(self, tokens: int) -> bool:
        """Do the model's passes of up to so many tokens read no keys after their own?"""
        return self.model.backend.splits_keys(tokens)

    def passes(self, tree: TokenTree, tensors: TreeTensors) -> tuple[DraftPass, ...]:
        """One pass for each level that has children, over the nodes that have them.

        The first pass also reads the token before the root again: if that was an accepted leaf, the
        draft has not read it yet.
        """
        first, *deeper = passes_by_level(tree, tensors)
        # the token before the root attends to committed tokens only, which column 0 stands for
        committed = torch.zeros_like(tensors.mask[:1], dtype=torch.bool)
        committed[0, 0] = True
        mask = torch.cat([additive_mask(committed, tensors.mask.dtype), first.mask])
        # relative to the root: the token before it, and the root
        slots = torch.tensor([-1, 0], device=tensors.nodes.device)
        return (replace(first, input_slots=slots, offsets=slots, mask=mask), *deeper)

    def prefill(self, cache: TreeCache, tokens: Tensor, start: int) -> None:
        """Read `tokens` (int64 [n]) from slot `start` on."""
        self.model.prefill(cache, tokens, start=start)

    def forward(
        self,
        draft_pass: DraftPass,
        sequence: SequenceState,
        columns: Tensor,
        previous: ForwardOutput | None = None,
    ) -> ForwardOutput:
        """Read the pass's tokens with the language model, and write to its cache."""
        slots = read_slots = sequence.length + draft_pass.input_slots
        positions = sequence.length + draft_pass.offsets
        if previous is None:
            # a prompt of one token has no token before its root: token 0 stands for it
            read_slots, slots = slots.clamp(min=0), distinct_slots(sequence.length, slots)
            positions.clamp_(min=0)
        output = self.model(
            sequence.draft,
            sequence.tokens[read_slots],
            positions,
            slots,
            draft_pass.mask.index_select(1, columns),
            logits_to_keep=draft_pass.num_parents,
        )
        return ForwardOutput(output.logits[:, : self.vocabulary])

    def logits_over_text(self, sequence: SequenceState, slots: Tensor, *_: object) -> Tensor:
        """See `Drafter`; a language model's logits do not depend on the level."""
        tokens, extent = sequence.tokens[slots], int(slots[-1]) + 1
        logits = self.model.read_text(sequence.draft, tokens, slots, extent).logits
        return logits[:, : self.vocabulary]

    def catch_up(self, sequence: SequenceState, slots: Tensor, extent: int) -> None:
        """Read the committed tokens in `slots` (int64 [tokens]); the cache then has them."""
        self.model.read_text(sequence.draft, sequence.tokens[slots], slots, extent, 1)

    def commit(self, sequence: SequenceState, path: Tensor) -> None:
        """Move keys and values of nodes in `path` (int64 [depth]) to slots from the root's on."""
        sequence.draft.commit(sequence.length + path, sequence.length)
