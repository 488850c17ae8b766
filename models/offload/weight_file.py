"""A model's weights in one file, in the order in which a pass needs them: docs/format.md.

The first block has what is outside the layers; one block for each layer follows. A packed output
head comes last, in blocks that are no larger than a layer's: the first of them has its place. Each
block begins at a multiple of 4,096 bytes, as reads past the page cache require, and has a checksum.
The index of the blocks is JSON at the end of the file, and after it come its length and its
checksum. A file is mapped into memory, or its layers are read in every pass.
"""

import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO
from weakref import finalize

import msgspec
import numpy as np
import torch
from msgspec import Struct, structs
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.cache import round_up
from sequoia_plan.models.base.dtype import Bytes, Shape
from sequoia_plan.models.base.loading import OnBytes
from sequoia_plan.models.files.stored import Source

ALIGNMENT = 4096  # offsets, sizes and addresses of reads are multiples of so many bytes
TENSOR_ALIGNMENT = 64  # tensors begin at multiples of so many bytes
VERSION = 2
MAX_INDEX_BYTES = 1 << 28
INDEX_END = struct.Struct("<QI")
"""The end of the file: how long the index is in bytes, and its CRC-32."""
CHUNK_BYTES = 4 << 20  # bytes that a thread reads at once
REMEDY = "delete it, and it will be made again"
"""Ends the messages about a file that cannot be used."""
WRITERS = 2  # threads that make blocks


class Place(Struct, frozen=True, omit_defaults=True):
    """Where a tensor is in its block: torch's name of its dtype, its shape, and its first byte.

    A packed matrix is uint8 [tiles, bytes of one]; `format`, `outputs` and `inputs` are the
    matrix's own.
    """

    dtype: str
    shape: Shape
    start: int = 0
    format: str = ""
    outputs: int = 0
    inputs: int = 0

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return getattr(torch, self.dtype).itemsize * math.prod(self.shape)

    def view(self, memory: Tensor) -> Tensor:
        """The tensor as a view of `memory` (uint8), which holds the block."""
        own = memory[self.start : self.start + self.size]
        return own.view(getattr(torch, self.dtype)).view(self.shape)


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
    """What a file of weights holds, and what it was made from.

    `written`: the seconds of its last change, as the system notes them, if nobody changed it since.
    """

    version: int
    written: int
    source: Source
    blocks: tuple[WeightBlock, ...]

    def to_bytes(self) -> bytes:
        """The end of the file, from the index on."""
        data = msgspec.json.encode(self)
        return data + INDEX_END.pack(len(data), zlib.crc32(data))


class WeightFile:
    """An open file of weights.

    Several processes may have it open. If another file is renamed over it, this one stays as it is.
    """

    def __init__(self, path: Path, fingerprint: str | None = None) -> None:
        self.path = path
        try:
            self.index = _read_index(path, fingerprint)
            self.fd = _open_past_page_cache(path)
        except OSError as error:
            raise SequoiaPlanError(f"{path}: cannot be read ({error.strerror or error})") from error
        self.blocks, self._close = self.index.blocks, finalize(self, os.close, self.fd)
        self.size_and_mtime = _size_and_mtime(self.fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._close()
        self.fd = -1

    def map(self) -> Bytes:
        """The whole file as memory that processes share; pages are read when they are used.

        If the file was written to since it was made, all blocks are checked first.
        """
        mapped = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        _ask_for_large_pages(mapped)
        if self.size_and_mtime[1] != self.index.written * 10**9:
            for block in self.blocks:
                self.check(block, zlib.crc32(memoryview(mapped)[block.offset :][: block.size]))
        return np.frombuffer(mapped, np.uint8)

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the file's bytes from `offset` on.

        The address of `memory`, its length and `offset` must be multiples of `ALIGNMENT`. Raises
        SequoiaPlanError if the file was written to since it was opened.
        """
        if self.fd < 0:
            raise SequoiaPlanError(f"{self.path}: is closed; load the models again")
        bytes_read = 0
        while bytes_read < len(memory):
            try:
                count = self._read_at(offset + bytes_read, memory[bytes_read:])
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
        self.check_unchanged()

    def _read_at(self, offset: int, memory: memoryview) -> int:
        """Read into memory; returns how many bytes there are."""
        if hasattr(os, "preadv"):
            return os.preadv(self.fd, [memory], offset)
        with open(self.path, "rb", buffering=0) as file:  # Windows replaces no open file
            file.seek(offset)
            return file.readinto(memory)

    def check(self, block: WeightBlock, checksum: int) -> None:
        """Compare the checksum of a block that was read."""
        if checksum != block.checksum:
            raise SequoiaPlanError(
                f"{self.path}: the block at {block.offset} has the checksum {checksum:08x}, "
                f"expected {block.checksum:08x}: it was damaged; {REMEDY}"
            )

    def check_unchanged(self) -> None:
        """Check that nobody has written into the file since it was opened."""
        if self.fd >= 0 and _size_and_mtime(self.fd) != self.size_and_mtime:
            raise SequoiaPlanError(f"{self.path}: was written to while it was in use; {REMEDY}")

    def memory_of(self, block: WeightBlock, size: int | None = None) -> Tensor:
        """Read and check a whole block. Returns its bytes (uint8), or at least `size` of them."""
        memory = aligned_memory(block.size if size is None else round_up(size, ALIGNMENT))
        checksum, target = 0, bytes_of(memory)
        for start in chain([0], range(len(memory), block.size, CHUNK_BYTES)):
            if start == len(memory):  # the rest is only checked
                target = bytes_of(aligned_memory(CHUNK_BYTES))
            target = target[: block.size - start]
            self.read(block.offset + start, target)
            checksum = zlib.crc32(target, checksum)
        self.check(block, checksum)
        return memory


def aligned_memory(size: int) -> Tensor:
    """uint8 [size]: zeros that begin at a page."""
    # what a process and its forks share would be overwritten by each other's passes
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(size, 1), **private)
    _ask_for_large_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def bytes_of(memory: Tensor) -> memoryview:
    """A CPU tensor (uint8) as a buffer to read into."""
    view = memory.numpy().data
    return view.cast("B") if memory.numel() else view


def _ask_for_large_pages(memory: mmap.mmap) -> None:
    """With pages of 4 KB, reading weights once takes up to twice as long."""
    with suppress(AttributeError, OSError):  # systems and kernels without them
        memory.madvise(mmap.MADV_HUGEPAGE)


def _read_index(path: Path, fingerprint: str | None) -> Index:
    """The index of a file that was made from such a source (None: from any) and is whole."""
    with open(path, "rb") as file:
        start_of_end = max(file.seek(0, os.SEEK_END) - INDEX_END.size, 0)
        file.seek(start_of_end)
        length, checksum = INDEX_END.unpack(file.read().rjust(INDEX_END.size))
        file.seek(max(start_of_end - length, 0))
        data = file.read(min(length, MAX_INDEX_BYTES))
    if zlib.crc32(data) != checksum:
        raise SequoiaPlanError(f"{path}: its index was damaged, or it was cut off; {REMEDY}")
    try:
        index = msgspec.json.decode(data, type=Index)
    except msgspec.DecodeError as error:
        raise SequoiaPlanError(f"{path}: not a file of weights; {REMEDY}") from error
    if index.version != VERSION or fingerprint not in (None, index.source.fingerprint):
        raise SequoiaPlanError(
            f"{path}: made from another model, or from one that has changed since; {REMEDY}"
        )
    return index


def _open_past_page_cache(path: Path) -> int:
    """Open a file to be read past the page cache, where system and file system can."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, flags)


def _reserve(file: BinaryIO, size: int) -> None:
    """Give a file its room: a full disk is an error here; later, it would be a signal."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    for start in range(0, size, CHUNK_BYTES):
        file.write(bytes(min(CHUNK_BYTES, size - start)))
    file.flush()


def _size_and_mtime(fd: int) -> tuple[int, int]:
    """An open file's bytes, and the time of its last change in nanoseconds."""
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


WeightLayout = Sequence[Mapping[str, Place]]
"""The tensors of each block by name; where they start is still to be found."""
Fill = Callable[[str, Bytes], None]
"""Writes the tensor of a name into its memory, which is zeros before."""


def place_blocks(layout: WeightLayout) -> tuple[WeightBlock, ...]:
    """Blocks of a layout, one after the other; a packed head is split. Checksums are still 0."""
    blocks, offset = [], 0
    for tensors in layout:
        places, size = {}, 0
        for name, place in tensors.items():
            places[name] = structs.replace(place, start=size)
            size = round_up(size + place.size, TENSOR_ALIGNMENT)
        blocks.append(WeightBlock(offset, round_up(size, ALIGNMENT), 0, places))
        offset += blocks[-1].size
    *layers, last = blocks
    inside = list(last.tensors.values())
    if layers and len(inside) == 1 and inside[0].format:  # the head: whole pages of whole tiles
        unit = math.lcm(inside[0].shape[1], ALIGNMENT)
        piece = max(max(block.size for block in layers[1:] or layers) // unit, 1) * unit
        blocks[-1:] = [
            WeightBlock(last.offset + at, min(piece, last.size - at), 0, {} if at else last.tensors)
            for at in range(0, last.size, piece)
        ]
    return tuple(blocks)


def write_weights(
    path: Path,
    layout: WeightLayout,
    fill: Fill,
    source: Callable[[], Source],
    on_bytes: OnBytes = lambda done, total: None,
) -> None:
    """Write a file of weights beside `path`, then rename it to `path`.

    Tensors are written where they lie in the file, mapped, so they take no memory of this process.
    `source` is called once they are there; `on_bytes` now and then, with the bytes so far and all.
    """
    blocks, unfinished = place_blocks(layout), unfinished_path(path)
    size = blocks[-1].offset + blocks[-1].size
    try:
        with open(unfinished, "w+b") as file:
            _reserve(file, size)
            written = _fill_blocks(file.fileno(), size, blocks, fill, on_bytes)
            file.seek(size)
            seconds = int(time.time()) // 2 * 2  # which any file system notes exactly
            file.write(Index(VERSION, seconds, source(), written).to_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.utime(unfinished, (seconds, seconds))
        os.replace(unfinished, path)
    finally:
        with suppress(PermissionError):  # Windows, where an error keeps it mapped
            unfinished.unlink(missing_ok=True)


def _fill_blocks(
    fd: int, size: int, blocks: Sequence[WeightBlock], fill: Fill, on_bytes: OnBytes
) -> tuple[WeightBlock, ...]:
    """Fill the blocks of a file; it is mapped meanwhile, as Windows renames no file that is."""
    mapped, done = mmap.mmap(fd, size), 0
    _ask_for_large_pages(mapped)
    memory = np.frombuffer(mapped, np.uint8)

    def fill_tensors(block: WeightBlock) -> None:
        """Fill a block's tensors."""
        nonlocal done
        for name, place in block.tensors.items():
            start = block.offset + place.start
            fill(name, memory[start : start + place.size])
            done += place.size
            on_bytes(done, size)

    def with_checksum(block: WeightBlock) -> WeightBlock:
        """A block that is filled, with its checksum."""
        content = memory[block.offset : block.offset + block.size]
        return structs.replace(block, checksum=zlib.crc32(content.data))

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(fill_tensors, blocks))
        return tuple(writers.map(with_checksum, blocks))


def unfinished_path(path: Path) -> Path:
    """The file beside `path` that is written first, and renamed to it in the end."""
    return path.with_name(f".{path.name}.unfinished")
