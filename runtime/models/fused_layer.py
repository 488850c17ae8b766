"""Decoder layers of Llama's kind, computed with fewer operations (fused layers).

In passes over few tokens, a layer's small operations take longer than its matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from sequoia_plan.runtime.models.architecture import attention_window, text_config
from sequoia_plan.runtime.models.int8 import Int8Linear

FUSIBLE_LAYERS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
)
"""transformers' layers that compute what `FusedLayer` computes."""


def can_fuse(model: Any, layer: nn.Module) -> bool:
    """Can a `FusedLayer` replace this layer of `model`?

    It can if the layer's class is one of `FUSIBLE_LAYERS`, all of its matrices are in plain linear
    layers, and it attends to every earlier position.
    """
    return (
        type(layer).__name__ in FUSIBLE_LAYERS
        and _matrices_are_linear(layer)
        and attention_window(text_config(model))[0] is None
    )


def _matrices_are_linear(layer: nn.Module) -> bool:
    """Are all weights of `layer` with two dimensions or more in plain linear layers?"""
    for module in layer.modules():
        has_matrix = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        if has_matrix and type(module) is not nn.Linear:
            return False
    return True


class FusedLayer(nn.Module):
    """A decoder layer in 8 bits that computes the function of a layer of transformers.

    Queries, keys and values are one matrix product; the MLP's gate and up projections are another.

    Args:
        layer: the layer that this one replaces. Its weights are not read; they may be on the meta
            device.
        tensors: the weights of the layer, by their names in it.
        dtype: of the hidden states.
    """

    def __init__(self, layer: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        attention = layer.self_attn
        self.layer_idx = attention.layer_idx
        self.head_dim = attention.head_dim
        self.scaling = attention.scaling
        self.epsilon = attention.config.rms_norm_eps
        self.query_heads = attention.config.num_attention_heads
        self.key_heads = attention.config.num_key_value_heads
        self.activation = layer.mlp.act_fn
        self.attention_norm = _norm_weight(tensors, "input_layernorm", dtype)
        self.mlp_norm = _norm_weight(tensors, "post_attention_layernorm", dtype)
        self.q_norm = _norm_weight(tensors, "self_attn.q_norm", dtype)
        self.k_norm = _norm_weight(tensors, "self_attn.k_norm", dtype)
        qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qkv = _joined_linear(tensors, qkv_names, dtype)
        self.out = _joined_linear(tensors, ("self_attn.o_proj",), dtype)
        self.gate_up = _joined_linear(tensors, ("mlp.gate_proj", "mlp.up_proj"), dtype)
        self.down = _joined_linear(tensors, ("mlp.down_proj",), dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        **options: Any,
    ) -> Tensor:
        """Compute the layer, with the arguments that transformers gives its layers.

        Args:
            hidden_states: float [batch, tokens, width].
            attention_mask: additive [batch, 1, tokens, extent]; None for causal attention.
            position_embeddings: cosines and sines, [batch, tokens, head_dim] each.
            options: `past_key_values` is used; the rest is ignored.

        Returns:
            float [batch, tokens, width].
        """
        cache = options.get("past_key_values")
        attended = self.attend(hidden_states, attention_mask, position_embeddings, cache)
        hidden_states = hidden_states + attended
        width = hidden_states.shape[-1]
        normed = rms_norm(hidden_states, (width,), self.mlp_norm, self.epsilon)
        gate, up = self.gate_up(normed).chunk(2, -1)
        return hidden_states + self.down(self.activation(gate) * up)

    def attend(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,
    ) -> Tensor:
        """What attention adds to the hidden states: float [batch, tokens, width].

        Args:
            hidden_states, mask, position_embeddings: as for `forward`.
            cache: gets the new keys and values, and returns all those to attend to; None attends to
                the tokens of this pass.
        """
        batch, tokens, width = hidden_states.shape
        normed = rms_norm(hidden_states, (width,), self.attention_norm, self.epsilon)
        heads = self.qkv(normed).view(batch, tokens, -1, self.head_dim)
        queries_and_keys, values = heads.split(
            (self.query_heads + self.key_heads, self.key_heads), 2
        )
        if self.q_norm is not None:
            queries_and_keys = self._normed_heads(queries_and_keys)
        rotated = _rotate(queries_and_keys, position_embeddings)
        queries, keys = rotated.transpose(1, 2).split((self.query_heads, self.key_heads), 1)
        values = values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        if mask is None:
            attended = scaled_dot_product_attention(
                queries,
                keys,
                values,
                is_causal=tokens > 1,
                scale=self.scaling,
                enable_gqa=True,
            )
        else:
            # Queries that share keys become rows of one head. The kernel would otherwise read, or
            # copy, the keys once for each query head.
            rows = queries.reshape(batch, self.key_heads, -1, self.head_dim)
            row_mask = mask.repeat(1, 1, self.query_heads // self.key_heads, 1)
            attended = scaled_dot_product_attention(
                rows, keys, values, row_mask, scale=self.scaling
            )
        attended = attended.reshape(batch, self.query_heads, tokens, self.head_dim)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))

    def _normed_heads(self, queries_and_keys: Tensor) -> Tensor:
        """The heads [batch, tokens, heads, head_dim] after the norms of queries and of keys."""
        queries, keys = queries_and_keys.split((self.query_heads, self.key_heads), 2)
        shape = (self.head_dim,)
        queries = rms_norm(queries, shape, self.q_norm, self.epsilon)
        keys = rms_norm(keys, shape, self.k_norm, self.epsilon)
        return torch.cat((queries, keys), 2)


def _rotate(heads: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embeddings applied to heads [batch, tokens, heads, head_dim].

    Args:
        position_embeddings: cosines and sines, [batch, tokens, head_dim] each.
    """
    cos, sin = position_embeddings
    first_half, second_half = heads.chunk(2, -1)
    rotated_half = torch.cat((-second_half, first_half), -1)
    return torch.addcmul(heads * cos.unsqueeze(2), rotated_half, sin.unsqueeze(2))


def _joined_linear(
    tensors: Mapping[str, Tensor], names: tuple[str, ...], dtype: torch.dtype
) -> Int8Linear:
    """One linear layer that computes those called `names`, their outputs side by side."""
    weight = torch.cat([tensors[f"{name}.weight"] for name in names])
    biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
    return Int8Linear(weight, torch.cat(biases) if biases else None, dtype)


def _norm_weight(
    tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype
) -> nn.Parameter | None:
    """A copy of a norm's weight; None if the layer has no such norm."""
    weight = tensors.get(f"{name}.weight")
    if weight is None:
        return None
    return nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
