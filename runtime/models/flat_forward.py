"""A model's forward pass as a walk over its fused layers, without transformers' own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sequoia_plan.runtime.base.cache import TreeCache
from sequoia_plan.runtime.models.architecture import FULL, text_config
from sequoia_plan.runtime.models.fused_layer import FusedLayer

TOKENS = 4
"""Tokens of the pass that is compared with transformers' own."""

_compared: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""For each model that was tried: does the walk compute what transformers computes?"""


class FlatForward:
    """The forward pass of a causal LM of Llama's kind whose layers are all fused."""

    def __init__(self, model: Any) -> None:
        base = model.model
        self.embed_tokens, self.rotary_emb = base.embed_tokens, base.rotary_emb
        self.norm, self.head = base.norm, model.get_output_embeddings()
        layers: list[Any] = list(base.layers)
        types = getattr(text_config(model), "layer_types", None) or [FULL] * len(layers)
        self.layers = tuple(zip(layers, types, strict=True))

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | Mapping[str, Tensor] | None,
        cache: TreeCache | None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits [1, tokens, vocabulary], of the last `logits_to_keep` tokens only (0: all).

        `tokens`, `positions` int64 [1, tokens]; `mask` [1, 1, tokens, extent].
        """
        hidden_states = self.embed_tokens(tokens)
        position_embeddings = self.rotary_emb(hidden_states, positions)
        for layer, layer_type in self.layers:
            hidden_states = layer(
                hidden_states,
                mask[layer_type] if isinstance(mask, Mapping) else mask,
                position_embeddings,
                cache=cache,
            )
        logits: Tensor = self.head(self.norm(hidden_states[:, -logits_to_keep:]))
        return logits


def flat_forward(model: Any) -> FlatForward | None:
    """The pass of `model` as a walk over its layers; None if there is no such walk.

    There is one if all layers are fused, no hook waits for a module between them, and the walk
    gives the logits of transformers' forward, which multiplies or caps them in some models.
    """
    if not _has_parts_of_llama(model):
        return None
    if model not in _compared:
        _compared[model] = _computes_the_same(model)
    return FlatForward(model) if _compared[model] else None


def _has_parts_of_llama(model: Any) -> bool:
    """Does the model have the modules that `FlatForward` walks over, and no hooks around them?"""
    base: Any = getattr(model, "model", None)
    parts = ("embed_tokens", "rotary_emb", "norm", "layers")
    if not all(hasattr(base, name) for name in parts):
        return False
    has_hooks = any(
        module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
        for module in (model, base)
    )
    return not has_hooks and all(type(layer) is FusedLayer for layer in list(base.layers))


@torch.inference_mode()
def _computes_the_same(model: Any) -> bool:
    """Does the walk give the logits of transformers' forward for a plain sequence?"""
    device = model.device
    tokens = torch.arange(TOKENS, device=device)[None] % text_config(model).vocab_size
    expected = model(input_ids=tokens, use_cache=False).logits.float()
    walked = FlatForward(model)(tokens, torch.arange(TOKENS, device=device)[None], None, None)
    bound = torch.finfo(model.dtype).eps * expected.abs().max()
    return bool((walked.float() - expected).abs().max() <= bound)
