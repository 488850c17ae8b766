"""One transformers model, run over tokens whose keys and values go to given slots of a cache."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.cache import Layout, TreeCache
from sequoia_plan.runtime.models.attention import attending, shares_heads
from sequoia_plan.runtime.models.stream import stream_of
from sequoia_plan.runtime.models.taps import NORMED, heard, listen

PREFILL_CHUNK = {"cpu": 256, "cuda": 1024}
"""Tokens of a prompt in one pass. On CUDA fewer leave the device waiting for launches."""
STREAMED_CHUNK = 1024
"""The same where each pass streams the model's weights."""
PREFILL_STEPS = {"cpu": (1, 1), "cuda": (64, 512)}
"""On CUDA a prompt's passes have multiples of so many tokens and slots: few shapes, whose kernels are chosen once."""
MOST_SHAPES = 256
"""Shapes of a model's passes that are compiled: the widths of its passes times the extents of attention."""
CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change once the sequence is longer than the model was first trained for: cached keys go stale."""


@dataclass(frozen=True)
class Reading:
    """What a pass of a model returns.

    Args:
        logits: [tokens, vocabulary].
        features: [tokens, width], the hidden states that somebody asked for, side by side; None if nobody did.
    """

    logits: Tensor
    features: Tensor | None = None


class TreeModel:
    """A causal LM as a decoding step runs it. What it remembers of a sequence is in the cache it is given.

    Args:
        model: a transformers causal LM in eval mode.
        layout: its cache's, if known.
        vocabulary: use only so many logits; None for all.
        taps: hidden states to return with each pass, numbered as in taps.py.

    Raises:
        SequoiaPlanError: if the model has no such hidden states.
    """

    def __init__(self, model: Any, layout: Layout | None = None, vocabulary: int | None = None, taps: Sequence[int] = ()) -> None:
        self.model, self.place, self.stream = model, place(model), stream_of(plain(model))
        self.device = self.place[0]
        config = text_config(model)
        self.layers: int | Layout = layout or int(config.num_hidden_layers)
        self.vocabulary = vocabulary
        self.context = context_length(config)
        self.window, self.by_kind = attention_window(config)
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        self.last_token = int(getattr(embedding, "num_embeddings", 1 << 30)) - 1
        kind = "cuda" if self.device.type == "cuda" else "cpu"
        self.prefill_chunk = STREAMED_CHUNK if self.stream else PREFILL_CHUNK[kind]
        self.prefill_steps = PREFILL_STEPS[kind]
        self.sharing = config if shares_heads(plain(model), config) else None
        self.compiled: Any = None
        self.taps = tuple(taps)
        if self.taps:
            listen(plain(model), decoder_layers(plain(model))[1] if set(taps) - {NORMED} else None, taps)
        self.keeps_logits = "logits_to_keep" in inspect.signature(plain(model).forward).parameters

    def compile(self, backend: Any = "inductor") -> None:
        """Compile passes over a tree by torch.compile, each shape for itself; prompts, whose shapes vary, are read as before."""
        self.compiled = torch.compile(self.model, dynamic=False, backend=backend)

    def new_cache(self, capacity: int) -> TreeCache:
        """A cache for a sequence of up to `capacity` slots.

        Raises:
            SequoiaPlanError: if there is not the memory.
        """
        windowed = self.window is not None and self.window < capacity
        return TreeCache(self.layers, capacity, self.device, counts_positions=windowed)

    def __call__(self, cache: TreeCache, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, last: int = 0, *, compiled: bool = True) -> Reading:
        """Read `tokens`, write their keys and values to `slots` of `cache`, attend by the additive mask [tokens, extent].

        Args:
            tokens, positions, slots: int64 [tokens]. Positions beyond the model's context are those of nodes that cannot be
                used any more; they only have to be valid.
            last: logits of the last so many tokens only; 0 for all.
            compiled: run what `compile` made, if it was called.

        Raises:
            SequoiaPlanError: if the mask looks further than the cache reaches.
        """
        if mask.shape[1] > cache.capacity:
            raise SequoiaPlanError(f"KV cache: {mask.shape[1]} slots needed, it has {cache.capacity}; prefill with more max_new_tokens")
        positions = positions.clamp(max=self.context - 1)
        run = self.compiled if compiled and self.compiled is not None else self.model
        with attending(self.device, self.sharing), many_shapes(run is not self.model):
            output = run(
                input_ids=tokens.clamp(max=self.last_token)[None],  # a draft may lack the target's last tokens; `prefill` checks the target's
                position_ids=positions[None],
                attention_mask=self._attention(cache, mask, positions, slots),
                past_key_values=cache.at(slots, mask.shape[1]),
                use_cache=True,
                **({"logits_to_keep": last} if self.keeps_logits else {}),
            )
        logits: Tensor = output.logits[0, -last:, : self.vocabulary]
        cache.finite.logical_and_(logits.amax(-1).isfinite().all())
        return Reading(logits, heard(cache, self.taps, self.device) if self.taps else None)

    def prefetch(self) -> None:
        """A step begins: weights that its pass will stream may be sent on their way."""
        if self.stream:
            self.stream.begin()

    def prefill(self, cache: TreeCache, tokens: Tensor, on_chunk: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None) -> None:
        """Start a sequence with `tokens` (int64 [n]), read in chunks so that the mask stays small.

        Args:
            on_chunk: is told each chunk's tokens, slots, mask and features; what is beyond the prompt in the last one has no meaning.

        Raises:
            SequoiaPlanError: if the model is in training mode, or was moved after this was made of it.
        """
        kind = getattr(self.model.config, "model_type", type(plain(self.model)).__name__)
        if place(self.model) != self.place:
            (device, dtype), (device_now, dtype_now) = self.place, place(self.model)
            raise SequoiaPlanError(f"{kind}: found as {dtype_now} on {device_now}, it was {dtype} on {device} when the decoder was made; make it anew")
        if getattr(self.model, "training", False):
            raise SequoiaPlanError(f"{kind}: found in training mode, where dropout changes its logits; call eval() on the model")
        cache.finite.fill_(True)
        multiple, slots = self.prefill_steps
        for start in range(0, tokens.numel(), self.prefill_chunk):
            chunk = tokens[start : start + self.prefill_chunk]
            width = min(round_up(chunk.numel(), multiple), cache.capacity - start)
            extent = min(round_up(start + width, slots), cache.capacity)
            chunk = nn.functional.pad(chunk, (0, width - chunk.numel()))  # what is written beyond the prompt is hidden until a step writes there
            positions = torch.arange(start, start + width, device=tokens.device)
            columns = torch.arange(extent, device=tokens.device)
            mask = additive(columns <= positions[:, None], self.model.dtype)
            features = self(cache, chunk, positions, positions, mask, last=1, compiled=False).features
            if on_chunk is not None and features is not None:
                on_chunk(chunk, positions, mask, features)

    def _attention(self, cache: TreeCache, mask: Tensor, positions: Tensor, slots: Tensor) -> Tensor | dict[str, Tensor]:
        """The mask as the model takes it. A window counts positions, which in a tree are not slots."""
        mask = as_dtype(mask, self.model.dtype)
        if cache.positions is None or self.window is None:
            return mask[None, None]
        windowed = in_window(cache, mask, positions, slots, self.window)[None, None]
        return {"full_attention": mask[None, None], "sliding_attention": windowed} if self.by_kind else windowed


def many_shapes(compiled: bool) -> contextlib.AbstractContextManager[Any]:
    """Every width and extent is compiled: torch.compile would give up after eight shapes."""
    return torch._dynamo.config.patch(recompile_limit=MOST_SHAPES) if compiled else contextlib.nullcontext()


def round_up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step


def as_dtype(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask in another dtype; neither dtype may hold the lowest number of the other."""
    return mask if mask.dtype == dtype else mask.to(dtype).clamp(min=torch.finfo(dtype).min)


def in_window(cache: TreeCache, mask: Tensor, positions: Tensor, slots: Tensor, window: int) -> Tensor:
    """An additive mask [tokens, extent] less what is `window` positions away or more; notes the `positions` of `slots` in the cache."""
    assert cache.positions is not None
    cache.positions.index_copy_(0, slots, positions)
    near = cache.positions[: mask.shape[1]] > positions[:, None] - window
    return mask.where(near, torch.finfo(mask.dtype).min)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, the most negative number elsewhere: the one mask `sdpa` and `eager` attention both take."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def execution_device(model: Any) -> torch.device:
    """Where a model takes its input and computes. Weights that accelerate has moved away are on `meta` between passes."""
    hooked = getattr(getattr(plain(model), "_hf_hook", None), "execution_device", None)
    if model.device.type != "meta" and hooked is None:
        return torch.device(model.device)
    embedding = getattr(model.get_input_embeddings(), "_hf_hook", None)
    found = hooked if hooked is not None else getattr(embedding, "execution_device", None)
    return torch.device(model.device if found is None else found)


def place(model: Any) -> tuple[torch.device, torch.dtype]:
    """Where a model computes and in what: `model.to(...)` changes it."""
    return execution_device(model), model.dtype


def plain(model: Any) -> Any:
    """The model under torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def text_config(model: Any) -> Any:
    """The configuration of the language model, also inside a multimodal one."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """The list of a model's decoder layers, and its name in the model.

    Raises:
        SequoiaPlanError: if there is none.
    """
    count = text_config(model).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise SequoiaPlanError(f"{model.config.model_type}: no list of {count} layers found in the model; it cannot be taken layer by layer")


def context_length(config: Any) -> int:
    """Tokens a sequence may have; 2^30 where the configuration sets no limit."""
    length: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    if rope_changes(config):
        trained = _rope(config).get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", length)
        return min(length, int(trained or length))
    return length


def rope_changes(config: Any) -> bool:
    """Do rotary embeddings depend on the length of the sequence, which transformers then reads on the host in every pass?"""
    return _rope(config).get("rope_type", _rope(config).get("type")) in CHANGING_ROPE


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def attention_window(config: Any) -> tuple[int | None, bool]:
    """How many positions windowed layers see (None without any), and whether the model asks for masks by kind of layer.

    Raises:
        SequoiaPlanError: if layers attend, or remember, in a way a tree's mask cannot describe.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "attention_layers", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention", "attention", "global"})
    if unknown:
        raise SequoiaPlanError(f"{config.model_type}: layers of kind {', '.join(unknown)} cannot branch into a tree, expected attention with a KV cache")
    window: int | None = getattr(config, "sliding_window", None) if "sliding_attention" in kinds or not kinds else None
    return window if getattr(config, "use_sliding_window", True) else None, len(kinds) > 1
