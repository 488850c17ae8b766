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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.cache import round_up

FORMAT, VERSION = "sequoia-plan-drafts", 1
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

WeightLayout = Sequence[Mapping[str, Tensor]]
"""The tensors of each block by name; only their dtypes and shapes count."""


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
            self.fd = _open_past_page_cache(path)
            try:
                self.blocks = _read_header(path, source)
                self.size_and_mtime = _size_and_mtime(self.fd)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise SequoiaPlanError(f"{path}: cannot be read ({error.strerror or error})") from error

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

    def load(self, block: WeightBlock) -> dict[str, Tensor]:
        """Read a block's tensors into memory that holds nothing else."""
        return block.views(self.memory_of(block))

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


def write_weights(
    path: Path, layout: WeightLayout, load: Callable[[str], Tensor], source: str
) -> None:
    """Write a file of weights beside `path`, then rename it to `path`."""
    unfinished = _unfinished(path)
    try:
        with open(unfinished, "wb") as file:
            entries, extents = _plan_blocks(layout)
            # The header's length does not depend on the checksums, which are known at the end.
            without_checksums = [(offset, size, 0) for offset, size in extents]
            file.seek(len(_header(entries, without_checksums, source)))
            blocks = [
                (offset, size, _write_block(file, size, tensors, load))
                for (offset, size), tensors in zip(extents, layout, strict=True)
            ]
            file.seek(0)
            file.write(_header(entries, blocks, source))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise SequoiaPlanError(
            f"{path}: cannot be written ({error.strerror or error}); it takes as much room as the "
            "weights: free some, or set SEQUOIA_PLAN_CACHE to a folder that has it"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Let one process at a time work on `path`, and remove what a killed one left unfinished."""
    with open(path.with_name(f".{path.name}.lock"), "wb") as lock_file:
        _lock(lock_file)
        _unfinished(path).unlink(missing_ok=True)
        yield


def _lock(file: IO[bytes]) -> None:
    """Wait for the lock on a file, which lasts until the file is closed."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes may both write the file
        return
    fcntl.flock(file, fcntl.LOCK_EX)


def _unfinished(path: Path) -> Path:
    """The file beside `path` that is written first, and renamed to it in the end."""
    return path.with_name(f".{path.name}.unfinished")


def _write_block(
    file: IO[bytes], size: int, tensors: Mapping[str, Tensor], load: Callable[[str], Tensor]
) -> int:
    """Write a block's tensors, and zeros up to its `size`. Returns its CRC-32."""
    checksum = written = 0
    for name, expected in tensors.items():
        tensor = load(name).to(device="cpu", dtype=expected.dtype)
        tensor = tensor.reshape(expected.shape).contiguous()
        data = bytes_of(tensor.view(-1).view(torch.uint8)) if tensor.numel() else b""
        file.write(data)
        checksum = zlib.crc32(data, checksum)
        written += len(data)
    padding = bytes(size - written)
    file.write(padding)
    return zlib.crc32(padding, checksum)


def _plan_blocks(
    layout: WeightLayout,
) -> tuple[dict[str, dict[str, Any]], list[tuple[int, int]]]:
    """safetensors' entries by name, and each block's offset (in the data) and size."""
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, dict[str, Any]] = {}
    extents: list[tuple[int, int]] = []
    offset = 0
    for number, tensors in enumerate(layout):
        block_start = offset
        for name, tensor in tensors.items():
            end = offset + tensor.numel() * tensor.dtype.itemsize
            entries[name] = {
                "dtype": dtype_names[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        end = round_up(offset, ALIGNMENT)
        if end > offset:
            entries[f"{PADDING}{number}"] = {
                "dtype": "U8",
                "shape": [end - offset],
                "data_offsets": [offset, end],
            }
        extents.append((block_start, end - block_start))
        offset = end
    return entries, extents


def _header(
    entries: Mapping[str, Any], blocks: Sequence[tuple[int, int, int]], source: str
) -> bytes:
    """The file's first bytes, a multiple of `ALIGNMENT`. Checksums do not change their number."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "blocks": [[offset, size, f"{checksum:08x}"] for offset, size, checksum in blocks],
    }
    metadata["checksum"] = _header_checksum(entries, metadata)
    header = {"__metadata__": {"sequoia_plan": json.dumps(metadata)}, **entries}
    encoded = json.dumps(header).encode()
    # safetensors begins with the header's length in 8 bytes; spaces fill up to the alignment
    encoded += b" " * (-(len(encoded) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded


def _header_checksum(entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """CRC-32 of everything in the header but the checksum itself."""
    checked = {key: value for key, value in metadata.items() if key != "checksum"}
    return f"{zlib.crc32(json.dumps([entries, checked], sort_keys=True).encode()):08x}"


def _read_header(path: Path, source: str | None) -> tuple[WeightBlock, ...]:
    """Read and check a file's header; see `WeightFile`."""
    with open(path, "rb") as file:
        length_bytes = file.read(8)
        length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else 0
        if not 0 < length <= MAX_HEADER_BYTES:
            raise SequoiaPlanError(
                f"{path}: not a file of weights (its header would have {length} bytes); {REMEDY}"
            )
        try:
            entries = json.loads(file.read(length))
            metadata = json.loads(entries.pop("__metadata__")["sequoia_plan"])
            _check_metadata(path, entries, metadata)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SequoiaPlanError(
                f"{path}: not a file of weights written by sequoia-plan; {REMEDY}"
            ) from error
        if source not in (None, metadata["source"]):
            raise SequoiaPlanError(
                f"{path}: made from another model, or from one that has changed since; {REMEDY}"
            )
        file_size = os.fstat(file.fileno()).st_size
    data_start = 8 + length
    expected_size = data_start + sum(size for _, size, _ in metadata["blocks"])
    if file_size != expected_size:
        raise SequoiaPlanError(
            f"{path}: {file_size} bytes, expected {expected_size}: it was cut off or written to; "
            f"{REMEDY}"
        )
    return _blocks_of(entries, metadata["blocks"], data_start)


def _check_metadata(path: Path, entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Raise SequoiaPlanError for another format or version, or if the header was damaged."""
    if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
        raise SequoiaPlanError(
            f"{path}: format {metadata['format']!r:.40}, version {metadata['version']!r:.40}, "
            f"expected {FORMAT}, {VERSION}; {REMEDY}"
        )
    if metadata["checksum"] != _header_checksum(entries, metadata):
        raise SequoiaPlanError(
            f"{path}: its header does not fit its checksum: it was damaged; {REMEDY}"
        )


def _blocks_of(
    entries: Mapping[str, Any], extents: Sequence[tuple[int, int, str]], data_start: int
) -> tuple[WeightBlock, ...]:
    """The blocks that a header describes."""
    starts = sorted(
        (entry["data_offsets"][0], name)
        for name, entry in entries.items()
        if not name.startswith(PADDING)
    )
    blocks = []
    for offset, size, checksum in extents:
        places: dict[str, Place] = {}
        for start, name in starts:
            if offset <= start < offset + size:
                dtype, shape = DTYPES[entries[name]["dtype"]], tuple(entries[name]["shape"])
                places[name] = Place(dtype, shape, start - offset)
        blocks.append(WeightBlock(data_start + offset, size, int(checksum, 16), places))
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
