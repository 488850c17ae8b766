"""Attention of a few tokens to many keys as Triton kernels; PyTorch's is their oracle.

PyTorch's kernels that take a mask give all keys of a head to one program, so that a tree's pass
over a long text leaves most of a GPU idle. Here the keys are split: each program attends to a part
of them, and a second kernel merges the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
LOWEST, TINY = tl.constexpr(-1e30), tl.constexpr(1e-30)


@triton.jit
def attend_to_part(
    query, key, value, mask, slots, part_sums, part_totals, part_max, num_tokens, extent, group,
    scale, query_head_stride, query_token_stride, key_head_stride, key_slot_stride,
    value_head_stride, value_slot_stride, mask_token_stride,
    HEAD_DIM: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, MAX_TOKENS: tl.constexpr,
):
    """Attend to one part of the keys. The programs are [shared heads, blocks of rows, parts].

    The parts end with the last of `slots`, which is read here: one launch, and one graph, serves
    texts of all lengths. Nothing branches in the loop, so that its loads overlap. `query`
    [heads, num_tokens, HEAD_DIM]; `key`, `value` [shared heads, at least extent, HEAD_DIM]; `slots`
    int64 [num_tokens]; `part_sums` float32 [parts, shared heads * rows, HEAD_DIM]; `part_totals`,
    `part_max` float32 [parts, shared heads * rows].
    """
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    num_rows = num_tokens * group
    row_inside = rows < num_rows
    row_tokens = rows % num_tokens
    query_heads = head * group + rows // num_tokens
    dims = tl.arange(0, BLOCK_DIM)
    dim_inside = dims < HEAD_DIM
    row_starts = query_heads * query_head_stride + row_tokens * query_token_stride
    q = tl.load(
        query + row_starts[:, None] + dims[None, :],
        mask=row_inside[:, None] & dim_inside[None, :], other=0.0,
    )
    highest = tl.full([BLOCK_ROWS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    own = tl.arange(0, MAX_TOKENS)
    last = tl.max(tl.load(slots + own, mask=own < num_tokens, other=0)).to(tl.int32)
    end = tl.minimum(last + 1, extent)
    chunk = tl.cdiv(tl.cdiv(end, tl.num_programs(2)), BLOCK_KEYS) * BLOCK_KEYS
    first = part * chunk
    for start in range(first, tl.minimum(first + chunk, end), BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        key_inside = keys < extent  # not `end`: loads of 16 bytes need a multiple of 16
        k = tl.load(
            key + head * key_head_stride + keys[None, :] * key_slot_stride + dims[:, None],
            mask=key_inside[None, :] & dim_inside[:, None], other=0.0,
        )
        bias = tl.load(
            mask + row_tokens[:, None] * mask_token_stride + keys[None, :],
            mask=row_inside[:, None] & key_inside[None, :], other=-float("inf"),
        ).to(tl.float32)
        is_visible = (bias > HIDDEN) & (keys < end)[None, :]
        scores = tl.dot(q, k, input_precision="ieee") * scale + bias
        scores = tl.where(is_visible, scores, LOWEST)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.where(is_visible, tl.exp(scores - new_highest[:, None]), 0.0)
        v = tl.load(
            value + head * value_head_stride + keys[:, None] * value_slot_stride + dims[None, :],
            mask=key_inside[:, None] & dim_inside[None, :], other=0.0,
        )
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        sums = sums * rescale[:, None] + weighted
        highest = new_highest
    results = (part * tl.num_programs(0) + head) * num_rows + rows
    tl.store(part_totals + results, total, mask=row_inside)
    tl.store(part_max + results, highest, mask=row_inside)
    tl.store(
        part_sums + results[:, None] * HEAD_DIM + dims[None, :], sums,
        mask=row_inside[:, None] & dim_inside[None, :],
    )


@triton.jit
def merge_parts(
    part_sums, part_totals, part_max, attended, num_parts, num_tokens, group,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, MAX_PARTS: tl.constexpr,
):
    """Merge the parts of each row, one program a row. The programs are [shared heads, rows].

    `attended` [num_tokens, heads, HEAD_DIM].
    """
    head, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    num_rows = num_tokens * group
    parts, dims = tl.arange(0, MAX_PARTS), tl.arange(0, BLOCK_DIM)
    part_inside, dim_inside = parts < num_parts, dims < HEAD_DIM
    results = (parts * tl.num_programs(0) + head) * num_rows + row
    part_highest = tl.load(part_max + results, mask=part_inside, other=LOWEST)
    factors = tl.exp(part_highest - tl.max(part_highest))
    total = tl.sum(factors * tl.load(part_totals + results, mask=part_inside, other=0.0))
    sums = tl.load(
        part_sums + results[:, None] * HEAD_DIM + dims[None, :],
        mask=part_inside[:, None] & dim_inside[None, :], other=0.0,
    )
    result = tl.sum(sums * factors[:, None], 0) / tl.maximum(total, TINY)
    query_head = head * group + row // num_tokens
    place = (row % num_tokens) * tl.num_programs(0) * group + query_head
    tl.store(attended + place * HEAD_DIM + dims, result, mask=dim_inside)
