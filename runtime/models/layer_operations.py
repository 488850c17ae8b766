"""Launches of the kernels of `layer_kernels.py`: norm, rotary embedding, gate of an MLP."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from sequoia_plan.runtime.base.kernel_launch import kernel_or_tensors, kernels_available

T = TypeVar("T")

BLOCK = 1024
"""Numbers that a program of `silu_mul` reads at once."""


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


def rms_norm(hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """float [..., tokens, heads or 1, width] -> the same shape: each row normed, times `weight`."""
    width = hidden_states.shape[-1]
    rows = hidden_states if hidden_states.ndim > 3 else hidden_states.unsqueeze(-2)
    rows = rows.flatten(0, -3)
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    block = _next_power_of_two(width)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _kernels().rms_norm[(rows.shape[0] * rows.shape[1],)](
            rows, weight, out, rows.shape[1], rows.stride(0), rows.stride(1), width, epsilon,
            BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out.view(hidden_states.shape)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """float [batch, tokens, heads, head_dim], rotated by angles [batch, tokens, head_dim]."""
    rows = heads.flatten(0, 1)
    cos, sin = (angles.expand(*heads.shape[:2], -1).contiguous() for angles in (cos, sin))
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    head_dim = heads.shape[3]
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _kernels().rotate[rows.shape[:2]](
            rows, cos, sin, out, heads.shape[2], rows.stride(0), rows.stride(1),
            HEAD_DIM=head_dim, BLOCK=_next_power_of_two(head_dim // 2), num_warps=1,
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """float [..., 2 * width], gate and up side by side -> silu(gate) * up, [..., width]."""
    rows = gate_up.flatten(0, -2).contiguous()
    width = rows.shape[1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=rows.dtype, device=rows.device)
    with torch.cuda.device_of(out):  # Triton launches on the current device
        _kernels().silu_mul[(rows.shape[0], -(-width // BLOCK))](
            rows, out, width, BLOCK=BLOCK, num_warps=4
        )
    return out


def _kernels() -> ModuleType:
    """`layer_kernels.py`, which only a machine with Triton can import."""
    return importlib.import_module("sequoia_plan.runtime.models.layer_kernels")


def _next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
