"""Products of rows by a matrix whose weights stay in the bits of their file.

All rows use a group of a tile's weights while these are in registers. Each row sums over its inputs
in one order, whatever rows stand beside it.
"""

import functools
from typing import NamedTuple

from llvmlite import ir
from llvmlite.ir import Value
from numba import cfunc, types
from numba.core.ccallback import CFunc

from sequoia_plan.models.packed.features import BYTE, HALF_WORD, LONG, WORD, multiplies_bfloats
from sequoia_plan.models.packed.formats import FORMATS, GROUP, OUTPUTS, QUAD, Format
from sequoia_plan.models.packed.instructions import OWN, Instructions
from sequoia_plan.models.packed.vectors import FLOAT, LANES, Emitter, emitted

CHUNK = 32  # rows that are encoded side by side, and multiplied by a tile at once
WORDS_BYTES = 4 * OUTPUTS  # bytes of one 32-bit word (or float32) for each output of a tile
LINE = 64
AHEAD = 9216  # bytes from the weights that are read to those that are prefetched
ENCODE_FLOATS, ENCODE_BFLOAT16, ENCODE_ROUNDED, ENCODE_INTEGERS = range(4)
"""How rows are stored: as float32, in bfloat16, as float32 rounded to it, or in 8 bits."""
NUMBER_BYTES = (4, 2, 4, 1)
RECORD_BYTES = (128, 64, 128, 64)
"""Bytes of an encoded group of a row: its numbers; after those in 8 bits, the words below."""
SCALES, TOTALS, TOTAL, COUNTS = 0, 2, 4, 5
"""Indices of 32-bit words after a group's int8 numbers: for each 16 of them their scale, and their
sum times -factor (see `Encoding`); for the group, the sum of both; for each 16 of them again, 128
times the sum of the int8 numbers, an int32. The others are float32."""


class Encoding(NamedTuple):
    """How rows are stored. Their sums, times -factor, are added to products by integers."""

    form: int  # one of `ENCODE_...`
    factor: int = 0  # weights: scale * (integer - factor), or scale * integer - factor * offset


def encoding_for(format: int, kind: Instructions = OWN) -> Encoding:
    """How rows are stored to be multiplied by weights of a format (an index of `FORMATS`)."""
    layout = FORMATS[format]
    if not layout.is_float:
        return Encoding(ENCODE_INTEGERS, factor=layout.zero or layout.offset_sign)
    if layout.name != "BF16":
        return Encoding(ENCODE_FLOATS)
    return Encoding(ENCODE_BFLOAT16 if multiplies_bfloats(kind.lanes) else ENCODE_ROUNDED)


def encoded_bytes(format: int, inputs: int, kind: Instructions = OWN) -> int:
    """Bytes of an encoded row of so many inputs, padded to whole groups."""
    return -(-inputs // GROUP) * RECORD_BYTES[encoding_for(format, kind).form]


@emitted(literals=1)
def multiply_tile(
    emit: Emitter, rows: Value, num_rows: Value,  # the address of encoded rows, at most `CHUNK`
    tile: Value, steps: Value,  # its address, and how many blocks of inputs it has
    results: Value, result_bytes: Value,  # address of float32 [OUTPUTS]; bytes to the next row's
    format: int,  # an index of `FORMATS`
) -> None:  # fmt: skip
    """Write the products of encoded rows by one tile; all values are int64."""
    emit_tile(emit.builder, OWN, format, rows, num_rows, tile, steps, results, result_bytes)


def emit_tile(builder: ir.IRBuilder, kind: Instructions, format: int, *arguments: Value) -> None:
    """Emit `multiply_tile`, with its `arguments` from `rows` on, for a kind of processor."""
    emit, layout = Emitter(builder, kind.lanes), FORMATS[format]
    if layout.is_float:
        _emit_float_tile(emit, layout, encoding_for(format, kind).form, kind.float_rows, *arguments)
    else:
        _emit_integer_tile(emit, layout, kind, *arguments)


def _emit_float_tile(
    emit: Emitter, format: Format, encoding: int, at_once: int, rows: Value, num_rows: Value,
    tile: Value, steps: Value, results: Value, result_bytes: Value,
) -> None:  # fmt: skip
    """`emit_tile` for floating-point weights. Sums of a batch of rows are in registers throughout.

    A piece is a vector of outputs. Batches have `at_once` rows, those that are left have fewer.
    """
    builder = emit.builder
    count = format.step.shape[0]  # inputs of a step, or pairs of them
    record_bytes, number_bytes = RECORD_BYTES[encoding], NUMBER_BYTES[encoding]
    weight_bytes = format.step.itemsize // count  # of all outputs
    pieces, first = range(OUTPUTS // emit.lanes), LONG(0)
    for batch_rows in range(at_once, 0, -1):
        batches = builder.udiv(builder.sub(num_rows, first), LONG(batch_rows))
        with emit.loop(batches) as batch:
            row = emit.at(first, (batch, batch_rows))
            sums = [emit.variables(len(pieces)) for _ in range(batch_rows)]
            with emit.loop(steps) as step:
                weights = emit.at(tile, (step, format.step.itemsize))
                record = emit.at(
                    rows, (builder.mul(step, num_rows), record_bytes), (row, record_bytes)
                )
                with emit.loop(LONG(count)) as index:
                    vectors = emit.at(weights, (index, weight_bytes))
                    emit.prefetch(emit.at(vectors, AHEAD), weight_bytes)
                    numbers = emit.at(record, (index, GROUP // count * number_bytes))
                    for piece in pieces:
                        address = emit.at(vectors, weight_bytes // len(pieces) * piece)
                        for vector, byte in _emit_weights(emit, format, encoding, address):
                            number_kind = WORD if encoding == ENCODE_BFLOAT16 else FLOAT
                            for r, variables in enumerate(sums):
                                number = emit.load_splat(
                                    emit.at(numbers, record_bytes * r + byte), number_kind
                                )
                                emit.add_product(vector, number, variables[piece])
            for r, variables in enumerate(sums):
                target = emit.at(results, builder.mul(emit.at(row, r), result_bytes))
                for piece in pieces:
                    value = builder.load(variables[piece])
                    emit.store(value, emit.at(target, 4 * emit.lanes * piece))
        first = emit.at(first, (batches, batch_rows))


def _emit_weights(
    emit: Emitter, format: Format, encoding: int, address: Value
) -> list[tuple[Value, int]]:
    """Vectors of weights of an input, or a pair, each with the byte where its number begins."""
    if format.name != "BF16":
        return [(emit.floats(address, f"float{8 * format.block_bytes}"), 0)]
    pairs = emit.load(address, emit.word_vector)
    if encoding == ENCODE_BFLOAT16:
        return [(pairs, 0)]  # one instruction multiplies both
    return list(zip(emit.halves(pairs), (4, 0), strict=True))  # the upper one is the second input


def _emit_integer_tile(
    emit: Emitter, format: Format, kind: Instructions, rows: Value, num_rows: Value, tile: Value,
    steps: Value, results: Value, result_bytes: Value,
) -> None:  # fmt: skip
    """`emit_tile` for weights that are integers; sums are in memory between two groups.

        for each block of inputs, each share of the tile's outputs, each group of the block:
            load the group's weights, and their scales, for these outputs into registers
            for each row: total += scale * (sum of products) - offset * (sum of the row's group)

    `totals`: float32 [rows, outputs of a tile]. A share's weights fit in registers.
    """
    builder, groups = emit.builder, format.block // GROUP
    totals = emit.memory(CHUNK * OUTPUTS // LANES)
    vector_starts = range(0, WORDS_BYTES, 4 * emit.lanes)
    with emit.loop(num_rows) as row:
        for start in vector_starts:
            emit.store(emit.numbers(0.0), emit.at(totals, (row, WORDS_BYTES), start), align=4)
    group_bytes = builder.mul(num_rows, LONG(RECORD_BYTES[ENCODE_INTEGERS]))
    at_once = emit.lanes * kind.pieces
    with emit.loop(steps) as step:
        block = emit.at(tile, (step, format.step.itemsize))
        first = emit.at(rows, builder.mul(builder.mul(step, LONG(groups)), group_bytes))
        records = [emit.at(first, (group_bytes, group)) for group in range(groups)]
        with emit.loop(LONG(OUTPUTS // at_once)) as share:
            first_output = builder.mul(share, LONG(at_once))
            lines = -(-format.step.itemsize * at_once // OUTPUTS // LINE)
            ahead = emit.at(block, AHEAD, (share, lines * LINE))
            _emit_integer_step(
                emit, format, kind, block, first_output, records, num_rows, totals, ahead, lines
            )
    with emit.loop(num_rows) as row:
        target = emit.at(results, builder.mul(row, result_bytes))
        for start in vector_starts:
            total = emit.load(emit.at(totals, (row, WORDS_BYTES), start), emit.float_vector)
            emit.store(total, emit.at(target, start))


def _emit_integer_step(
    emit: Emitter, format: Format, kind: Instructions,
    block: Value, first_output: Value,  # the block's address, and the index of an output
    records: list[Value], num_rows: Value,  # for each group of inputs, the encoded rows' address
    totals: Value, ahead: Value, lines: int,  # addresses; cache lines to prefetch from `ahead` on
) -> None:  # fmt: skip
    """Add a block's products to the rows' totals, for `kind.pieces` vectors (pieces) of outputs."""
    outputs = [emit.at(first_output, emit.lanes * piece) for piece in range(kind.pieces)]  # indices
    factors = [_emit_factors(emit, format, block, output) for output in outputs]
    scales = [
        _emit_planes(
            emit, emit.at(block, format.start("scales"), (output, QUAD)), format.scale_planes,
            format.num_scales // QUAD,
        ) for output in outputs
    ]  # fmt: skip
    weights, group_bytes = emit.at(block, format.start("weights")), WORDS_BYTES * format.bits
    num_scales = GROUP // format.group  # of a group of inputs
    bits = 8 if format.values else format.bits  # a table's values take a byte
    for group, record in enumerate(records):
        first, end = (lines * number // len(records) for number in (group, group + 1))
        emit.prefetch(emit.at(ahead, first * LINE), (end - first) * LINE)
        numbers = range(group * num_scales, (group + 1) * num_scales)  # of scales of the block
        weights_by_piece, scales_by_piece = [], []
        for piece, output in enumerate(outputs):
            address = emit.at(weights, group_bytes * group, (output, QUAD))  # plus output * QUAD
            quads = _emit_planes(emit, address, format.planes, GROUP // QUAD)
            if format.values:
                quads = [kind.look_up(emit, quad, format.values) for quad in quads]
            weights_by_piece.append([kind.prepare(emit, quad, bits) for quad in quads])
            scales_by_piece.append(
                _emit_scales(emit, format, factors[piece], scales[piece], numbers)
            )
        with emit.loop(num_rows) as row:
            row_record = emit.at(record, (row, RECORD_BYTES[ENCODE_INTEGERS]))
            row_totals = [emit.at(totals, (row, WORDS_BYTES), (output, 4)) for output in outputs]
            _emit_integer_row(
                emit, kind, bits, row_record, weights_by_piece, scales_by_piece, row_totals
            )


def _emit_factors(emit: Emitter, format: Format, block: Value, output: Value) -> list[Value]:
    """Scales of `emit.lanes` outputs from `output` on in a block, and offsets if there are any."""
    builder, size = emit.builder, format.step["factors"].shape[2]
    if size == 1:  # 2 ** (byte - 127) / 16, as MXFP4's values are 16-fold: exponent field byte - 4
        exponents = emit.load(emit.at(block, output), ir.VectorType(BYTE, emit.lanes))
        exponents = builder.zext(exponents, emit.word_vector)
        exponents = builder.sub(exponents, emit.words(4))
        name = f"llvm.smax.v{emit.lanes}i32"
        exponents = emit.call(name, emit.word_vector, exponents, emit.words(0))
        return [builder.bitcast(builder.shl(exponents, emit.words(23)), emit.float_vector)]
    return [
        emit.floats(emit.at(block, size * OUTPUTS * number, (output, size)), "float16")
        for number in range(len(format.factors))
    ]


def _emit_scales(
    emit: Emitter, format: Format, factors: list[Value], scales: list[Value], groups: range
) -> list[list[Value]]:
    """[scale] or [scale, offset], float32 vectors of outputs, of some groups of a block."""
    if not scales:  # the block's own are those of all its groups
        return [factors] * len(groups)
    builder, results = emit.builder, []
    for group in groups:
        vectors = []
        for is_offset, factor in enumerate(factors):
            number = group + is_offset * format.num_scales // 2  # of a byte; a word has four
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
    """For each quad, a vector of words whose bytes are its integers (see `Format.step`)."""
    builder, low = emit.builder, 0  # bits of the planes before
    results: list[Value | None] = [None] * quads
    halves = ir.VectorType(HALF_WORD, 2 * emit.lanes)  # x86 shifts no bytes
    for bits in planes:
        vectors = quads * bits // 8
        for vector in range(vectors):
            loaded = emit.load(emit.at(address, WORDS_BYTES * vector), halves)
            for field in range(8 // bits):
                left = low - bits * field
                distance = ir.Constant(halves, [abs(left)] * halves.count)
                moved = loaded
                if left:
                    moved = (builder.shl if left > 0 else builder.lshr)(loaded, distance)
                mask = ((1 << bits) - 1) << low
                if mask != 255:
                    moved = builder.and_(moved, ir.Constant(halves, [mask * 257] * halves.count))
                quad = vector + vectors * field
                moved = builder.bitcast(moved, emit.word_vector)
                joined = results[quad]
                results[quad] = moved if joined is None else builder.or_(joined, moved)
        address, low = emit.at(address, WORDS_BYTES * vectors), low + bits
    return results


def _emit_integer_row(
    emit: Emitter, kind: Instructions, bits: int,  # of a weight
    record: Value,  # the address of the row's int8 numbers, and their words `SCALES` to `COUNTS`
    weights: list[list[Value]],  # for each vector of outputs, those of each quad of inputs
    scales: list[list[list[Value]]],  # for each, and one or two halves: [scale] or [scale, offset]
    totals: list[Value],  # for each, the address of its sums
) -> None:  # fmt: skip
    """Add one row's products by one group of inputs to its totals for some vectors of outputs."""
    builder, halves, num_scales = emit.builder, range(GROUP // LANES), len(scales[0])
    words = [emit.at(record, GROUP + 4 * index) for index in range(COUNTS + len(halves))]
    numbers = [emit.load_splat(word, FLOAT) for word in words[: TOTAL + 1]]
    sums = [  # of 16 inputs, which have a scale of the row
        [
            builder.sitofp(
                kind.add_up(
                    emit, quads[half * LANES // QUAD : (half + 1) * LANES // QUAD], bits,
                    emit.at(record, LANES * half), words[COUNTS + half],
                ), emit.float_vector,
            ) for half in halves
        ] for quads in weights
    ]  # fmt: skip
    for piece, address in enumerate(totals):
        result = emit.load(address, emit.float_vector, 4)
        for index, (scale, *offset) in enumerate(scales[piece]):
            row_total = numbers[TOTAL if num_scales == 1 else TOTALS + index]
            products = None if offset else row_total
            for half in halves[index::num_scales]:
                factors = sums[piece][half], numbers[SCALES + half]
                products = emit.fma(*factors, products) if products else builder.fmul(*factors)
            result = emit.fma(scale, products, result)
            if offset:
                result = emit.fma(offset[0], row_total, result)
        emit.store(result, address, 4)


@functools.cache
def multiplier(format: int) -> CFunc:
    """`multiply_tile` for a format, compiled for any number of encoded rows and adjacent tiles."""
    groups = max(FORMATS[format].block // GROUP, 1)
    step_bytes = groups * RECORD_BYTES[encoding_for(format).form]

    @cfunc(types.void(*[types.int64] * 8), cache=True, error_model="numpy")
    def multiply(rows, num_rows, tiles, num_tiles, tile_bytes, steps, results, result_bytes):
        for first in range(0, num_rows, CHUNK):  # rows, tiles and results are addresses
            chunk, target = rows + first * steps * step_bytes, results + first * result_bytes
            count = min(num_rows - first, CHUNK)
            for number in range(num_tiles):  # each has the next `OUTPUTS` columns of the results
                tile, products = tiles + number * tile_bytes, target + WORDS_BYTES * number
                multiply_tile(chunk, count, tile, steps, products, result_bytes, format)

    return multiply
