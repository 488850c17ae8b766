"""How a pass attends: which of PyTorch's kernels take a tree's mask on CUDA, and heads that share keys and values without copies of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sequoia_plan"
WITH_A_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Flash attention takes no mask. cuDNN does, but builds a plan of tens of milliseconds for every new shape and stride."""


def shared(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa` attention. With a mask it copies keys and values once for each head that shares them; here those heads are a
    dimension along which keys and values are expanded, or the rows of one head where each sequence has one token. Neither copies anything.

    Args:
        query: [sequences, heads, tokens, head_dim], of one sequence or of one token each.
        key, value: [sequences, shared heads, extent, head_dim].
        attention_mask: additive, [sequences, 1, tokens, extent].

    Returns:
        [sequences, tokens, heads, head_dim], and None for weights.
    """
    heads, sequences, tokens = key.shape[1], query.shape[0], query.shape[2]
    alike = attention_mask is not None and attention_mask.shape[1] == 1
    attend = partial(nn.functional.scaled_dot_product_attention, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    if query.shape[1] != heads and alike and all(kwargs.get(name) is None for name in ("softcap", "position_bias", "cache")):
        if sequences > 1 and tokens == 1:
            return attend(query[:, :, 0].unflatten(1, (heads, -1)), key, value).flatten(1, 2)[:, None].contiguous(), None
        if sequences == 1 and tokens > 1:
            query = query[0].unflatten(0, (heads, -1))
            key, value = (each[0][:, None].expand(-1, query.shape[1], -1, -1) for each in (key, value))
            return attend(query, key, value).flatten(0, 1)[None].transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


AttentionInterface.register(NAME, shared)
AttentionMaskInterface.register(NAME, sdpa_mask)


def implementation(config: Any) -> str | None:
    """How a model attends, also while another thread is amid a pass of it."""
    found: str | None = getattr(config, "_attn_implementation", None)
    return "sdpa" if found == NAME else found


def shares_heads(model: nn.Module, config: Any) -> bool:
    """Do several heads of `model` share keys and values, and does it attend by `sdpa`?"""
    return implementation(config) == "sdpa" and any(getattr(module, "num_key_value_groups", 1) > 1 for module in model.modules())


@contextlib.contextmanager
def attending(device: torch.device, config: Any = None) -> Iterator[None]:
    """Passes of a model in here attend as above.

    Args:
        device: the model's.
        config: the model's, if it `shares_heads`.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(sdpa_kernel(WITH_A_MASK))
        if config is not None:
            stack.callback(setattr, config, "_attn_implementation", "sdpa")  # other threads may be in here: not what was found
            config._attn_implementation = NAME
        yield
