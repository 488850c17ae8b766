"""A model whose weights are packed in a file of the cache: mapped into memory, or streamed from it."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn
from weakref import finalize

import torch

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.backends.packed.backend import PackedBackend
from sequoia_plan.runtime.backends.packed.weights import (
    PackedWeights,
    Storage,
    fill_from,
    layout_of,
)
from sequoia_plan.runtime.models.dtype import dtype_name
from sequoia_plan.runtime.models.gguf import cache_folder
from sequoia_plan.runtime.models.stored import Source, WeightSource
from sequoia_plan.runtime.offload.disk_stream import DiskStream
from sequoia_plan.runtime.offload.memory import MemorySplit
from sequoia_plan.runtime.offload.weight_file import WeightFile, exclusive_lock, write_weights

OnBytes = Callable[[int, int], None]


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
        resident = {number: self.file.memory_of(self.layers[number]) for number in split.resident_layers}
        self.streamed_layers = [n for n in range(len(self.layers)) if n not in resident]
        memories = [self.outside]
        if self.streamed_layers:
            blocks = [self.layers[number] for number in self.streamed_layers]
            self.stream = DiskStream(self.file, blocks, split.slots, torch.device("cpu"))
            finalize(self, self.stream.close)
        for number, block in enumerate(self.layers):
            memory = resident.get(number)
            if memory is None:
                slots = self.stream.memory
                memory = slots[self.streamed_layers.index(number) % len(slots)][: block.size]
            memories.append(memory.numpy())
        self.recorded |= split.to_metadata(link, len(self.layers))
        self.use(PackedWeights(self.file.blocks, memories))

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and copies with a SequoiaPlanError."""
        raise SequoiaPlanError(
            "target: its layers are streamed, so it can neither be pickled nor copied; load it "
            "where it is needed"
        )


def packed_file(
    name: str, source: WeightSource, storage: Storage, on_bytes: OnBytes = lambda done, total: None
) -> WeightFile:
    """The packed file of these weights in the cache; it is written on first use.

    Its name has a hash of samples of the source. If the system says that the source was touched
    since, its whole content is compared.

    Raises:
        ValueError: for a format that the pass does not read.
        SequoiaPlanError: if it cannot be written.
    """
    kind = f"{storage.bits}-bits" if storage.bits else "own-bits"
    kind = dtype_name(storage.dtype) if storage.dtype else kind
    identity, content = source.identity(), ""
    path = cache_folder() / f"{name}-{identity.fingerprint}-{kind}.packed"
    for is_locked in (False, True):
        with contextlib.ExitStack() as stack:
            if is_locked:
                _enter(stack, path)
            with contextlib.suppress(SequoiaPlanError):  # none, or not whole
                file = WeightFile(path, identity.fingerprint)
                if file.index.source.times == identity.times:
                    return file
                content = content or source.content()
                if file.index.source.content == content:
                    return file
                file.close()
            if is_locked:
                layout, fill = layout_of(source, storage), fill_from(source, storage)
                hashed = stack.enter_context(ThreadPoolExecutor(1)).submit(source.content)

                def made_from() -> Source:
                    """The source, with a hash of all of it."""
                    return Source(identity.fingerprint, identity.times, hashed.result())

                with _errors_of(path):
                    write_weights(path, layout, fill, made_from, on_bytes)
    return WeightFile(path, identity.fingerprint)


def _enter(stack: contextlib.ExitStack, path: Path) -> None:
    """Let no other process make the file meanwhile."""
    with _errors_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(exclusive_lock(path))


@contextlib.contextmanager
def _errors_of(path: Path) -> Any:
    """A context whose system errors say what to do."""
    try:
        yield
    except OSError as error:
        raise SequoiaPlanError(
            f"{path}: cannot be written ({error.strerror or error}); it takes as much room as the "
            "weights: free some, or set SEQUOIA_PLAN_CACHE to another folder"
        ) from error


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
