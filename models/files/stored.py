"""Weights as they are stored: rows of bytes in a file's own format, read part by part."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from msgspec import Struct
from safetensors import safe_open
from torch import Tensor, nn

from sequoia_plan.models.base.dtype import Bytes, Float32, Shape

DTYPE_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""ggml's names of floating-point formats."""
SAMPLES, SAMPLE_BYTES = 256, 4096
"""So many samples of so many bytes, spread over a file, tell its content apart."""


class Source(Struct, frozen=True):
    """What weights were made from.

    A hash that is quickly found again, the files' sizes and times, and a hash of all of it.
    """

    fingerprint: str
    times: tuple[int, ...] = ()
    content: str = ""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [outputs, inputs] in one of ggml's formats.

    `read(first, end)` gives the bytes of some rows, uint8 [end - first, bytes of a row].
    """

    format: str
    outputs: int
    inputs: int
    read: Callable[[int, int], Bytes]

    def in_dtype(self, dtype: torch.dtype) -> StoredMatrix:
        """The same matrix, whose rows are rounded to a dtype when they are read."""
        if self.format == DTYPE_FORMATS[dtype]:
            return self
        return replace(
            self,
            format=DTYPE_FORMATS[dtype],
            read=lambda first, end: bytes_of_rows(self.dense(first, end).to(dtype)),
        )

    def dense(self, first: int = 0, end: int | None = None) -> Tensor:
        """Some rows, float32 [rows, inputs]."""
        rows = self.read(first, self.outputs if end is None else end)
        return torch.from_numpy(decoded_rows(self.format, rows))


class WeightSource(Protocol):
    """The weights of a Llama-like model by transformers' names, and the files that they are in."""

    files: list[Path]

    def shapes(self) -> dict[str, Shape]:
        """The shape of each tensor."""

    def matrix(self, name: str) -> StoredMatrix:
        """A tensor of two dimensions."""

    def vector(self, name: str) -> Float32:
        """A tensor of one dimension."""


class CheckpointSource:
    """The weights of a folder's safetensors files (see `WeightSource`)."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.safetensors"))
        opened = [safe_open(file, framework="pt") for file in self.files]
        self.file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def shapes(self) -> dict[str, Shape]:
        return {n: tuple(f.get_slice(n).get_shape()) for n, f in self.file_of.items()}

    def matrix(self, name: str) -> StoredMatrix:
        rows = self.file_of[name].get_slice(name)
        return stored_matrix(rows, rows.get_shape())

    def vector(self, name: str) -> Float32:
        return self.file_of[name].get_tensor(name).float().numpy()


class ModuleSource:
    """The weights of a module in memory (see `WeightSource`)."""

    files: list[Path] = []

    def __init__(self, module: nn.Module) -> None:
        self.tensors = dict(module.named_parameters())  # tied ones once

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def matrix(self, name: str) -> StoredMatrix:
        return stored_matrix(self.tensors[name].detach())

    def vector(self, name: str) -> Float32:
        return self.tensors[name].detach().float().numpy()


def stored_matrix(weight: Any, shape: Sequence[int] = ()) -> StoredMatrix:
    """A matrix as rows of bytes: a tensor, or a slice of a file with its `shape`."""
    outputs, inputs = shape or weight.shape
    return StoredMatrix(
        DTYPE_FORMATS[weight[:0].dtype],
        outputs,
        inputs,
        lambda first, end: bytes_of_rows(weight[first:end]),
    )


def bytes_of_rows(rows: Tensor) -> Bytes:
    """float [n, inputs] -> uint8 [n, bytes of a row]."""
    return rows.contiguous().view(torch.uint8).reshape(len(rows), -1).numpy()


def decoded_rows(format: str, rows: Bytes) -> Float32:
    """Rows of bytes in one of ggml's formats as float32 [n, inputs]."""
    rows = np.ascontiguousarray(rows)
    if format == "F32":
        return rows.view(np.float32)
    if format == "F16":
        return rows.view(np.float16).astype(np.float32)
    if format == "BF16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    from gguf import GGMLQuantizationType, dequantize  # of the extra gguf

    return dequantize(rows, GGMLQuantizationType[format])


def content_of(files: Sequence[Path]) -> str:
    """The SHA-256 of a file; of several, that of all of theirs."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256(str(digests).encode()).hexdigest()


def fingerprint(files: Sequence[Path]) -> Source:
    """A hash of files' sizes and of samples of their content, and `times`: what a change changes.

    The time of an inode's change is among that, which nobody can set.
    """
    crc, sizes, times = 0, [], []
    for path in files:
        status = path.stat()
        sizes.append(status.st_size)
        times += [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(number * max(status.st_size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                crc = zlib.crc32(file.read(SAMPLE_BYTES), crc)
    return Source(hashlib.sha256(f"{sizes} {crc}".encode()).hexdigest()[:16], tuple(times))
