"""Products of rows by a matrix whose weights stay in the bits of their file.

All rows use a group of a tile's weights while these are in registers. Each row sums over its inputs
in one order, whatever rows stand beside it.
"""

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from llvmlite.ir import Value
from numba import cfunc, types

from sequoia_plan.models.packed.features import BYTE, HALF_WORD, LONG, WORD, multiplies_bfloats
from sequoia_plan.models.packed.formats import FORMATS, GROUP, OUTPUTS, QUAD, Format
from sequoia_plan.models.packed.instructions import OWN, Instructions
from sequoia_plan.models.packed.vectors import FLOAT, LANES, Emitter, emitted

CHUNK = 32
"""Rows that are encoded side by side, and multiplied by a tile at once."""
PAIR = 4 * OUTPUTS
"""Bytes of the words of all outputs of a tile."""
LINE = 64
AHEAD = 9216
"""Bytes from what is read to what is fetched."""
ENCODE_FLOATS, ENCODE_BFLOAT16, ENCODE_ROUNDED, ENCODE_INTEGERS = range(4)
"""How rows are stored: as float32, in bfloat16, as float32 rounded to it, or in 8 bits."""
NUMBER_BYTES = (4, 2, 4, 1)
RECORD_BYTES = (128, 64, 128, 64)
"""Of a group of a row: its numbers, then `SCALES` to `COUNTS`."""
SCALES, TOTALS, TOTAL, COUNTS = 0, 2, 4, 5
"""Places of words after the numbers: of each 16 the scale, a factor times their sum; the total; of
each 16, 128 times the sum of the bytes, an int32."""


class Encoding(NamedTuple):
    """How rows are stored; their sums are multiplied by what `factor` weights subtract."""

    form: int
    factor: int = 0


def encoding_for(format: int, kind: Instructions = OWN) -> Encoding:
    """How a kind of processor stores the rows that a format multiplies."""
    layout = FORMATS[format]
    if not layout.is_float:
        return Encoding(ENCODE_INTEGERS, factor=layout.zero or layout.offset_sign)
    if layout.name != "BF16":
        return Encoding(ENCODE_FLOATS)
    return Encoding(ENCODE_BFLOAT16 if multiplies_bfloats(kind.lanes) else ENCODE_ROUNDED)


def encoded_bytes(format: int, inputs: int, kind: Instructions = OWN) -> int:
    """Bytes of a row of so many inputs as an encoder writes it."""
    return -(-inputs // GROUP) * RECORD_BYTES[encoding_for(format, kind).form]


@emitted(literals=1)
def multiply_tile(
    emit: Emitter, rows: Value, num_rows: Value, tile: Value, steps: Value, results: Value,
    result_bytes: Value, format: int,
) -> None:  # fmt: skip
    """See `emit_tile`, which this calls for the processor that numba compiles for."""
    emit_tile(emit.builder, OWN, format, rows, num_rows, tile, steps, results, result_bytes)


def emit_tile(
    builder: ir.IRBuilder, kind: Instructions, format: int, rows: Value, num_rows: Value,
    tile: Value, steps: Value, results: Value, result_bytes: Value,
) -> None:  # fmt: skip
    """The products of up to `CHUNK` encoded rows by one tile, written to their results."""
    emit, layout, places = Emitter(builder, kind.lanes), FORMATS[format], (rows, num_rows, tile)
    if layout.is_float:
        encoding = encoding_for(format, kind).form
        _emit_float_tile(
            emit, layout, encoding, kind.float_rows, *places, steps, results, result_bytes
        )
    else:
        _emit_integer_tile(emit, layout, kind, *places, steps, results, result_bytes)


def _emit_float_tile(
    emit: Emitter, format: Format, encoding: int, at_once: int, rows: Value, num_rows: Value,
    tile: Value, steps: Value, results: Value, result_bytes: Value,
) -> None:  # fmt: skip
    """The sums of some rows at once, then of fewer, are in registers from the first input on."""
    builder = emit.builder
    numbers, record_bytes = format.step.shape[0], RECORD_BYTES[encoding]
    weight_bytes, input_bytes = format.step.itemsize // numbers, GROUP // numbers
    pieces, first = range(OUTPUTS // emit.lanes), LONG(0)
    for count in range(at_once, 0, -1):
        batches = builder.udiv(builder.sub(num_rows, first), LONG(count))
        with emit.loop(batches) as batch:
            row = emit.at(first, (batch, count))
            sums = [emit.variables(len(pieces)) for _ in range(count)]
            with emit.loop(steps) as step:
                weights = emit.at(tile, (step, format.step.itemsize))
                record = emit.at(
                    rows, (builder.mul(step, num_rows), record_bytes), (row, record_bytes)
                )
                with emit.loop(LONG(numbers)) as number:
                    place = emit.at(weights, (number, weight_bytes))
                    emit.prefetch(emit.at(place, AHEAD), weight_bytes)
                    address = emit.at(record, (number, input_bytes * NUMBER_BYTES[encoding]))
                    for piece in pieces:
                        at = emit.at(place, weight_bytes // len(pieces) * piece)
                        for vector, byte in _emit_numbers(emit, format, encoding, at):
                            number_kind = WORD if encoding == ENCODE_BFLOAT16 else FLOAT
                            for r, variables in enumerate(sums):
                                splat = emit.load_splat(
                                    emit.at(address, record_bytes * r + byte), number_kind
                                )
                                emit.add_product(vector, splat, variables[piece])
            for r, variables in enumerate(sums):
                target = emit.at(results, builder.mul(emit.at(row, r), result_bytes))
                for piece in pieces:
                    value = builder.load(variables[piece])
                    emit.store(value, emit.at(target, 4 * emit.lanes * piece))
        first = emit.at(first, (batches, count))


def _emit_numbers(
    emit: Emitter, format: Format, encoding: int, address: Value
) -> list[tuple[Value, int]]:
    """Vectors of weights and the places of their inputs; of pairs, the upper numbers first."""
    if format.name != "BF16":
        return [(emit.floats(address, f"float{8 * format.block_bytes}"), 0)]
    pairs = emit.load(address, emit.word_vector)
    if encoding == ENCODE_BFLOAT16:
        return [(pairs, 0)]
    return list(zip(emit.halves(pairs), (4, 0), strict=True))


def _emit_integer_tile(
    emit: Emitter, format: Format, kind: Instructions, rows: Value, num_rows: Value, tile: Value,
    steps: Value, results: Value, result_bytes: Value,
) -> None:  # fmt: skip
    """All rows use a group of weights; their sums are in memory between two groups.

        for each block of inputs, each part of the tile's outputs, each group of the block:
            load the group's weights, and their scales, for these outputs into registers
            for each row: total += scale * (sum of products) - offset * (sum of the row's group)

    `totals`: float32 [rows, outputs of a tile]. A part has the outputs of `at_once` bytes of words.
    """
    builder, groups = emit.builder, format.block // GROUP
    totals = emit.memory(CHUNK * OUTPUTS // LANES)
    vectors = range(0, PAIR, 4 * emit.lanes)
    with emit.loop(num_rows) as row:
        for vector in vectors:
            emit.store(emit.numbers(0.0), emit.at(totals, (row, PAIR), vector), align=4)
    record_bytes = builder.mul(num_rows, LONG(RECORD_BYTES[ENCODE_INTEGERS]))
    at_once = 4 * emit.lanes * kind.pieces
    with emit.loop(steps) as step:
        block = emit.at(tile, (step, format.step.itemsize))
        first = emit.at(rows, builder.mul(builder.mul(step, LONG(groups)), record_bytes))
        records = [emit.at(first, (record_bytes, group)) for group in range(groups)]
        with emit.loop(LONG(PAIR // at_once)) as part:
            outputs = builder.mul(part, LONG(at_once // 4))
            lines = -(-format.step.itemsize * at_once // PAIR // LINE)
            fetched = emit.at(block, AHEAD, (part, lines * LINE))
            _emit_integer_step(
                emit, format, kind, block, outputs, records, num_rows, totals, fetched,
                lines,
            )  # fmt: skip
    with emit.loop(num_rows) as row:
        target = emit.at(results, builder.mul(row, result_bytes))
        for vector in vectors:
            total = emit.load(emit.at(totals, (row, PAIR), vector), emit.float_vector)
            emit.store(total, emit.at(target, vector))


def _emit_integer_step(
    emit: Emitter, format: Format, kind: Instructions, block: Value, outputs: Value,
    records: list[Value], num_rows: Value, totals: Value, fetched: Value, lines: int,
) -> None:  # fmt: skip
    """Add scale * (products of integers) - offset * (sum of the row's group) of some outputs.

    A block's weights are at `block`; `lines` from `fetched` on are asked for on the way.
    """
    fields: Any = format.step.fields
    pieces = [emit.at(outputs, emit.lanes * piece) for piece in range(kind.pieces)]
    factors = [_emit_factors(emit, format, block, output) for output in pieces]
    scales = [
        _emit_planes(
            emit, emit.at(block, fields["scales"][1], (output, QUAD)), format.scale_planes,
            format.num_scales // QUAD,
        ) for output in pieces
    ]  # fmt: skip
    weights, group_bytes = emit.at(block, fields["weights"][1]), PAIR * format.bits
    parts, bits = GROUP // format.group, 8 if format.values else format.bits
    for group, record in enumerate(records):
        first, end = (lines * place // len(records) for place in (group, group + 1))
        emit.prefetch(emit.at(fetched, first * LINE), (end - first) * LINE)
        numbers = range(group * parts, (group + 1) * parts)
        quads, by_piece = [], []
        for piece, output in enumerate(pieces):
            address = emit.at(weights, group_bytes * group, (output, QUAD))
            vectors = _emit_planes(emit, address, format.planes, GROUP // QUAD)
            if format.values:
                vectors = [kind.look_up(emit, x, format.values) for x in vectors]
            quads.append([kind.prepare(emit, vector, bits) for vector in vectors])
            by_piece.append(_emit_scales(emit, format, factors[piece], scales[piece], numbers))
        with emit.loop(num_rows) as row:
            _emit_integer_row(
                emit, kind, bits, emit.at(record, (row, RECORD_BYTES[ENCODE_INTEGERS])),
                quads, by_piece, [emit.at(totals, (row, PAIR), (output, 4)) for output in pieces],
            )  # fmt: skip


def _emit_factors(emit: Emitter, format: Format, block: Value, output: Value) -> list[Value]:
    """The factors of a block, float32 [lanes] each, of the outputs from `output` on."""
    builder, size = emit.builder, format.step["factors"].shape[2]
    if size == 1:  # 2 to the power of byte - 131, whose exponent field is byte - 4
        exponents = emit.load(emit.at(block, output), ir.VectorType(BYTE, emit.lanes))
        exponents = builder.zext(exponents, emit.word_vector)
        exponents = builder.sub(exponents, emit.words(4))
        name = f"llvm.smax.v{emit.lanes}i32"
        exponents = emit.call(name, emit.word_vector, exponents, emit.words(0))
        return [builder.bitcast(builder.shl(exponents, emit.words(23)), emit.float_vector)]
    return [
        emit.floats(emit.at(block, size * OUTPUTS * place, (output, size)), "float16")
        for place in range(len(format.factors))
    ]


def _emit_scales(
    emit: Emitter, format: Format, factors: list[Value], scales: list[Value], groups: range
) -> list[list[Value]]:
    """Of some groups of a block, [scale] or [scale, offset] as float32 vectors."""
    if not scales:
        return [factors] * len(groups)
    builder, results = emit.builder, []
    for group in groups:
        vectors = []
        for part, factor in enumerate(factors):
            number = group + part * format.num_scales // 2
            shifted = builder.lshr(scales[number // QUAD], emit.words(8 * (number % QUAD)))
            integers = builder.and_(shifted, emit.words(255))
            integers = builder.sitofp(integers, emit.float_vector)
            if format.scale_zero:
                zero = emit.numbers(float(format.scale_zero))
                integers = builder.fsub(integers, zero)
            vectors.append(builder.fmul(factor, integers))
        results.append(vectors)
    return results


def _emit_planes(emit: Emitter, address: Value, planes: tuple[int, ...], quads: int) -> list[Value]:
    """Integers from their planes (see `Format.step`): a vector of words for each quad."""
    builder, low = emit.builder, 0
    results: list[Any] = [None] * quads
    halves = ir.VectorType(HALF_WORD, 2 * emit.lanes)
    for bits in planes:
        vectors = quads * bits // 8
        for vector in range(vectors):
            loaded = emit.load(emit.at(address, PAIR * vector), halves)
            for field in range(8 // bits):
                by = low - bits * field
                places = ir.Constant(halves, [abs(by)] * halves.count)
                moved = loaded
                if by:
                    moved = (builder.shl if by > 0 else builder.lshr)(loaded, places)
                mask = ((1 << bits) - 1) << low
                if mask != 255:
                    moved = builder.and_(moved, ir.Constant(halves, [mask * 257] * halves.count))
                quad = vector + vectors * field
                moved = builder.bitcast(moved, emit.word_vector)
                joined = results[quad]
                results[quad] = moved if joined is None else builder.or_(joined, moved)
        address, low = emit.at(address, PAIR * vectors), low + bits
    return results


def _emit_integer_row(
    emit: Emitter, kind: Instructions, bits: int, record: Value, quads: list[list[Value]],
    scales: list[Value], totals: list[Value],
) -> None:  # fmt: skip
    """Add one row's products by a group of some pieces of a tile to its totals."""
    builder, parts, num_scales = emit.builder, range(GROUP // LANES), len(scales[0])
    words = [emit.at(record, GROUP + 4 * place) for place in range(COUNTS + len(parts))]
    numbers = [emit.load_splat(word, FLOAT) for word in words[: TOTAL + 1]]
    sums = [
        [
            builder.sitofp(
                kind.add_up(
                    emit, vectors[part * LANES // QUAD : (part + 1) * LANES // QUAD], bits,
                    emit.at(record, LANES * part), words[COUNTS + part],
                ), emit.float_vector,
            ) for part in parts
        ] for vectors in quads
    ]  # fmt: skip
    for piece, address in enumerate(totals):
        result = emit.load(address, emit.float_vector, 4)
        for place, (scale, *offset) in enumerate(scales[piece]):
            row_total = numbers[TOTAL if num_scales == 1 else TOTALS + place]
            products = None if offset else row_total
            for part in parts[place::num_scales]:
                factors = sums[piece][part], numbers[SCALES + part]
                products = emit.fma(*factors, products) if products else builder.fmul(*factors)
            result = emit.fma(scale, products, result)
            if offset:
                result = emit.fma(offset[0], row_total, result)
        emit.store(result, address, 4)


@functools.cache
def multiplier(format: int) -> Any:
    """A compiled function that multiplies encoded rows by some tiles of a matrix of a format."""
    groups = max(FORMATS[format].block // GROUP, 1)
    step_bytes = groups * RECORD_BYTES[encoding_for(format).form]

    @cfunc(types.void(*[types.int64] * 8), cache=True, error_model="numpy")
    def multiply(rows, num_rows, tiles, num_tiles, tile_bytes, steps, results, result_bytes):
        for first in range(0, num_rows, CHUNK):
            x, y = rows + first * steps * step_bytes, results + first * result_bytes
            left = min(num_rows - first, CHUNK)
            for tile in range(num_tiles):
                w = tiles + tile * tile_bytes
                multiply_tile(x, left, w, steps, y + PAIR * tile, result_bytes, format)

    return multiply
