"""The small operations of a decoder layer as one Triton kernel each, for CUDA.

The tensor operations of `fused_layer.py`, which are several kernels each, compute the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def rms_norm(
    x, weight, out, num_heads, token_stride, head_stride, width, epsilon, BLOCK: tl.constexpr,
):
    """out = x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467), one program a row.

    `x` [tokens, num_heads, width]; `weight` [width]; `out` [tokens, num_heads, width].
    """
    row = tl.program_id(0).to(tl.int64)
    start = x + row // num_heads * token_stride + row % num_heads * head_stride
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    normed = values / tl.sqrt(tl.sum(values * values) / width + epsilon)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, normed * factors, mask=inside)


@triton.jit
def rotate(
    heads, cos, sin, out, num_heads, token_stride, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):
    """Rotary embeddings (arXiv 2104.09864): halves (a, b) become (a cos - b sin, b cos + a sin).

    The programs are [tokens, heads]. `heads` [tokens, num_heads, HEAD_DIM]; `cos`, `sin` [tokens,
    HEAD_DIM]; `out` [tokens, num_heads, HEAD_DIM].
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half, columns = HEAD_DIM // 2, tl.arange(0, BLOCK)
    inside = columns < half
    start, angles = heads + token * token_stride + head * head_stride, token * HEAD_DIM + columns
    first = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + half + columns, mask=inside, other=0.0).to(tl.float32)
    first_cos = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + angles + half, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + angles + half, mask=inside, other=0.0).to(tl.float32)
    place = out + (token * num_heads + head) * HEAD_DIM + columns
    tl.store(place, first * first_cos - second * first_sin, mask=inside)
    tl.store(place + half, second * second_cos + first * second_sin, mask=inside)


@triton.jit
def silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    """out = silu(gate) * up, with silu(x) = x / (1 + exp(-x)). The programs are [tokens, blocks].

    `gate_up` [tokens, 2 * width]; `out` [tokens, width].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row = gate_up + token * 2 * width + columns
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, gate / (1 + tl.exp(-gate)) * up, mask=inside)
