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
    HAS_BYTE_TABLES,
    HAS_INTEGER_PRODUCTS,
    LANES,
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
AHEAD = 2048
"""Bytes from what is read to what is fetched."""
FLOAT_ROWS = 4
"""Rows that use a number's weights at once, where weights are in floating point."""
BYTES = ir.VectorType(BYTE, 4 * LANES)
ENCODE_FLOATS, ENCODE_BFLOAT16, ENCODE_INTEGERS, ENCODE_WHOLE_FLOATS = range(4)
"""How rows are stored: as numbers, or as integers of 8 bits (or floats of such) with scales."""
NUMBER_BYTES = (4, 2, 1, 4)
RECORD_BYTES = (128, 64, 64, 192)
"""Of a group of a row: its numbers, then `SCALES` to `TOTAL`."""
SCALES, TOTALS, TOTAL = 0, 2, 4
"""Places of float32 after the numbers: of each 16 the scale and -128 times the sum; their total."""


def own_encoding(format: Format) -> int:
    """How this processor stores the rows that a format multiplies."""
    if format.is_float:
        return ENCODE_BFLOAT16 if format.name == "BF16" else ENCODE_FLOATS
    return ENCODE_INTEGERS if HAS_INTEGER_PRODUCTS else ENCODE_WHOLE_FLOATS


def encoded_bytes(format: int, inputs: int, encoding: int | None = None) -> int:
    """Bytes of a row of so many inputs as an encoder writes it."""
    encoding = own_encoding(FORMATS[format]) if encoding is None else encoding
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
    format, builder = FORMATS[number], emit.builder
    totals = emit.memory(CHUNK * PAIR // VECTOR)
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    with emit.loop(num_rows) as row:
        for half in HALVES:
            emit.store(zero, emit.at(totals, (row, PAIR), VECTOR * half), align=64)
    emit_step = _emit_float_step if format.is_float else _emit_integer_step
    record_bytes = builder.mul(num_rows, emit.count(RECORD_BYTES[encoding]))
    groups = max(format.block // GROUP, 1)
    with emit.loop(steps) as step:
        start = emit.at(tile, (step, format.step.itemsize))
        first = emit.at(rows, builder.mul(builder.mul(step, emit.count(groups)), record_bytes))
        records = [emit.at(first, (record_bytes, group)) for group in range(groups)]
        emit_step(emit, format, encoding, start, records, num_rows, totals)
    with emit.loop(num_rows) as row:
        target = emit.at(results, builder.mul(row, result_bytes))
        for half in HALVES:
            total = emit.load(emit.at(totals, (row, PAIR), VECTOR * half), FLOATS, 64)
            emit.store(total, emit.at(target, VECTOR * half))


def _emit_float_step(
    emit: Emitter, format: Format, encoding: int, step: Any, records: list[Any], num_rows: Any,
    totals: Any,
) -> None:  # fmt: skip
    """Add the products of 32 inputs, of some rows at once and then of the others."""
    builder, is_pair = emit.builder, encoding == ENCODE_BFLOAT16
    numbers, kind = format.step.shape[0], WORD if is_pair else FLOAT
    weight_bytes = format.step.itemsize // numbers
    emit.prefetch(emit.at(step, AHEAD), format.step.itemsize)
    batches = builder.udiv(num_rows, emit.count(FLOAT_ROWS))
    rest = builder.urem(num_rows, emit.count(FLOAT_ROWS))
    for rows, count, first in (
        (FLOAT_ROWS, batches, emit.count(0)), (1, rest, builder.sub(num_rows, rest)),
    ):  # fmt: skip
        with emit.loop(count) as batch:
            row = builder.add(first, builder.mul(batch, emit.count(rows)))
            record = emit.at(records[0], (row, RECORD_BYTES[encoding]))
            target = emit.at(totals, (row, PAIR))
            sums = [emit.variables(2, emit.at(target, PAIR * r)) for r in range(rows)]
            with emit.loop(emit.count(numbers)) as number:
                place = emit.at(step, (number, weight_bytes))
                for half in HALVES:
                    at = emit.at(place, weight_bytes // 2 * half)
                    if is_pair:
                        weights = emit.load(at, WORDS)
                    else:
                        weights = emit.floats(
                            at, "float16" if weight_bytes == VECTOR else "float32"
                        )
                    for r, variables in enumerate(sums):
                        address = emit.at(record, (number, 4), RECORD_BYTES[encoding] * r)
                        emit.add_product(weights, emit.load_splat(address, kind), variables[half])
            for r, variables in enumerate(sums):
                for half in HALVES:
                    total = builder.load(variables[half])
                    emit.store(total, emit.at(target, PAIR * r + VECTOR * half))


def _emit_integer_step(
    emit: Emitter, format: Format, encoding: int, step: Any, records: list[Any], num_rows: Any,
    totals: Any,
) -> None:  # fmt: skip
    """Add scale * (products of integers) - offset * (sum of the row's group) of a block."""
    fields: Any = format.step.fields
    # integers are shifted so that the one that means 0 is 128, see `TOTALS`
    shift = 0 if format.zero is None or format.values else 8 - format.bits
    factors = _emit_factors(emit, format, step, shift)
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
            quads = [[_emit_lookup(emit, quad, format.values) for quad in half] for half in quads]
        numbers = range(group * parts, (group + 1) * parts)
        both = [_emit_scales(emit, format, factors[half], scales[half], numbers) for half in HALVES]
        with emit.loop(num_rows) as row:
            _emit_integer_row(
                emit, encoding, emit.at(record, (row, RECORD_BYTES[encoding])), quads, both,
                emit.at(totals, (row, PAIR)), format.zero is not None,
            )  # fmt: skip


def _emit_factors(emit: Emitter, format: Format, step: Any, shift: int) -> list[list[Any]]:
    """For each half of the outputs, the factors of a block as float32 vectors."""
    factors = []
    for half in HALVES:
        if format.step["factors"].shape[2] == 1:
            exponent = emit.load(emit.at(step, LANES * half), ir.VectorType(BYTE, LANES))
            factors.append([emit.power_of_two(exponent, -128)])
            continue
        vectors = [
            emit.floats(emit.at(step, 2 * OUTPUTS * place + 2 * LANES * half), "float16")
            for place in range(len(format.factors))
        ]
        units = [2.0**-shift, format.offset_sign / 128]
        factors.append(
            [emit.times(vector, unit) for vector, unit in zip(vectors, units, strict=False)]
        )
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
                zero = ir.Constant(FLOATS, [float(format.scale_zero)] * LANES)
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
    builder, indices = emit.builder, emit.builder.bitcast(quad, BYTES)
    if HAS_BYTE_TABLES:
        table = ir.Constant(BYTES, list(values) * 4)
        found = emit.call("llvm.x86.avx512.pshuf.b.512", BYTES, table, indices)
        return builder.bitcast(found, WORDS)
    entries = [ir.Constant(BYTES, [value] * 4 * LANES) for value in values]
    for bit in range(4):
        place = ir.Constant(BYTES, [1 << bit] * 4 * LANES)
        is_set = builder.icmp_unsigned("==", builder.and_(indices, place), place)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [builder.select(is_set, odd, even) for even, odd in pairs]
    return builder.bitcast(entries[0], WORDS)


def _emit_integer_row(
    emit: Emitter, encoding: int, record: Any, quads: list[list[Any]], scales: list[Any],
    totals: Any, has_zero: bool,
) -> None:  # fmt: skip
    """Add one row's products by a group of a tile to its totals."""
    builder, number_bytes = emit.builder, NUMBER_BYTES[encoding]

    def number(place: int) -> Any:
        """One of the floats after the integers."""
        return emit.load_splat(emit.at(record, GROUP * number_bytes + 4 * place), FLOAT)

    num_parts = GROUP // LANES
    row_scales = [number(SCALES + part) for part in range(num_parts)]
    by_part = len(scales[0]) == num_parts
    row_totals = [number(TOTALS + part if by_part else TOTAL) for part in range(len(scales[0]))]
    sums = [_emit_integer_sums(emit, encoding, record, quads, part) for part in range(num_parts)]
    for half in HALVES:
        address = emit.at(totals, VECTOR * half)
        result = emit.load(address, FLOATS, 64)
        products = None
        for part in range(num_parts):
            if has_zero and (by_part or products is None):
                products = row_totals[part if by_part else 0]
            elif by_part:
                products = None
            integers, row_scale = sums[part][half], row_scales[part]
            if products is None:
                products = builder.fmul(integers, row_scale)
            else:
                products = emit.fma(integers, row_scale, products)
            if by_part or part == num_parts - 1:
                place = part if by_part else 0
                result = emit.fma(scales[half][place][0], products, result)
                if not has_zero:
                    result = emit.fma(scales[half][place][1], row_totals[place], result)
        emit.store(result, address, 64)


def _emit_integer_sums(
    emit: Emitter, encoding: int, record: Any, quads: list[list[Any]], part: int
) -> list[Any]:
    """The sums of integer products over 16 inputs, float32, of each half of the outputs."""
    builder, places = emit.builder, range(part * LANES // QUAD, (part + 1) * LANES // QUAD)
    if encoding == ENCODE_INTEGERS:
        sums: list[Any] = [ir.Constant(WORDS, [0] * LANES)] * len(HALVES)
        for place in places:
            four = emit.load_splat(emit.at(record, QUAD * place), WORD)
            for half in HALVES:
                sums[half] = emit.call(
                    "llvm.x86.avx512.vpdpbusd.512", WORDS, sums[half], quads[half][place], four
                )
        return [builder.sitofp(total, FLOATS) for total in sums]
    # sums of whole numbers below 2^24 are exact in float32, so the bits are the same
    sums = [ir.Constant(FLOATS, [0.0] * LANES)] * len(HALVES)
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
