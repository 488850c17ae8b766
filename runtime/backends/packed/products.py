"""Products of a few rows by a matrix whose weights stay in the bits of their file.

A matrix is cut into tiles of 16 outputs, and a tile into groups of inputs. For each input, or for
four neighbouring ones where weights are integers, the tile has the weights of its 16 outputs side
by side. All rows use a tile while it is in registers, and each sums over its inputs in one order,
whatever rows stand beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types

from sequoia_plan.runtime.backends.packed.vectors import (
    BYTE,
    FLOAT,
    FLOATS,
    HAS_INTEGER_PRODUCTS,
    LANES,
    WORD,
    WORDS,
    Emitter,
    emitted,
)

MAX_ROWS = 8
"""Rows of one tile's product; more rows take several."""
FLOAT_TILE = 2
"""Vectors of outputs in a tile of floating-point weights: each number of a row is loaded once."""


@dataclass(frozen=True)
class Format:
    """How weights are stored: in floating point, or as scale * integer + offset by group.

    `group` 0 is floating point, of the kind `scale`. `offset_scales`: the offset is the scale times
    this number; None: each group stores its own.
    """

    name: str
    bits: int
    group: int
    scale: str
    offset_scales: int | None = None

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return LANES if self.group else FLOAT_TILE * LANES

    @property
    def encoding(self) -> int:
        """How this processor stores the rows that are multiplied by it (an `ENCODE_` number)."""
        if self.group:
            return ENCODE_INTEGERS if HAS_INTEGER_PRODUCTS else ENCODE_WHOLE_FLOATS
        return ENCODE_BFLOAT16 if self.scale == "bfloat16" else ENCODE_FLOATS

    def step(self, encoding: int) -> int:
        """Inputs that the weights of a tile are stored for side by side."""
        return self.group or (2 if encoding == ENCODE_BFLOAT16 else 1)

    def block_bytes(self, encoding: int) -> int:
        """The size of a tile's weights for the inputs of one step."""
        return self.step(encoding) * self.outputs * self.bits // 8

    @property
    def group_bytes(self) -> int:
        """The size of a group's scales and offsets, for the 16 outputs of a tile."""
        return self.group and LANES * np.dtype(self.scale).itemsize * (
            2 if self.offset_scales is None else 1
        )


ENCODE_FLOATS, ENCODE_BFLOAT16, ENCODE_INTEGERS, ENCODE_WHOLE_FLOATS = range(4)
FORMATS = (
    Format("F32", 32, 0, "float32"),
    Format("F16", 16, 0, "float16"),
    Format("BF16", 16, 0, "bfloat16"),
    Format("Q4_0", 4, 32, "float16", -8),
    Format("Q4_1", 4, 32, "float16"),
    Format("Q5_0", 8, 32, "float16", -16),
    Format("Q5_1", 8, 32, "float16"),
    Format("Q8_0", 8, 32, "float16", -128),
    Format("Q4_K", 4, 32, "float32"),
    Format("Q5_K", 8, 32, "float32"),
    Format("Q6_K", 8, 16, "float32", -32),
)
FORMAT_NAMES = tuple(format.name for format in FORMATS)
NUMBER_BYTES = {ENCODE_FLOATS: 4, ENCODE_BFLOAT16: 2, ENCODE_INTEGERS: 1, ENCODE_WHOLE_FLOATS: 4}


def encoded_bytes(format: Format, encoding: int, inputs: int) -> int:
    """Bytes of one row as an encoder writes it: its numbers, the scale of each 16, group totals."""
    scales = inputs // LANES + inputs // format.group if format.group else 0
    return -(-(inputs * NUMBER_BYTES[encoding] + 4 * scales) // 64) * 64


@emitted(literals=1, counts=MAX_ROWS)
def multiply_tile(
    emit: Emitter,
    rows: Any,
    row_bytes: Any,
    tile: Any,
    scales: Any,
    results: Any,
    result_bytes: Any,
    groups: Any,
    kind: int,
    num_rows: int,
) -> None:
    """The products of up to `MAX_ROWS` encoded rows by one tile, written to their results.

    `groups`: groups of inputs, or inputs where weights are in floating point; `kind`: a format's
    number * 4 + an encoding.
    """
    number, encoding = divmod(kind, 4)
    format = FORMATS[number]
    vectors = format.outputs // LANES
    totals = [emit.variables(vectors) for _ in range(num_rows)]
    emit_group = _emit_integer_group if format.group else _emit_float_group
    with emit.loop(groups) as group:
        starts = [emit.at(rows, (row_bytes, row)) for row in range(num_rows)]
        emit_group(emit, format, encoding, starts, tile, scales, group, groups, totals)
    for row, variables in enumerate(totals):
        for vector, variable in enumerate(variables):
            address = emit.at(results, (result_bytes, row), 4 * LANES * vector)
            emit.store(emit.builder.load(variable), address)


def _emit_float_group(
    emit: Emitter, format: Format, encoding: int, rows: Any, tile: Any, scales: Any, group: Any,
    groups: Any, totals: Any,
) -> None:  # fmt: skip
    """Add the products of one input, or of two in bfloat16, to the totals."""
    vector_bytes = format.block_bytes(encoding) // FLOAT_TILE
    is_pair = encoding == ENCODE_BFLOAT16
    for vector in range(FLOAT_TILE):
        place = emit.at(tile, (group, FLOAT_TILE * vector_bytes), vector * vector_bytes)
        weights = emit.load(place, WORDS, 64) if is_pair else emit.floats(place, format.scale)
        for row, variables in zip(rows, totals, strict=True):
            number = emit.load_splat(emit.at(row, (group, 4)), WORD if is_pair else FLOAT)
            emit.add_product(weights, number, variables[vector])


def _emit_integer_group(
    emit: Emitter, format: Format, encoding: int, rows: Any, tile: Any, scales: Any, group: Any,
    groups: Any, totals: Any,
) -> None:  # fmt: skip
    """Add scale * (products of integers) + offset * (sum of the row's group) to the totals."""
    builder = emit.builder
    weights = emit.at(tile, (group, format.block_bytes(encoding)))
    scales = emit.at(scales, (group, format.group_bytes))
    scale = emit.floats(scales, format.scale)
    has_offset = format.offset_scales is None
    if has_offset:
        offset = emit.floats(emit.at(scales, format.group_bytes // 2), format.scale)
    number_bytes = NUMBER_BYTES[encoding]
    numbers = [emit.at(row, (group, format.group * number_bytes)) for row in rows]
    parts = format.group // LANES
    quads = _emit_quads(emit, format, weights)
    for row, row_numbers, (variable,) in zip(rows, numbers, totals, strict=True):
        row_scales = emit.at(row, (groups, format.group * number_bytes))
        row_total = emit.load_splat(emit.at(row_scales, (groups, 4 * parts), (group, 4)), FLOAT)
        total = None if has_offset else row_total
        for part in range(parts):
            part_quads = quads[4 * part : 4 * part + 4]
            start = emit.at(row_numbers, LANES * number_bytes * part)
            products = _emit_integer_sum(emit, encoding, part_quads, start)
            row_scale = emit.load_splat(emit.at(row_scales, (group, 4 * parts), 4 * part), FLOAT)
            total = (
                builder.fmul(products, row_scale)
                if total is None
                else emit.fma(products, row_scale, total)
            )
        emit.add_product(scale, total, variable)
        if has_offset:
            emit.add_product(offset, row_total, variable)


def _emit_quads(emit: Emitter, format: Format, weights: Any) -> list[Any]:
    """The weights of one group: for each four inputs, a vector of 16 outputs with four bytes."""
    builder, num_quads = emit.builder, format.group // 4
    low = ir.Constant(ir.VectorType(BYTE, 4 * LANES), [15] * 4 * LANES)
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)
    quads: list[Any] = [None] * num_quads
    for place in range(num_quads * format.bits // 8):
        loaded = emit.load(emit.at(weights, 4 * LANES * place), low.type, align=64)
        if format.bits == 4:  # the low halves of the bytes, then the high ones
            shifted = builder.lshr(builder.bitcast(loaded, halves), ir.Constant(halves, [4] * 32))
            high = builder.and_(builder.bitcast(shifted, low.type), low)
            quads[place + num_quads // 2] = builder.bitcast(high, WORDS)
            loaded = builder.and_(loaded, low)
        quads[place] = builder.bitcast(loaded, WORDS)
    return quads


def _emit_integer_sum(emit: Emitter, encoding: int, quads: list[Any], numbers: Any) -> Any:
    """The sums of integer products of one row over 16 inputs, as float32."""
    builder = emit.builder
    if encoding == ENCODE_INTEGERS:
        total = ir.Constant(WORDS, [0] * LANES)
        for place, quad in enumerate(quads):
            four = emit.load_splat(emit.at(numbers, 4 * place), WORD)
            total = emit.call("llvm.x86.avx512.vpdpbusd.512", WORDS, total, quad, four)
        return builder.sitofp(total, FLOATS)
    # sums of whole numbers below 2^24 are exact in float32, so the bits are the same
    exact = ir.Constant(FLOATS, [0.0] * LANES)
    for place, quad in enumerate(quads):
        for byte in range(4):
            shifted = builder.lshr(quad, ir.Constant(WORDS, [8 * byte] * LANES))
            weight = builder.uitofp(
                builder.and_(shifted, ir.Constant(WORDS, [255] * LANES)), FLOATS
            )
            value = emit.load_splat(emit.at(numbers, 16 * place + 4 * byte), FLOAT)
            exact = emit.fma(weight, value, exact)
    return exact


@functools.cache
def multiplier(number: int, encoding: int) -> Any:
    """A compiled function that multiplies encoded rows by some tiles of a matrix of a format."""
    format = FORMATS[number]
    kind, outputs, group_bytes = number * 4 + encoding, format.outputs, format.group_bytes
    block_bytes = format.block_bytes(encoding)

    @cfunc(types.void(*[types.int64] * 8), cache=True, error_model="numpy")
    def multiply(rows, row_bytes, tile, scales, results, result_bytes, steps, counts):
        tiles, num_rows = counts >> 32, counts & 0xFFFFFFFF
        for _ in range(tiles):
            first, s = 0, scales
            while first < num_rows:
                x, y = rows + first * row_bytes, results + first * result_bytes
                left = min(num_rows - first, MAX_ROWS)
                multiply_tile(x, row_bytes, tile, s, y, result_bytes, steps, left, kind)
                first += left
            tile += steps * block_bytes
            scales += steps * group_bytes
            results += 4 * outputs

    return multiply
