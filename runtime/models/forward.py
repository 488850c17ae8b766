"""The forward pass of a transformers model over tokens whose keys and values go to given slots."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.cache import CacheLayout, TreeCache, cache_argument, round_up
from sequoia_plan.runtime.base.masks import additive_mask, mask_as_dtype, windowed_mask
from sequoia_plan.runtime.base.weight_stream import stream_of
from sequoia_plan.runtime.models.architecture import (
    CHUNKED,
    FULL,
    RECURRENT,
    UNLIMITED,
    WINDOWED,
    attention_window,
    context_length,
    decoder_layers,
    device_and_dtype,
    text_config,
    unwrapped,
)
from sequoia_plan.runtime.models.attention import attending, attends_by_sdpa
from sequoia_plan.runtime.models.aux_hidden_states import (
    AFTER_FINAL_NORM,
    register_hooks,
    take_aux_hidden_states,
)
from sequoia_plan.runtime.models.compiled_passes import compiled_pass
from sequoia_plan.runtime.models.recurrent import RecurrentCache, record_inputs, recurrent_modules
from sequoia_plan.runtime.models.split_keys import splits_keys

PREFILL_CHUNK = {"cpu": 256, "cuda": 1024}
"""Tokens of a prompt in one pass. On CUDA, shorter passes leave the device waiting for launches."""
STREAMED_PREFILL_CHUNK = 1024
"""The same where each pass streams the model's weights."""
PREFILL_MULTIPLES = {"cpu": (1, 1), "cuda": (64, 512)}
"""On CUDA, a prompt's passes have multiples of so many tokens and slots: few shapes, whose kernels
are chosen once."""

ChunkCallback = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(tokens, slots, mask, aux hidden states) of a part of the prompt that the model has read."""


@dataclass(frozen=True)
class ForwardOutput:
    """What a forward pass returns, and what it has prepared of later ones.

    `logits` [tokens, vocabulary]; `hidden_states` [tokens, width].
    """

    logits: Tensor
    hidden_states: Tensor | None = None
    later: Sequence[Sequence[Tensor]] = ()


class TreeModel:
    """A causal LM as a decoding step runs it. Its state is in the cache that each call is given."""

    def __init__(
        self,
        model: Any,
        layout: CacheLayout | None = None,
        vocabulary: int | None = None,
        aux_hidden_state_layers: Sequence[int] = (),
    ) -> None:
        plain_model, config = unwrapped(model), text_config(model)
        self.model, self.vocabulary = model, vocabulary
        self.is_wrapped = plain_model is not model
        self.device, self.dtype = device_and_dtype(model)
        self.stream = stream_of(plain_model)
        self.layers: int | CacheLayout = layout or int(config.num_hidden_layers)
        layout = layout or ()
        self.layer_memories = {memory for pair in layout for memory in pair or ()}
        self.context = context_length(config)
        self.window, self.masks_by_layer_type = attention_window(config)
        self.has_chunks = getattr(config, "attention_chunk_size", None) is not None
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        self.max_token_id = int(getattr(embedding, "num_embeddings", UNLIMITED)) - 1
        backend = "cuda" if self.device.type == "cuda" else "cpu"
        self.prefill_chunk = STREAMED_PREFILL_CHUNK if self.stream else PREFILL_CHUNK[backend]
        self.prefill_multiples = PREFILL_MULTIPLES[backend]
        self.sdpa_config = config if attends_by_sdpa(plain_model, config) else None
        self.compiled_pass = compiled_pass(plain_model)
        self.aux_hidden_state_layers = tuple(aux_hidden_state_layers)
        if self.aux_hidden_state_layers and not self.compiled_pass:
            needs_layers = bool(set(aux_hidden_state_layers) - {AFTER_FINAL_NORM})
            layers = decoder_layers(plain_model)[1] if needs_layers else None
            register_hooks(plain_model, layers, aux_hidden_state_layers)
        parameters = inspect.signature(plain_model.forward).parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        self.cache_argument = cache_argument(plain_model.forward)
        self.recurrent_modules = recurrent_modules(plain_model)
        for module in self.recurrent_modules:
            record_inputs(module)

    def splits_keys(self, tokens: int) -> bool:
        """Do passes over a tree of so many tokens read no keys after the tree, at any extent?"""
        is_compiled = getattr(self.model, "_compiled_call_impl", None) or self.is_wrapped
        if isinstance(self.layers, int) or self.sdpa_config is None or is_compiled:
            return False
        return all(
            splits_keys(device, dtype, head_dim, tokens)
            for device, dtype, _, head_dim in self.layer_memories
        )

    def new_cache(self, capacity: int) -> TreeCache:
        """A cache for a sequence of up to `capacity` slots."""
        windowed = self.window is not None and self.window < capacity
        if self.compiled_pass:
            cache: TreeCache = self.compiled_pass.new_cache(capacity, counts_positions=windowed)
            return cache
        cache_class = RecurrentCache if self.recurrent_modules else TreeCache
        return cache_class(self.layers, capacity, self.device, counts_positions=windowed)

    def __call__(
        self,
        cache: TreeCache,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        logits_to_keep: int = 0,
    ) -> ForwardOutput:
        """One pass over `tokens`, which writes their keys and values to `slots` of `cache`.

        `tokens`, `positions`, `slots` int64 [tokens].
        """
        if mask.shape[1] > cache.capacity:
            raise SequoiaPlanError(
                f"KV cache: {mask.shape[1]} slots needed, it has {cache.capacity}; prefill with "
                "more max_new_tokens"
            )
        positions = positions.clamp(max=self.context - 1)
        tokens = tokens.clamp(max=self.max_token_id)  # a draft may lack the target's last tokens
        cache = cache.at(slots, mask.shape[1])
        masks = self._attention_mask(cache, mask, positions, slots)
        if self.has_chunks:  # Llama 4 scales queries by the length before a row, plus its number
            cache.length = positions - torch.arange(positions.numel(), device=positions.device)
        if self.compiled_pass and isinstance(masks, Tensor):
            logits, hidden_states = self.compiled_pass(
                cache, tokens, positions, slots, masks[0, 0], logits_to_keep,
                self.aux_hidden_state_layers,
            )  # fmt: skip
            has_states = bool(self.aux_hidden_state_layers)
            hidden_states = hidden_states.to(self.dtype) if has_states else None
            return ForwardOutput(logits[:, : self.vocabulary], hidden_states)
        with attending(self.sdpa_config, slots):
            options: dict[str, Any] = {self.cache_argument: cache}
            if self.takes_logits_to_keep:
                options["logits_to_keep"] = logits_to_keep
            all_logits = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=masks,
                use_cache=True,
                **options,
            ).logits
        # [-0:] keeps all rows; a model without `logits_to_keep` returns more than were asked for
        logits = all_logits[0, -logits_to_keep:, : self.vocabulary]
        cache.finite.logical_and_(logits.amax(-1).isfinite().all())
        layers = self.aux_hidden_state_layers
        hidden_states = take_aux_hidden_states(cache, layers, self.device) if layers else None
        return ForwardOutput(logits, hidden_states)

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
    ) -> None:
        """Read `tokens` (int64 [n]) from slot `start` on, in chunks to keep the mask small."""
        cache.finite.fill_(True)
        cache.clear()
        token_multiple, slot_multiple = self.prefill_multiples
        if self.recurrent_modules:
            token_multiple = 1  # they would read the padding
        for first in range(start, tokens.numel(), self.prefill_chunk):
            chunk = tokens[first : first + self.prefill_chunk]
            width = min(round_up(chunk.numel(), token_multiple), cache.capacity - first)
            extent = min(round_up(first + width, slot_multiple), cache.capacity)
            # padding beyond the prompt stays hidden until a step writes to its slots
            chunk = nn.functional.pad(chunk, (0, width - chunk.numel()))
            slots = torch.arange(first, first + width, device=tokens.device)
            columns = torch.arange(extent, device=tokens.device)
            mask = additive_mask(columns <= slots[:, None], self.dtype)
            output = self(cache, chunk, slots, slots, mask, logits_to_keep=1)
            if on_chunk is not None and output.hidden_states is not None:
                on_chunk(chunk, slots, mask, output.hidden_states)

    def _attention_mask(
        self, cache: TreeCache, mask: Tensor, positions: Tensor, slots: Tensor
    ) -> Tensor | dict[str, Tensor | None]:
        """The mask in the form that the model takes.

        It has two more dimensions at the front, for batch and heads. Layers with a sliding window
        get a mask that also hides positions outside the window; positions count here, not slots.
        `positions`, `slots` int64 [tokens].
        """
        mask = mask_as_dtype(mask, self.dtype)
        full = mask[None, None]
        if cache.positions is None or self.window is None:
            return full
        # a chunk is a window that begins with the chunk
        window = positions[:, None] % self.window + 1 if self.has_chunks else self.window
        windowed = windowed_mask(cache, mask, positions, slots, window)[None, None]
        if self.masks_by_layer_type:
            masks = {FULL: full, WINDOWED: windowed, CHUNKED: windowed}
            return {**dict.fromkeys(RECURRENT), **masks}
        return windowed
