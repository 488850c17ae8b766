"""The small operations of a decoder layer as one Triton kernel each, for CUDA.

The tensor operations of `fused_layer.py`, which are several kernels each, compute the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def rms_norm(
    x, addend, total, weight, out, width, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):
    """out = x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467), one program a row.

    With ADDS, it is the norm of total = x + addend. `weight` [width]; the others [rows, width].
    """
    cells = tl.program_id(0).to(tl.int64) * width + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + cells, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(addend + cells, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + cells, rounded, mask=inside)
        values = rounded.to(tl.float32)
    normed = values / tl.sqrt(tl.sum(values * values) / width + epsilon)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + cells, normed * factors, mask=inside)


@triton.jit
def rotate_and_cache(
    heads, q_weight, k_weight, cos, sin, slots, queries, keys, values, query_heads, key_heads,
    head_stride, epsilon,
    NORMS: tl.constexpr, ROTATES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):
    """Queries, and keys and values in their slots of the cache, from one matrix product.

    The programs are [tokens, heads]. With NORMS, each head of queries and keys is normed as by
    `rms_norm`. Rotary embeddings (arXiv 2104.09864) then turn halves (a, b) into (a cos - b sin,
    b cos + a sin). `heads` [tokens, query_heads + 2 * key_heads, HEAD_DIM]; `cos`, `sin` [tokens,
    HEAD_DIM]; `slots` int64 [tokens]; `queries` [tokens, query_heads, HEAD_DIM]; `keys`, `values`
    [key_heads, slots, HEAD_DIM].
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half, columns = HEAD_DIM // 2, tl.arange(0, BLOCK)
    inside = columns < half
    angles = token * HEAD_DIM + columns
    cell = heads + (token * tl.num_programs(1) + head) * HEAD_DIM
    first = tl.load(cell + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(cell + half + columns, mask=inside, other=0.0).to(tl.float32)
    slot, key_head = tl.load(slots + token) * HEAD_DIM, head - query_heads
    place = queries + (token * query_heads + head) * HEAD_DIM
    if head >= query_heads + key_heads:
        place = values + (key_head - key_heads) * head_stride + slot
    else:
        weight = q_weight
        if head >= query_heads:
            place = keys + key_head * head_stride + slot
            weight = k_weight
        if NORMS:
            root = tl.sqrt(tl.sum(first * first + second * second) / HEAD_DIM + epsilon)
            first *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) / root
            second *= tl.load(weight + half + columns, mask=inside, other=0.0).to(tl.float32) / root
        if ROTATES:
            first_cos = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)
            first_sin = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)
            second_cos = tl.load(cos + angles + half, mask=inside, other=0.0).to(tl.float32)
            second_sin = tl.load(sin + angles + half, mask=inside, other=0.0).to(tl.float32)
            turned = first * first_cos - second * first_sin
            second = second * second_cos + first * second_sin
            first = turned
    tl.store(place + columns, first, mask=inside)
    tl.store(place + half + columns, second, mask=inside)


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
