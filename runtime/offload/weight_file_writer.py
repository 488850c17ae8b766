"""Writes the files of weights that `weight_file.py` reads."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.cache import round_up
from sequoia_plan.runtime.offload.weight_file import (
    ALIGNMENT,
    DTYPES,
    FORMAT,
    PADDING,
    bytes_of,
    header_checksum,
)

WeightLayout = Sequence[Mapping[str, Tensor]]
"""The tensors of each block by name; only their dtypes and shapes count."""


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
    with FileLock(path.with_name(f".{path.name}.lock")):
        _unfinished(path).unlink(missing_ok=True)
        yield


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
        "source": source,
        "blocks": [[offset, size, f"{checksum:08x}"] for offset, size, checksum in blocks],
    }
    metadata["checksum"] = header_checksum(entries, metadata)
    header = {"__metadata__": {"sequoia_plan": json.dumps(metadata)}, **entries}
    encoded = json.dumps(header).encode()
    # safetensors begins with the header's length in 8 bytes; spaces fill up to the alignment
    encoded += b" " * (-(len(encoded) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded
