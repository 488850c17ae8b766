"""Launches of the kernels of `layer_kernels.py`: norm, heads with their cache, gate of an MLP."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sequoia_plan.models.base.kernel_launch import kernel_or_tensors, kernels_available, launch

T = TypeVar("T")

BLOCK = 1024  # numbers that a program of `silu_mul` reads at once


def runs_kernels(x: Tensor) -> bool:
    """Do these kernels take `x`? Not where torch.compile traces, nor where gradients go back."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return False
    return not x.requires_grad and kernels_available(x.device)


def by_kernel(
    name: str, x: Tensor, run_kernel: Callable[[], T], run_tensor_operations: Callable[[], T]
) -> T:
    """What a kernel computes of `x` where it runs; else what tensor operations compute."""
    if not runs_kernels(x):
        return run_tensor_operations()
    return kernel_or_tensors((name, x.dtype), run_kernel, run_tensor_operations)


def rms_norm(
    hidden_states: Tensor, weight: Tensor, epsilon: float, addend: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum with `addend` and its RMS norm by rows, float [..., width] each, by one kernel."""
    width = hidden_states.shape[-1]
    x = hidden_states.contiguous()
    added = x if addend is None else addend.contiguous()
    out, total = torch.empty_like(x), x if addend is None else torch.empty_like(x)
    block = next_power_of_two(width)
    launch(
        "models.layers.layer_kernels.rms_norm", (x.numel() // width,),
        x, added, total, weight, out, width, epsilon, ADDS=addend is not None,
        BLOCK=block, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return total, out


def rotate_and_cache(
    heads: Tensor, norms: Sequence[Any], angles: Sequence[Tensor] | None, slots: Tensor,
    keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """Norm and rotate heads, and write keys and values to slots of a cache; returns the queries.

    `heads` [1, tokens, heads of queries, keys and values, head_dim]; `norms` of queries and keys,
    or none; `angles`, cosines and sines, [1, tokens, head_dim], or none; `slots` int64 [tokens];
    `keys`, `values` [1, heads, capacity, head_dim]. Returns [1, heads, tokens, head_dim].
    """
    heads = heads.contiguous()
    _, tokens, num_heads, head_dim = heads.shape
    key_heads = keys.shape[1]
    queries = heads.new_empty(1, tokens, num_heads - 2 * key_heads, head_dim)
    weights = [norm.weight for norm in norms] or [heads, heads]
    cos, sin = [angle.contiguous() for angle in angles or (heads, heads)]
    launch(
        "models.layers.layer_kernels.rotate_and_cache", (tokens, num_heads),
        heads, *weights, cos, sin, slots, queries, keys, values, queries.shape[2], key_heads,
        keys.stride(1), norms[0].epsilon if norms else 0.0, NORMS=bool(norms),
        ROTATES=angles is not None, HEAD_DIM=head_dim,
        BLOCK=next_power_of_two(head_dim // 2), num_warps=1,
    )  # fmt: skip
    return queries.transpose(1, 2)


def silu_mul(gate_up: Tensor) -> Tensor:
    """float [..., 2 * width], gate and up side by side -> silu(gate) * up, [..., width]."""
    rows = gate_up.flatten(0, -2).contiguous()
    width = rows.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=rows.dtype, device=rows.device)
    launch(
        "models.layers.layer_kernels.silu_mul",
        (rows.shape[0], -(-width // BLOCK)),
        rows,
        out,
        width,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
