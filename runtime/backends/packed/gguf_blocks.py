"""The matrices of a GGUF file in their own bits (the layouts are those of llama.cpp's ggml)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.runtime.backends.packed.packing import Blocks
from sequoia_plan.runtime.backends.packed.products import FORMAT_NAMES

Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]
"""Integers [blocks, weights], scales and offsets [blocks, groups] of blocks."""


def read_blocks(tensor: Any, rows: NDArray[np.int64] | None = None) -> Blocks:
    """The weights of a tensor of a `gguf.GGUFReader`, or some of its rows.

    ValueError for a format that is not known.
    """
    name = tensor.tensor_type.name
    if name not in FORMAT_NAMES:
        raise ValueError(f"found weights in {name}, expected one of {', '.join(FORMAT_NAMES)}")
    outputs = int(tensor.shape[1])
    raw = np.asarray(tensor.data).view(np.ndarray).view(np.uint8).reshape(outputs, -1)
    if rows is not None:
        raw, outputs = raw[rows], len(rows)
    format, numbers_kind = FORMAT_NAMES.index(name), FLOAT_KINDS.get(name)
    if numbers_kind:
        return Blocks(format, raw.view(numbers_kind))
    numbers, *scales = READERS[name](raw.reshape(-1, BLOCK_BYTES[name]))
    numbers = numbers.reshape(outputs, -1)
    return Blocks(format, numbers, *(s if s is None else s.reshape(outputs, -1) for s in scales))


def _halves(blocks: NDArray[np.uint8], start: int) -> NDArray[np.float16]:
    """The float16 at a place of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The low halves of the bytes, then the high ones."""
    halves: NDArray[np.uint8] = np.concatenate([packed & 15, packed >> 4], 1)
    return halves


def _fifth_bits(blocks: NDArray[np.uint8], start: int) -> NDArray[np.uint8]:
    """The highest bits of 32 weights of 5 bits, as 0 or 16."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(blocks: NDArray[np.uint8]) -> Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _q4_1(blocks: NDArray[np.uint8]) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: NDArray[np.uint8]) -> Parts:
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), _halves(blocks, 0), None


def _q5_1(blocks: NDArray[np.uint8]) -> Parts:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return numbers, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: NDArray[np.uint8]) -> Parts:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None  # from signed to unsigned


def _k_scales(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and offsets [blocks, 8] of Q4_K and Q5_K, whose factors have 6 bits."""
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], 1)
    offsets = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], 1)
    scale, offset = _halves(blocks, 0).astype(np.float32), _halves(blocks, 2).astype(np.float32)
    return scale * scales, -offset * offsets


def _k_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """256 halves of bytes: of each 32 bytes, the low halves, then the high ones."""
    parts = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([parts & 15, parts >> 4], 2).reshape(-1, 256)


def _q4_k(blocks: NDArray[np.uint8]) -> Parts:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: NDArray[np.uint8]) -> Parts:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    highest = (blocks[:, None, 16:48] >> shifts & 1) << 4
    return _k_nibbles(blocks[:, 48:]) | highest.reshape(-1, 256), *_k_scales(blocks)


def _q6_k(blocks: NDArray[np.uint8]) -> Parts:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], 2).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scales = _halves(blocks, 208).astype(np.float32) * factors
    return (low | high << 4).reshape(-1, 256), scales, None


FLOAT_KINDS: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
READERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
BLOCK_BYTES = {
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176,
    "Q6_K": 210,
}  # fmt: skip
