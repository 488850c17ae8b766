"""What all steps of a decoder share: target, drafter, their sequence, and their CUDA graphs."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.runtime.base.sequence import SequenceState
from sequoia_plan.runtime.base.weight_stream import stream_of
from sequoia_plan.runtime.capture import is_on_one_cuda_device, step_graphs, weight_addresses
from sequoia_plan.runtime.draft.dflash import DFlashDrafter
from sequoia_plan.runtime.draft.dflash_model import DFlashModel
from sequoia_plan.runtime.draft.drafter import Drafter
from sequoia_plan.runtime.draft.eagle import EagleDrafter
from sequoia_plan.runtime.draft.eagle_model import Eagle1, Eagle3
from sequoia_plan.runtime.draft.language_model import LanguageModelDrafter, SelfDrafter
from sequoia_plan.runtime.draft.mtp import MtpDraft
from sequoia_plan.runtime.draft.self_draft import shares_cache
from sequoia_plan.runtime.models.architecture import (
    execution_device,
    model_type,
    rope_reason,
    text_config,
    unwrapped,
)
from sequoia_plan.runtime.models.compiled_passes import CAN_COMPILE, compiled_pass, passes
from sequoia_plan.runtime.models.forward import TreeModel
from sequoia_plan.runtime.models.fused_twin import twin_of, twins
from sequoia_plan.runtime.models.model_state import Watch, check_mode, structure, weights
from sequoia_plan.runtime.models.parallel import shared_seed
from sequoia_plan.runtime.models.probe import probe
from sequoia_plan.runtime.models.vocabulary import shared_vocabulary

MAX_TREE_NODES = 4096
"""The mask and the paths of a tree grow with the square of its size."""


class DecodingModels:
    """A target and a drafter that decode one sequence with trees like `tree`.

    `options` are those of `SequoiaDecoder`. Without a drafted tree, a draft is not used.
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        tree: TokenTree,
        *,
        tokenizer: Any = None,
        draft_tokenizer: Any = None,
        captured: bool | None = None,
    ) -> None:
        self.device = execution_device(target)
        self.drafter: Drafter | None = None
        if not any(t.num_drafted_levels for t in tree.all_trees):
            draft = None
        self.models = [model for model in (target, draft) if model is not None]
        for model in self.models:
            check_mode(model)
        if not shares_cache(draft, target):
            compile_passes(self.models)
            target, draft = (
                twin_of(model) if model is not None and is_on_one_cuda_device(model) else model
                for model in (target, draft)
            )
        if draft is not None:
            draft_device = execution_device(draft)
            if draft_device != self.device:
                raise SequoiaPlanError(
                    f"draft: on {draft_device}, the target takes its input on {self.device}; move "
                    "the draft there"
                )
            vocabulary, d2t = shared_vocabulary(target, draft, tokenizer, draft_tokenizer)
            self.drafter = make_drafter(target, draft, vocabulary, d2t)
        layers = self.drafter.aux_hidden_state_layers if self.drafter else ()
        layout = None if compiled_pass(target) else probe(target)
        self.target = TreeModel(target, layout, aux_hidden_state_layers=layers)
        self.passes = [compiled_pass(m) or twins.get(unwrapped(m)) for m in self.models]
        self.watch, self.weights = Watch(structure), Watch(partial(weights, sampled=False))
        for model in self.models:
            self.watch.look(model)
            self.weights.look(model)
        self.sequence = SequenceState(self.device)
        if self.target.recurrent_modules:
            captured = False  # the host reads how many tokens they read again
        self.graphs = step_graphs(target, draft, self.device, captured)

    def check_unchanged(self) -> None:
        """Raise SequoiaPlanError if a model is no longer what the decoder was made for.

        Weights may change: those that a compiled pass has are then packed anew, and what the
        sequence holds counts as not read.
        """
        for model, compiled in zip(self.models, self.passes, strict=True):
            if names := self.watch.changes(model):
                raise SequoiaPlanError(
                    f"{model_type(model)}: {', '.join(names[:3])} changed after the decoder was "
                    "made; make it anew"
                )
            check_mode(model)
            changed = compiled and compiled.check(model)
            is_streamed = stream_of(unwrapped(model)) is not None  # its memory changes in each pass
            if changed or (not is_streamed and self.weights.changes(model)):
                self.sequence.num_read = 0
                self.weights.look(model)

    @torch.no_grad()
    def prefill(
        self, prompt: Tensor, capacity: int, max_size: int, seed: int | None, unsettled: int | None
    ) -> None:
        """Start a sequence: both caches hold the prompt without its last token, the first root.

        What the models have read of the prompt is not read again, if the draft has settled all but
        the last `unsettled` tokens; None reads everything. `prompt` int64 [n].
        """
        self.check_unchanged()
        sequence, drafter = self.sequence, self.drafter
        sequence.generator.manual_seed(shared_seed(self.target.model) if seed is None else seed)
        settled = sequence.num_read - (unsettled or 0)
        # a recurrent state cannot go back to where the texts part
        reads_all = unsettled is None or self.target.recurrent_modules
        start = 0 if reads_all else sequence.num_shared(prompt[:-1])
        sequence.num_read = start
        self._reserve(capacity, max_size)
        start = sequence.num_read
        sequence.tokens[: prompt.numel()] = prompt
        sequence.length.fill_(prompt.numel() - 1)
        sequence.num_unread = 0
        on_chunk = None
        if drafter:
            on_chunk = partial(drafter.prefill_hidden_states, sequence.draft)
            slots = torch.arange(min(max(settled, 0), start), start, device=self.device)
            if slots.numel():
                drafter.catch_up(sequence, slots, start)
            drafter.prefill(sequence.draft, prompt[:-1], start)
        self.target.prefill(sequence.target, prompt[:-1], on_chunk, start)
        sequence.num_read = prompt.numel() - 1

    def _reserve(self, capacity: int, max_size: int) -> None:
        """Reserve `capacity` slots, and memory for the hidden states of `max_size` nodes."""
        sequence, drafter, model = self.sequence, self.drafter, self.target.model
        shares_cache = drafter is not None and drafter.drafting.shares_cache
        new_draft_cache = drafter.new_cache if drafter and not shares_cache else None
        sequence.reserve(capacity, self.target.new_cache, new_draft_cache)
        if shares_cache:
            sequence.draft = sequence.target
        if drafter and drafter.aux_hidden_state_layers:
            width = len(drafter.aux_hidden_state_layers) * text_config(model).hidden_size
            sequence.reserve_rows("aux_hidden_states", max_size, (width,), model.dtype)
        if self.graphs:
            sequence.note_weight_addresses(weight_addresses(self.models))

    @property
    def max_children(self) -> int:
        """The most children that a node may have."""
        if self.target.recurrent_modules:
            return 1
        return self.drafter.vocabulary if self.drafter else MAX_TREE_NODES

    def check_prompt(self, prompt: Tensor) -> None:
        """Check that the target has the prompt's tokens, and room for one more in its context.

        `prompt` int64 [n].
        """
        lowest, highest = int(prompt.min()), int(prompt.max())
        max_token_id, context = self.target.max_token_id, self.target.context
        if lowest < 0 or highest > max_token_id:
            wrong = highest if highest > max_token_id else lowest
            raise ArgumentError(
                f"prompt: found the token {wrong}, expected 0 to {max_token_id}, the target's "
                "embeddings; was it made by another tokenizer?"
            )
        if prompt.numel() >= context:
            raise SequoiaPlanError(
                f"prompt: {prompt.numel()} tokens, expected at most {context - 1} (the model's "
                f"context less one new token{rope_reason(text_config(self.target.model))}); "
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
        if tree.branching > 1 and self.target.recurrent_modules:
            raise SequoiaPlanError(
                f"tree: {tree.branching} children of one node, and {model_type(self.target.model)} "
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


def make_drafter(target: Any, draft: Any, vocabulary: int, d2t: Tensor | None) -> Drafter:
    """The drafter for a draft of `target`. `d2t` int64 [vocabulary]."""
    drafter: Any = LanguageModelDrafter
    if isinstance(draft, (Eagle1, Eagle3, MtpDraft)):
        drafter = EagleDrafter
    elif isinstance(draft, DFlashModel):
        drafter = DFlashDrafter
    elif shares_cache(draft, target):
        drafter = SelfDrafter
    return drafter(draft, vocabulary, d2t)


def compile_passes(models: Iterable[Any]) -> None:
    """Compile the passes of transformers' models on a CPU, unless it was said what runs them.

    A pass whose model changed beyond what it can follow is given up.
    """
    for model in models:
        if compiled := compiled_pass(model):
            try:
                compiled.check(model)
            except SequoiaPlanError:
                del passes[unwrapped(model)]
        is_loaded = isinstance(model, PreTrainedModel) and model.device.type == "cpu"
        if not is_loaded or model in passes or not CAN_COMPILE:
            continue
        # decoding on a GPU does not need these
        from sequoia_plan.runtime.backends.packed.target import compile_target, why_not
        from sequoia_plan.runtime.offload.memory import format_bytes, free_memory

        needed, free = sum(p.nbytes for p in model.parameters()), free_memory(model.device)
        if needed < free:
            compile_target(model)
        elif not why_not(model):
            warnings.warn(
                f"{model_type(model)}: PyTorch runs it, because a copy of its weights needs "
                f"{format_bytes(needed)} of memory, and {format_bytes(free)} are free",
                stacklevel=4,
            )
