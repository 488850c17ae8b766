"""What all steps of a decoder share: target, drafter, their sequence, and their CUDA graphs."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.models.backends import loaded
from sequoia_plan.models.base.architecture import model_type, rope_reason
from sequoia_plan.models.loaded_model import Backend, LoadedModel
from sequoia_plan.models.vocabulary import check_tokenizers, shared_vocabulary
from sequoia_plan.runtime.capture import step_graphs
from sequoia_plan.runtime.draft.dflash import DFlashDrafter
from sequoia_plan.runtime.draft.drafter import Drafter
from sequoia_plan.runtime.draft.eagle import EagleDrafter
from sequoia_plan.runtime.draft.hidden_state_draft import HiddenStateDraft
from sequoia_plan.runtime.draft.language_model import LanguageModelDrafter
from sequoia_plan.runtime.sequence import SequenceState

if TYPE_CHECKING:  # they need numba
    from sequoia_plan.runtime.compiled.compiled_step import CompiledStep
    from sequoia_plan.runtime.draft.packed_eagle import PackedEagle

Model = LoadedModel | nn.Module
"""What `load_pair` loads, or a transformers model, which something may wrap."""
MAX_TREE_NODES = 4096
"""The mask and the paths of a tree grow with the square of its size."""


class DecodingModels:
    """A target and a drafter that decode one sequence with trees like `tree`.

    The arguments are those of `SequoiaDecoder`. If `tree` drafts nothing, neither does a draft.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        tree: TokenTree,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        captured: bool | None = None,
    ) -> None:
        self.target = loaded(target)
        self.device = self.target.device
        self.drafter: Drafter | None = None
        self.models: list[Backend | HiddenStateDraft | PackedEagle] = [self.target.backend]
        self.contexts = [self.target.context]
        if draft is not None and any(t.num_drafted_levels for t in tree.all_trees):
            draft = draft if isinstance(draft, HiddenStateDraft) else loaded(draft)
            self.models.append(draft.backend)
            if draft.device != self.device:
                raise SequoiaPlanError(
                    f"draft: on {draft.device}, the target takes its input on {self.device}; move "
                    "the draft there"
                )
            common_size = None
            if tokenizer is not None and draft_tokenizer is not None:
                common_size = check_tokenizers(tokenizer, draft_tokenizer)
            vocabulary, d2t = shared_vocabulary(self.target, draft, common_size)
            self.drafter = drafter_of(draft, vocabulary, d2t)
            if isinstance(draft, LoadedModel):
                self.contexts.append(draft.context)
        self.hidden_states = self.drafter.aux_hidden_state_layers if self.drafter else ()
        self.target.backend.prepare(self.hidden_states)
        self.versions = [model.version for model in self.models]  # a change of weights is a new one
        files = (getattr(model, "file", None) for model in self.models)
        self.files = [file for file in files if file is not None]
        self.sequence = SequenceState(self.device)
        if self.target.traits.chains_only:
            captured = False  # the host reads how many tokens they read again
        captures_draft = all(model.can_be_captured() for model in self.models[1:])
        self.graphs = step_graphs(self.target.backend, captures_draft, self.device, captured)
        self.compiled_step: CompiledStep | None = None
        self.step_state: list[int] = []

    def step_for(self, rows: int) -> "CompiledStep | None":
        """Compiled steps for passes of up to so many rows; None if a model is not compiled."""
        sequence = self.sequence
        if not all(model.traits.is_compiled for model in self.models):
            return None
        memory = (sequence.tokens, sequence.bits, sequence.lookup_chain)
        state = [*self.versions, sequence.version, *(tensor.data_ptr() for tensor in memory)]
        is_large_enough = self.compiled_step is None or self.compiled_step.rows >= rows
        if state != self.step_state or not is_large_enough:
            self.step_state = state
            from sequoia_plan.runtime.compiled.compiled_step import new_step

            self.compiled_step = new_step(
                self.target.backend, self.drafter, sequence, rows, self.contexts, self.hidden_states
            )
        return self.compiled_step

    def check_unchanged(self) -> None:
        """Raise SequoiaPlanError if a model is no longer what the decoder was made for.

        Weights may change: what the sequence holds then counts as not read.
        """
        for model in self.models:
            model.check()
        versions = [model.version for model in self.models]
        if versions != self.versions:
            self.versions, self.sequence.num_read = versions, 0

    def check_files(self) -> None:
        """Raise SequoiaPlanError if a file from which a model computes was written to."""
        for file in self.files:
            file.check_unchanged()

    @torch.no_grad()
    def prefill(
        self, prompt: Tensor, capacity: int, max_size: int, seed: int | None, unsettled: int | None
    ) -> None:
        """Start a sequence: both caches hold the prompt without its last token, the first root.

        `prompt` int64 [n]; `max_size`: nodes of the largest tree. What the prompt shares with the
        text before is not read again, except by the draft its part in the last `unsettled` tokens
        of that text, which steps may have read otherwise or not at all. With None, all is read.
        """
        self.check_unchanged()
        sequence, drafter = self.sequence, self.drafter
        if seed is None:
            seed = int(self.target.backend.from_first(torch.randint((1 << 63) - 1, ())))
        sequence.generator.manual_seed(seed)
        settled = sequence.num_read - (unsettled or 0)  # the draft need not read these again
        # a recurrent state cannot go back to where the texts begin to differ
        reads_all = unsettled is None or self.target.traits.chains_only
        start = 0 if reads_all else sequence.num_shared(prompt[:-1])
        sequence.num_read = start
        sequence.reserve(capacity, self.target.new_cache, drafter.new_cache if drafter else None)
        if self.hidden_states:
            width = len(self.hidden_states) * self.target.config.hidden_size
            sequence.reserve_rows("aux_hidden_states", max_size, (width,), self.target.dtype)
        if self.graphs:
            sequence.note_weight_memory([model.weight_memory() for model in self.models])
        start = sequence.num_read
        sequence.tokens[: prompt.numel()] = prompt
        sequence.length.fill_(prompt.numel() - 1)
        sequence.num_unread = 0
        on_chunk = None
        if drafter:
            on_chunk = partial(drafter.prefill_hidden_states, sequence)
            slots = torch.arange(min(max(settled, 0), start), start, device=self.device)
            if slots.numel():
                drafter.catch_up(sequence, slots, start)
            sequence.draft.finite.fill_(True)
            drafter.prefill(sequence.draft, prompt[:-1], start)
        self.target.prefill(sequence.target, prompt[:-1], on_chunk, start, self.hidden_states)
        # weights that are streamed are read for the prompt's last part and the first step at once
        sequence.num_read = start if self.target.stream else prompt.numel() - 1

    @property
    def max_children(self) -> int:
        """The most children that a node may have."""
        if self.target.traits.chains_only:
            return 1
        return self.drafter.vocabulary if self.drafter else MAX_TREE_NODES

    def check_prompt(self, prompt: Tensor) -> None:
        """Check that the target has the prompt's tokens (int64 [n]), and room for one more."""
        lowest, highest = int(prompt.min()), int(prompt.max())
        count, context = self.target.num_embeddings, self.target.context
        if lowest < 0 or highest >= count:
            wrong = highest if highest >= count else lowest
            raise ArgumentError(
                f"prompt: found the token {wrong}, expected 0 to {count - 1}, the target's "
                "embeddings; was it made by another tokenizer?"
            )
        if prompt.numel() >= context:
            raise SequoiaPlanError(
                f"prompt: {prompt.numel()} tokens, expected at most {context - 1} (the model's "
                f"context less one new token{rope_reason(self.target.config)}); "
                "shorten it"
            )

    def check_tree(self, tree: TokenTree) -> None:
        """Check that the draft can draft `tree`, and that the decoder can hold it."""
        drafter = self.drafter
        if drafter is None and tree.num_drafted_levels:
            raise SequoiaPlanError(
                f"a tree of {tree.size} nodes needs a draft model; only a tree of one node decodes "
                "without"
            )
        if tree.branching > 1 and self.target.traits.chains_only:
            raise SequoiaPlanError(
                f"tree: {tree.branching} children of one node, and {model_type(self.target)} "
                "has layers with a recurrent state, where a tree needs a state for each node; take "
                "a chain, as solve does with a profile of this target"
            )
        if drafter and tree.branching > drafter.vocabulary:
            raise SequoiaPlanError(
                f"tree: {tree.branching} children of one node, more than the draft's vocabulary "
                "holds"
            )
        max_depth = drafter.drafting.max_depth if drafter else None  # None: any depth
        if max_depth and tree.num_drafted_levels >= max_depth:
            raise SequoiaPlanError(
                f"tree: {tree.depth} levels, the draft reaches {max_depth}; solve with its own "
                f"profile, or with --depth {max_depth}"
            )
        if tree.size > MAX_TREE_NODES:
            raise SequoiaPlanError(
                f"tree: {tree.size} nodes, expected at most {MAX_TREE_NODES} to decode with; solve "
                "with a smaller --budget"
            )


def drafter_of(
    draft: LoadedModel | HiddenStateDraft, vocabulary: int, d2t: Tensor | None
) -> Drafter:
    """The drafter of the class that suits a draft. `vocabulary`, `d2t`: see `Drafter`."""
    if isinstance(draft, LoadedModel):
        return LanguageModelDrafter(draft, vocabulary, d2t)
    drafter = EagleDrafter if draft.drafting.drafts_by_level else DFlashDrafter
    return drafter(draft, vocabulary, d2t)
