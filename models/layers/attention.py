"""How passes attend: CUDA kernels that accept a tree's mask, and shared heads without copies."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sequoia_plan.models.base.kernel_launch import kernel_or_tensors
from sequoia_plan.models.layers.split_keys import KERNELS_NAME, can_split_keys, split_key_attention

IMPLEMENTATIONS = ("sdpa", "eager")
"""transformers' attention implementations that take a tree's mask."""
IMPLEMENTATION = "sequoia_plan"
"""The name under which transformers knows the attention of this module."""

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
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute transformers' `sdpa` attention, without copies of keys and values that heads share.

    `query` [sequences, heads, tokens, head_dim]; `key`, `value` [sequences, shared heads, extent,
    head_dim]. Returns [sequences, tokens, heads, head_dim], and None for the weights.
    """
    key_heads, sequences, tokens = key.shape[1], query.shape[0], query.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    is_plain_sdpa = all(kwargs.get(name) is None for name in ("softcap", "position_bias", "cache"))
    mask = attention_mask
    can_share = is_plain_sdpa and not dropout and 1 in (sequences, tokens)
    if mask is None or mask.shape[1] != 1 or not can_share:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)

    def attend_by_tensor_operations() -> Tensor:
        """What this function returns, for one sequence or one token of each."""
        if tokens == 1 or not query.is_cuda:  # heads become rows (tokens) of the shared head
            rows = query.unflatten(1, (key_heads, -1)).flatten(2, 3)
            masks = mask if tokens == 1 else mask.repeat(1, 1, rows.shape[2] // tokens, 1)
            attended = _attend(rows, key, value, masks, scale).unflatten(2, (-1, tokens))
            return attended.flatten(1, 2).transpose(1, 2).contiguous()
        # shared heads become the batch dimension
        queries = query.squeeze(0).unflatten(0, (key_heads, -1))
        keys, values = (
            states.transpose(0, 1).expand(-1, queries.shape[1], -1, -1) for states in (key, value)
        )
        attended = _attend(queries, keys, values, mask, scale).flatten(0, 1)
        return attended.transpose(0, 1).unsqueeze(0).contiguous()

    slots = None if torch.compiler.is_compiling() else _slots.get()
    tensors = (query, key, value, mask)
    if slots is None or not can_split_keys(*tensors, slots):
        return attend_by_tensor_operations(), None
    attended = kernel_or_tensors(
        (KERNELS_NAME, query.dtype),
        lambda: split_key_attention(*tensors, slots, scale),
        attend_by_tensor_operations,
    )
    return attended, None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """PyTorch's attention; on CUDA its memory-efficient kernel, which takes a mask well.

    Flash attention takes none. cuDNN does, but builds a plan of tens of milliseconds for every new
    shape and stride.
    """
    is_aligned = query.shape[-1] % 8 == value.shape[-1] % 8 == mask.stride(-2) % 16 == 0
    if not query.is_cuda or query.requires_grad or not is_aligned:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    mask = mask.expand(*query.shape[:3], -1)
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, mask, False, scale=scale)[0]


AttentionInterface.register(IMPLEMENTATION, attend_shared_heads)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def attention_implementation(config: PreTrainedConfig) -> str | None:
    """The attention that a model was loaded with, also while another thread runs a pass of it."""
    name = getattr(config, "_attn_implementation", None)
    return "sdpa" if name == IMPLEMENTATION else name


def attends_by_sdpa(model: nn.Module, config: PreTrainedConfig) -> bool:
    """Can passes of `model` attend by `attend_shared_heads`?"""
    takes_others = getattr(model, "_supports_attention_backend", True)
    return takes_others and attention_implementation(config) == "sdpa"


@contextlib.contextmanager
def attending(config: PreTrainedConfig | None, slots: Tensor | None = None) -> Iterator[None]:
    """A context whose passes, if there is a `config`, attend by `attend_shared_heads`.

    `slots` int64 [tokens]: where a pass writes its tokens' keys; none of them sees a later slot.
    """
    with contextlib.ExitStack() as stack:
        if config is not None:
            # all had "sdpa": the name found now is ours if another thread is in this context
            stack.callback(setattr, config, "_attn_implementation", "sdpa")
            config._attn_implementation = IMPLEMENTATION
        if slots is not None and not torch.compiler.is_compiling():
            stack.callback(_slots.reset, _slots.set(slots))
        yield
