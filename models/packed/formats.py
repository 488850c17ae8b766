"""Formats of weights: where a GGUF file has their bits (as llama.cpp's ggml), and where a tile has.

A tile holds 32 outputs of a matrix. Its steps, one after the other, hold a block of inputs each:
the file's bits of 32 rows, with those of all outputs side by side (see `Format.step`).
"""

import re
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

OUTPUTS = 32  # outputs of a tile
GROUP = 32
"""Inputs of a group: its weights lie side by side in a tile, and a row's numbers when encoded."""
QUAD = 4
"""Neighbouring inputs whose weights for one output, or scales of one output, lie in one word."""


class Run(NamedTuple):
    """Where a block of a file has some bits of `length` values, one byte for each.

    They are `bits` bits of the bytes from `start` on, from the bit `shift` on. They belong to the
    value `first` and to each that is `apart` further on, and are its bits from `to` on.
    """

    start: int
    shift: int
    bits: int
    first: int
    length: int
    to: int = 0
    apart: int = 1


@dataclass(frozen=True)
class Format:
    """How weights are stored: as numbers, or w = scale * (integer - zero) by blocks of inputs.

    `block` inputs take `block_bytes` of a row in the file; `runs`: the places of their integers,
    which have the bits of all `planes`, the lowest first. `factors` are the places of the float16
    scale and, where `zero` is None, of what is subtracted instead (`offset_sign` -1: added). With
    `num_scales`, these are factors of integers minus `scale_zero`: a scale for each `group` of the
    inputs, then as many offsets. `flip` and `scale_flip` turn signed bytes into unsigned ones.
    `values`: what integers stand for.
    """

    name: str
    block: int
    block_bytes: int
    planes: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    factors: tuple[int, ...] = ()
    zero: int | None = None
    offset_sign: int = 1
    group: int = 32
    num_scales: int = 0
    scale_planes: tuple[int, ...] = ()
    scale_runs: tuple[Run, ...] = ()
    scale_zero: int = 0
    flip: int = 0
    scale_flip: int = 0
    values: tuple[int, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether weights are floating-point numbers."""
        return not self.planes

    @property
    def bits(self) -> int:
        """Bits of a weight, scales aside."""
        return sum(self.planes) or 8 * self.block_bytes

    @property
    def inputs(self) -> int:
        """Inputs of a step of a tile."""
        return max(self.block, GROUP)

    @cached_property
    def step(self) -> np.dtype[np.void]:
        """The layout of a tile's step: a block of inputs, or a group of floating-point ones.

        Integers are split into planes of b bits. A plane takes b vectors of words [OUTPUTS] for the
        8 quads of a group: in each byte of vector v, the bits from b f on are those of quad v + b
        f. Scales lie alike. Floating-point weights are [inputs, OUTPUTS], in bfloat16 [pairs of
        inputs, OUTPUTS, 2].
        """
        if self.is_float:
            pair = 2 if self.name == "BF16" else 1
            return np.dtype((f"u{self.block_bytes}", (GROUP // pair, OUTPUTS, pair)))
        vectors = self.num_scales // QUAD * sum(self.scale_planes) // 8
        return np.dtype(
            [
                ("factors", "u1", (len(self.factors), OUTPUTS, 1 if self.name == "MXFP4" else 2)),
                ("scales", "u1", (vectors, OUTPUTS, QUAD)),
                ("weights", "u1", (self.block // GROUP, self.bits, OUTPUTS, QUAD)),
            ]
        )

    def start(self, field: str) -> int:
        """The byte of a step where one of its fields begins."""
        assert self.step.fields  # weights are integers
        return self.step.fields[field][1]


def _runs(bits: int, start: int, run: int, count: int = 256, to: int = 0) -> tuple[Run, ...]:
    """Runs of `run` values: the first has the lowest bits of `run` bytes, the next those above.

    After 8 // bits of them, the bytes are full, and the next ones follow. `count`: all values.
    """
    fields = 8 // bits
    return tuple(
        Run(start + number // fields * run, number % fields * bits, bits, number * run, run, to)
        for number in range(count // run)
    )


def _neighbours(bits: int, start: int, count: int, to: int) -> tuple[Run, ...]:
    """Runs of `count` values of which 8 // bits neighbours share a byte, the first lowest."""
    fields = 8 // bits
    return tuple(Run(start, f * bits, bits, f, count // fields, to, fields) for f in range(fields))


K_SCALES = (
    Run(4, 0, 6, 0, 4), Run(12, 0, 4, 4, 4), Run(4, 6, 2, 4, 4, 4),
    Run(8, 0, 6, 8, 4), Run(12, 4, 4, 12, 4), Run(8, 6, 2, 12, 4, 4),
)  # fmt: skip
"""Eight scales and eight offsets of 6 bits, of Q4_K and Q5_K."""
IQ4 = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
"""What the integers of IQ4_NL and IQ4_XS stand for."""
KFormat = partial(Format, num_scales=16, scale_planes=(4, 2))
FORMATS = (
    Format("F32", 1, 4),
    Format("F16", 1, 2),
    Format("BF16", 1, 2),
    Format("Q2_K", 256, 84, (2,), _runs(2, 16, 32), (80, 82), group=16, num_scales=32,
           scale_planes=(4,), scale_runs=_runs(4, 0, 16, 32)),
    KFormat("Q3_K", 256, 110, (2, 1), _runs(2, 32, 32) + _runs(1, 0, 32, to=2), (108,), 4, group=16,
            scale_runs=_runs(4, 96, 8, 16) + _runs(2, 104, 4, 16, 4), scale_zero=32),
    KFormat("Q4_K", 256, 144, (4,), _runs(4, 16, 32), (0, 2), scale_runs=K_SCALES),
    KFormat("Q5_K", 256, 176, (4, 1), _runs(4, 48, 32) + _runs(1, 16, 32, to=4), (0, 2),
            scale_runs=K_SCALES),
    Format("Q6_K", 256, 210, (4, 2), _runs(4, 0, 64) + _runs(2, 128, 32, to=4), (208,), 32,
           group=16, num_scales=16, scale_planes=(8,), scale_runs=_runs(8, 192, 16, 16),
           scale_zero=128, scale_flip=128),
    Format("Q8_0", 32, 34, (8,), _runs(8, 2, 32, 32), (0,), 128, flip=128),
    Format("Q4_0", 32, 18, (4,), _runs(4, 2, 16, 32), (0,), 8),
    Format("Q4_1", 32, 20, (4,), _runs(4, 4, 16, 32), (0, 2), offset_sign=-1),
    Format("Q5_0", 32, 22, (4, 1), _runs(4, 6, 16, 32) + _neighbours(1, 2, 32, 4), (0,), 16),
    Format("Q5_1", 32, 24, (4, 1), _runs(4, 8, 16, 32) + _neighbours(1, 4, 32, 4), (0, 2),
           offset_sign=-1),
    Format("IQ4_NL", 32, 18, (4,), _runs(4, 2, 16, 32), (0,), 128, values=IQ4),
    Format("IQ4_XS", 256, 136, (4,), _runs(4, 8, 16), (0,), 128, num_scales=8, scale_planes=(8,),
           scale_runs=_neighbours(4, 4, 8, 0) + _neighbours(2, 2, 8, 4), scale_zero=32, values=IQ4),
    Format("MXFP4", 32, 17, (4,), _runs(4, 1, 16, 32), (0,), 128,
           values=(128, 136, 144, 152, 160, 176, 192, 224, 128, 120, 112, 104, 96, 80, 64, 32)),
)  # fmt: skip
FORMAT_NAMES = tuple(format.name for format in FORMATS)


def format_number(name: str) -> int:
    """The index of a format in `FORMATS`; ValueError for one that is not known."""
    if name in FORMAT_NAMES:
        return FORMAT_NAMES.index(name)
    digits = re.search(r"\d+", name)
    bits = int(digits[0]) if digits else 0
    nearest = min(FORMATS, key=lambda f: (f.bits < bits, abs(f.bits - bits)))
    raise ValueError(
        f"found weights in {name}, expected one of {', '.join(FORMAT_NAMES)}; the nearest is "
        f"{nearest.name}"
    )


def row_bytes(format: int, inputs: int) -> int:
    """Bytes of a row of so many inputs in a GGUF file."""
    return -(-inputs // FORMATS[format].block) * FORMATS[format].block_bytes


def num_steps(format: int, inputs: int) -> int:
    """Steps of a tile for so many inputs."""
    return -(-inputs // FORMATS[format].inputs)


def tile_bytes(format: int, inputs: int) -> int:
    """Bytes of a tile for so many inputs."""
    return num_steps(format, inputs) * FORMATS[format].step.itemsize


def num_tiles(outputs: int) -> int:
    """Tiles for so many outputs."""
    return -(-outputs // OUTPUTS)
