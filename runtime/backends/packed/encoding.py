"""Rows as the products of a format read them: floating-point numbers, or integers with scales."""

import functools
from typing import Any

from llvmlite import ir
from numba import cfunc, types

from sequoia_plan.runtime.backends.packed.products import (
    ENCODE_BFLOAT16,
    ENCODE_WHOLE_FLOATS,
    FORMATS,
    NUMBER_BYTES,
)
from sequoia_plan.runtime.backends.packed.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    LANES,
    WORD,
    WORDS,
    Emitter,
    emitted,
)


@emitted(literals=2)
def encode_group(
    emit: Emitter, source: Any, numbers: Any, scales: Any, total: Any, number: int, as_floats: int
) -> None:
    """Store a group of numbers as integers of 8 bits with a scale for each 16, and its total.

    Where a format's offset is its scale times a number, the total is stored times that number.
    """
    builder, totals, format = emit.builder, [], FORMATS[number]
    magnitude, group = ir.Constant(WORDS, [0x7FFFFFFF] * LANES), format.group
    for start in range(0, group, LANES):
        part = emit.load(emit.at(source, 4 * start), FLOATS)
        # compared as integers, which keeps NaN
        sizes = builder.and_(builder.bitcast(part, WORDS), magnitude)
        largest = emit.call("llvm.vector.reduce.umax.v16i32", WORD, sizes)
        largest = builder.bitcast(largest, FLOAT)
        is_zero = builder.fcmp_ordered("==", largest, FLOAT(0.0))
        inverse = builder.select(is_zero, FLOAT(0.0), builder.fdiv(FLOAT(127.0), largest))
        scale = builder.fmul(largest, FLOAT(1 / 127))
        whole = builder.fmul(part, emit.splat(inverse))
        whole = emit.call("llvm.rint.v16f32", FLOATS, whole)
        integers = builder.fptosi(whole, WORDS)
        if as_floats:
            emit.store(whole, emit.at(numbers, 4 * start))
        else:
            packed = builder.trunc(integers, ir.VectorType(BYTE, LANES))
            emit.store(packed, emit.at(numbers, start))
        emit.store(scale, emit.at(scales, 4 * start // LANES), align=4)
        # of the rounded numbers: with the exact sum, a weight's offset would not cancel
        count = emit.call("llvm.vector.reduce.add.v16i32", WORD, integers)
        totals.append(builder.fmul(scale, builder.sitofp(count, FLOAT)))
    sum_of_group = functools.reduce(builder.fadd, totals)
    factor = 1.0 if format.offset_scales is None else float(format.offset_scales)
    emit.store(builder.fmul(sum_of_group, FLOAT(factor)), total, align=4)


@emitted(literals=1)
def store_numbers(emit: Emitter, source: Any, numbers: Any, as_bfloat16: int) -> None:
    """Copy 16 float32 numbers, as they are or rounded to bfloat16."""
    value = emit.load(source, FLOATS)
    emit.store(emit.bfloats(value) if as_bfloat16 else value, numbers)


@functools.cache
def encoder(number: int, encoding: int) -> Any:
    """A compiled function that stores rows of float32 as the products of a format read them."""
    group = FORMATS[number].group
    as_floats, as_bfloat16 = int(encoding == ENCODE_WHOLE_FLOATS), int(encoding == ENCODE_BFLOAT16)
    number_bytes = NUMBER_BYTES[encoding]

    @cfunc(types.void(*[types.int64] * 6), cache=True, error_model="numpy")
    def encode(rows, source_bytes, count, inputs, encoded, encoded_bytes):
        for row in range(count):
            source, target = rows + row * source_bytes, encoded + row * encoded_bytes
            if group:
                scales = target + inputs * number_bytes
                totals = scales + inputs // LANES * 4
                for part in range(inputs // group):
                    first = part * group
                    encode_group(
                        source + 4 * first,
                        target + first * number_bytes,
                        scales + first // LANES * 4,
                        totals + 4 * part,
                        number,
                        as_floats,
                    )
            else:
                for first in range(0, inputs, LANES):
                    store_numbers(source + 4 * first, target + number_bytes * first, as_bfloat16)

    return encode
