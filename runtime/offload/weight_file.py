"""A model's weights in one file, in the order in which a pass needs them, to be read in blocks.

The first block has what is outside the layers; one block for each layer follows. Each block begins
at a multiple of 4,096 bytes, as reads past the page cache require, and has a checksum. The index of
the blocks is JSON at the end of the file, and after it come its length and its checksum.
"""

import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import torch
from filelock import FileLock
from msgspec import Struct
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.models.dtype import dtype_name

ALIGNMENT = 4096
"""Offsets, sizes and addresses of reads are multiples of so many bytes."""
MAX_INDEX_BYTES = 1 << 28
INDEX_END = struct.Struct("<QI")
"""The end of the file: how long the index is in bytes, and its CRC-32."""
REMEDY = "delete it, and it will be made again"
"""Ends the messages about a file that cannot be used."""


class Place(Struct, frozen=True):
    """Where a tensor is in its block: torch's name of its dtype, its shape, and its first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize * math.prod(self.shape)

    def view(self, memory: Tensor) -> Tensor:
        """The tensor as a view of `memory` (uint8), which holds the block."""
        part = memory[self.start : self.start + self.size]
        return part.view(getattr(torch, self.dtype)).view(self.shape)


class WeightBlock(Struct, frozen=True, eq=False):
    """A block: its bytes [offset, offset + size) in the file, their CRC-32, its tensors by name."""

    offset: int
    size: int
    checksum: int
    tensors: dict[str, Place]

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The block's tensors by name, as views of `memory` (uint8), which holds the block."""
        return {name: place.view(memory) for name, place in self.tensors.items()}


class Index(Struct):
    """What a file of weights holds, and a hash of what it was made from."""

    source: str
    blocks: tuple[WeightBlock, ...]

    def to_bytes(self) -> bytes:
        """The end of the file, from the index on."""
        data = msgspec.json.encode(self)
        return data + INDEX_END.pack(len(data), zlib.crc32(data))


class WeightFile:
    """An open file of weights.

    Several processes may have it open. If another file is renamed over it, this one stays as it is.
    """

    def __init__(self, path: Path, source: str | None = None) -> None:
        self.path = path
        try:
            self.blocks = _read_blocks(path, source)
            self.fd = _open_past_page_cache(path)
        except OSError as error:
            raise SequoiaPlanError(f"{path}: cannot be read ({error.strerror or error})") from error
        self.size_and_mtime = _size_and_mtime(self.fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the file's bytes from `offset` on.

        The address of `memory`, its length and `offset` must be multiples of `ALIGNMENT`.
        """
        bytes_read = 0
        while bytes_read < len(memory):
            try:
                count = os.preadv(self.fd, [memory[bytes_read:]], offset + bytes_read)
            except OSError as error:
                raise SequoiaPlanError(
                    f"{self.path}: cannot be read ({error.strerror or error}); {REMEDY}"
                ) from error
            if count == 0:
                raise SequoiaPlanError(
                    f"{self.path}: ends at {offset + bytes_read} bytes, expected more: "
                    f"it was cut off; {REMEDY}"
                )
            bytes_read += count

    def check(self, block: WeightBlock, memory: memoryview) -> None:
        """Compare a block that was read into `memory` with its checksum."""
        checksum = zlib.crc32(memory[: block.size])
        if checksum != block.checksum:
            raise SequoiaPlanError(
                f"{self.path}: the block at {block.offset} has the checksum {checksum:08x}, "
                f"expected {block.checksum:08x}: it was damaged; {REMEDY}"
            )

    def check_unchanged(self) -> None:
        """Check that nobody has written into the file since it was opened."""
        if _size_and_mtime(self.fd) != self.size_and_mtime:
            raise SequoiaPlanError(f"{self.path}: was written to while it was in use; {REMEDY}")

    def memory_of(self, block: WeightBlock) -> Tensor:
        """Read and check a block. Returns its bytes (uint8)."""
        memory = aligned_memory(block.size)
        view = bytes_of(memory)
        self.read(block.offset, view)
        self.check(block, view)
        return memory


def aligned_memory(size: int) -> Tensor:
    """uint8 [size]: zeros that begin at a page."""
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]


def bytes_of(memory: Tensor) -> memoryview:
    """A CPU tensor (uint8) as a buffer to read into."""
    view: memoryview = memory.numpy().data
    return view.cast("B") if memory.numel() else view


def _read_blocks(path: Path, source: str | None) -> tuple[WeightBlock, ...]:
    """The blocks of a file that was made from `source` (None: from any) and is whole."""
    with open(path, "rb") as file:
        start_of_end = max(file.seek(0, os.SEEK_END) - INDEX_END.size, 0)
        file.seek(start_of_end)
        end = file.read().rjust(INDEX_END.size)
        length, checksum = INDEX_END.unpack(end)
        file.seek(max(start_of_end - length, 0))
        data = file.read(min(length, MAX_INDEX_BYTES))
    if zlib.crc32(data) != checksum:
        raise SequoiaPlanError(f"{path}: its index was damaged, or it was cut off; {REMEDY}")
    try:
        index = msgspec.json.decode(data, type=Index)
    except msgspec.DecodeError as error:
        raise SequoiaPlanError(f"{path}: not a file of weights; {REMEDY}") from error
    if source not in (None, index.source):
        raise SequoiaPlanError(
            f"{path}: made from another model, or from one that has changed since; {REMEDY}"
        )
    return index.blocks


def _open_past_page_cache(path: Path) -> int:
    """Open a file to be read past the page cache, where the file system can."""
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, os.O_RDONLY)


def _size_and_mtime(fd: int) -> tuple[int, int]:
    """An open file's bytes, and the time of its last change in nanoseconds."""
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


WeightLayout = Sequence[Mapping[str, Tensor]]
"""The tensors of each block by name; only their dtypes and shapes count."""


def write_weights(
    path: Path, layout: WeightLayout, load: Callable[[str], Tensor], source: str
) -> None:
    """Write a file of weights beside `path`, then rename it to `path`."""
    unfinished = _unfinished(path)
    try:
        with open(unfinished, "wb") as file:
            blocks = tuple(_write_block(file, tensors, load) for tensors in layout)
            file.write(Index(source, blocks).to_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Let one process at a time work on `path`, and remove what a killed one left unfinished."""
    with FileLock(path.with_name(f".{path.name}.lock")):
        _unfinished(path).unlink(missing_ok=True)
        yield


def _unfinished(path: Path) -> Path:
    """The file beside `path` that is written first, and renamed to it in the end."""
    return path.with_name(f".{path.name}.unfinished")


def _write_block(
    file: IO[bytes], tensors: Mapping[str, Tensor], load: Callable[[str], Tensor]
) -> WeightBlock:
    """Write a block's tensors, and zeros up to the next block's begin."""
    places: dict[str, Place] = {}
    offset, size, checksum = file.tell(), 0, 0
    for name, expected in tensors.items():
        tensor = load(name).to(device="cpu", dtype=expected.dtype)
        tensor = tensor.reshape(expected.shape).contiguous()
        data = bytes_of(tensor.view(-1).view(torch.uint8))
        file.write(data)
        checksum = zlib.crc32(data, checksum)
        places[name] = Place(dtype_name(expected.dtype), tuple(expected.shape), size)
        size += len(data)
    padding = bytes(-size % ALIGNMENT)
    file.write(padding)
    return WeightBlock(offset, size + len(padding), zlib.crc32(padding, checksum), places)
