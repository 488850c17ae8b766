"""Matrices in the bits of a GGUF file, and products by them."""

import numpy as np
import pytest
from matrices import FORMAT_OF, encode, normal, pack, random_rows

from sequoia_plan.models.packed.formats import OUTPUTS, row_bytes
from sequoia_plan.models.packed.forward import multiply
from sequoia_plan.models.packed.tiles import dense_rows, round_rows
from sequoia_plan.models.packed.weights import describe

NUM_OUTPUTS, INPUTS, ROWS = 70, 512, 35
"""No multiple of a tile's outputs; more rows than are encoded side by side."""
SHAPE = NUM_OUTPUTS, INPUTS
all_formats = pytest.mark.parametrize("name", FORMAT_OF)


def products(matrix, rows):
    """The products of all rows, float32 [rows, outputs of all tiles]."""
    encoded = encode(matrix, rows)
    results = np.full((len(rows), len(matrix.tiles) * OUTPUTS), np.nan, np.float32)
    multiply(describe(matrix), len(rows), encoded, results, 0, 0, results.shape[1])
    return results


def weights_of(matrix):
    return dense_rows(matrix, np.arange(matrix.outputs))


def read_rows(name, rows):
    """Rows as an encoder stores them: in 8 bits with a scale for each 16, or as they are."""
    if FORMAT_OF[name].is_float:
        return rows.astype(np.float64)
    parts = rows.reshape(len(rows), -1, 16)
    largest = np.abs(parts).max(-1, keepdims=True)
    whole = np.rint(parts * (np.float32(127) / largest)).astype(np.float64)
    return (whole * (largest / 127)).reshape(rows.shape)


def error(results, rows, weights):
    """The largest error relative to the sum of what is added, in float64."""
    weights = weights.astype(np.float64)
    sizes = np.abs(rows) @ np.abs(weights).T
    return (np.abs(results[:, : len(weights)] - rows @ weights.T) / sizes).max()


@all_formats
def test_tiles_are_what_the_package_gguf_reads(name):
    """A part of the rows goes to its own tiles, in as many bytes as the file has."""
    rows, weights = random_rows(name, *SHAPE)
    matrix = pack(name, rows, INPUTS)
    np.testing.assert_array_equal(weights_of(matrix), weights)
    some = np.array([69, 0, 33, 33])
    np.testing.assert_array_equal(dense_rows(matrix, some), weights[some])
    np.testing.assert_array_equal(pack(name, rows[OUTPUTS:], INPUTS).tiles, matrix.tiles[1:])
    assert rows.shape[1] == row_bytes(matrix.format, INPUTS)
    assert matrix.tiles.shape[1] <= 1.03 * OUTPUTS * rows.shape[1]


@all_formats
def test_products_are_exact_and_the_same_beside_other_rows(name):
    """Against float64 with rows rounded alike; and with another weight, off by more than that."""
    packed_rows, weights = random_rows(name, *SHAPE)
    matrix, rows = pack(name, packed_rows, INPUTS), normal(ROWS, INPUTS)
    results = products(matrix, rows)
    read, bound = read_rows(name, rows), 1e-2 if name == "BF16" else 1e-6
    assert error(results, read, weights) < bound < error(results, read, np.roll(weights, 1, 1))
    assert not results[:, NUM_OUTPUTS:].any()
    for count in (*range(1, 10), 16, 17, ROWS - 1):
        np.testing.assert_array_equal(products(matrix, rows[-count:]), results[-count:])


def test_rows_too_small_to_scale_are_zeros():
    """The inverse of their scale would be infinite, and their products NaN."""
    packed_rows, weights = random_rows("Q8_0", *SHAPE)
    rows = normal(4, INPUTS)
    least = np.float32(127 / 2.0**127)
    rows[0, 16:32], rows[1, :16] = least * rows[0, 16:32].clip(-1, 1), 0
    rows[2, :16] = np.linspace(-1.01, 1.01, 16, dtype=np.float32) * least  # scaled as others
    rows[3, :16] = np.nan
    results = products(pack("Q8_0", packed_rows, INPUTS), rows)[:, :NUM_OUTPUTS]
    assert np.isfinite(results[:3]).all() and np.isnan(results[3]).all()
    assert error(results[:3], rows[:3], weights) < 1e-2


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q5_1"])
def test_sizes_that_are_no_multiple_of_anything(name):
    """Inputs of a row end in the middle of a group, in formats that have no blocks."""
    inputs = 70 if FORMAT_OF[name].is_float else 96
    packed_rows, weights = random_rows(name, 33, inputs)
    matrix = pack(name, packed_rows, inputs)
    np.testing.assert_array_equal(weights_of(matrix), weights)
    rows = np.pad(normal(3, inputs), ((0, 0), (0, 96 - inputs)))
    results = products(matrix, rows)
    assert error(results, read_rows(name, rows)[:, :inputs], weights) < 1e-2
    assert not results[:, 33:].any()


def test_the_sum_of_a_group_is_that_of_its_rounded_numbers():
    """With the exact sum, a weight's offset would not cancel."""
    matrix = pack("Q4_1", round_rows(normal(*SHAPE, seed=2), 4), INPUTS)
    weights, rows = weights_of(matrix).astype(np.float64), normal(ROWS, INPUTS) + 3
    ours = products(matrix, rows)[:, :NUM_OUTPUTS]
    offsets = weights.reshape(NUM_OUTPUTS, -1, 32).min(-1)
    sums = (rows.astype(np.float64) - read_rows("Q4_1", rows)).reshape(ROWS, -1, 32).sum(-1)
    expected = rows.astype(np.float64) @ weights.T
    wrong = ours + sums @ offsets.T
    assert np.abs(ours - expected).mean() * 1.5 < np.abs(wrong - expected).mean()


@pytest.mark.parametrize(("bits", "name"), [(8, "Q8_0"), (4, "Q4_1")])
def test_rounded_rows_are_off_by_half_a_step(bits, name):
    weights = normal(*SHAPE)
    weights[5] = 0
    rounded_weights = weights_of(pack(name, round_rows(weights, bits), INPUTS))
    groups = weights.reshape(NUM_OUTPUTS, -1, 32)
    steps = np.abs(groups).max(-1) / 127 if bits == 8 else np.ptp(groups, -1) / 15
    bound = (0.51 + 2.0 ** (bits - 12)) * steps.repeat(32, 1) + 2e-3 * (bits == 4)
    errors = np.abs(rounded_weights - weights)
    assert (errors <= bound).all() and errors.max() > bound.max() / 3
    assert not rounded_weights[5].any()
