"""A model's weights in one file, in the order in which a pass needs them, so that they can be read block by block.

The file is a safetensors file. Each block (what is outside the layers, then one layer after the other) begins at a multiple of 4,096
bytes, as reads that go past the page cache require; tensors named `padding.N` fill the gaps. Each block has a checksum.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError

FORMAT, VERSION = "sequoia-plan-weights", 1
ALIGNMENT = 4096
LARGEST_HEADER = 1 << 28
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
"""safetensors' names."""


@dataclass(frozen=True)
class Place:
    """Where a tensor is in its block: dtype, shape, and the bytes from `start` on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in `memory` (uint8), which holds the block."""
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return memory[self.start : self.start + count].view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class Block:
    """One block: its bytes [offset, offset + size) in the file, their CRC-32, and its tensors by name."""

    offset: int
    size: int
    checksum: int
    tensors: Mapping[str, Place]


class WeightFile:
    """An open file of weights. Several processes may have it open; one that is renamed over it leaves this one as it is.

    Attributes:
        blocks: in file order.

    Raises:
        SequoiaPlanError: if the file is damaged, or was made from another source.
    """

    def __init__(self, path: Path, source: str | None = None) -> None:
        self.path = path
        try:
            self.fd = _open(path)
            try:
                self.blocks = _read_header(path, source)
                self.state = _state(self.fd)
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
        """Fill `memory` from `offset` on. Both, and the length, must be multiples of `ALIGNMENT`.

        Raises:
            SequoiaPlanError: if the file ends before, or cannot be read.
        """
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self.fd, [memory[done:]], offset + done)
            except OSError as error:
                raise SequoiaPlanError(f"{self.path}: cannot be read ({error.strerror or error}); delete it, and it will be made again") from error
            if count == 0:
                raise SequoiaPlanError(f"{self.path}: ends at {offset + done} bytes, expected more: it was cut off; delete it, and it will be made again")
            done += count

    def check(self, block: Block, memory: memoryview) -> None:
        """Compare a block that was read with its checksum.

        Raises:
            SequoiaPlanError: if they differ.
        """
        found = zlib.crc32(memory[: block.size])
        if found != block.checksum:
            raise SequoiaPlanError(
                f"{self.path}: the block at {block.offset} has the checksum {found:08x}, expected {block.checksum:08x}: it was damaged; "
                "delete it, and it will be made again"
            )

    def check_unchanged(self) -> None:
        """Has somebody written into the file since it was opened?

        Raises:
            SequoiaPlanError: if so.
        """
        if _state(self.fd) != self.state:
            raise SequoiaPlanError(f"{self.path}: was written to while it was in use; delete it, and it will be made again")

    def load(self, block: Block) -> dict[str, Tensor]:
        """A block's tensors, in memory of their own that holds nothing else."""
        memory = self.memory_of(block)
        return {name: place.view(memory) for name, place in block.tensors.items()}

    def memory_of(self, block: Block) -> Tensor:
        """A block's bytes (uint8), checked.

        Raises:
            SequoiaPlanError: if they cannot be read, or are damaged.
        """
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


Layout = Sequence[Mapping[str, Tensor]]
"""The tensors of each block by name; only their dtypes and shapes count."""


def write_weights(path: Path, layout: Layout, load: Callable[[str], Tensor], source: str) -> None:
    """Write a file of weights beside `path`, then rename it.

    Args:
        load: gives a tensor by name; it is asked for one after the other, in file order.
        source: says what the weights were made from; `WeightFile` refuses a file made from something else.

    Raises:
        SequoiaPlanError: if the file cannot be written; `path` is then as it was.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            entries, blocks = _plan(layout)
            start = len(_header(entries, [(offset, size, 0) for offset, size in blocks], source))
            file.seek(start)
            checksums = []
            for (_, size), tensors in zip(blocks, layout, strict=True):
                checksum = written = 0
                for name, like in tensors.items():
                    data = load(name).to(device="cpu", dtype=like.dtype).reshape(like.shape).contiguous()
                    raw = bytes_of(data.view(-1).view(torch.uint8)) if data.numel() else b""
                    file.write(raw)
                    checksum, written = zlib.crc32(raw, checksum), written + len(raw)
                file.write(gap := bytes(size - written))
                checksums.append(zlib.crc32(gap, checksum))
            file.seek(0)
            file.write(_header(entries, [(*block, checksum) for block, checksum in zip(blocks, checksums, strict=True)], source))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise SequoiaPlanError(
            f"{path}: cannot be written ({error.strerror or error}); it takes as much room as the weights: free some, or set SEQUOIA_PLAN_CACHE "
            "to a folder that has it"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Only one process at a time is in here for `path`; it may remove what a killed one left unfinished."""
    with open(path.with_name(f".{path.name}.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.with_name(f".{path.name}.unfinished").unlink(missing_ok=True)
        yield


def _plan(layout: Layout) -> tuple[dict[str, dict[str, Any]], list[tuple[int, int]]]:
    """safetensors' entries by name, and each block's offset (from where the data begins) and size."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, dict[str, Any]] = {}
    blocks: list[tuple[int, int]] = []
    at = 0
    for number, tensors in enumerate(layout):
        begin = at
        for name, like in tensors.items():
            end = at + like.numel() * like.dtype.itemsize
            entries[name] = {"dtype": names[like.dtype], "shape": list(like.shape), "data_offsets": [at, end]}
            at = end
        end = -(-at // ALIGNMENT) * ALIGNMENT
        if end > at:
            entries[f"padding.{number}"] = {"dtype": "U8", "shape": [end - at], "data_offsets": [at, end]}
        blocks.append((begin, end - begin))
        at = end
    return entries, blocks


def _header(entries: Mapping[str, Any], blocks: Sequence[tuple[int, int, int]], source: str) -> bytes:
    """The file's first bytes, a multiple of `ALIGNMENT`; as many whatever the checksums are."""
    ours = {"format": FORMAT, "version": VERSION, "source": source, "blocks": [[offset, size, f"{checksum:08x}"] for offset, size, checksum in blocks]}
    ours["checksum"] = _checksum(entries, ours)
    text = json.dumps({"__metadata__": {"sequoia_plan": json.dumps(ours)}, **entries}).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _checksum(entries: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Of all the header says."""
    return f"{zlib.crc32(json.dumps([entries, {name: ours[name] for name in ours if name != 'checksum'}], sort_keys=True).encode()):08x}"


def _read_header(path: Path, source: str | None) -> tuple[Block, ...]:
    again = "delete it, and it will be made again"
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= LARGEST_HEADER:
            raise SequoiaPlanError(f"{path}: not a file of weights (its header would have {length} bytes); {again}")
        try:
            entries = json.loads(file.read(length))
            ours = json.loads(entries.pop("__metadata__")["sequoia_plan"])
            if (ours["format"], ours["version"]) != (FORMAT, VERSION):
                raise SequoiaPlanError(f"{path}: format {ours['format']!r:.40}, version {ours['version']!r:.40}, expected {FORMAT}, {VERSION}; {again}")
            if ours["checksum"] != _checksum(entries, ours):
                raise SequoiaPlanError(f"{path}: its header does not fit its checksum: it was damaged; {again}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SequoiaPlanError(f"{path}: not a file of weights written by sequoia-plan; {again}") from error
        if source not in (None, ours["source"]):
            raise SequoiaPlanError(f"{path}: made from another model, or from one that has changed since; {again}")
        start, end = 8 + length, os.fstat(file.fileno()).st_size
    blocks, tensors = [], sorted(((entry["data_offsets"][0], name, entry) for name, entry in entries.items() if not name.startswith("padding.")))
    expected = start + sum(size for _, size, _ in ours["blocks"])
    if end != expected:
        raise SequoiaPlanError(f"{path}: {end} bytes, expected {expected}: it was cut off or written to; {again}")
    for offset, size, checksum in ours["blocks"]:
        mine = [(at - offset, name, entry) for at, name, entry in tensors if offset <= at < offset + size]
        places = {name: Place(DTYPES[entry["dtype"]], tuple(entry["shape"]), at) for at, name, entry in mine}
        blocks.append(Block(start + offset, size, int(checksum, 16), places))
    return tuple(blocks)


def _open(path: Path) -> int:
    """Past the page cache where the file system can."""
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, os.O_RDONLY)


def _state(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns
