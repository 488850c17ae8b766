"""Attention of a tree's pass on CUDA, with the keys split over the device."""

import functools

import torch
from torch import Tensor

from sequoia_plan.models.base.kernel_launch import has_failed, kernels_available, launch
from sequoia_plan.models.layers.layer_operations import next_power_of_two

MAX_TOKENS, MIN_EXTENT = 256, 1024
"""With more tokens or fewer keys, PyTorch's kernels leave little of a device idle."""
MAX_ROWS, MAX_HEAD_DIM, WARPS, STAGES = 64, 128, 4, 2
"""Of a program. Two of them fit a multiprocessor (tests/models/test_kernel_compile.py)."""
MAX_PARTS = 64
HIDDEN = {torch.float32: -1e30, torch.bfloat16: -1e30, torch.float16: -6e4}
"""By the mask's dtype: numbers up to here hide a key. Masks have the dtype's lowest number."""
KERNELS_NAME = "attention"  # of the kernels, in the warning if they cannot be compiled
DTYPES = (torch.bfloat16, torch.float16)
"""Where the kernels are fast; in float32, their products would spill registers."""


def splits_keys(device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int) -> bool:
    """Would passes of so many tokens over a long text attend by `split_key_attention`?"""
    return (
        kernels_available(device)
        and not has_failed((KERNELS_NAME, dtype))
        and dtype in DTYPES
        and head_dim <= MAX_HEAD_DIM
        and tokens <= MAX_TOKENS
    )


def can_split_keys(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, slots: Tensor) -> bool:
    """Does `split_key_attention` take these tensors, on a device where it is faster?"""
    tensors = (query, key, value, mask)
    return (
        splits_keys(query.device, query.dtype, query.shape[3], query.shape[2])
        and query.shape[0] == 1
        and key.shape[2] >= MIN_EXTENT
        and query.shape[3] == value.shape[3]
        and slots.device == query.device
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and not any(tensor.requires_grad for tensor in tensors)
    )


def split_key_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    slots: Tensor,
    scale: float,
    num_parts: int = 0,
) -> Tensor:
    """`scaled_dot_product_attention` by Triton kernels that split the keys over the device.

    `query` [1, heads, tokens, head_dim]; `key`, `value` [1, shared heads, extent, head_dim];
    `slots` int64 [tokens].
    """
    _, heads, tokens, head_dim = query.shape
    shared_heads, extent = key.shape[1], key.shape[2]
    group = heads // shared_heads
    num_rows = group * tokens
    block_rows = min(max(16, next_power_of_two(num_rows)), MAX_ROWS)
    row_blocks = -(-num_rows // block_rows)
    capability, multiprocessors = _properties(query.device)
    block_keys = keys_of_a_block(block_rows, capability)
    num_parts = num_parts or max(1, 2 * multiprocessors // (shared_heads * row_blocks))
    num_parts = min(num_parts, MAX_PARTS, -(-extent // block_keys))
    device, num_results = query.device, shared_heads * num_rows
    part_sums = torch.empty(num_parts, num_results, head_dim, dtype=torch.float32, device=device)
    part_totals = torch.empty(num_parts, num_results, dtype=torch.float32, device=device)
    part_max = torch.empty_like(part_totals)
    attended = torch.empty(1, tokens, heads, head_dim, dtype=query.dtype, device=device)
    block_dim = max(16, next_power_of_two(head_dim))
    launch(
        "models.layers.split_key_kernels.attend_to_part", (shared_heads, row_blocks, num_parts),
        query, key, value, mask, slots, part_sums, part_totals, part_max,
        tokens, extent, group, scale,
        query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1),
        value.stride(2), mask.stride(2),
        HEAD_DIM=head_dim, HIDDEN=HIDDEN[mask.dtype], BLOCK_ROWS=block_rows,
        BLOCK_KEYS=block_keys, BLOCK_DIM=block_dim,
        MAX_TOKENS=next_power_of_two(tokens), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    launch(
        "models.layers.split_key_kernels.merge_parts", (shared_heads, num_rows),
        part_sums, part_totals, part_max, attended, num_parts, tokens, group,
        HEAD_DIM=head_dim, BLOCK_DIM=block_dim,
        MAX_PARTS=next_power_of_two(num_parts), num_warps=WARPS,
    )  # fmt: skip
    return attended


def keys_of_a_block(block_rows: int, capability: int) -> int:
    """How many keys a program reads at once; more spill registers but on a Hopper."""
    return 64 if block_rows < MAX_ROWS or capability == 9 else 32


@functools.cache
def _properties(device: torch.device) -> tuple[int, int]:
    """A device's compute capability, and how many multiprocessors it has."""
    if device.type == "cpu":  # Triton's interpreter
        return 0, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
