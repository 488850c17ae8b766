"""Attention over a cache whose keys lie so that the scores of 16 slots are one vector.

Keys are [16 slots] by dimension, values by slot. Sums over slots run in the order of the slots, so
a row's result does not depend on the other rows, nor on hidden slots between those that it sees.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from sequoia_plan.runtime.compiled.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    LANES,
    LONG,
    WORDS,
    Emitter,
    emitted,
)

QUERIES = 4
"""Queries that share each load of keys and values: rows of a pass, and heads of a group."""
VALUE_VECTORS = 4
"""Vectors of a value that are summed at once."""
KINDS = {2: "bfloat16", 4: "float32"}
"""Of keys and values, by their bytes."""
LOG2_E = 1.4426950408889634
EXP2 = (1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158,
        0.009618129107628477, 0.0013333558146428443, 0.00015403530393381608)  # fmt: skip
"""The series of 2^x: exact to float32 for -.5 <= x <= .5."""


def _emit_scores(
    emit: Emitter,
    queries: Any,
    keys: Any,
    head_dim: Any,
    blocks: Any,
    scores: Any,
    score_bytes: Any,
    key_bytes: int,
    num_queries: int,
) -> None:
    """scores[query, slot] = queries[query] * keys[slot], for blocks of 16 slots.

    `queries`: addresses, one int64 each, of float32 [head_dim]; `keys` [blocks, head_dim, 16].
    """
    addresses = [emit.load(emit.at(queries, 8 * query), LONG) for query in range(num_queries)]
    with emit.loop(blocks) as block:
        totals = emit.variables(num_queries, FLOATS)
        block_keys = emit.at(keys, (emit.builder.mul(block, head_dim), LANES * key_bytes))
        with emit.loop(head_dim) as dimension:
            vector = emit.floats(
                emit.at(block_keys, (dimension, LANES * key_bytes)), KINDS[key_bytes]
            )
            for address, variable in zip(addresses, totals, strict=True):
                number = emit.load_splat(emit.at(address, (dimension, 4)), FLOAT)
                emit.add_product(number, vector, variable)
        for query, variable in enumerate(totals):
            target = emit.at(scores, (score_bytes, query), (block, 4 * LANES))
            emit.store(emit.builder.load(variable), target)


@intrinsic(prefer_literal=True)
def compute_scores(
    context, queries, keys, head_dim, blocks, scores, score_bytes, key_bytes, num_queries
):
    """See `_emit_scores`."""
    arguments = (queries, keys, head_dim, blocks, scores, score_bytes, key_bytes, num_queries)
    return emitted(_emit_scores, arguments, literals=2)


def _emit_weighted_sums(
    emit: Emitter,
    weights: Any,
    weight_bytes: Any,
    values: Any,
    value_bytes: Any,
    slots: Any,
    results: Any,
    result_offset: Any,
    key_bytes: int,
    num_queries: int,
    vectors: int,
) -> None:
    """results[query] = the mean of values[slot], weighted by weights[query, slot].

    Of each value, `vectors` vectors are read; `results`: an address for each query, to which
    `result_offset` bytes are added.
    """
    builder = emit.builder
    sums = [emit.variables(vectors, FLOATS) for _ in range(num_queries)]
    totals = emit.variables(num_queries, FLOATS)
    with emit.loop(slots) as slot:
        value = emit.at(values, builder.mul(slot, value_bytes))
        parts = [
            emit.floats(emit.at(value, LANES * key_bytes * vector), KINDS[key_bytes])
            for vector in range(vectors)
        ]
        for query, (variables, total) in enumerate(zip(sums, totals, strict=True)):
            address = emit.at(weights, (weight_bytes, query), (slot, 4))
            weight = emit.load_splat(address, FLOAT)
            builder.store(builder.fadd(builder.load(total), weight), total)
            for part, variable in zip(parts, variables, strict=True):
                emit.add_product(weight, part, variable)
    for query, (variables, total) in enumerate(zip(sums, totals, strict=True)):
        divisor = builder.load(total)
        nothing = ir.Constant(FLOATS, [0.0] * LANES)
        is_seen = builder.fcmp_ordered(">", divisor, nothing)  # a row may see no slot
        target = emit.load(emit.at(results, 8 * query), LONG)
        for vector, variable in enumerate(variables):
            mean = builder.fdiv(builder.load(variable), divisor)
            mean = builder.select(is_seen, mean, nothing)
            emit.store(mean, emit.at(target, result_offset, 4 * LANES * vector))


@intrinsic(prefer_literal=True)
def compute_weighted_sums(
    context, weights, weight_bytes, values, value_bytes, slots, results, result_offset,
    key_bytes, num_queries, vectors,
):  # fmt: skip
    """See `_emit_weighted_sums`."""
    arguments = (
        weights, weight_bytes, values, value_bytes, slots, results, result_offset,
        key_bytes, num_queries, vectors,
    )  # fmt: skip
    return emitted(_emit_weighted_sums, arguments, literals=3)


def _emit_exp2(emit: Emitter, exponent: Any) -> Any:
    """2 to the power of 16 float32 numbers, at least 2^-126."""
    builder = emit.builder
    lowest = ir.Constant(FLOATS, [-126.0] * LANES)
    exponent = emit.call("llvm.maxnum.v16f32", FLOATS, exponent, lowest)
    whole = emit.call("llvm.rint.v16f32", FLOATS, exponent)
    fraction = builder.fsub(exponent, whole)
    power = ir.Constant(FLOATS, [EXP2[-1]] * LANES)
    for coefficient in EXP2[-2::-1]:
        power = emit.fma(power, fraction, ir.Constant(FLOATS, [coefficient] * LANES))
    bits = builder.add(builder.fptosi(whole, WORDS), ir.Constant(WORDS, [127] * LANES))
    scale = builder.bitcast(builder.shl(bits, ir.Constant(WORDS, [23] * LANES)), FLOATS)
    return builder.fmul(power, scale)


def _emit_softmax(emit: Emitter, scores: Any, visible: Any, blocks: Any) -> None:
    """Replace scores, in units of log 2, by 2^(score - largest); those of hidden slots by 0.

    `visible`: of the address of bool [slots].
    """
    builder = emit.builder
    visible = emit.load(visible, LONG)
    lowest = ir.Constant(FLOATS, [-3e38] * LANES)
    hidden = ir.Constant(ir.VectorType(BYTE, LANES), [0] * LANES)
    (largest,) = emit.variables(1, FLOATS)
    builder.store(lowest, largest)

    def is_visible(block: Any) -> Any:
        return builder.icmp_unsigned(
            "!=", emit.load(emit.at(visible, (block, LANES)), hidden.type), hidden
        )

    with emit.loop(blocks) as block:
        seen = emit.load(emit.at(scores, (block, 4 * LANES)), FLOATS)
        seen = builder.select(is_visible(block), seen, lowest)
        maximum = emit.call("llvm.maxnum.v16f32", FLOATS, builder.load(largest), seen)
        builder.store(maximum, largest)
    reduced = emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, builder.load(largest))
    maximum = emit.splat(reduced)
    with emit.loop(blocks) as block:
        address = emit.at(scores, (block, 4 * LANES))
        weight = _emit_exp2(emit, builder.fsub(emit.load(address, FLOATS), maximum))
        nothing = ir.Constant(FLOATS, [0.0] * LANES)
        emit.store(builder.select(is_visible(block), weight, nothing), address)


@intrinsic(prefer_literal=True)
def compute_softmax(context, scores, visible, blocks):
    """See `_emit_softmax`."""
    return emitted(_emit_softmax, (scores, visible, blocks), literals=0)


def _emit_gated(emit: Emitter, gate: Any, up: Any, results: Any) -> None:
    """results = SiLU(gate) * up, 16 numbers of each."""
    builder = emit.builder
    value = emit.load(gate, FLOATS)
    exponent = builder.fmul(value, ir.Constant(FLOATS, [-LOG2_E] * LANES))
    one = ir.Constant(FLOATS, [1.0] * LANES)
    highest = ir.Constant(FLOATS, [126.0] * LANES)
    exponent = emit.call("llvm.minnum.v16f32", FLOATS, exponent, highest)
    silu = builder.fdiv(value, builder.fadd(one, _emit_exp2(emit, exponent)))
    emit.store(builder.fmul(silu, emit.load(up, FLOATS)), results)


@intrinsic(prefer_literal=True)
def gate(context, gate, up, results):
    """See `_emit_gated`."""
    return emitted(_emit_gated, (gate, up, results), literals=0)


@functools.cache
def attender(key_bytes: int) -> Any:
    """A compiled function: attention of up to `QUERIES` queries of one head of the cache.

    `queries`, `results`, `visible`: of int64 [count], addresses of float32 [head_dim] and of bool
    [slots]; `keys`, `values`: of the first of `blocks` * 16 slots; `scores`: of a scratch.
    """

    @cfunc(types.void(*[types.int64] * 9), cache=True, error_model="numpy")
    def attend(queries, results, visible, count, keys, values, head_dim, blocks, scores):
        stride = blocks * LANES * 4
        k, d, n = keys, head_dim, blocks
        if count == 1:
            compute_scores(queries, k, d, n, scores, stride, key_bytes, 1)
        elif count == 2:
            compute_scores(queries, k, d, n, scores, stride, key_bytes, 2)
        elif count == 3:
            compute_scores(queries, k, d, n, scores, stride, key_bytes, 3)
        else:
            compute_scores(queries, k, d, n, scores, stride, key_bytes, 4)
        for query in range(count):
            compute_softmax(scores + query * stride, visible + 8 * query, blocks)
        slots, value_bytes = blocks * LANES, head_dim * key_bytes
        s, v, y = scores, values, results
        for first in range(0, head_dim, VALUE_VECTORS * LANES):
            if head_dim - first < VALUE_VECTORS * LANES:
                for start in range(first, head_dim, LANES):
                    v, offset = values + start * key_bytes, 4 * start
                    for query in range(count):
                        w = scores + query * stride
                        compute_weighted_sums(
                            w, stride, v, value_bytes, slots, y + 8 * query, offset, key_bytes, 1, 1
                        )
                break
            v, offset = values + first * key_bytes, 4 * first
            if count == 1:
                compute_weighted_sums(s, stride, v, value_bytes, slots, y, offset, key_bytes, 1, 4)
            elif count == 2:
                compute_weighted_sums(s, stride, v, value_bytes, slots, y, offset, key_bytes, 2, 4)
            elif count == 3:
                compute_weighted_sums(s, stride, v, value_bytes, slots, y, offset, key_bytes, 3, 4)
            else:
                compute_weighted_sums(s, stride, v, value_bytes, slots, y, offset, key_bytes, 4, 4)

    return attend
