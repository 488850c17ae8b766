"""Decoder layers of Llama's kind, computed with fewer operations (fused layers).

In passes over few tokens, a layer's small operations take longer than its matrix products, and two
products over the same input take longer than one.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer as DecoderLayer

from sequoia_plan.models.base.cache import TreeCache, cache_among
from sequoia_plan.models.layers.attention import attend_shared_heads
from sequoia_plan.models.layers.fused_norm import RMSNorm, add_before, fused_norm
from sequoia_plan.models.layers.layer_operations import by_kernel, rotate_and_cache, silu_mul

FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3")
"""transformers' families of models whose layers and norms compute what those of this file do."""
FUSIBLE_LAYERS = tuple(f"{family}DecoderLayer" for family in FAMILIES)
FUSIBLE_NORMS = tuple(f"{family}RMSNorm" for family in FAMILIES)
GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""The modules of an MLP that `FusedMLP` replaces; any other, as one of experts, stays as it is."""
QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
JOINED = {"self_attn.qkv_proj": QUERY_KEY_VALUE, "mlp.gate_up_proj": GATE_UP}
JOINED_WEIGHTS = tuple(
    f"{name}.{kind}" for names in JOINED.values() for kind in ("weight", "bias") for name in names
)
"""The weights in a layer that are joined, in that order: each matrix below the one before it."""


def can_fuse(layer: DecoderLayer) -> bool:
    """Can a `FusedLayer` replace this layer?

    It can if the layer's class is one of `FUSIBLE_LAYERS`, and the matrices of its attention and of
    a gated MLP are plain linear layers. The modules have no hooks, which would not run any more.
    """
    if type(layer).__name__ not in FUSIBLE_LAYERS:
        return False
    experts = None if has_gated_mlp(layer) else layer.mlp  # which stay
    replaced = [m for child in layer.children() if child is not experts for m in child.modules()]
    matrices_are_linear = all(
        type(module) is nn.Linear
        for module in replaced
        # some quantised layers hold their matrices in buffers
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if tensor.ndim > 1
    )
    return matrices_are_linear and all(map(is_as_defined, [layer, *replaced]))


def is_as_defined(module: nn.Module) -> bool:
    """Does a call of this module run its class's `forward`, and nothing else?"""
    has_hooks = module._forward_hooks or module._forward_pre_hooks
    return not has_hooks and "forward" not in vars(module)


def in_joined_order(names: Iterable[str]) -> list[str]:
    """Sort names of weights: first those that fused layers join, layer by layer.

    Weights that lie in memory in this order are joined without a copy.
    """
    return sorted(
        names,
        key=lambda name: next(
            (
                (name.removesuffix(joined), rank)
                for rank, joined in enumerate(JOINED_WEIGHTS)
                if name.endswith(joined)
            ),
            ("~", 0),  # after the name of any layer
        ),
    )


def has_gated_mlp(layer: DecoderLayer) -> bool:
    """Does this layer's MLP compute down(activation(gate(x)) * up(x))?"""
    return {name for name, _ in layer.mlp.named_children()} == GATED_MLP


class FusedLayer(nn.Module):
    """A decoder layer that computes the function of a layer of transformers.

    Its parts have the names and the arguments of those that they replace.
    """

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    next_norm: tuple[nn.Module | None] = (None,)
    """The norm that reads this layer's output; in a tuple, it is not one of its modules."""

    def __init__(self, layer: DecoderLayer, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.self_attn = FusedAttention(layer.self_attn, tensors)
        for name, norm in layer.named_children():
            if name.endswith("norm"):  # EAGLE-3 has one more, and EAGLE-1 one that does nothing
                weight = tensors.get(f"{name}.weight")
                setattr(self, name, norm if weight is None else fused_norm(norm, weight))
        is_gated = has_gated_mlp(layer)
        self.mlp = FusedMLP(layer.mlp.act_fn, tensors) if is_gated else layer.mlp
        self.rows = {
            name: len(tensors[f"{name}.weight"])
            for name in (*QUERY_KEY_VALUE, *GATE_UP)
            if f"{name}.weight" in tensors
        }
        self.register_state_dict_post_hook(_split_joined)
        self.register_load_state_dict_pre_hook(_join_split)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        **options: object,
    ) -> Tensor:
        """Compute the layer, with the arguments that transformers gives its layers.

        `hidden_states` float [batch, tokens, width]; `attention_mask` [batch, 1, tokens, extent];
        returns float [batch, tokens, width].
        """
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings,
            attention_mask,
            **options,
        )
        hidden_states = add_before(self.post_attention_layernorm, hidden_states, attended)
        mlp = self.mlp(self.post_attention_layernorm(hidden_states))
        return add_before(self.next_norm[0], hidden_states, mlp)


def _split_joined(layer: FusedLayer, tensors: dict[str, Tensor], prefix: str, *_: object) -> None:
    """A hook of `state_dict`: joined weights are split, under the names of transformers' layer."""
    for joined, names in JOINED.items():
        for kind in ("weight", "bias"):
            tensor = tensors.pop(f"{prefix}{joined}.{kind}", None)
            parts = () if tensor is None else tensor.split([layer.rows[name] for name in names])
            tensors |= {f"{prefix}{n}.{kind}": p for n, p in zip(names, parts, strict=False)}


def _join_split(layer: FusedLayer, tensors: dict[str, Tensor], prefix: str, *_: object) -> None:
    """A hook of `load_state_dict`, which undoes what `_split_joined` does."""
    for joined, names in JOINED.items():
        for kind in ("weight", "bias"):
            keys = [f"{prefix}{name}.{kind}" for name in names]
            if layer.rows.keys() >= set(names) and tensors.keys() >= set(keys):
                tensors[f"{prefix}{joined}.{kind}"] = torch.cat([tensors.pop(k) for k in keys])


class FusedAttention(nn.Module):
    """Self-attention whose queries, keys and values are one matrix product."""

    def __init__(self, attention: Any, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        config = attention.config
        self.layer_idx = attention.layer_idx
        self.head_dim = attention.head_dim
        self.scaling = attention.scaling
        self.query_heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        # transformers' own attention function reads these two
        self.num_key_value_groups = attention.num_key_value_groups
        self.is_causal = True
        self.rotates = getattr(attention, "use_rope", True)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if "self_attn.q_norm.weight" in tensors:
            self.q_norm, self.k_norm = (
                fused_norm(getattr(attention, name), tensors[f"self_attn.{name}.weight"])
                for name in ("q_norm", "k_norm")
            )
        self.qkv_proj = _joined_linear(tensors, QUERY_KEY_VALUE)
        self.o_proj = _joined_linear(tensors, ("self_attn.o_proj",))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        **options: object,
    ) -> tuple[Tensor, None]:
        """What attention adds to the hidden states, float [batch, tokens, width], in this shape.

        None stands for the attention's weights, which transformers' layers return as well.
        """
        queries, keys, values = self.queries_keys_values(
            hidden_states, position_embeddings, cache_among(options)
        )
        attended, _ = attend_shared_heads(
            self, queries, keys, values, attention_mask, scaling=self.scaling
        )
        return self.o_proj(attended.flatten(2)), None

    def queries_keys_values(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, tokens, dim] of normed hidden states.

        With a cache, keys and values are written to its slots; returned are those of all slots.
        """
        heads = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))

        def by_tensor_operations() -> tuple[Tensor, Tensor, Tensor]:
            """What `queries_keys_values` returns; queries and keys are rotated together."""
            sizes = (self.query_heads, self.key_heads)
            queries_and_keys, values = heads.split((sum(sizes), self.key_heads), 2)
            if self.q_norm is not None and self.k_norm is not None:
                queries, keys = queries_and_keys.split(sizes, 2)
                queries_and_keys = torch.cat((self.q_norm(queries), self.k_norm(keys)), 2)
            if self.rotates:
                queries_and_keys = _rotate(queries_and_keys, position_embeddings)
            queries, keys = queries_and_keys.transpose(1, 2).split(sizes, 1)
            values = values.transpose(1, 2)
            if cache is not None:
                keys, values = cache.update(keys, values, self.layer_idx)
            return queries, keys, values

        def in_place() -> tuple[Tensor, Tensor, Tensor]:
            """The same by one kernel, which writes to the cache itself."""
            angles = position_embeddings if self.rotates else None
            norms = () if self.q_norm is None else (self.q_norm, self.k_norm)
            queries = rotate_and_cache(
                heads, norms, angles, cache.slots, memory.keys, memory.values
            )
            return queries, *memory.visible()

        memory: Any = cache.layers[self.layer_idx] if isinstance(cache, TreeCache) else None
        if memory is None or not memory.is_initialized:
            return by_tensor_operations()
        return by_kernel("heads", heads, in_place, by_tensor_operations)


class FusedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)) whose gate and up projections are one matrix product."""

    def __init__(self, activation: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.act_fn = activation
        self.gate_up_proj = _joined_linear(tensors, GATE_UP)
        self.down_proj = _joined_linear(tensors, ("mlp.down_proj",))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """float [..., width] -> float [..., width]."""
        gate_up = self.gate_up_proj(hidden_states)
        if not isinstance(self.act_fn, SiLUActivation):
            return self.down_proj(self._gated(gate_up))
        gated = by_kernel("gate", gate_up, lambda: silu_mul(gate_up), lambda: self._gated(gate_up))
        return self.down_proj(gated)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """activation(gate) * up: float [..., 2 * width] -> float [..., width]."""
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate) * up


def _rotate(heads: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embeddings applied to heads [batch, tokens, heads, head_dim]."""
    cos, sin = position_embeddings
    first_half, second_half = heads.chunk(2, -1)
    rotated_half = torch.cat((-second_half, first_half), -1)
    return torch.addcmul(heads * cos.unsqueeze(2), rotated_half, sin.unsqueeze(2))


def _joined_linear(tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> nn.Module:
    """One linear layer that computes those called `names`, their outputs side by side."""
    weight = _joined([tensors[f"{name}.weight"].detach() for name in names])
    biases = [tensors[f"{name}.bias"].detach() for name in names if f"{name}.bias" in tensors]
    linear = nn.Linear(weight.shape[1], len(weight), bias=bool(biases), device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        linear.bias = nn.Parameter(_joined(biases), requires_grad=False)
    return linear


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one, in order of their rows: a view if they lie so in memory, else a copy."""
    if not all(_ends_at(tensor, next_tensor) for tensor, next_tensor in pairwise(tensors)):
        return torch.cat(tuple(tensors))
    first, rows = tensors[0], sum(map(len, tensors))
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _ends_at(tensor: Tensor, other: Tensor) -> bool:
    """Does `other` begin where `tensor` ends, in the same memory?"""
    memory, other_memory = tensor.untyped_storage(), other.untyped_storage()
    return (
        tensor.is_contiguous()
        and other.is_contiguous()
        and memory.data_ptr() == other_memory.data_ptr()
        and tensor.data_ptr() + tensor.nbytes == other.data_ptr()
    )
