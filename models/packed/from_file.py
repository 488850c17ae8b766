"""A model whose weights are packed in a file of the cache: mapped, or streamed from it."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import torch
from transformers import PreTrainedConfig

from sequoia_plan.models.base.cache import round_up
from sequoia_plan.models.base.dtype import Bytes, Float32, Int64, dtype_name
from sequoia_plan.models.base.loading import OnBytes
from sequoia_plan.models.base.weight_stream import refuse_copies
from sequoia_plan.models.files.stored import WeightSource
from sequoia_plan.models.offload.disk_stream import DiskStream
from sequoia_plan.models.offload.memory import MemorySplit
from sequoia_plan.models.offload.weight_cache import cached_weights
from sequoia_plan.models.offload.weight_file import (
    ALIGNMENT,
    WeightFile,
    aligned_memory,
    bytes_of,
)
from sequoia_plan.models.packed.backend import PackedBackend
from sequoia_plan.models.packed.formats import OUTPUTS, format_number
from sequoia_plan.models.packed.tiles import Matrix, dense_rows
from sequoia_plan.models.packed.weights import (
    EMBEDDING,
    PackedWeights,
    Storage,
    fill_from,
    layout_of,
)

READERS = 8  # threads that read embeddings


class PackedFile(PackedBackend):
    """Runs the weights of a packed file, which processes share."""

    def __init__(
        self,
        path: Path,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        recorded: Mapping[str, object],
    ) -> None:
        self.file = file = WeightFile(path)
        mapped = file.map()
        weights = PackedWeights(file.blocks, [mapped[block.offset :] for block in file.blocks])
        super().__init__(weights, config, dtype, recorded)
        self.use(weights)
        self.arguments = path, config, dtype, recorded

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copies: the same file."""
        return PackedFile, self.arguments, self.kept_tokens

    def check(self) -> None:
        self.file.check_unchanged()

    def forward(self, *arguments: Any) -> Any:
        """See `Backend`. What was cut off the file would end the process with a signal."""
        self.check()
        return super().forward(*arguments)


class StreamedFile(PackedBackend):
    """Runs the weights of a packed file, of which some layers are read in every pass.

    `load` says which. `layers` are the blocks of layers and of the head's parts; what is outside
    them stays in memory, but for the embeddings, whose rows are read from the file when needed.
    """

    reads_embeddings = True

    def __init__(
        self,
        file: WeightFile,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        recorded: Mapping[str, object],
    ) -> None:
        self.file, (outside, *self.layers), self.backend = file, file.blocks, self
        *_, last = outside.tensors.values()
        vectors = last.start if last.format else last.start + last.size
        nothing = [np.zeros(0, np.uint8)] * len(self.layers)
        self.memories = [file.memory_of(outside, vectors).numpy(), *nothing]
        super().__init__(PackedWeights(file.blocks, self.memories), config, dtype, recorded)
        [self.rows_block] = [block for block in file.blocks if EMBEDDING in block.tensors]
        self.outside_bytes = vectors

    def keep_head(self) -> None:
        """Read the head's parts into memory and keep them, for a draft that uses the same head."""
        count = self.config.num_hidden_layers
        memory = torch.cat([self.file.memory_of(block) for block in self.layers[count:]])
        self.memories[1 + count], self.layers = memory.numpy(), self.layers[:count]
        self.outside_bytes += len(memory)

    def layer_sizes(self) -> list[int]:
        """Bytes of each layer."""
        return [block.size for block in self.layers]

    def load(self, split: MemorySplit, link: str, fused: bool) -> None:
        """Load the resident layers of `split`, and stream the others in every pass."""
        resident, memories = split.resident_layers, self.memories
        for number in resident:
            memories[1 + number] = self.file.memory_of(self.layers[number]).numpy()
        self.streamed_layers = [n for n in range(len(self.layers)) if n not in resident]
        blocks = [self.layers[number] for number in self.streamed_layers]
        if blocks:
            self.stream = stream = DiskStream(self.file, blocks, split.slots, torch.device("cpu"))
            finalize(self, stream.close)
            for index, number in enumerate(self.streamed_layers):
                slot = stream.memory[index % len(stream.memory)]
                memories[1 + number] = slot[: blocks[index].size].numpy()
        self.recorded |= split.to_metadata(link, len(self.layers))
        self.use(PackedWeights(self.file.blocks, memories))

    def embedded(self, tokens: Int64) -> Float32:
        """See `PackedBackend`; reads of tiles wait behind those of layers, so many go at once."""
        place = self.rows_block.tensors[EMBEDDING]
        rows = np.minimum(tokens, self.num_embeddings - 1)
        numbers, indices = np.unique(rows // OUTPUTS, return_inverse=True)
        size = place.shape[1]

        def tile(number: int) -> Bytes:
            """Read one tile, uint8 [size]; a read begins and ends at multiples of `ALIGNMENT`."""
            first = self.rows_block.offset + place.start + number * size
            start = first // ALIGNMENT * ALIGNMENT
            memory = aligned_memory(round_up(first + size - start, ALIGNMENT))
            self.file.read(start, bytes_of(memory))
            return memory.numpy()[first - start :][:size]

        with ThreadPoolExecutor(READERS) as readers:
            tiles = np.stack(list(readers.map(tile, numbers.tolist())))
        matrix = Matrix(format_number(place.format), len(tiles) * OUTPUTS, place.inputs, tiles)
        return dense_rows(matrix, indices * OUTPUTS + rows % OUTPUTS)

    __reduce__ = refuse_copies


def packed_file(name: str, source: WeightSource, storage: Storage, on_bytes: OnBytes) -> WeightFile:
    """The packed file of these weights in the cache; it is written on first use.

    Raises:
        ValueError: for a format that the pass does not read.
        SequoiaPlanError: if it cannot be written.
    """
    kind = f"{storage.bits}-bits" if storage.bits else "own-bits"
    kind = dtype_name(storage.dtype) if storage.dtype else kind
    return cached_weights(
        name,
        f"{kind}.packed",
        source.files,
        lambda: (layout_of(source, storage), fill_from(source, storage)),
        on_bytes,
    )


def recorded_of(file: WeightFile, dtype: torch.dtype, source: WeightSource) -> dict[str, object]:
    """What profiles record of a model whose weights are packed in `file`, made from `source`."""
    content = file.index.source.content
    return {
        "digest": content[:16],
        "content": content[16:32],
        "dtype": dtype_name(dtype),
        "parameters": sum(map(math.prod, source.shapes().values())),
        "placement": "compiled",
    }
