"""Writes the files of weights that `weight_file.py` reads."""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from filelock import FileLock
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.models.dtype import dtype_name
from sequoia_plan.runtime.offload.weight_file import (
    ALIGNMENT,
    Index,
    Place,
    WeightBlock,
    bytes_of,
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
            blocks = tuple(_write_block(file, tensors, load) for tensors in layout)
            file.write(Index(source, blocks).to_bytes())
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
    file: IO[bytes], tensors: Mapping[str, Tensor], load: Callable[[str], Tensor]
) -> WeightBlock:
    """Write a block's tensors, and zeros up to the next block's begin."""
    places: dict[str, Place] = {}
    offset, size, checksum = file.tell(), 0, 0
    for name, expected in tensors.items():
        tensor = load(name).to(device="cpu", dtype=expected.dtype)
        tensor = tensor.reshape(expected.shape).contiguous()
        data = bytes_of(tensor.view(-1).view(torch.uint8)) if tensor.numel() else b""
        file.write(data)
        checksum = zlib.crc32(data, checksum)
        places[name] = Place(dtype_name(expected.dtype), tuple(expected.shape), size)
        size += len(data)
    padding = bytes(-size % ALIGNMENT)
    file.write(padding)
    return WeightBlock(offset, size + len(padding), zlib.crc32(padding, checksum), places)
