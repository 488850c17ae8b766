"""Attention over a cache whose keys lie so that the scores of 16 slots are one vector.

Sums over slots run in the order of the slots, so a row's result does not depend on the other rows,
nor on hidden slots between those that it sees. In a cache of bfloat16 numbers, a word holds two
dimensions of a key, or two slots of a value with the earlier one in its upper half: products of
pairs are added one after the other, the upper one first.
"""

import functools

from llvmlite import ir
from llvmlite.ir import Value
from numba import cfunc, types
from numba.core.ccallback import CFunc

from sequoia_plan.models.packed.features import BYTE, LONG, WORD
from sequoia_plan.models.packed.instructions import OWN
from sequoia_plan.models.packed.vectors import FLOAT, FLOATS, LANES, WORDS, Emitter, emitted

QUERIES = 6  # queries that share each load of keys and values: rows of a pass, and heads of a group
BATCHES = 4
"""Batches of so many queries that take turns with each part of the slots, while it is in cache."""
WIDTH = min(max(OWN.lanes, 8), LANES)
"""Numbers of a vector here: sums of `QUERIES` by `AT_ONCE` or `VALUE_VECTORS` are in registers."""
AT_ONCE, VALUE_VECTORS, HALF_VALUE = 2, WIDTH // 4, WIDTH // 8
BLOCK = 2 * LANES  # slots of a block of keys
PART = 16  # blocks whose keys or values stay in the processor's cache while batches take turns
WORD_BYTES, VECTOR_BYTES, TOTALS_BYTES = 4, 4 * WIDTH, 4 * LANES
"""Of a number, of a vector, and of what lies before the sums of a query."""
VALUE_BYTES = VALUE_VECTORS * VECTOR_BYTES  # of a value's sums that are in registers at once
WORD_KINDS = {2: WORD, 4: FLOAT}
"""By the bytes of a number: a pair of bfloat16 numbers, or one of float32."""
LOG2_E = 1.4426950408889634
EXP2 = (1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158,
        0.009618129107628477, 0.0013333558146428443, 0.00015403530393381608)  # fmt: skip
"""The series of 2^x: exact to float32 for -.5 <= x <= .5, the first five to bfloat16."""
ROUNDING = 1.5 * 2**23 + 127
"""Added to a small number: the last bits of the sum are the nearest integer, plus 127."""
HIDDEN, LOWEST = -3e38, -1e38
"""The score of a hidden slot, and what the largest score of a row is at least."""


@emitted(literals=1, counts=QUERIES)
def compute_scores(
    emit: Emitter,
    visible: Value,  # address of int64 [queries]: the addresses of bool [slots]
    keys: Value, words: Value,  # address of words [blocks, words of a key, slots of a block]
    first: Value, blocks: Value,  # the first block of slots, and how many
    queries: Value, scores: Value, stride: Value,  # addresses; the next query's: so many bytes on
    key_bytes: int, num_queries: int,
) -> None:  # fmt: skip
    """Write scores[query, slot] = queries[query] * keys[slot], or `HIDDEN` if not visible."""
    emit, kind = Emitter(emit.builder, WIDTH), WORD_KINDS[key_bytes]
    builder, vector_kind = emit.builder, ir.VectorType(kind, WIDTH)
    seen = [emit.load(emit.at(visible, 8 * query), LONG) for query in range(num_queries)]
    nothing = ir.Constant(ir.VectorType(BYTE, WIDTH), [0] * WIDTH)
    hidden, rounds = emit.numbers(HIDDEN), BLOCK // (AT_ONCE * WIDTH)  # rounds of a block
    with emit.loop(builder.mul(blocks, LONG(rounds))) as index:
        index = builder.add(index, builder.mul(first, LONG(rounds)))
        block = builder.udiv(index, LONG(rounds))
        slot = builder.mul(builder.urem(index, LONG(rounds)), LONG(AT_ONCE * WIDTH))
        totals = [emit.variables(AT_ONCE) for _ in range(num_queries)]
        block_keys = emit.at(
            keys, (builder.mul(block, words), BLOCK * WORD_BYTES), (slot, WORD_BYTES)
        )
        with emit.loop(words) as word:
            start = emit.at(block_keys, (word, BLOCK * WORD_BYTES))
            vectors = emit.load_vectors(start, AT_ONCE, vector_kind)
            for query, variables in enumerate(totals):
                address = emit.at(queries, (stride, query), (word, WORD_BYTES))
                number = emit.load_splat(address, kind)
                for vector, variable in zip(vectors, variables, strict=True):
                    emit.add_product(number, vector, variable)
        for query, variables in enumerate(totals):
            target = emit.at(
                scores, (stride, query), (block, BLOCK * WORD_BYTES), (slot, WORD_BYTES)
            )
            for number, variable in enumerate(variables):
                address = emit.at(seen[query], (block, BLOCK), slot, WIDTH * number)
                mask = emit.load(address, nothing.type)
                is_seen = builder.icmp_unsigned("!=", mask, nothing)
                score = builder.select(is_seen, builder.load(variable), hidden)
                emit.store(score, emit.at(target, number * VECTOR_BYTES))


def _emit_exp2(emit: Emitter, exponent: Value, degree: int = len(EXP2) - 1) -> Value:
    """2 to the power of float32 numbers, 0 if one is -127 or less, by a series of this degree."""
    builder = emit.builder
    exponent = emit.larger(exponent, emit.numbers(-127.0))
    rounding = emit.numbers(ROUNDING)
    rounded = builder.fadd(exponent, rounding)  # its low bits: the nearest integer plus 127
    fraction = builder.fsub(exponent, builder.fsub(rounded, rounding))
    power = emit.numbers(EXP2[degree])
    for coefficient in EXP2[degree - 1 :: -1]:
        power = emit.fma(power, fraction, emit.numbers(coefficient))
    # the integer becomes the exponent of a float32
    bits = builder.shl(builder.bitcast(rounded, emit.word_vector), emit.words(23))
    scale = builder.bitcast(bits, emit.float_vector)
    return builder.fmul(power, scale)


@emitted(literals=1)
def compute_weights(emit: Emitter, scores: Value, blocks: Value, key_bytes: int) -> None:
    """Replace a query's scores, float32 in units of log 2, by 2^(score - largest) as the cache has.

    Pairs of bfloat16 lie swapped, as in words of values.
    """
    builder, vectors = emit.builder, BLOCK // LANES
    largest = emit.variables(vectors)
    for variable in largest:
        builder.store(emit.numbers(LOWEST), variable)
    with emit.loop(blocks) as block:
        start = emit.at(scores, (block, BLOCK * WORD_BYTES))
        block_scores = emit.load_vectors(start, vectors, FLOATS)
        for score, variable in zip(block_scores, largest, strict=True):
            builder.store(emit.larger(score, builder.load(variable)), variable)
    by_lane = functools.reduce(emit.larger, map(builder.load, largest))
    maximum = emit.splat(emit.call("llvm.vector.reduce.fmax.v16f32", FLOAT, by_lane))
    is_float, swapped = key_bytes == 4, ir.Constant(WORDS, [lane ^ 1 for lane in range(LANES)])
    with emit.loop(blocks) as block:
        start = emit.at(scores, (block, BLOCK * WORD_BYTES))
        target = emit.at(scores, (block, BLOCK * key_bytes))
        for number, score in enumerate(emit.load_vectors(start, vectors, FLOATS)):
            weight = _emit_exp2(emit, builder.fsub(score, maximum), 6 if is_float else 4)
            if not is_float:
                weight = emit.bfloats(weight)
                weight = builder.shuffle_vector(weight, weight, swapped)
            emit.store(weight, emit.at(target, LANES * key_bytes * number))


@emitted(literals=2, counts=QUERIES)
def compute_weighted_sums(
    emit: Emitter, weights: Value,  # address of the first query's: words of one or two slots
    values: Value, value_bytes: Value, words: Value,  # address; bytes and count of words of slots
    totals: Value, sums: Value,  # addresses: float32 [WIDTH], a lane for each query; [queries, n]
    stride: Value,  # bytes from a query's weights or sums to those of the next one
    key_bytes: int, vectors: int, num_queries: int,  # `vectors`: of a value that are read
) -> None:  # fmt: skip
    """Add weights[query, slot] * values[slot] to sums[query], and weights to totals[query]."""
    emit, kind = Emitter(emit.builder, WIDTH), WORD_KINDS[key_bytes]
    vector_kind = ir.VectorType(kind, WIDTH)
    one = ir.Constant(vector_kind, [1.0 if kind == FLOAT else 0x3F803F80] * WIDTH)
    bools = ir.VectorType(ir.IntType(1), WIDTH)
    addresses = [emit.at(sums, (stride, query)) for query in range(num_queries)]
    results = [emit.variables(vectors, address) for address in addresses]
    (total,) = emit.variables(1, totals)
    with emit.loop(words) as word:
        start = emit.at(values, emit.builder.mul(word, value_bytes))
        value, lanes = emit.load_vectors(start, vectors, vector_kind), one
        for query, variables in enumerate(results):
            weight = emit.load_splat(emit.at(weights, (stride, query), (word, WORD_BYTES)), kind)
            own_lane = ir.Constant(bools, [lane == query for lane in range(WIDTH)])
            lanes = emit.builder.select(own_lane, weight, lanes)
            for vector, variable in zip(value, variables, strict=True):
                emit.add_product(weight, vector, variable)
        emit.add_product(lanes, one, total)  # one instruction for the totals of all queries
    for address, variables in zip([*addresses, totals], [*results, [total]], strict=True):
        for number, variable in enumerate(variables):
            emit.store(emit.builder.load(variable), emit.at(address, number * VECTOR_BYTES))


@emitted()
def gate(emit: Emitter, gate: Value, up: Value, results: Value) -> None:
    """Write SiLU(gate) * up, 16 float32 numbers of each at these addresses, to `results`."""
    builder = emit.builder
    value = emit.load(gate, FLOATS)
    exponent = builder.fmul(value, emit.numbers(-LOG2_E))
    exponent = emit.call("llvm.minnum.v16f32", FLOATS, exponent, emit.numbers(126.0))
    silu = builder.fdiv(value, builder.fadd(emit.numbers(1.0), _emit_exp2(emit, exponent)))
    emit.store(builder.fmul(silu, emit.load(up, FLOATS)), results)


@functools.cache
def attender(key_bytes: int) -> CFunc:
    """A compiled function: attention of up to `QUERIES * BATCHES` queries of one cached head.

    Addresses: `visible`, of int64 [count] addresses of bool [slots]; `keys`, `values`, of the first
    of `blocks`; `rows`, of a row for each query, `stride` bytes each: 16 lanes and the sums of
    values, float32 [head_dim], both 0 before; the query, [head_dim] words; memory for scores. Query
    q's total of weights is then in row q // QUERIES * QUERIES, lane q % QUERIES.
    """
    per_word = WORD_BYTES // key_bytes

    @cfunc(types.void(*[types.int64] * 8), cache=True, error_model="numpy")
    def attend(visible, count, keys, values, head_dim, blocks, rows, stride):
        value_bytes, sums = head_dim * WORD_BYTES, rows + TOTALS_BYTES  # parts of the first row
        queries = sums + value_bytes
        scores = queries + value_bytes
        for first in range(0, blocks, PART):  # keys in the processor's cache serve all queries
            part_blocks = min(PART, blocks - first)
            for q in range(0, count, QUERIES):
                offset, batch = q * stride, min(QUERIES, count - q)
                compute_scores(
                    visible + 8 * q, keys, head_dim // per_word, first, part_blocks,
                    queries + offset, scores + offset, stride, batch, key_bytes,
                )  # fmt: skip
        for q in range(count):
            compute_weights(scores + q * stride, blocks, key_bytes)
        for first in range(0, blocks, PART):
            words = min(PART, blocks - first) * BLOCK // per_word  # that the part's slots take
            for q in range(0, count, QUERIES):
                weights = scores + q * stride + first * BLOCK * key_bytes
                value = values + first * BLOCK * head_dim * key_bytes
                totals, target = rows + q * stride, sums + q * stride
                batch = min(QUERIES, count - q)
                for _ in range(value_bytes // VALUE_BYTES):  # as many dimensions as registers hold
                    compute_weighted_sums(
                        weights, value, value_bytes, words, totals, target, stride, batch,
                        key_bytes, VALUE_VECTORS,
                    )  # fmt: skip
                    value, target = value + VALUE_BYTES, target + VALUE_BYTES
                    totals = rows + (q + 1) * stride  # for further dimensions, a row nobody reads
                if value_bytes % VALUE_BYTES:  # then half of it: head_dim is a multiple of 32
                    compute_weighted_sums(
                        weights, value, value_bytes, words, totals, target, stride, batch,
                        key_bytes, HALF_VALUE,
                    )  # fmt: skip

    return attend
