"""The products of the compiled pass, and the matrices that they multiply by."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from sequoia_plan.runtime.backends.packed.encoding import encoder
from sequoia_plan.runtime.backends.packed.gguf_blocks import BLOCK_BYTES, read_blocks
from sequoia_plan.runtime.backends.packed.packing import Arena, Blocks, aligned_zeros, in_8_bits, pack
from sequoia_plan.runtime.backends.packed.products import (
    ENCODE_INTEGERS,
    ENCODE_WHOLE_FLOATS,
    FORMAT_NAMES,
    FORMATS,
    HAS_INTEGER_PRODUCTS,
    multiplier,
)
from sequoia_plan.runtime.backends.packed.weights import describe

OUTPUTS, INPUTS, ROWS = 70, 512, 11
SCALE_PLACES = {"Q8_0": [0], "Q4_0": [0], "Q5_0": [0], "Q6_K": [208]}


def random_tensor(name, rng, outputs=OUTPUTS):
    """A tensor as `gguf.GGUFReader` gives it, and its weights as the package gguf reads them."""
    kind = gguf.GGMLQuantizationType[name]
    if name in BLOCK_BYTES:
        raw = rng.integers(0, 256, (outputs, INPUTS // gguf.GGML_QUANT_SIZES[kind][0], 1))
        raw = rng.integers(0, 256, (*raw.shape[:2], BLOCK_BYTES[name])).astype(np.uint8)
        for place in SCALE_PLACES.get(name, [0, 2]):  # random bits may be infinite
            scales = rng.random(raw.shape[:2]).astype(np.float16) * np.float16(0.1)
            raw[:, :, place : place + 2] = scales[..., None].view(np.uint8)
        raw = raw.reshape(outputs, -1)
    else:
        weights = rng.standard_normal((outputs, INPUTS)).astype(np.float32)
        raw = gguf.quants.quantize(weights, kind)
    tensor = SimpleNamespace(tensor_type=kind, shape=(INPUTS, outputs), data=raw)
    return tensor, gguf.quants.dequantize(raw, kind)


def encodings(name):
    """The processor's own way, and the portable one."""
    own = FORMATS[FORMAT_NAMES.index(name)].encoding
    return {own, ENCODE_WHOLE_FLOATS} if name in BLOCK_BYTES else {own}


def products(matrix, rows):
    """The products of all rows, float32 [rows, padded outputs]."""
    encoded = aligned_zeros((len(rows), matrix.encoded_bytes))
    results = np.zeros((len(rows), matrix.padded_outputs), np.float32)
    _, _, tiles, scales, _, inputs, steps, *_ = (int(number) for number in describe(matrix))
    encoder(matrix.format, matrix.encoding).ctypes(
        rows.ctypes.data, rows.strides[0], len(rows), inputs, encoded.ctypes.data,
        matrix.encoded_bytes,
    )  # fmt: skip
    multiplier(matrix.format, matrix.encoding).ctypes(
        encoded.ctypes.data, matrix.encoded_bytes, tiles, scales, results.ctypes.data,
        results.strides[0], steps, len(matrix.tiles) << 32 | len(rows),
    )  # fmt: skip
    return results


def rounded(rows, group):
    """Rows as 8-bit integers by group, and their scales, in float64."""
    parts = rows.astype(np.float64).reshape(len(rows), -1, group)
    scales = np.abs(parts).max(-1, keepdims=True) / 127
    return np.rint(parts / scales) * scales


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_blocks_are_what_the_package_gguf_reads(name):
    tensor, weights = random_tensor(name, np.random.default_rng(0))
    blocks = read_blocks(tensor)
    np.testing.assert_array_equal(blocks.dense(), weights)
    order = np.array([3, 0, 69])
    np.testing.assert_array_equal(blocks.rows(order).dense(), weights[order])
    np.testing.assert_array_equal(read_blocks(tensor, order).dense(), weights[order])


def test_another_format_is_named():
    tensor = SimpleNamespace(tensor_type=gguf.GGMLQuantizationType.IQ4_NL, shape=(32, 2), data=None)
    with pytest.raises(ValueError, match="found weights in IQ4_NL, expected one of F32, F16"):
        read_blocks(tensor)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_products_are_exact_and_the_same_beside_other_rows(name):
    """Exact up to rounding: against float64, with the rows rounded as the format has them."""
    rng = np.random.default_rng(1)
    tensor, weights = random_tensor(name, rng)
    rows = rng.standard_normal((ROWS, INPUTS)).astype(np.float32)
    results = {}
    for encoding in encodings(name):
        matrix = pack(read_blocks(tensor), Arena(), encoding)
        results[encoding] = all_rows = products(matrix, rows)
        group = FORMATS[matrix.format].group
        read = rounded(rows, 16).reshape(rows.shape) if group else rows.astype(np.float64)
        expected = read @ weights.astype(np.float64).T
        bound = 1e-2 if name == "BF16" else 3e-6
        sizes = np.abs(read) @ np.abs(weights.astype(np.float64)).T
        assert (np.abs(all_rows[:, :OUTPUTS] - expected) / sizes).max() < bound
        assert not all_rows[:, OUTPUTS:].any()
        for count in range(1, ROWS):
            first = ROWS - count
            np.testing.assert_array_equal(products(matrix, rows[first:]), all_rows[first:])
    if name in BLOCK_BYTES:  # whole numbers are exact in float32: even the bits are the same
        assert len(set(map(np.ndarray.tobytes, results.values()))) == 1


def test_the_sum_of_a_group_is_that_of_its_rounded_numbers():
    """The control: with the exact sum, a weight's offset does not cancel, and errors are larger."""
    rng = np.random.default_rng(2)
    tensor, _ = random_tensor("Q4_1", rng)
    blocks = read_blocks(tensor)
    offsets = -8 * blocks.scales  # weights around 0, as a model's are
    blocks = Blocks(blocks.format, blocks.numbers, blocks.scales, offsets)
    rows = rng.standard_normal((ROWS, INPUTS)).astype(np.float32) + 3
    expected = rows.astype(np.float64) @ blocks.dense().astype(np.float64).T
    ours = products(pack(blocks, Arena()), rows)[:, :OUTPUTS]
    exact_sums = rows.astype(np.float64).reshape(ROWS, -1, 32).sum(-1)
    rounded_sums = rounded(rows, 32).sum(-1)
    wrong = ours + (exact_sums - rounded_sums) @ offsets.astype(np.float64).T
    assert np.abs(ours - expected).mean() * 1.5 < np.abs(wrong - expected).mean()


def test_a_matrix_in_8_bits_is_off_by_half_a_step():
    weights = np.random.default_rng(3).standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    weights[5] = 0
    rounded_weights = in_8_bits(Blocks(FORMAT_NAMES.index("F32"), weights)).dense()
    steps = np.abs(weights).reshape(OUTPUTS, -1, 32).max(-1).repeat(32, 1) / 127
    assert (np.abs(rounded_weights - weights) <= 0.51 * steps + 128 * 2**-11 * steps).all()
    assert not rounded_weights[5].any()


def test_the_processor_decides_what_is_compared():
    """Where it has no products of integers, the portable ones are the only ones."""
    assert (encodings("Q8_0") == {ENCODE_INTEGERS, ENCODE_WHOLE_FLOATS}) == HAS_INTEGER_PRODUCTS
