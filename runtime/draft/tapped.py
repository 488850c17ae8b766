"""What drafts have in common that read hidden states of their target (taps.py) beside tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from sequoia_plan.runtime.cache import Layout, TreeCache
from sequoia_plan.runtime.models.attention import attending, shares_heads
from sequoia_plan.runtime.models.forward import as_dtype, in_window

LAYERS: dict[str, tuple[type, type, type]] = {
    "llama": (LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
"""By `model_type`: decoder layer, norm and rotary embedding of transformers."""
FULL, WINDOWED = "full_attention", "sliding_attention"


class TappedDraft(nn.Module):
    """A draft's own weights; embeddings and output head are the target's where it has none.

    Args:
        config: of its layers (transformers' LlamaConfig or Qwen3Config).
        target: what it drafts for. It stays the owner of what is shared: nothing of it is among the draft's parameters.
        taps: the target's hidden states that it reads, side by side.
        covered: int64 [draft vocabulary], the target's token for each of the draft's; None if they are the same.
        embeds: has it embeddings of its own?
        head: rows of its own output head; 0 if that is the target's.
    """

    covered_tokens: Tensor | None

    def __init__(self, config: Any, target: Any, taps: tuple[int, ...], covered: Tensor | None, embeds: bool, head: int) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        self.config, self.taps, self._target = config, taps, (target,)
        self.layer_class, self.norm_class, rotary = LAYERS[config.model_type]
        self.rotary_emb = rotary(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if embeds else None
        self.lm_head = nn.Linear(config.hidden_size, head, bias=False) if head else None
        self.kinds = tuple(getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers)
        self.register_buffer("covered_tokens", covered, persistent=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy whose own weights are copies, for the same target."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self._target)] = self._target
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """That of its weights, of which the norms' always are parameters."""
        return next(self.parameters()).dtype

    @property
    def window(self) -> int | None:
        """How many positions windowed layers see; None without any."""
        return int(self.config.sliding_window) if WINDOWED in self.kinds else None

    def get_input_embeddings(self) -> nn.Module:
        """Its own, or the target's."""
        found: nn.Module = self.embed_tokens if self.embed_tokens is not None else self._target[0].get_input_embeddings()
        return found

    def get_output_embeddings(self) -> nn.Module:
        """Its own, or the target's."""
        found: nn.Module = self.lm_head if self.lm_head is not None else self._target[0].get_output_embeddings()
        return found

    def norm_of(self, width: int) -> nn.Module:
        """A new norm as its layers have."""
        norm: nn.Module = self.norm_class(width, eps=self.config.rms_norm_eps)
        return norm

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [..., tokens] -> [..., tokens, hidden size]."""
        table = self.get_input_embeddings()
        embedded: Tensor = table(tokens.clamp(max=table.num_embeddings - 1))  # type: ignore[operator]
        return embedded.to(self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """[..., hidden size] -> logits [..., draft vocabulary]."""
        logits: Tensor = self.get_output_embeddings()(hidden if self.lm_head is not None else hidden.to(self._target[0].dtype))
        return logits

    def new_layout(self) -> Layout:
        """What its layers' keys and values need."""
        kind = (self.device, self.dtype, int(self.config.num_key_value_heads), int(self.config.head_dim))
        return ((kind, kind),) * len(self.kinds)

    def masks(self, cache: TreeCache, mask: Tensor, positions: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """An additive mask [tokens, extent] as each kind of layer takes it."""
        mask = as_dtype(mask, self.dtype)
        found = {FULL: mask[None, None]}
        if self.window is not None:
            found[WINDOWED] = in_window(cache, mask, positions, slots, self.window)[None, None]
        return found

    def attending(self) -> Any:
        """Passes in here attend as the target's do."""
        return attending(self.device, self.config if shares_heads(self, self.config) else None)

    def run_layers(self, layers: Any, hidden: Tensor, positions: Tensor, masks: Mapping[str, Tensor], cache: Cache | None, first: int = 0) -> Tensor:
        """[batch, tokens, hidden size] -> the same, through `layers`, of which the first one is layer `first` of the draft."""
        turned = self.rotary_emb(hidden, positions)
        for number, layer in enumerate(layers, first):
            hidden = layer(hidden, attention_mask=masks[self.kinds[number]], position_embeddings=turned, past_key_values=cache, use_cache=cache is not None)
        return hidden
