"""Matrices as tiles: from the blocks of a GGUF file, or from floating-point weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.runtime.backends.packed.products import (
    ENCODE_BFLOAT16,
    FORMAT_NAMES,
    FORMATS,
    encoded_bytes,
)
from sequoia_plan.runtime.backends.packed.vectors import LANES

GROUP = 32
"""Inputs are padded with zeros to a multiple of these."""
PIECE_BYTES = 1 << 26
"""Of an arena. In pages of 4 KB, one row's products take twice as long."""


@dataclass(frozen=True)
class Blocks:
    """The weights of a matrix by rows, in one of `FORMATS`.

    `numbers` [outputs, inputs]: floating point (bfloat16 as uint16), or the integers of w = scale *
    integer + offset; `scales`, `offsets` [outputs, groups], None where there are none.
    """

    format: int
    numbers: NDArray[Any]
    scales: NDArray[Any] | None = None
    offsets: NDArray[Any] | None = None

    def rows(self, order: NDArray[np.int64]) -> Blocks:
        """Some rows, in an order."""
        scales, offsets = (None if p is None else p[order] for p in (self.scales, self.offsets))
        return Blocks(self.format, self.numbers[order], scales, offsets)

    def dense(self) -> NDArray[np.float32]:
        """The weights as float32."""
        format = FORMATS[self.format]
        if not format.group:
            if format.scale == "bfloat16":
                return (self.numbers.astype(np.uint32) << 16).view(np.float32)
            return self.numbers.astype(np.float32)
        assert self.scales is not None
        scales = self.scales.astype(np.float32)[:, :, None]
        numbers = self.numbers.reshape(*self.scales.shape, format.group) * scales
        if format.offset_scales is not None:
            numbers += scales * np.float32(format.offset_scales)
        elif self.offsets is not None:
            numbers += self.offsets.astype(np.float32)[:, :, None]
        return numbers.reshape(self.numbers.shape)


@dataclass(frozen=True)
class Matrix:
    """A packed matrix: uint8 [tiles, bytes of one], aligned to 64 bytes."""

    format: int
    encoding: int
    outputs: int
    inputs: int
    tiles: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    @property
    def padded_outputs(self) -> int:
        """Numbers that a product writes: outputs, then zeros."""
        return len(self.tiles) * FORMATS[self.format].outputs

    @property
    def encoded_bytes(self) -> int:
        """Bytes of a row as its products read it."""
        return encoded_bytes(FORMATS[self.format], self.encoding, self.inputs)


class Arena:
    """Memory for many matrices in a few large pieces, which the system gives large pages."""

    def __init__(self) -> None:
        self.free = np.empty(0, np.uint8)

    def zeros(self, rows: int, row_bytes: int) -> NDArray[np.uint8]:
        """uint8 [rows, bytes of one], aligned to 64 bytes."""
        size = rows * row_bytes
        if len(self.free) < size:
            self.free = aligned_zeros((max(size, PIECE_BYTES),))
        taken, self.free = self.free[:size], self.free[-(-size // 64) * 64 :]
        return taken.reshape(rows, row_bytes)


def pack(blocks: Blocks, arena: Arena, encoding: int | None = None) -> Matrix:
    """Cut a matrix into tiles, for rows in an encoding; None: the processor's own."""
    format = FORMATS[blocks.format]
    encoding = format.encoding if encoding is None else encoding
    outputs, inputs = blocks.numbers.shape
    num_tiles = -(-outputs // format.outputs)
    padded_inputs = -(-inputs // GROUP) * GROUP
    padding = ((0, num_tiles * format.outputs - outputs), (0, padded_inputs - inputs))
    numbers = np.pad(blocks.numbers, padding) if np.any(padding) else blocks.numbers
    numbers = numbers.reshape(num_tiles, format.outputs, padded_inputs)
    steps = padded_inputs // format.step(encoding)
    tiles = arena.zeros(num_tiles, steps * format.block_bytes(encoding))
    scales = arena.zeros(num_tiles, steps * format.group_bytes)
    if not format.group:
        if encoding == ENCODE_BFLOAT16:  # pairs of inputs stay together
            numbers = numbers.reshape(num_tiles, format.outputs, padded_inputs // 2, 2)
            numbers = numbers.transpose(0, 2, 1, 3)
        else:
            numbers = numbers.transpose(0, 2, 1)
        tiles[:] = np.ascontiguousarray(numbers).reshape(num_tiles, -1).view(np.uint8)
        return Matrix(blocks.format, encoding, outputs, padded_inputs, tiles, scales)
    groups = padded_inputs // format.group
    quads = numbers.reshape(num_tiles, LANES, groups, format.group // 4, 4).transpose(0, 2, 3, 1, 4)
    if format.bits == 4:
        half = format.group // 8
        quads = quads[:, :, :half] | quads[:, :, half:] << 4
    tiles[:] = quads.reshape(num_tiles, -1)
    parts = [blocks.scales] if format.offset_scales is not None else [blocks.scales, blocks.offsets]
    stacked = np.stack([_scales_of_tiles(part, num_tiles, groups) for part in parts], 2)
    stacked = np.ascontiguousarray(stacked.astype(format.scale))
    scales[:] = stacked.reshape(num_tiles, -1).view(np.uint8)
    return Matrix(blocks.format, encoding, outputs, padded_inputs, tiles, scales)


def _scales_of_tiles(scales: Any, num_tiles: int, groups: int) -> NDArray[Any]:
    """[tiles, groups, 16] from [outputs, groups]."""
    padding = ((0, num_tiles * LANES - len(scales)), (0, groups - scales.shape[1]))
    return np.pad(scales, padding).reshape(num_tiles, LANES, groups).transpose(0, 2, 1)


def in_8_bits(blocks: Blocks) -> Blocks:
    """A floating-point matrix rounded to 8 bits, with one scale for each 32 inputs of a row."""
    groups = _groups(blocks)
    scales = (np.abs(groups).max(-1) / 127).astype(np.float16)
    numbers = _whole_multiples(groups, scales, -128, 127) + 128
    return Blocks(FORMAT_NAMES.index("Q8_0"), numbers.astype(np.uint8), scales)


def in_4_bits(blocks: Blocks) -> Blocks:
    """The same in 4 bits, with one scale and one offset for each 32 inputs of a row."""
    groups = _groups(blocks)
    offsets = groups.min(-1).astype(np.float16)
    scales = ((groups.max(-1) - groups.min(-1)) / 15).astype(np.float16)
    groups = groups - offsets.astype(np.float32)[:, :, None]
    numbers = _whole_multiples(groups, scales, 0, 15)
    return Blocks(FORMAT_NAMES.index("Q4_1"), numbers.astype(np.uint8), scales, offsets)


def _groups(blocks: Blocks) -> NDArray[np.float32]:
    """Weights [outputs, groups, 32], padded with zeros."""
    weights = blocks.dense()
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % GROUP)))
    return padded.reshape(len(weights), -1, GROUP)


def _whole_multiples(groups: Any, scales: Any, lowest: int, highest: int) -> NDArray[np.float32]:
    """Weights [outputs, inputs] in units of their group's scale, rounded."""
    units = np.maximum(scales.astype(np.float32), np.finfo(np.float32).tiny)[:, :, None]
    whole: NDArray[np.float32] = np.rint(groups / units).clip(lowest, highest)
    return whole.reshape(len(groups), -1)


def aligned_zeros(shape: tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any]:
    """Zeros whose first byte is at a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)
