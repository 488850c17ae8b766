"""How passes attend: CUDA kernels that accept a tree's mask, and shared heads without copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sequoia_plan.runtime.base.kernel_launch import kernel_or_tensors
from sequoia_plan.runtime.models.split_keys import (
    KERNELS_NAME,
    can_split_keys,
    split_key_attention,
)

IMPLEMENTATION = "sequoia_plan"
"""The name under which transformers knows the attention of this module."""
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's kernels that take a mask well. Flash attention takes none. cuDNN does, but builds a
plan of tens of milliseconds for every new shape and stride."""
MAX_ROW_TOKENS = 8
"""In passes over so many tokens, bfloat16 heads that share keys are rows of one head on the CPU."""

_slots: ContextVar[Tensor | None] = ContextVar("slots", default=None)
"""Where the keys of the running pass's own tokens are, none of which sees a later slot."""


def attend_shared_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' `sdpa` attention, without copies of keys and values that heads share.

    `query` [sequences, heads, tokens, head_dim]; `key`, `value` [sequences, shared heads, extent,
    head_dim].
    """
    key_heads, sequences, tokens = key.shape[1], query.shape[0], query.shape[2]
    heads_are_shared = query.shape[1] != key_heads
    one_mask_for_all_heads = attention_mask is not None and attention_mask.shape[1] == 1
    is_plain_sdpa = all(kwargs.get(name) is None for name in ("softcap", "position_bias", "cache"))
    attend = partial(
        nn.functional.scaled_dot_product_attention,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )

    def attend_by_tensor_operations() -> Tensor:
        """What this function returns, for one sequence or one token of each."""
        if tokens == 1:  # heads become rows (tokens) of the shared head
            rows = query[:, :, 0].unflatten(1, (key_heads, -1))
            return attend(rows, key, value).flatten(1, 2)[:, None].contiguous()
        # shared heads become the batch dimension
        queries = query[0].unflatten(0, (key_heads, -1))
        keys = key[0][:, None].expand(-1, queries.shape[1], -1, -1)
        values = value[0][:, None].expand(-1, queries.shape[1], -1, -1)
        attended = attend(queries, keys, values).flatten(0, 1)[None]
        return attended.transpose(1, 2).contiguous()

    if heads_are_shared and one_mask_for_all_heads and is_plain_sdpa and 1 in (sequences, tokens):
        assert attention_mask is not None
        slots = None if torch.compiler.is_compiling() else _slots.get()
        tensors = (query, key, value, attention_mask)
        if dropout or slots is None or not can_split_keys(*tensors, slots):
            return attend_by_tensor_operations(), None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        split_keys = partial(split_key_attention, *tensors, slots, scale)
        return kernel_or_tensors(KERNELS_NAME, split_keys, attend_by_tensor_operations), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, **kwargs
    )


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float
) -> Tensor:
    """Attention by PyTorch's CPU kernel, which reads keys and values that heads share in place.

    In bfloat16, that kernel takes several times as long for one row of a head as for two. So heads
    that share keys are rows of one head where few tokens attend, and a single row is there twice.
    Most results are the same, bit for bit; a few differ in the last bit. `query` [sequences, heads,
    tokens, head_dim]; `key`, `value` [sequences, shared heads, extent, head_dim].
    """
    attend = partial(
        nn.functional.scaled_dot_product_attention, key=key, value=value, scale=scaling
    )
    tokens, heads_per_key = query.shape[2], query.shape[1] // key.shape[1]
    has_one_mask_row = tokens == 1 or attention_mask is not None
    if query.dtype != torch.bfloat16 or tokens > MAX_ROW_TOKENS or not has_one_mask_row:
        is_causal = attention_mask is None and tokens > 1
        attended = attend(
            query, attn_mask=attention_mask, is_causal=is_causal, enable_gqa=heads_per_key > 1
        )
        return attended.transpose(1, 2)
    rows = query.unflatten(1, (-1, heads_per_key)).flatten(2, 3)
    copies = heads_per_key
    if rows.shape[2] == 1:
        rows, copies = rows.expand(-1, -1, 2, -1), 2
    if attention_mask is not None:
        is_one_row = tokens == 1  # which takes no copy
        attention_mask = (
            attention_mask.expand(-1, -1, copies, -1)
            if is_one_row
            else attention_mask.repeat(1, 1, copies, 1)
        )
    attended = attend(rows, attn_mask=attention_mask)[:, :, : heads_per_key * tokens]
    return attended.unflatten(2, (heads_per_key, tokens)).flatten(1, 2).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, attend_shared_heads)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def attention_implementation(config: Any) -> str | None:
    """The attention that a model was loaded with, also while another thread runs a pass of it."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return "sdpa" if name == IMPLEMENTATION else name


def shares_heads(model: nn.Module, config: Any) -> bool:
    """Do several heads of `model` share keys and values, and does it attend by `sdpa`?"""
    return attention_implementation(config) == "sdpa" and any(
        getattr(module, "num_key_value_groups", 1) > 1 for module in model.modules()
    )


@contextlib.contextmanager
def attending(
    device: torch.device, config: Any = None, slots: Tensor | None = None
) -> Iterator[None]:
    """A context whose passes attend with kernels that suit a tree's mask.

    On CUDA they use `MASKED_BACKENDS`, PyTorch's kernels that take a mask. With `config` they use
    `attend_shared_heads`, which does not copy keys and values that several heads share. `slots`
    int64 [tokens].
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(sdpa_kernel(MASKED_BACKENDS))
        if config is not None:
            # another thread may be in this context, so the name found now may not be the model's
            stack.callback(setattr, config, "_attn_implementation", "sdpa")
            config._attn_implementation = IMPLEMENTATION
        if slots is not None and not torch.compiler.is_compiling():
            stack.callback(_slots.reset, _slots.set(slots))
        yield
