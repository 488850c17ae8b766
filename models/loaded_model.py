"""A language model as decoding runs it: what it is, and the backend that runs its passes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.models.base.architecture import (
    CHUNKED,
    FULL,
    RECURRENT,
    WINDOWED,
    attention_window,
    context_length,
    unwrapped,
)
from sequoia_plan.models.base.cache import TreeCache, round_up
from sequoia_plan.models.base.masks import causal_mask, mask_as_dtype, windowed_mask
from sequoia_plan.models.base.weight_stream import WeightStream

PREFILL_CHUNK = {"cpu": 256, "cuda": 1024}
"""Tokens of a prompt in one pass. On CUDA, shorter passes leave the device waiting for launches."""
STREAMED_PREFILL_CHUNK = 1024  # the same where each pass streams the model's weights
PREFILL_MULTIPLES = {"cpu": (1, 1), "cuda": (64, 512)}
"""On CUDA, a prompt's passes have multiples of so many tokens and slots: few shapes, whose kernels
are chosen once."""
NOT_CUT = (
    "this draft is none that can be cut; expected a language model whose pass is compiled on a CPU "
    "(as a GGUF file's); leave --draft-vocabulary out"
)

ChunkCallback = Callable[[Tensor, int, Tensor], None]
"""(slots, extent, aux hidden states) of a part of the prompt that the model has read."""
Masks = Tensor | Mapping[str, Tensor | None]
"""An additive mask [tokens, extent], or one for each type of layer."""


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward pass returns.

    `logits` [tokens, vocabulary]; `hidden_states` [tokens, width]; `later`: what a draft has
    computed for its passes over the next levels.
    """

    logits: Tensor
    hidden_states: Tensor | None = None
    later: Sequence[Sequence[Tensor]] = ()


@dataclass(frozen=True)
class Traits:
    """How a model's passes run, as far as decoding and profiling ask.

    Attributes:
        is_compiled: they have threads of their own, to which PyTorch's would be in the way, and can
            be parts of a compiled step.
        chains_only: a node of a tree can have one child, because layers have a recurrent state.
        is_split: the model is split over several processes.
        reads_features: it is a draft that reads what is made of its target's hidden states.
    """

    is_compiled: bool = False
    chains_only: bool = False
    is_split: bool = False
    reads_features: bool = False


class Backend(Protocol):
    """Runs a model's passes.

    `dtype` is that of its hidden states; `module` transformers' model, if there is one. `version`
    grows with each change of the weights that it has noticed.
    """

    module: Any = None
    device: torch.device
    dtype: torch.dtype
    vocabulary: int
    num_embeddings: int
    version: int = 0
    stream: WeightStream | None = None
    traits: Traits

    def metadata(self) -> dict[str, object]:
        """What profiles and trees record of it, beside the model's name."""

    def prepare(self, hidden_states: Sequence[int]) -> None:
        """Make ready for decoding with a tree, and for passes that return these hidden states.

        Raises SequoiaPlanError if it cannot.
        """

    def is_stale(self) -> bool:
        """Is the model no longer what the backend was made for?"""
        return False

    def check(self) -> None:
        """Follow changes of the model, or raise SequoiaPlanError."""
        return None

    def refresh(self) -> None:
        """Take the weights anew, whether or not a change can be seen; those of files have none."""
        self.check()

    def new_cache(self, capacity: int, *, counts_positions: bool) -> TreeCache:
        """A cache for a sequence of up to so many slots."""

    def forward(
        self, cache: TreeCache, tokens: Tensor, positions: Tensor, masks: Masks,
        logits_to_keep: int, hidden_states: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """One pass over tokens that go to the cache's slots (see `LoadedModel`)."""

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of tokens, int64 [..., n] -> [..., n, width]."""

    def head(self, hidden_states: Tensor) -> Tensor:
        """Normed hidden states [..., width] -> logits [..., vocabulary]."""

    def keep_logits(self, tokens: Tensor) -> None:
        """Compute the logits of these tokens (int64 [n]) alone, in this order."""
        raise ArgumentError(f"draft vocabulary: {NOT_CUT}")

    def splits_keys(self, tokens: int) -> bool:
        """Do passes over a tree of so many tokens read no keys after the tree, at any extent?"""
        return False

    def can_be_captured(self) -> bool:
        """Can a pass be a part of a CUDA graph?"""
        return False

    def is_on_one_cuda_device(self) -> bool:
        """Is all of it on one CUDA device, in one process, and compiled by nobody?"""
        return False

    def weight_memory(self) -> tuple[tuple[int, int], ...]:
        """Address and bytes of each tensor: graphs read there, and `model.to(...)` moves them."""

    def from_first(self, values: Tensor) -> Tensor:
        """Where the model is split over several processes, the first one's values in all."""
        return values


class LoadedModel:
    """A causal language model that a backend runs.

    What it knows of a text is in the cache that each call is given.

    Attributes:
        config: transformers' configuration of the language model.
        module: transformers' model; None if nothing of it is in memory.
        files: the `ModelFiles` that it was loaded from; None for a module of a user.
        tokens: the vocabulary as text, by number; empty if it is not known without the tokenizer.
        remarks: what a user should know about how it runs, a sentence each.
        d2t: of a draft that covers a part of its target's vocabulary, int64 [its vocabulary]: the
            target's token for each of its own.
    """

    def __init__(
        self,
        backend: Backend,
        config: PreTrainedConfig,
        files: Any = None,
        remarks: tuple[str, ...] = (),
    ) -> None:
        self.backend, self.config, self.files, self.remarks = backend, config, files, remarks
        self.module = backend.module
        self.name: str = files.name if files else ""
        self.tokens: Sequence[str] = files.tokens if files else ()
        self.files_generation_config = files.generation_config() if files else None
        self.device, self.dtype = backend.device, backend.dtype
        self.vocabulary, self.num_embeddings = backend.vocabulary, backend.num_embeddings
        self.traits = backend.traits
        self.context = context_length(config)  # tokens
        # `window`: tokens that layers with a sliding window, or chunks as Llama 4's, see, or None
        self.window, self.masks_by_layer_type = attention_window(config)
        self.has_chunks = getattr(config, "attention_chunk_size", None) is not None
        self.d2t: Tensor | None = getattr(unwrapped(self.module), "d2t", None)

    @property
    def generation_config(self) -> GenerationConfig | None:
        """transformers' generation config; None if there is none."""
        return getattr(unwrapped(self.module), "generation_config", self.files_generation_config)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """transformers' tokenizer; None if there is none."""
        return self.files.tokenizer() if self.files else None

    @property
    def stream(self) -> WeightStream | None:
        """What brings weights that are streamed; None if all are in memory."""
        return self.backend.stream

    def metadata(self) -> dict[str, Any]:
        """Name, digest, content, dtype, parameters and placement, as profiles record them."""
        return {"name": self.name} | self.backend.metadata()

    def new_cache(self, capacity: int) -> TreeCache:
        """A cache for a sequence of up to `capacity` slots."""
        windowed = self.window is not None and self.window < capacity
        return self.backend.new_cache(capacity, counts_positions=windowed)

    def __call__(
        self,
        cache: TreeCache,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        logits_to_keep: int = 0,
        hidden_states: Sequence[int] = (),
    ) -> ForwardOutput:
        """One pass over `tokens`, which writes their keys and values to `slots` of `cache`.

        `tokens`, `positions`, `slots` int64 [tokens]; `mask` [tokens, extent]; `hidden_states` are
        numbered as in `aux_hidden_states`; 0 keeps all logits.
        """
        if mask.shape[1] > cache.capacity:
            raise SequoiaPlanError(
                f"KV cache: {mask.shape[1]} slots needed, it has {cache.capacity}; prefill with "
                "more max_new_tokens"
            )
        positions = positions.clamp(max=self.context - 1)
        tokens = tokens.clamp(max=self.num_embeddings - 1)  # a draft may lack the last tokens
        cache = cache.at(slots, mask.shape[1])
        masks = self._masks(cache, mask, positions, slots)
        if self.has_chunks:  # Llama 4 scales queries by the length before a row, plus its number
            cache.length = positions - torch.arange(positions.numel(), device=positions.device)
        return ForwardOutput(
            *self.backend.forward(cache, tokens, positions, masks, logits_to_keep, hidden_states)
        )

    def read_text(
        self,
        cache: TreeCache,
        tokens: Tensor,
        slots: Tensor,
        extent: int,
        logits_to_keep: int = 0,
        hidden_states: Sequence[int] = (),
    ) -> ForwardOutput:
        """`__call__` for tokens of a text: in their slots, each sees all slots up to its own."""
        mask = causal_mask(slots, extent, self.dtype)
        return self(cache, tokens, slots, slots, mask, logits_to_keep, hidden_states)

    def cut_vocabulary(self, d2t: Tensor) -> None:
        """Let a draft propose only these tokens of the target (int64 [n]); else ArgumentError."""
        own = torch.arange(self.vocabulary) if self.d2t is None else self.d2t
        kept = torch.isin(own, d2t).nonzero().flatten()  # the draft's numbers of them
        self.backend.keep_logits(kept)
        self.d2t, self.vocabulary = own[kept], kept.numel()

    def prefetch(self) -> None:
        """Start streaming the weights that the next pass needs first, if weights are streamed."""
        if self.stream:
            self.stream.begin_step()

    def prefill(
        self,
        cache: TreeCache,
        tokens: Tensor,
        on_chunk: ChunkCallback | None = None,
        start: int = 0,
        hidden_states: Sequence[int] = (),
    ) -> None:
        """Read `tokens` (int64 [n]) from slot `start` on, in chunks to keep the mask small."""
        cache.finite.fill_(True)
        cache.clear()
        device = "cuda" if self.device.type == "cuda" else "cpu"
        num_read = STREAMED_PREFILL_CHUNK if self.stream else PREFILL_CHUNK[device]
        token_multiple, slot_multiple = PREFILL_MULTIPLES[device]
        if self.traits.chains_only:
            token_multiple = 1  # a recurrent state would read the padding
        for first in range(start, tokens.numel(), num_read):
            chunk = tokens[first : first + num_read]
            width = min(round_up(chunk.numel(), token_multiple), cache.capacity - first)
            extent = min(round_up(first + width, slot_multiple), cache.capacity)
            # padding beyond the prompt stays hidden until a step writes to its slots
            chunk = nn.functional.pad(chunk, (0, width - chunk.numel()))
            slots = torch.arange(first, first + width, device=tokens.device)
            is_last = first + num_read >= tokens.numel()
            cache.may_wait = is_last and not hidden_states  # one reading of the weights for both
            output = self.read_text(cache, chunk, slots, extent, 1, hidden_states)
            if on_chunk is not None and output.hidden_states is not None:
                on_chunk(slots, extent, output.hidden_states)
        cache.may_wait = False

    def _masks(self, cache: TreeCache, mask: Tensor, positions: Tensor, slots: Tensor) -> Masks:
        """The mask, or one for each type of layer.

        Layers with a sliding window get one that also hides positions outside the window; positions
        count here, not slots. `positions`, `slots` int64 [tokens].
        """
        full = mask_as_dtype(mask, self.dtype)
        if cache.positions is None or self.window is None:
            return full
        # a chunk is a window that begins with the chunk
        window = positions[:, None] % self.window + 1 if self.has_chunks else self.window
        windowed = windowed_mask(cache, full, positions, slots, window)
        if self.masks_by_layer_type:
            return {**dict.fromkeys(RECURRENT), FULL: full, WINDOWED: windowed, CHUNKED: windowed}
        return windowed
