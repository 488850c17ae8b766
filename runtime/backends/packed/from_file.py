"""A model whose weights are packed in a file of the cache: mapped, or streamed from it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from weakref import finalize

import torch

from sequoia_plan.runtime.backends.packed.backend import PackedBackend
from sequoia_plan.runtime.backends.packed.weights import (
    PackedWeights,
    Storage,
    fill_from,
    layout_of,
)
from sequoia_plan.runtime.base.weight_stream import refuse_copies
from sequoia_plan.runtime.models.dtype import dtype_name
from sequoia_plan.runtime.models.stored import WeightSource
from sequoia_plan.runtime.offload.disk_stream import DiskStream
from sequoia_plan.runtime.offload.memory import MemorySplit
from sequoia_plan.runtime.offload.weight_file import OnBytes, WeightFile, cached_weights


class PackedFile(PackedBackend):
    """Runs the weights of a packed file, which processes share."""

    def __init__(
        self, path: Path, config: Any, dtype: torch.dtype, recorded: Mapping[str, Any]
    ) -> None:
        self.file = file = WeightFile(path)
        mapped = file.map()
        memories = [mapped[block.offset : block.offset + block.size] for block in file.blocks]
        weights = PackedWeights(file.blocks, memories)
        super().__init__(weights, config, dtype, recorded, check_source=file.check_unchanged)
        self.use(weights)
        self.arguments = path, config, dtype, recorded

    def __reduce__(self) -> Any:
        """For pickle and copies: the same file."""
        return PackedFile, self.arguments


class StreamedFile(PackedBackend):
    """Runs the weights of a packed file, of which some layers are read in every pass.

    `place` says which; what is outside the layers is in memory.
    """

    def __init__(
        self, file: WeightFile, config: Any, dtype: torch.dtype, recorded: Mapping[str, Any]
    ) -> None:
        self.file, (outside, *self.layers) = file, file.blocks
        self.outside = file.memory_of(outside).numpy()
        super().__init__(PackedWeights([outside], [self.outside]), config, dtype, recorded)
        self.backend, self.outside_bytes = self, outside.size

    def layer_sizes(self) -> list[int]:
        """Bytes of each layer."""
        return [block.size for block in self.layers]

    def place(self, split: MemorySplit, link: str, fused: bool) -> None:
        """Load the resident layers, and stream the others."""
        resident = {
            number: self.file.memory_of(self.layers[number]) for number in split.resident_layers
        }
        self.streamed_layers = [n for n in range(len(self.layers)) if n not in resident]
        memories, slots = [self.outside], list[torch.Tensor]()
        if self.streamed_layers:
            blocks = [self.layers[number] for number in self.streamed_layers]
            self.stream = stream = DiskStream(self.file, blocks, split.slots, torch.device("cpu"))
            slots = stream.memory
            finalize(self, stream.close)
        for number, block in enumerate(self.layers):
            memory = resident.get(number)
            if memory is None:
                memory = slots[self.streamed_layers.index(number) % len(slots)][: block.size]
            memories.append(memory.numpy())
        self.recorded |= split.to_metadata(link, len(self.layers))
        self.use(PackedWeights(self.file.blocks, memories))

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copies with a SequoiaPlanError."""
        refuse_copies()


def packed_file(
    name: str, source: WeightSource, storage: Storage, on_bytes: OnBytes = lambda done, total: None
) -> WeightFile:
    """The packed file of these weights in the cache; it is written on first use.

    Raises:
        ValueError: for a format that the pass does not read.
        SequoiaPlanError: if it cannot be written.
    """
    kind = f"{storage.bits}-bits" if storage.bits else "own-bits"
    kind = dtype_name(storage.dtype) if storage.dtype else kind
    return cached_weights(
        f"{name}-{{}}-{kind}.packed",
        source.files,
        lambda: (layout_of(source, storage), fill_from(source, storage)),
        on_bytes,
    )


def recorded_of(file: WeightFile, dtype: torch.dtype, shapes: Sequence[Sequence[int]]) -> Any:
    """What profiles record of packed weights."""
    content = file.index.source.content
    return {
        "digest": content[:16],
        "content": content[16:32],
        "dtype": dtype_name(dtype),
        "parameters": sum(map(math.prod, shapes)),
        "placement": "compiled",
    }
