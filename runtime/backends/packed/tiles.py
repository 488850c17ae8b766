"""Matrices as tiles: from rows as a GGUF file has them, and back to float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from sequoia_plan.runtime.backends.packed.formats import (
    FORMATS,
    GROUP,
    OUTPUTS,
    QUAD,
    Run,
    num_tiles,
    row_bytes,
    tile_bytes,
)


@dataclass(frozen=True)
class Matrix:
    """A matrix in one of `FORMATS`, whose rows are `outputs`.

    `tiles` uint8 [num_tiles, tile_bytes], aligned to 64 bytes, are only read.
    """

    format: int
    outputs: int
    inputs: int
    tiles: NDArray[np.uint8]


def pack_rows(format: int, rows: NDArray[np.uint8], inputs: int, tiles: NDArray[np.uint8]) -> None:
    """Write rows, uint8 [outputs, row_bytes] as a GGUF file has them, to the tiles for them.

    Zeros stand for outputs and inputs that are missing. `tiles` uint8 [num_tiles, tile_bytes].
    ValueError for rows or tiles of another size.
    """
    layout, sizes = FORMATS[format], (rows.shape[1], *tiles.shape)
    expected = row_bytes(format, inputs), num_tiles(format, len(rows)), tile_bytes(format, inputs)
    if sizes != expected:
        raise ValueError(f"row bytes, tiles and their bytes: found {sizes}, expected {expected}")
    rows = rows.view()
    rows.flags.writeable = False  # compiled once, whether or not they can be written
    if layout.is_float:
        numbers, pair = layout.step.base, layout.step.shape[2]
        _pack_numbers(rows.view(numbers), tiles.view(numbers), pair)
        return
    places: Any = layout.step.fields
    _pack_blocks(
        rows, tiles, np.array([layout.block_bytes, layout.block, layout.num_scales]),
        np.array([layout.step.itemsize, places["scales"][1], places["weights"][1]]),
        np.array(layout.factors), layout.step["factors"].shape[2],
        np.array(layout.scale_runs or [Run(0, 0, 0, 0, 0)]),
        np.array(layout.scale_planes, np.int64), np.uint8(layout.scale_flip),
        np.array(layout.runs), np.array(layout.planes), np.uint8(layout.flip),
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _pack_numbers(numbers, tiles, pair):
    """Numbers [outputs, inputs] to tiles [tiles, numbers of one]."""
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


@njit(nogil=True, cache=True, error_model="numpy")
def _pack_blocks(
    rows, tiles, sizes, places, factors, factor_bytes, scale_runs, scale_planes, scale_flip, runs,
    planes, flip,
):  # fmt: skip
    """Blocks of integers; `sizes`: bytes and values of one; `places`: of a step's end and parts."""
    block_bytes, num_values, num_scales = sizes
    step_bytes, scales_at, weights_at = places
    values = np.zeros((OUTPUTS, num_values), np.uint8)
    scales = np.zeros((OUTPUTS, num_scales), np.uint8)
    for tile in range(tiles.shape[0]):
        count = max(min(rows.shape[0] - tile * OUTPUTS, OUTPUTS), 0)
        part = rows[tile * OUTPUTS : tile * OUTPUTS + count]
        values[count:], scales[count:] = 0, 0
        for number in range(tiles.shape[1] // step_bytes):
            step, block = tiles[tile, number * step_bytes :], number * block_bytes
            step[:scales_at] = 0
            for factor in range(factors.shape[0]):
                for output in range(count):
                    for byte in range(factor_bytes):
                        at = (factor * OUTPUTS + output) * factor_bytes + byte
                        step[at] = part[output, block + factors[factor] + byte]
            _unpack(part, block, scale_runs, scale_flip, scales)
            _unpack(part, block, runs, flip, values)
            _put_planes(scales, scale_planes, num_scales // QUAD, step[scales_at:])
            _put_planes(values, planes, GROUP // QUAD, step[weights_at:])


@njit(nogil=True, cache=True, error_model="numpy")
def _unpack(rows, block, runs, flip, values):
    """The integers of the rows' blocks (see `Run`)."""
    for run in range(runs.shape[0]):
        start, shift, bits, first, length, to, apart = runs[run]
        lower, mask = np.uint8((1 << to) - 1), np.uint8((1 << bits) - 1)
        shift, to = np.uint8(shift), np.uint8(to)
        for output in range(rows.shape[0]):
            if apart == 1:  # many at once
                source, target = rows[output, block + start :], values[output, first:]
                for i in range(length):
                    bits = ((source[i] >> shift) & mask) ^ flip
                    target[i] = (target[i] & lower) | (bits << to)
            else:
                for i in range(length):
                    at = first + i * apart
                    bits = ((rows[output, block + start + i] >> shift) & mask) ^ flip
                    values[output, at] = (values[output, at] & lower) | (bits << to)


@njit(nogil=True, cache=True, error_model="numpy")
def _put_planes(values, planes, quads, target):
    """The planes of integers, uint8 [outputs, values], by groups of so many quads."""
    words, target = values.view(np.uint32), target.view(np.uint32)
    column = np.empty((quads, OUTPUTS), np.uint32)
    at = 0
    for start in range(0, words.shape[1], max(quads, 1)):
        for output in range(OUTPUTS):
            for quad in range(quads):
                column[quad, output] = words[output, start + quad]
        low = 0
        for plane in range(planes.shape[0]):
            bits = planes[plane]
            vectors, mask = quads * bits // 8, np.uint32(((1 << bits) - 1) * 0x01010101)
            for vector in range(vectors):
                part = target[at : at + OUTPUTS]
                part[:] = 0
                for field in range(8 // bits):
                    quad = column[vector + vectors * field]
                    right, left = np.uint32(low), np.uint32(bits * field)
                    for output in range(OUTPUTS):
                        part[output] |= ((quad[output] >> right) & mask) << left
                at += OUTPUTS
            low += bits


def dense_rows(matrix: Matrix, row_numbers: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows of a matrix, float32 [n, inputs]: the numbers that the package gguf reads."""
    layout = FORMATS[matrix.format]
    tile, output = row_numbers // OUTPUTS, row_numbers % OUTPUTS
    if layout.is_float:
        shape = len(matrix.tiles), -1, OUTPUTS, layout.step.shape[2]
        numbers = matrix.tiles.view(layout.step.base).reshape(shape)[tile, :, output]
        numbers = numbers.reshape(len(tile), -1)[:, : matrix.inputs]
        if layout.name == "BF16":
            return (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.view(f"f{layout.block_bytes}").astype(np.float32)
    steps = matrix.tiles.view(layout.step)
    integers = _join_planes(steps["weights"][tile, :, :, :, output], layout.planes)
    shape = (*integers.shape[:2], layout.block // layout.group, layout.group)
    numbers = np.array(layout.values or range(1 << layout.bits), np.float32)[integers]
    numbers = numbers.reshape(shape) - np.float32(layout.zero or 0)
    factors = _factors(steps["factors"][tile, :, :, output])
    if layout.num_scales:
        scales = _join_planes(steps["scales"][tile, :, :, output], layout.scale_planes)
        signed = scales.astype(np.float32) - layout.scale_zero
        factors = factors * signed.reshape(*shape[:2], -1, shape[2])
    numbers *= factors[:, :, 0, :, None]
    if layout.zero is None:
        numbers -= np.float32(layout.offset_sign) * factors[:, :, 1, :, None]
    return numbers.reshape(len(tile), -1)[:, : matrix.inputs]


def _factors(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Factors [n, steps, factors, 1] from their bytes: float16, or the exponent of a power of 2."""
    if stored.shape[-1] == 2:
        return stored.view(np.float16).astype(np.float32)
    return np.ldexp(np.float32(1), stored.astype(np.int32) - 131)


def _join_planes(parts: NDArray[np.uint8], planes: tuple[int, ...]) -> NDArray[np.uint8]:
    """Integers [..., values] from vectors of planes [..., vectors, 4]."""
    quads = 8 * parts.shape[-2] // sum(planes)
    integers, first, low = np.zeros((*parts.shape[:-2], QUAD * quads), np.uint8), 0, 0
    for bits in planes:
        end = first + quads * bits // 8
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
        fields = parts[..., None, first:end, :] >> shifts & np.uint8((1 << bits) - 1)
        integers |= fields.reshape(integers.shape) << np.uint8(low)
        first, low = end, low + bits
    return integers


def round_rows(weights: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """Rows float32 [n, inputs] rounded to 8 bits (Q8_0) or 4 (Q4_1): uint8 [n, row_bytes]."""
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % GROUP)))
    groups = padded.reshape(len(weights), -1, GROUP)
    lowest = groups.min(-1, keepdims=True)
    if bits == 8:
        factors = (np.abs(groups).max(-1, keepdims=True) / 127).astype(np.float16)
        numbers = _whole_multiples(groups, factors, -128, 127).astype(np.int8).view(np.uint8)
    else:
        scales = ((groups.max(-1, keepdims=True) - lowest) / 15).astype(np.float16)
        factors = np.concatenate([scales, lowest.astype(np.float16)], -1)
        groups = groups - factors[..., 1:].astype(np.float32)
        numbers = _whole_multiples(groups, scales, 0, 15).astype(np.uint8)
        numbers = numbers[..., :16] | numbers[..., 16:] << np.uint8(4)
    return np.concatenate([factors.view(np.uint8), numbers], -1).reshape(len(weights), -1)


def _whole_multiples(groups: Any, scales: Any, lowest: int, highest: int) -> NDArray[Any]:
    """Weights in units of their group's scale, rounded."""
    units = np.maximum(scales.astype(np.float32), np.finfo(np.float32).tiny)
    return np.rint(groups / units).clip(lowest, highest)


def aligned_zeros(shape: tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any]:
    """Zeros whose first byte is at a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
