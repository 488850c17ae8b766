"""Products of rows by a matrix whose weights stay in the bits of their file.

All rows use a group of a tile's weights while these are in registers. Each row sums over its inputs
in one order, whatever rows stand beside it.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import cfunc, types

from sequoia_plan.runtime.backends.packed.formats import (
    FORMATS,
    GROUP,
    OUTPUTS,
    QUAD,
    Format,
)
from sequoia_plan.runtime.backends.packed.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HAS_INTEGER_PRODUCTS,
    LANES,
    LONG,
    WORD,
    WORDS,
    Emitter,
    emitted,
)

CHUNK = 32
"""Rows that are encoded side by side, and multiplied by a tile at once."""
HALVES = range(OUTPUTS // LANES)
VECTOR, PAIR = 4 * LANES, 4 * OUTPUTS
"""Bytes of a vector, and of the vectors of all outputs of a tile."""
AHEAD = 9216
"""Bytes from what is read to what is fetched."""
FLOAT_ROWS = 8
"""Rows at most that use weights in floating point at once."""
BYTES = ir.VectorType(BYTE, 4 * LANES)
ENCODE_FLOATS, ENCODE_BFLOAT16, ENCODE_INTEGERS, ENCODE_WHOLE_FLOATS = range(4)
"""How rows are stored: as numbers, or as integers of 8 bits (or floats of such) with scales."""
NUMBER_BYTES = (4, 2, 1, 4)
RECORD_BYTES = (128, 64, 64, 192)
"""Of a group of a row: its numbers, then `SCALES` to `TOTAL`."""
SCALES, TOTALS, TOTAL = 0, 2, 4
"""Places of float32 after the numbers: of each 16 the scale and -128 times the sum; their total."""


def own_encoding(format: int) -> int:
    """How this processor stores the rows that a format multiplies."""
    if FORMATS[format].is_float:
        return ENCODE_BFLOAT16 if FORMATS[format].name == "BF16" else ENCODE_FLOATS
    return ENCODE_INTEGERS if HAS_INTEGER_PRODUCTS else ENCODE_WHOLE_FLOATS


def encoded_bytes(format: int, inputs: int, encoding: int | None = None) -> int:
    """Bytes of a row of so many inputs as an encoder writes it."""
    encoding = own_encoding(format) if encoding is None else encoding
    return -(-inputs // GROUP) * RECORD_BYTES[encoding]


@emitted(literals=1)
def multiply_tile(
    emit: Emitter, rows: Any, num_rows: Any, tile: Any, steps: Any, results: Any,
    result_bytes: Any, kind: int,
) -> None:  # fmt: skip
    """The products of up to `CHUNK` encoded rows by one tile, written to their results.

    `kind`: a format's number * 4 + an encoding.
    """
    number, encoding = divmod(kind, 4)
    emit_tile = _emit_float_tile if FORMATS[number].is_float else _emit_integer_tile
    emit_tile(emit, FORMATS[number], encoding, rows, num_rows, tile, steps, results, result_bytes)


def _emit_float_tile(
    emit: Emitter, format: Format, encoding: int, rows: Any, num_rows: Any, tile: Any, steps: Any,
    results: Any, result_bytes: Any,
) -> None:  # fmt: skip
    """The sums of some rows at once, then of fewer, are in registers from the first input on."""
    builder, is_pair = emit.builder, encoding == ENCODE_BFLOAT16
    numbers, kind = format.step.shape[0], WORD if is_pair else FLOAT
    weight_bytes, record_bytes = format.step.itemsize // numbers, RECORD_BYTES[encoding]
    first = LONG(0)
    for count in range(FLOAT_ROWS, 0, -1):
        batches = builder.udiv(builder.sub(num_rows, first), LONG(count))
        with emit.loop(batches) as batch:
            row = emit.at(first, (batch, count))
            sums = [emit.variables(len(HALVES)) for _ in range(count)]
            with emit.loop(steps) as step:
                weights = emit.at(tile, (step, format.step.itemsize))
                record = emit.at(
                    rows, (builder.mul(step, num_rows), record_bytes), (row, record_bytes)
                )
                with emit.loop(LONG(numbers)) as number:
                    emit.prefetch(emit.at(weights, (number, weight_bytes), AHEAD), weight_bytes)
                    for half in HALVES:
                        place = emit.at(weights, (number, weight_bytes), weight_bytes // 2 * half)
                        vector = (
                            emit.load(place, WORDS)
                            if is_pair
                            else emit.floats(place, f"float{8 * format.block_bytes}")
                        )
                        for r, variables in enumerate(sums):
                            address = emit.at(record, (number, 4), record_bytes * r)
                            emit.add_product(
                                vector, emit.load_splat(address, kind), variables[half]
                            )
            for r, variables in enumerate(sums):
                target = emit.at(results, builder.mul(emit.at(row, r), result_bytes))
                for half in HALVES:
                    emit.store(builder.load(variables[half]), emit.at(target, VECTOR * half))
        first = emit.at(first, (batches, count))


def _emit_integer_tile(
    emit: Emitter, format: Format, encoding: int, rows: Any, num_rows: Any, tile: Any, steps: Any,
    results: Any, result_bytes: Any,
) -> None:  # fmt: skip
    """All rows use a group of weights; their sums are in memory between two groups."""
    builder, groups = emit.builder, format.block // GROUP
    totals = emit.memory(CHUNK * PAIR // VECTOR)
    zero = emit.numbers(0.0)
    with emit.loop(num_rows) as row:
        for half in HALVES:
            emit.store(zero, emit.at(totals, (row, PAIR), VECTOR * half), align=64)
    record_bytes = builder.mul(num_rows, LONG(RECORD_BYTES[encoding]))
    with emit.loop(steps) as step:
        start = emit.at(tile, (step, format.step.itemsize))
        first = emit.at(rows, builder.mul(builder.mul(step, LONG(groups)), record_bytes))
        records = [emit.at(first, (record_bytes, group)) for group in range(groups)]
        _emit_integer_step(emit, format, encoding, start, records, num_rows, totals)
    with emit.loop(num_rows) as row:
        target = emit.at(results, builder.mul(row, result_bytes))
        for half in HALVES:
            total = emit.load(emit.at(totals, (row, PAIR), VECTOR * half), FLOATS, 64)
            emit.store(total, emit.at(target, VECTOR * half))


def _emit_integer_step(
    emit: Emitter, format: Format, encoding: int, step: Any, records: list[Any], num_rows: Any,
    totals: Any,
) -> None:  # fmt: skip
    """Add scale * (products of integers) - offset * (sum of the row's group) of a block."""
    fields: Any = format.step.fields
    # integers are shifted so that the one that means 0 is 128, see `TOTALS`
    shift = 0 if format.zero is None or format.values else 8 - format.bits
    factors = [_emit_factors(emit, format, step, half, shift) for half in HALVES]
    scales = [
        _emit_planes(
            emit, emit.at(step, fields["scales"][1]), format.scale_planes,
            format.num_scales // QUAD, half, 0,
        ) for half in HALVES
    ]  # fmt: skip
    weights, group_bytes = emit.at(step, fields["weights"][1]), PAIR * format.bits
    parts = GROUP // format.group
    fetched = format.step.itemsize // len(records)
    for group, record in enumerate(records):
        emit.prefetch(emit.at(step, AHEAD + fetched * group), fetched)
        address = emit.at(weights, group_bytes * group)
        quads = [
            _emit_planes(emit, address, format.planes, GROUP // QUAD, half, shift)
            for half in HALVES
        ]
        if format.values:
            lookup = _emit_lookup if encoding == ENCODE_INTEGERS else _emit_choice
            quads = [[lookup(emit, quad, format.values) for quad in half] for half in quads]
        numbers = range(group * parts, (group + 1) * parts)
        both = [_emit_scales(emit, format, factors[half], scales[half], numbers) for half in HALVES]
        with emit.loop(num_rows) as row:
            _emit_integer_row(
                emit, encoding, emit.at(record, (row, RECORD_BYTES[encoding])), quads, both,
                emit.at(totals, (row, PAIR)),
            )  # fmt: skip


def _emit_factors(emit: Emitter, format: Format, step: Any, half: int, shift: int) -> list[Any]:
    """The factors of a block for integers that are shifted, and for offsets by `TOTALS`."""
    builder, size = emit.builder, format.step["factors"].shape[2]
    if size == 1:  # 2 to the power of byte - 131
        exponents = emit.load(emit.at(step, LANES * half), ir.VectorType(BYTE, LANES))
        exponents = builder.sub(builder.zext(exponents, WORDS), emit.words(4))
        exponents = emit.call("llvm.smax.v16i32", WORDS, exponents, emit.words(0))
        return [builder.bitcast(builder.shl(exponents, emit.words(23)), FLOATS)]
    units, factors = (2.0**-shift, format.offset_sign / 128), []
    for place in range(len(format.factors)):
        address = emit.at(step, size * (OUTPUTS * place + LANES * half))
        unit = emit.numbers(units[place])
        factors.append(builder.fmul(emit.floats(address, "float16"), unit))
    return factors


def _emit_scales(
    emit: Emitter, format: Format, factors: list[Any], scales: list[Any], groups: range
) -> list[list[Any]]:
    """Of some groups of a block, [scale] or [scale, offset] as float32 vectors."""
    if not scales:
        return [factors] * len(groups)
    builder, results = emit.builder, []
    for group in groups:
        vectors = []
        for part, factor in enumerate(factors):
            number = group + part * format.num_scales // 2
            shifted = builder.lshr(scales[number // QUAD], emit.words(8 * (number % QUAD)))
            integers = builder.sitofp(builder.and_(shifted, emit.words(255)), FLOATS)
            if format.scale_zero:
                zero = emit.numbers(float(format.scale_zero))
                integers = builder.fsub(integers, zero)
            vectors.append(builder.fmul(factor, integers))
        results.append(vectors)
    return results


def _emit_planes(
    emit: Emitter, address: Any, planes: tuple[int, ...], quads: int, half: int, shift: int
) -> list[Any]:
    """Integers, shifted left, from their planes (see `Format.step`): a vector for each quad."""
    builder, results, low = emit.builder, [None] * quads, shift
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)
    for bits in planes:
        vectors = quads * bits // 8
        for vector in range(vectors):
            loaded = emit.load(emit.at(address, PAIR * vector + VECTOR * half), halves)
            for field in range(8 // bits):
                by = low - bits * field
                places = ir.Constant(halves, [abs(by)] * 2 * LANES)
                moved = loaded
                if by:
                    moved = (builder.shl if by > 0 else builder.lshr)(loaded, places)
                mask = ((1 << bits) - 1) << low
                if mask != 255:
                    moved = builder.and_(moved, ir.Constant(halves, [mask * 257] * 2 * LANES))
                quad = vector + vectors * field
                moved = builder.bitcast(moved, WORDS)
                joined = results[quad]
                results[quad] = moved if joined is None else builder.or_(joined, moved)
        address, low = emit.at(address, PAIR * vectors), low + bits
    return results


def _emit_lookup(emit: Emitter, quad: Any, values: tuple[int, ...]) -> Any:
    """What integers of 4 bits stand for."""
    table, indices = ir.Constant(BYTES, list(values) * 4), emit.builder.bitcast(quad, BYTES)
    looked_up = emit.call("llvm.x86.avx512.pshuf.b.512", BYTES, table, indices)
    return emit.builder.bitcast(looked_up, WORDS)


def _emit_choice(emit: Emitter, quad: Any, values: tuple[int, ...]) -> Any:
    """The same on any processor: each bit chooses between halves of what is left."""
    builder, indices = emit.builder, emit.builder.bitcast(quad, BYTES)
    entries = [ir.Constant(BYTES, [value] * 4 * LANES) for value in values]
    for bit in range(4):
        place = ir.Constant(BYTES, [1 << bit] * 4 * LANES)
        is_set = builder.icmp_unsigned("==", builder.and_(indices, place), place)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [builder.select(is_set, odd, even) for even, odd in pairs]
    return builder.bitcast(entries[0], WORDS)


def _emit_integer_row(
    emit: Emitter, encoding: int, record: Any, quads: list[list[Any]], scales: list[Any],
    totals: Any,
) -> None:  # fmt: skip
    """Add one row's products by a group of a tile to its totals."""
    builder, num_parts, num_scales = emit.builder, GROUP // LANES, len(scales[0])
    numbers = [
        emit.load_splat(emit.at(record, GROUP * NUMBER_BYTES[encoding] + 4 * place), FLOAT)
        for place in range(TOTAL + 1)
    ]
    sums = [_emit_integer_sums(emit, encoding, record, quads, part) for part in range(num_parts)]
    for half in HALVES:
        address = emit.at(totals, VECTOR * half)
        result = emit.load(address, FLOATS, 64)
        for place, (scale, *offset) in enumerate(scales[half]):
            row_total = numbers[TOTAL if num_scales == 1 else TOTALS + place]
            products = None if offset else row_total
            for part in range(num_parts)[place::num_scales]:
                factors = sums[part][half], numbers[SCALES + part]
                products = emit.fma(*factors, products) if products else builder.fmul(*factors)
            result = emit.fma(scale, products, result)
            if offset:
                result = emit.fma(offset[0], row_total, result)
        emit.store(result, address, 64)


def _emit_integer_sums(
    emit: Emitter, encoding: int, record: Any, quads: list[list[Any]], part: int
) -> list[Any]:
    """The sums of integer products over 16 inputs, float32, of each half of the outputs."""
    builder, places = emit.builder, range(part * LANES // QUAD, (part + 1) * LANES // QUAD)
    if encoding == ENCODE_INTEGERS:
        sums: list[Any] = [emit.words(0)] * len(HALVES)
        for place in places:
            four = emit.load_splat(emit.at(record, QUAD * place), WORD)
            for half in HALVES:
                sums[half] = emit.call(
                    "llvm.x86.avx512.vpdpbusd.512", WORDS, sums[half], quads[half][place], four
                )
        return [builder.sitofp(total, FLOATS) for total in sums]
    # sums of whole numbers below 2^24 are exact in float32, so the bits are the same
    sums = [emit.numbers(0.0)] * len(HALVES)
    for place in places:
        for byte in range(QUAD):
            value = emit.load_splat(emit.at(record, 4 * (QUAD * place + byte)), FLOAT)
            for half in HALVES:
                shifted = builder.lshr(quads[half][place], emit.words(8 * byte))
                weight = builder.sitofp(builder.and_(shifted, emit.words(255)), FLOATS)
                sums[half] = emit.fma(weight, value, sums[half])
    return sums


@functools.cache
def multiplier(format: int, encoding: int) -> Any:
    """A compiled function that multiplies encoded rows by some tiles of a matrix of a format."""
    kind = format * 4 + encoding
    step_records = max(FORMATS[format].block // GROUP, 1) * RECORD_BYTES[encoding]

    @cfunc(types.void(*[types.int64] * 8), cache=True, error_model="numpy")
    def multiply(rows, num_rows, tiles, num_tiles, tile_bytes, steps, results, result_bytes):
        for first in range(0, num_rows, CHUNK):
            x, y = rows + first * steps * step_records, results + first * result_bytes
            left = min(num_rows - first, CHUNK)
            for tile in range(num_tiles):
                w = tiles + tile * tile_bytes
                multiply_tile(x, left, w, steps, y + PAIR * tile, result_bytes, kind)

    return multiply
