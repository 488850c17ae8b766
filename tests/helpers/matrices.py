"""Matrices in the bits of a GGUF file, and what is multiplied by them."""

import gguf
import numpy as np

from sequoia_plan.models.files.stored import StoredMatrix
from sequoia_plan.models.packed.encoding import encoder
from sequoia_plan.models.packed.formats import FORMATS
from sequoia_plan.models.packed.products import OWN, encoded_bytes, encoding_for
from sequoia_plan.models.packed.tiles import aligned_zeros
from sequoia_plan.models.packed.weights import pack_into, place_of

FORMAT_OF = {format.name: format for format in FORMATS}


def normal(*shape, seed=1):
    """Random numbers, float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_rows(name, outputs, inputs):
    """Rows as in a file, and their weights as the package gguf reads them."""
    rng, kind, format = np.random.default_rng(0), gguf.GGMLQuantizationType[name], FORMAT_OF[name]
    if format.is_float:
        rows = gguf.quants.quantize(normal(outputs, inputs, seed=0), kind).view(np.uint8)
    else:
        shape = outputs, inputs // format.block, format.block_bytes
        blocks = rng.integers(0, 256, shape, dtype=np.uint8)
        for place in format.factors:  # random bits may be infinite
            if name == "MXFP4":
                blocks[..., place] = rng.integers(120, 128, shape[:2])
            else:
                factors = rng.normal(0, 0.1, shape[:2]).astype(np.float16)
                blocks[..., place : place + 2] = factors[..., None].view(np.uint8)
        rows = blocks
    rows = rows.reshape(outputs, -1)
    return rows, gguf.quants.dequantize(rows, kind).reshape(outputs, inputs)


def pack(name, rows, inputs):
    """A matrix whose tiles had other bytes before."""
    stored = StoredMatrix(name, len(rows), inputs, lambda first, end: rows[first:end])
    memory = aligned_zeros((place_of(stored).size,))
    memory[:] = 99
    return pack_into(stored, memory)


def encode(matrix, rows, kind=OWN):
    """Rows as the products by a matrix read them on a kind of processor."""
    encoded = aligned_zeros((len(rows), encoded_bytes(matrix.format, matrix.inputs, kind)))
    encoder(*encoding_for(matrix.format, kind)).ctypes(
        rows.ctypes.data, rows.strides[0], len(rows), matrix.inputs, encoded.ctypes.data,
        encoded.shape[1],
    )  # fmt: skip
    return encoded
