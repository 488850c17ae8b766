"""A model's weights in one file, in the order in which a pass needs them, to be read in blocks.

The file is a safetensors file. The first block has what is outside the layers; one block for each
layer follows. Each block begins at a multiple of 4,096 bytes, as reads past the page cache require;
tensors named `padding.N` fill the gaps. Each block has a checksum.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError

FORMAT = "sequoia-plan-weights-1"
ALIGNMENT = 4096
"""Offsets, sizes and addresses of reads are multiples of so many bytes."""
MAX_HEADER_BYTES = 1 << 28
PADDING = "padding."
"""The names of tensors that fill gaps begin so."""
REMEDY = "delete it, and it will be made again"
"""Ends the messages about a file that cannot be used."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""dtypes by safetensors' names."""


@dataclass(frozen=True)
class Place:
    """Where a tensor is in its block: its dtype, its shape, and the byte that it starts at."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * math.prod(self.shape)

    def view(self, memory: Tensor) -> Tensor:
        """The tensor as a view of `memory` (uint8), which holds the block."""
        return memory[self.start : self.start + self.size].view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class WeightBlock:
    """A block: its bytes [offset, offset + size) in the file, their CRC-32, its tensors by name."""

    offset: int
    size: int
    checksum: int
    tensors: Mapping[str, Place]

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The block's tensors by name, as views of `memory` (uint8), which holds the block."""
        return {name: place.view(memory) for name, place in self.tensors.items()}


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
    return view.cast("B")


def header_checksum(entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """CRC-32 of everything in the header but the checksum itself."""
    checked = {key: value for key, value in metadata.items() if key != "checksum"}
    return f"{zlib.crc32(json.dumps([entries, checked], sort_keys=True).encode()):08x}"


def _read_blocks(path: Path, source: str | None) -> tuple[WeightBlock, ...]:
    """The blocks of a file that was made from `source` (None: from any) and is whole."""
    try:
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            entries = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
            file_size = os.fstat(file.fileno()).st_size
        metadata = json.loads(entries.pop("__metadata__")["sequoia_plan"])
        is_whole = (
            metadata["format"] == FORMAT
            and metadata["checksum"] == header_checksum(entries, metadata)
            and file_size == 8 + length + sum(size for _, size, _ in metadata["blocks"])
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise SequoiaPlanError(f"{path}: not a file of weights; {REMEDY}") from error
    if not is_whole:
        raise SequoiaPlanError(f"{path}: its header was damaged, or it was cut off; {REMEDY}")
    if source not in (None, metadata["source"]):
        raise SequoiaPlanError(
            f"{path}: made from another model, or from one that has changed since; {REMEDY}"
        )
    starts = sorted(
        (entry["data_offsets"][0], name)
        for name, entry in entries.items()
        if not name.startswith(PADDING)
    )
    blocks = []
    for offset, size, checksum in metadata["blocks"]:
        places: dict[str, Place] = {}
        for start, name in starts:
            if offset <= start < offset + size:
                dtype, shape = DTYPES[entries[name]["dtype"]], tuple(entries[name]["shape"])
                places[name] = Place(dtype, shape, start - offset)
        blocks.append(WeightBlock(8 + length + offset, size, int(checksum, 16), places))
    return tuple(blocks)


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
