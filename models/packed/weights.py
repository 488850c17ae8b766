"""A Llama-like model's weights as the pass reads them: where each lies, and what is made of it.

The first block of a file has all vectors, and then the embedding unless that is the output head; a
layer's block has its seven matrices; the head is last.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedConfig

from sequoia_plan.models.base.dtype import Bytes, Float32, Int64
from sequoia_plan.models.files.stored import StoredMatrix, WeightSource
from sequoia_plan.models.offload.weight_file import Place, WeightBlock, place_blocks
from sequoia_plan.models.packed.attention import attender
from sequoia_plan.models.packed.encoding import encoder
from sequoia_plan.models.packed.formats import (
    FORMATS,
    OUTPUTS,
    format_number,
    num_steps,
    num_tiles,
    tile_bytes,
)
from sequoia_plan.models.packed.forward import Model
from sequoia_plan.models.packed.products import encoded_bytes, encoding_for, multiplier
from sequoia_plan.models.packed.tiles import Matrix, aligned_zeros, pack_rows, round_rows

MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""A layer's matrices, in the order of the pass."""
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
CHUNK_BYTES = 1 << 24  # rows are packed so many bytes at a time


@dataclass(frozen=True)
class Storage:
    """How matrices are stored: as they are, in a dtype, or rounded to 8 or 4 bits.

    A target's output head is rounded to 8 bits, because it loses the most.
    """

    dtype: torch.dtype | None = None
    bits: int | None = None
    head_bits: int = 8

    def of(self, name: str, matrix: StoredMatrix) -> StoredMatrix:
        """The matrix with this name, converted when its rows are read."""
        if self.bits and name != EMBEDDING:
            bits = self.head_bits if name == HEAD else self.bits
            return StoredMatrix(
                "Q8_0" if bits == 8 else "Q4_1",
                matrix.outputs,
                matrix.inputs,
                lambda *rows: round_rows(matrix.dense(*rows).numpy(), bits),
            )
        return matrix.in_dtype(self.dtype) if self.dtype else matrix


def place_of(matrix: StoredMatrix) -> Place:
    """The shape of a packed matrix; ValueError for a format that the pass does not read."""
    format = format_number(matrix.format)
    shape = num_tiles(matrix.outputs), tile_bytes(format, matrix.inputs)
    return Place("uint8", shape, format=matrix.format, outputs=matrix.outputs, inputs=matrix.inputs)


def layout_of(source: WeightSource, storage: Storage) -> list[dict[str, Place]]:
    """The tensors of each block by name: what is outside the layers, each layer, the head.

    ValueError for a format that the pass does not read.
    """
    shapes = source.shapes()
    head = HEAD if storage.bits or HEAD in shapes else EMBEDDING
    blocks: dict[float, dict[str, Place]] = {0: {}}  # by number; that of the head is infinite
    for name, shape in shapes.items():
        block = math.inf if name == head else 0.0
        if len(shape) == 1:
            place = Place("float32", tuple(shape))
        else:
            place = place_of(storage.of(name, source.matrix(name)))
            if name.startswith("model.layers."):
                block = 1 + int(name.split(".")[2])
        blocks.setdefault(block, {})[name] = place
    if head not in shapes:  # one that is the embedding is rounded beside it
        blocks[math.inf] = {HEAD: place_of(storage.of(HEAD, source.matrix(EMBEDDING)))}
    # vectors, which have no format, come first
    blocks[0] = dict(sorted(blocks[0].items(), key=lambda item: item[1].format != ""))
    return [blocks[number] for number in sorted(blocks)]


def fill_from(source: WeightSource, storage: Storage) -> Callable[[str, Bytes], None]:
    """A function that writes the tensor with a name into its memory, uint8 [bytes]."""
    shapes = source.shapes()

    def fill(name: str, memory: Bytes) -> None:
        """Write a vector as float32, or a matrix as tiles; a head that is tied is the embedding."""
        stored_name = name if name in shapes else EMBEDDING
        if len(shapes[stored_name]) == 1:
            memory.view(np.float32)[:] = source.vector(name)
            return
        pack_into(storage.of(name, source.matrix(stored_name)), memory)

    return fill


def pack_into(matrix: StoredMatrix, memory: Bytes) -> Matrix:
    """Pack a matrix into memory, uint8 of the size of its tiles; some rows at a time are read."""
    tiles, format = memory.reshape(place_of(matrix).shape), format_number(matrix.format)
    rows_at_once = max(1, CHUNK_BYTES // tiles.shape[1]) * OUTPUTS
    for first in range(0, matrix.outputs, rows_at_once):
        end = min(first + rows_at_once, matrix.outputs)
        their_tiles = tiles[first // OUTPUTS : -(-end // OUTPUTS)]
        pack_rows(format, matrix.read(first, end), matrix.inputs, their_tiles)
    return Matrix(format, matrix.outputs, matrix.inputs, tiles)


class PackedWeights:
    """Packed tensors by name: `memories` has for each block the bytes that were read of it.

    A packed head goes on in the blocks after its own. `places`: of each tensor, the memory of its
    block and where in it the tensor lies.
    """

    def __init__(self, blocks: Sequence[WeightBlock], memories: Sequence[Bytes]) -> None:
        self.memories = memories
        self.places = {
            name: (memory, place)
            for block, memory in zip(blocks, memories, strict=True)
            for name, place in block.tensors.items()
        }

    def matrix(self, name: str) -> Matrix:
        """A matrix, whose tiles lie in its block."""
        memory, place = self.places[name]
        tiles = _tiles(memory[place.start : place.start + place.size], place.shape[1])
        return Matrix(format_number(place.format), place.outputs, place.inputs, tiles)

    def vector(self, name: str) -> Float32:
        """A vector, float32 [n]."""
        memory, place = self.places[name]
        return memory[place.start : place.start + place.size].view(np.float32).copy()

    @property
    def embedding(self) -> Matrix:
        """The embeddings of tokens, one a row."""
        return self.matrix(EMBEDDING)

    @property
    def head(self) -> Matrix:
        """The output head, which may be the embedding."""
        return self.matrix(self._head_name)

    @property
    def _head_name(self) -> str:
        return HEAD if HEAD in self.places else EMBEDDING

    def head_parts(self) -> list[Matrix]:
        """The output head as a matrix for each of the blocks that it lies in."""
        head, size = self.head, self.head.tiles.shape[1]
        if len(head.tiles) * OUTPUTS >= head.outputs:
            return [head]
        first = [memory is self.places[self._head_name][0] for memory in self.memories].index(True)
        parts, left = list[Matrix](), head.outputs
        for memory in self.memories[first:]:  # the last one may have more room
            tiles = _tiles(memory, size)[: num_tiles(left)]
            parts.append(replace(head, outputs=min(left, len(tiles) * OUTPUTS), tiles=tiles))
            left -= parts[-1].outputs
        return parts

    def formats(self) -> tuple[str, ...]:
        """The formats of matrices that passes multiply by."""
        stored = {p.format for n, (_, p) in self.places.items() if p.format and n != EMBEDDING}
        return tuple(sorted({FORMATS[self.head.format].name} | stored))


def _tiles(memory: Bytes, size: int) -> Bytes:
    """The tiles of `size` bytes that memory has room for: uint8 [tiles, size], a view."""
    return memory[: len(memory) // size * size].reshape(-1, size)


def packed_in_memory(source: WeightSource, storage: Storage) -> PackedWeights:
    """Pack all tensors of a source. ValueError for a format that the pass does not read."""
    blocks, fill = place_blocks(layout_of(source, storage)), fill_from(source, storage)
    whole = aligned_zeros((blocks[-1].offset + blocks[-1].size,))
    memories = [whole[block.offset :] for block in blocks]
    for block, memory in zip(blocks, memories, strict=True):
        for name, place in block.tensors.items():
            fill(name, memory[place.start : place.start + place.size])
    return PackedWeights(blocks, memories)


def describe(matrix: Matrix) -> Int64:
    """A matrix as the pass reads it, which trusts these sizes: int64 [forward.ENCODE to ROW_BYTES].

    The first three are addresses: of the compiled encoder and multiplier, and of the tiles.
    """
    expected = num_tiles(matrix.outputs), tile_bytes(matrix.format, matrix.inputs)
    assert matrix.tiles.shape == expected, (matrix.tiles.shape, expected)
    return np.array(
        [
            encoder(*encoding_for(matrix.format)).address,
            multiplier(matrix.format).address,
            matrix.tiles.ctypes.data,
            *matrix.tiles.shape,
            num_steps(matrix.format, matrix.inputs),
            matrix.inputs,
            encoded_bytes(matrix.format, matrix.inputs),
        ]
    )


def model_of(
    weights: PackedWeights, config: PreTrainedConfig, head_dim: int, key_bytes: int
) -> Model:
    """What the pass reads of a model whose cache has numbers of `key_bytes` bytes."""
    layers = [f"model.layers.{number}." for number in range(config.num_hidden_layers)]
    matrices = [
        [describe(weights.matrix(f"{layer}{name}.weight")) for name in MATRICES] for layer in layers
    ]

    def vectors(*names: str) -> Float32:
        """Vectors of each layer, float32 [layers, names, n]; [0, names, 0] if there are none."""
        if f"{layers[0]}{names[0]}" not in weights.places:
            return np.zeros((0, len(names), 0), np.float32)
        return np.array([[weights.vector(layer + name) for name in names] for layer in layers])

    biases = [vectors(f"{name}.bias")[:, 0] for name in MATRICES[:3]]
    return Model(
        matrices=np.array(matrices).reshape(len(layers), len(MATRICES), -1),
        head=np.array([describe(part) for part in weights.head_parts()]),
        norms=vectors("input_layernorm.weight", "post_attention_layernorm.weight"),
        final_norm=weights.vector(FINAL_NORM),
        head_norms=vectors("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        biases=np.concatenate(biases, 1),
        epsilon=np.float32(config.rms_norm_eps),
        attend=attender(key_bytes).address,
        heads=config.num_attention_heads,
        head_dim=head_dim,
    )
