"""Rows as products read them: floating-point numbers, or integers with scales."""

import functools

from llvmlite import ir
from llvmlite.ir import Value
from numba import cfunc, types
from numba.core.ccallback import CFunc

from sequoia_plan.models.packed.features import BYTE, WORD
from sequoia_plan.models.packed.formats import GROUP
from sequoia_plan.models.packed.products import (
    CHUNK,
    COUNTS,
    ENCODE_BFLOAT16,
    ENCODE_INTEGERS,
    ENCODE_ROUNDED,
    NUMBER_BYTES,
    RECORD_BYTES,
    SCALES,
    TOTAL,
    TOTALS,
)
from sequoia_plan.models.packed.vectors import FLOAT, FLOATS, LANES, WORDS, Emitter, emitted

SMALLEST = 127 / 2.0**127
"""16 numbers of which none is larger are stored as zeros: the inverse of their scale is infinite"""


@emitted(literals=2)
def encode_group(emit: Emitter, source: Value, record: Value, encoding: int, factor: int) -> None:
    """Store `GROUP` float32 numbers at an address: in floating point, or int8 by 16 with a scale.

    After the int8 numbers come the words that `products.SCALES` to `COUNTS` name.
    """
    builder, totals, number_bytes = emit.builder, [], NUMBER_BYTES[encoding]
    magnitude, words = emit.words(0x7FFFFFFF), emit.at(record, GROUP * number_bytes)
    for start in range(0, GROUP, LANES):
        numbers = emit.load(emit.at(source, 4 * start), FLOATS)
        target = emit.at(record, number_bytes * start)
        if encoding != ENCODE_INTEGERS:
            if encoding == ENCODE_BFLOAT16:
                numbers = emit.bfloats(numbers)
            elif encoding == ENCODE_ROUNDED:
                upper = builder.shl(builder.zext(emit.bfloats(numbers), WORDS), emit.words(16))
                numbers = builder.bitcast(upper, FLOATS)
            emit.store(numbers, target)
            continue
        # compared as integers, which keeps NaN
        sizes = builder.and_(builder.bitcast(numbers, WORDS), magnitude)
        largest = emit.call("llvm.vector.reduce.umax.v16i32", WORD, sizes)
        largest = builder.bitcast(largest, FLOAT)
        is_zero = builder.fcmp_ordered("<=", largest, FLOAT(SMALLEST))
        inverse = builder.select(is_zero, FLOAT(0.0), builder.fdiv(FLOAT(127.0), largest))
        scale = builder.fmul(largest, FLOAT(1 / 127))
        scaled = builder.fmul(numbers, emit.splat(inverse))
        integers = builder.fptosi(emit.call("llvm.rint.v16f32", FLOATS, scaled), WORDS)
        emit.store(builder.trunc(integers, ir.VectorType(BYTE, LANES)), target)
        half = start // LANES
        emit.store(scale, emit.at(words, 4 * (SCALES + half)), align=4)
        # of the rounded numbers: with the exact sum, a weight's offset would not cancel
        count = emit.call("llvm.vector.reduce.add.v16i32", WORD, integers)
        total = builder.fmul(scale, builder.sitofp(count, FLOAT))
        totals.append(builder.fmul(total, FLOAT(-float(factor))))
        emit.store(totals[-1], emit.at(words, 4 * (TOTALS + half)), align=4)
        count = builder.shl(count, WORD(7))  # 128 times the sum
        emit.store(count, emit.at(words, 4 * (COUNTS + half)), align=4)
    if totals:
        total = functools.reduce(builder.fadd, totals)
        emit.store(total, emit.at(words, 4 * TOTAL), align=4)


@functools.cache
def encoder(encoding: int, factor: int) -> CFunc:
    """A compiled function that stores `count` rows of float32 as products read them.

    A chunk of rows has their first groups side by side, then their second ones, and so on. The
    memory of a row must have zeros up to a multiple of `GROUP`.
    """
    record_bytes = RECORD_BYTES[encoding]

    @cfunc(types.void(*[types.int64] * 6), cache=True, error_model="numpy")
    def encode(rows, source_bytes, count, inputs, encoded, encoded_bytes):
        for first in range(0, count, CHUNK):
            chunk, left = encoded + first * encoded_bytes, min(count - first, CHUNK)
            for row in range(left):
                source = rows + (first + row) * source_bytes
                for group in range(-(-inputs // GROUP)):
                    record = chunk + (group * left + row) * record_bytes
                    encode_group(source + 4 * GROUP * group, record, encoding, factor)

    return encode
