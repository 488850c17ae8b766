"""Decoder layers of Llama's kind with few small operations: in narrow passes these take longer than the products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from sequoia_plan.runtime.models.forward import attention_window, text_config
from sequoia_plan.runtime.models.int8 import Int8Linear

LIKE_LLAMA = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


def can_be_lean(model: Any, layer: nn.Module) -> bool:
    """Is the layer one of those that `LeanLayer` computes, of plain linear layers, and does it see every earlier position?"""
    with_matrices = [child for child in layer.modules() if any(weight.ndim > 1 for weight in child.parameters(recurse=False))]
    plain = all(type(child) is nn.Linear for child in with_matrices)
    return plain and type(layer).__name__ in LIKE_LLAMA and attention_window(text_config(model))[0] is None


class LeanLayer(nn.Module):
    """In place of a decoder layer of transformers: the same function, in 8 bits. Queries, keys and values are one product, gate and up are one.

    Args:
        layer: what it takes the place of. Its weights are not read, they may be on the meta device.
        tensors: the layer's weights by their names in it.
        dtype: that of the hidden states.
    """

    def __init__(self, layer: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()

        def product(*names: str) -> Int8Linear:
            biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
            return Int8Linear(torch.cat([tensors[f"{name}.weight"] for name in names]), torch.cat(biases) if biases else None, dtype)

        def norm(name: str) -> nn.Parameter | None:
            weight = tensors.get(f"{name}.weight")
            return None if weight is None else nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)

        attention = layer.self_attn
        self.number, self.head_dim, self.scaling, self.epsilon = attention.layer_idx, attention.head_dim, attention.scaling, attention.config.rms_norm_eps
        self.queries = attention.config.num_attention_heads
        self.keys = attention.config.num_key_value_heads
        self.activation = layer.mlp.act_fn
        self.before_attention, self.before_mlp = norm("input_layernorm"), norm("post_attention_layernorm")
        self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        self.qkv = product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = product("self_attn.o_proj")
        self.gate_up = product("mlp.gate_proj", "mlp.up_proj")
        self.down = product("mlp.down_proj")

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        """float [batch, tokens, width] -> the same, as transformers calls its layers."""
        hidden = hidden_states + self.attend(hidden_states, attention_mask, position_embeddings, options.get("past_key_values"))
        gate, up = self.gate_up(rms_norm(hidden, hidden.shape[-1:], self.before_mlp, self.epsilon)).chunk(2, -1)
        return hidden + self.down(self.activation(gate) * up)

    def attend(self, hidden: Tensor, mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        """What attention adds to the hidden states."""
        batch, tokens, width = hidden.shape
        heads = self.qkv(rms_norm(hidden, (width,), self.before_attention, self.epsilon)).view(batch, tokens, -1, self.head_dim)
        turned, values = heads.split((self.queries + self.keys, self.keys), 2)
        if self.q_norm is not None:
            queries, keys = turned.split((self.queries, self.keys), 2)
            shape = (self.head_dim,)
            turned = torch.cat((rms_norm(queries, shape, self.q_norm, self.epsilon), rms_norm(keys, shape, self.k_norm, self.epsilon)), 2)
        cos, sin = (each.unsqueeze(2) for each in position_embeddings)
        first, second = turned.chunk(2, -1)
        turned = torch.addcmul(turned * cos, torch.cat((-second, first), -1), sin)
        queries, keys = turned.transpose(1, 2).split((self.queries, self.keys), 1)
        values = values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, self.number)
        if mask is None:
            seen = scaled_dot_product_attention(queries, keys, values, is_causal=tokens > 1, scale=self.scaling, enable_gqa=True)
        else:  # queries that share keys become rows of one head: the kernel would read, or copy, the keys once for each
            rows = queries.reshape(batch, self.keys, -1, self.head_dim)
            seen = scaled_dot_product_attention(rows, keys, values, mask.repeat(1, 1, self.queries // self.keys, 1), scale=self.scaling)
        return self.out(seen.reshape(batch, self.queries, tokens, self.head_dim).transpose(1, 2).reshape(batch, tokens, -1))
