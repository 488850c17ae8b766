"""Matrices as tiles: from rows as a GGUF file has them, and back to float32."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.models.base.dtype import Bytes, Float32, Int64, Shape
from sequoia_plan.models.packed.formats import (
    FORMATS,
    GROUP,
    OUTPUTS,
    QUAD,
    Run,
    num_tiles,
    row_bytes,
    tile_bytes,
)
from sequoia_plan.models.packed.records import Record, compiled


@dataclass(frozen=True)
class Matrix:
    """A matrix in one of `FORMATS`, whose rows are `outputs`.

    `tiles` uint8 [num_tiles, tile_bytes], aligned to 64 bytes, are only read.
    """

    format: int
    outputs: int
    inputs: int
    tiles: Bytes


def pack_rows(format: int, rows: Bytes, inputs: int, tiles: Bytes) -> None:
    """Write rows, uint8 [outputs, row_bytes] as a GGUF file has them, to the tiles for them.

    Zeros stand for outputs and inputs that are missing. `tiles` uint8 [num_tiles, tile_bytes].
    ValueError for rows or tiles of another size.
    """
    layout, sizes = FORMATS[format], (rows.shape[1], *tiles.shape)
    expected = row_bytes(format, inputs), num_tiles(len(rows)), tile_bytes(format, inputs)
    if sizes != expected:
        raise ValueError(f"row bytes, tiles and their bytes: found {sizes}, expected {expected}")
    rows = rows.view()
    rows.flags.writeable = False  # compiled once, whether or not they can be written
    if layout.is_float:
        numbers, pair = layout.step.base, layout.step.shape[2]
        _pack_numbers(rows.view(numbers), tiles.view(numbers), pair)
        return
    _pack_blocks(
        rows, tiles, np.array([layout.block_bytes, layout.block, layout.num_scales]),
        np.array([layout.step.itemsize, layout.start("scales"), layout.start("weights")]),
        np.array(layout.factors), layout.step["factors"].shape[2],
        np.array(layout.scale_runs or [Run(0, 0, 0, 0, 0)]),
        np.array(layout.scale_planes, np.int64), np.uint8(layout.scale_flip),
        np.array(layout.runs), np.array(layout.planes), np.uint8(layout.flip),
    )  # fmt: skip


@compiled
def _pack_numbers(numbers, tiles, pair):
    """Copy weights [outputs, inputs] to tiles, each of [inputs / pair, OUTPUTS, pair] numbers."""
    outputs, inputs = numbers.shape
    for tile in range(tiles.shape[0]):
        target = tiles[tile]
        for start in range(0, target.shape[0] // OUTPUTS, GROUP):
            target[start * OUTPUTS : (start + GROUP) * OUTPUTS] = 0
            end = min(start + GROUP, inputs)
            for output in range(min(outputs - tile * OUTPUTS, OUTPUTS)):
                row = numbers[tile * OUTPUTS + output]
                for i in range(start, end):
                    target[(i // pair * OUTPUTS + output) * pair + i % pair] = row[i]


@compiled
def _pack_blocks(
    rows, tiles, block_sizes, step_sizes, factors, factor_bytes, scale_runs, scale_planes,
    scale_flip, runs, planes, flip,
):  # fmt: skip
    """Write the blocks of a file's rows as steps of tiles; arguments as fields of `Format`."""
    block_bytes, num_values, num_scales = block_sizes
    step_bytes, scales_start, weights_start = step_sizes  # the bytes of a step where these begin
    values = np.zeros((OUTPUTS, num_values), np.uint8)
    scales = np.zeros((OUTPUTS, num_scales), np.uint8)
    for tile in range(tiles.shape[0]):
        count = max(min(rows.shape[0] - tile * OUTPUTS, OUTPUTS), 0)
        tile_rows = rows[tile * OUTPUTS : tile * OUTPUTS + count]
        values[count:], scales[count:] = 0, 0
        for number in range(tiles.shape[1] // step_bytes):
            step, block = tiles[tile, number * step_bytes :], number * block_bytes
            step[:scales_start] = 0
            for factor in range(factors.shape[0]):
                for output in range(count):
                    for byte in range(factor_bytes):
                        target = (factor * OUTPUTS + output) * factor_bytes + byte
                        step[target] = tile_rows[output, block + factors[factor] + byte]
            _unpack(tile_rows, block, scale_runs, scale_flip, scales)
            _unpack(tile_rows, block, runs, flip, values)
            _put_planes(scales, scale_planes, num_scales // QUAD, step[scales_start:])
            _put_planes(values, planes, GROUP // QUAD, step[weights_start:])


@compiled
def _unpack(rows, block, runs, flip, values):
    """Write the integers of rows' blocks, from byte `block` on, to `values`, uint8 [outputs, n]."""
    for run in range(runs.shape[0]):
        start, shift, bits, first, length, to, apart = runs[run]  # see `Run`
        # a run of higher bits keeps the lower ones of the run before
        lower, mask = np.uint8((1 << to) - 1), np.uint8((1 << bits) - 1)
        shift, to = np.uint8(shift), np.uint8(to)
        for output in range(rows.shape[0]):
            if apart == 1:  # LLVM makes vectors of this loop alone
                source, target = rows[output, block + start :], values[output, first:]
                for i in range(length):
                    bits = ((source[i] >> shift) & mask) ^ flip
                    target[i] = (target[i] & lower) | (bits << to)
            else:
                for i in range(length):
                    value = first + i * apart
                    bits = ((rows[output, block + start + i] >> shift) & mask) ^ flip
                    values[output, value] = (values[output, value] & lower) | (bits << to)


@compiled
def _put_planes(values, planes, quads, target):
    """Write integers, uint8 [outputs, n], as planes of these bits (see `Format.step`)."""
    words, target = values.view(np.uint32), target.view(np.uint32)  # a word: four integers, a quad
    group = np.empty((quads, OUTPUTS), np.uint32)
    first = 0
    for start in range(0, words.shape[1], max(quads, 1)):
        for output in range(OUTPUTS):
            for quad in range(quads):
                group[quad, output] = words[output, start + quad]
        low = 0
        for plane in range(planes.shape[0]):
            bits = planes[plane]
            num_vectors, mask = quads * bits // 8, np.uint32(((1 << bits) - 1) * 0x01010101)
            for number in range(num_vectors):
                vector = target[first : first + OUTPUTS]
                vector[:] = 0
                for field in range(8 // bits):
                    quad = group[number + num_vectors * field]
                    right, left = np.uint32(low), np.uint32(bits * field)
                    for output in range(OUTPUTS):
                        vector[output] |= ((quad[output] >> right) & mask) << left
                first += OUTPUTS
            low += bits


class Embedding(Record):
    """A matrix whose rows compiled code reads, one at a time (see `read_row`).

    `tiles`, `planes`, `scale_planes`: see `Matrix` and `Format`. `values` float32: what an integer
    stands for, less `zero`. `sizes` int64 [10], for integers: `block`, `group`, `num_scales`; bytes
    of a step, and where in it scales and weights begin; bytes of a factor; 1 if there are offsets;
    `offset_sign`, `scale_zero`. For floating-point weights: bytes of a number, inputs that lie side
    by side, and zeros.
    """


def embedding_of(matrix: Matrix) -> Embedding:
    """What `read_row` needs of a matrix."""
    layout = FORMATS[matrix.format]
    if layout.is_float:
        sizes, values = [layout.block_bytes, layout.step.shape[2], *[0] * 8], [0]
    else:
        sizes = [
            layout.block, layout.group, layout.num_scales, layout.step.itemsize,
            layout.start("scales"), layout.start("weights"), layout.step["factors"].shape[2],
            layout.zero is None, layout.offset_sign, layout.scale_zero,
        ]  # fmt: skip
        values = [x - (layout.zero or 0) for x in layout.values or range(1 << layout.bits)]
    return Embedding(
        tiles=matrix.tiles, sizes=np.array(sizes, np.int64), values=np.array(values, np.float32),
        planes=np.array(layout.planes, np.int64),
        scale_planes=np.array(layout.scale_planes, np.int64),
    )  # fmt: skip


def dense_rows(matrix: Matrix, row_numbers: Int64) -> Float32:
    """Rows of a matrix, float32 [n, inputs]: the numbers that the package gguf reads."""
    rows, embedding = np.empty((len(row_numbers), matrix.inputs), np.float32), embedding_of(matrix)
    for row, number in zip(rows, row_numbers.tolist(), strict=True):
        read_row(embedding, number, row)
    return rows


@compiled
def read_row(embedding, number, row):
    """Write the row with this number to `row`, float32 [inputs]: value * scale - offset."""
    tile, output, values = embedding.tiles[number // OUTPUTS], number % OUTPUTS, embedding.values
    block, group, num_scales, step_bytes, scales_start, weights_start = embedding.sizes[:6]
    factor_bytes, has_offsets, sign, scale_zero = embedding.sizes[6:]
    if not factor_bytes:  # weights are floating-point numbers
        _read_floats(tile, output, block, group, row)
        return
    scales, integers = np.zeros(max(num_scales, 1), np.int64), np.zeros(GROUP, np.int64)
    group_bytes = embedding.planes.sum() * OUTPUTS * QUAD
    for start in range(0, row.shape[0], block):
        step = tile[start // block * step_bytes :]
        factor, offset = _factor(step, output * factor_bytes, factor_bytes), np.float32(0)
        if has_offsets:
            offset = np.float32(sign) * _factor(step, 2 * (OUTPUTS + output), 2)
        if num_scales:
            stored = step[scales_start:]
            _join_planes(stored, embedding.scale_planes, num_scales // QUAD, output, scales)
        for first in range(0, min(block, row.shape[0] - start), group):
            if first % GROUP == 0:
                stored = step[weights_start + first // GROUP * group_bytes :]
                _join_planes(stored, embedding.planes, GROUP // QUAD, output, integers)
            scale, subtracted, index = factor, offset, first // group
            if num_scales:
                scale = factor * np.float32(scales[index] - scale_zero)
                if has_offsets:  # these follow the scales
                    index += num_scales // 2
                    subtracted = offset * np.float32(scales[index] - scale_zero)
            for i in range(first, min(first + group, row.shape[0] - start)):
                row[start + i] = values[integers[i % GROUP]] * scale - subtracted


@compiled
def _join_planes(stored, planes, quads, output, integers):
    """Read what `_put_planes` wrote of one output's group: int64 [quads * QUAD]."""
    integers[:] = 0
    low = first = 0
    for plane in range(planes.shape[0]):
        bits = planes[plane]
        num_vectors, fields, mask = quads * bits // 8, 8 // bits, (1 << bits) - 1
        for vector in range(num_vectors):
            source = ((first + vector) * OUTPUTS + output) * QUAD
            for field in range(fields):
                target = (vector + num_vectors * field) * QUAD
                for lane in range(QUAD):
                    byte = np.int64(stored[source + lane])
                    integers[target + lane] |= ((byte >> (field * bits)) & mask) << low
        low, first = low + bits, first + num_vectors


@compiled
def _factor(stored, start, count):
    """The factor of `count` bytes from `start` on: float16, or the exponent of a power of 2."""
    if count == 1:  # MXFP4: 2^(byte - 127), and the values of its table are 16 times theirs
        return np.float32(2.0 ** (np.int64(stored[start]) - 131))
    return _half(np.int64(stored[start]) | np.int64(stored[start + 1]) << 8)


@compiled
def _half(bits):
    """A float16 number from its bits."""
    exponent, fraction = bits >> 10 & 31, bits & 1023
    number = (fraction + (1024 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 25)
    if exponent == 31:
        number = np.nan if fraction else np.inf
    return np.float32(-number if bits >> 15 else number)


@compiled
def _read_floats(tile, output, num_bytes, pair, row):
    """Write an output's floating-point weights to `row`; `pair` inputs are side by side."""
    halves, numbers = tile.view(np.uint16), tile.view(np.float32)
    for i in range(row.shape[0]):
        source = (i // pair * OUTPUTS + output) * pair + i % pair
        if num_bytes == 4:
            row[i] = numbers[source]
        elif pair == 2:  # bfloat16: the upper half of a float32
            row[i] = np.uint32(np.uint32(halves[source]) << np.uint32(16)).view(np.float32)
        else:
            row[i] = _half(np.int64(halves[source]))


def round_rows(weights: Float32, bits: int) -> Bytes:
    """Rows float32 [n, inputs] in GGUF's Q8_0 (8 bits) or Q4_1 (4 bits): uint8 [n, row_bytes]."""
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % GROUP)))
    groups = padded.reshape(len(weights), -1, GROUP)
    lowest = groups.min(-1, keepdims=True)
    if bits == 8:
        factors = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16)
        numbers = _whole_multiples(groups, factors, -128, 127).astype(np.int8).view(np.uint8)
    else:  # the lowest weight is the offset, which is added
        scales = ((groups.max(-1, keepdims=True) - lowest) / 15).astype(np.float16)
        factors = np.concatenate([scales, lowest.astype(np.float16)], -1)
        groups = groups - factors[..., 1:].astype(np.float32)
        numbers = _whole_multiples(groups, scales, 0, 15).astype(np.uint8)
        numbers = numbers[..., :16] | numbers[..., 16:] << np.uint8(4)
    return np.concatenate([factors.view(np.uint8), numbers], -1).reshape(len(weights), -1)


def _whole_multiples(
    groups: Float32, scales: NDArray[np.float16], lowest: int, highest: int
) -> Float32:
    """Weights [n, groups, GROUP] in units of their scales [n, groups, 1], rounded and clipped."""
    units = np.maximum(scales.astype(np.float32), np.finfo(np.float32).tiny)
    return np.rint(groups / units).clip(lowest, highest)


def aligned_zeros(shape: Shape, dtype: type[np.generic] = np.uint8) -> NDArray[Any]:
    """Zeros whose first byte is at a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
