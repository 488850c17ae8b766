"""A GGUF file: its metadata and where its tensors lie. Nothing of the weights is read.

The package gguf reads a vocabulary entry by entry, which takes seconds.
"""

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.dtype import Bytes, Shape

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""By a value's type in a file: its form for `struct`."""
STRING, ARRAY = 8, 9
SPLIT_COUNT = "split.count"

FOREIGN = (
    "4 Q4_2, 5 Q4_3, 31 Q4_0_4_4, 32 Q4_0_4_8, 33 Q4_0_8_8, 37 IQ4_NL_4_8, 38 IQ4_NL_8_8: that "
    "llama.cpp had before; 36 I2_S: of BitNet's llama.cpp; 133 Q6_0, 134 IQ1_BN, 135 IQ2_BN, "
    "137 IQ2_K, 138 IQ3_K, 139 IQ4_K, 140 IQ5_K, 141 IQ6_K, 144 IQ4_KS, 145 IQ2_KS, 146 IQ4_KSS, "
    "152 IQ5_KS, 153 IQ2_KT, 154 IQ3_KT, 155 IQ4_KT, 156 IQ3_KS, 157 IQ2_KL, 158 IQ1_KT: of "
    "ik_llama.cpp"
)
"""Types of tensors that llama.cpp does not have, with what has them."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: ggml's name of its format, its shape as PyTorch has it, and where its rows lie.

    A row has the last dimension.
    """

    path: Path
    format: str
    shape: Shape
    offset: int
    row_bytes: int

    def read(self, first: int = 0, end: int | None = None) -> Bytes:
        """The bytes of some rows, uint8 [rows, bytes of one]."""
        end = math.prod(self.shape[:-1]) if end is None else end
        start, count = self.offset + first * self.row_bytes, (end - first) * self.row_bytes
        return np.fromfile(self.path, np.uint8, count, offset=start).reshape(-1, self.row_bytes)


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its metadata by key, and where its tensors lie, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return self.metadata["general.architecture"]

    @property
    def settings(self) -> dict[str, Any]:
        """The metadata of the architecture, without its name."""
        return self.under(f"{self.architecture}.")

    def under(self, prefix: str) -> dict[str, Any]:
        """The metadata whose keys begin with a prefix, without it."""
        return {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix)
        }


def read_gguf(path: Path) -> GgufFile:
    """Read a file's metadata and the places of its tensors.

    Raises:
        SequoiaPlanError: if it is no whole GGUF file, a part of a split one, or not read.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # of the extra gguf

    if not path.is_file():
        raise SequoiaPlanError(f"{path}: no such file; expected a GGUF model")
    reader = _Reader(np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, "u1"))
    try:
        metadata, entries = reader.header()
        if "general.architecture" not in metadata:
            raise ValueError("its metadata has no general.architecture")
        alignment = metadata.get("general.alignment", 32)
        start, tensors = -(-reader.place // alignment) * alignment, {}
        names = {name for name, *_ in entries}
        for name, shape, kind, offset in entries:
            if kind not in set(GGMLQuantizationType):
                raise _not_read(path, name, kind)
            format = GGMLQuantizationType(kind)
            block_size, block_bytes = GGML_QUANT_SIZES[format]
            if shape[-1] % block_size:
                raise ValueError(
                    f"tensor {name} has rows of {shape[-1]} numbers in {format.name}, expected a "
                    f"multiple of {block_size}"
                )
            row_bytes = shape[-1] // block_size * block_bytes
            first, count = start + offset, math.prod(shape[:-1])
            if first + count * row_bytes > len(reader.view):
                raise ValueError(f"it ends at {len(reader.view)} bytes, inside tensor {name}")
            tensors[name] = GgufTensor(path, format.name, shape, first, row_bytes)
            if format.name == "NVFP4" and (scale := name.replace(".weight", ".scale")) in names:
                raise _not_read(path, name, kind, f"NVFP4 with the tensor {scale}")
    except SequoiaPlanError:
        raise
    except Exception as error:  # a damaged file may say anything
        raise SequoiaPlanError(f"{path}: no whole GGUF file ({error}); get it again") from error
    if (count := metadata.get(SPLIT_COUNT, 1)) > 1:
        raise SequoiaPlanError(
            f"{path}: one of {count} parts of a model; merge them: llama-gguf-split --merge "
            f"{path.name} merged.gguf"
        )
    return GgufFile(path, metadata, tensors)


def _not_read(path: Path, name: str, kind: int, text: str = "") -> SequoiaPlanError:
    """The error for a tensor of a type that is not read; `text`: what the type is, if known."""
    if match := re.search(rf"\b{kind} (\w+)[^:]*:([^;]+)", FOREIGN):
        text = "".join(match.groups())
    return SequoiaPlanError(
        f"{path}: tensor {name} has ggml's type {kind} ({text or 'of a fork, or too new'}), which "
        "is not read; take a file in another format, as Q4_K_M of llama.cpp's llama-quantize"
    )


class _Reader:
    """Reads values one after the other from the bytes of a file."""

    def __init__(self, data: Bytes) -> None:
        self.place, self.view = 0, data.data

    def header(self) -> tuple[dict[str, Any], list[tuple[str, Shape, int, int]]]:
        """The metadata; and for each tensor its name, shape, ggml's type, and offset in bytes."""
        if bytes(self.view[:4]) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.place = 4
        version, num_tensors, num_values = self.numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, expected 2 or 3")
        metadata = {}
        for _ in range(num_values):
            key = self.string()
            metadata[key] = self.value(*self.numbers("I"))
        entries = []
        for _ in range(num_tensors):
            name, (num_dimensions,) = self.string(), self.numbers("I")
            entries.append((name, self.numbers(f"{num_dimensions}Q")[::-1], *self.numbers("IQ")))
        return metadata, entries

    def numbers(self, form: str) -> tuple[Any, ...]:
        """The next numbers, little-endian, in the form of `struct`, as "IQ"."""
        values = struct.unpack_from(f"<{form}", self.view, self.place)
        self.place += struct.calcsize(f"<{form}")
        return values

    def string(self) -> str:
        """The next text."""
        (length,) = self.numbers("Q")
        start, self.place = self.place, self.place + length
        if self.place > len(self.view):
            raise ValueError(f"it ends at {len(self.view)} bytes")
        return str(self.view[start : self.place], "utf-8")

    def value(self, kind: int) -> Any:
        """The next value of a type (its number in GGUF): a number, a text, or a list of these."""
        if kind == STRING:
            return self.string()
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind])[0]
        if kind != ARRAY:
            raise ValueError(f"a value of the unknown type {kind}")
        kind, count = self.numbers("IQ")
        if count > len(self.view):
            raise ValueError(f"an array of {count} values")
        if kind in NUMBERS:
            return list(self.numbers(f"{count}{NUMBERS[kind]}"))
        return [self.value(kind) for _ in range(count)]
