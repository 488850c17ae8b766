"""Kinds of processors: the same bits on all that this machine is, and what others execute."""

import ctypes
import functools
import os
import re
import subprocess
import sys
from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from matrices import FORMAT_OF, encode, normal, pack, random_rows

from sequoia_plan.models.packed.features import FEATURES
from sequoia_plan.models.packed.formats import OUTPUTS, format_number, num_steps
from sequoia_plan.models.packed.instructions import KINDS, OWN, kind_for
from sequoia_plan.models.packed.products import emit_tile
from sequoia_plan.models.packed.tiles import dense_rows

INPUTS, ROWS = 512, 7
INTEGER_FORMATS = [name for name, format in FORMAT_OF.items() if not format.is_float]
BY_NAME = {kind.name: kind for kind in KINDS}
HERE = [kind for kind in KINDS if FEATURES.issuperset(kind.needs)]
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


def compiled_tile(format, kind, triple, processor, features):
    """The kernel of a tile, optimised for a processor: its module, and the processor's machine."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_tile(builder, kind, format, *function.args)
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=processor, features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.triple, parsed.data_layout = triple, str(machine.target_data)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return parsed, machine


@functools.cache
def tile_function(format, kind):
    """The kernel of a tile, to be called here."""
    features = ",".join(f"+{feature}" for feature in sorted(FEATURES))
    parsed, machine = compiled_tile(format, kind, llvm.get_process_triple(), "", features)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)(engine.get_function_address("tile"))
    function.engine = engine
    return function


def products(kind, matrix, rows):
    """The products of all rows by a matrix's first tile, float32 [rows, 32]."""
    encoded = encode(matrix, rows, kind)
    results = np.full((len(rows), OUTPUTS), np.nan, np.float32)
    tile_function(matrix.format, kind)(
        encoded.ctypes.data, len(rows), matrix.tiles.ctypes.data,
        num_steps(matrix.format, INPUTS), results.ctypes.data, results.strides[0],
    )  # fmt: skip
    return results


def extreme(name):
    """A matrix and rows that it is multiplied by.

    The matrix has rows of random bits, then with all bits set or none, by turns. The others are
    random numbers, then 127 units everywhere, -127, and both by turns and by pairs.
    """
    format, (packed_rows, _) = FORMAT_OF[name], random_rows(name, OUTPUTS, INPUTS)
    if not format.is_float:
        packed_rows[8:16], packed_rows[16:24] = 0, 255
        packed_rows[24:, ::2], packed_rows[24:, 1::2] = 0, 255
        blocks = packed_rows.reshape(OUTPUTS, -1, format.block_bytes)
        for place in format.factors:  # 1, or 2 to the power of -3
            one = 124 if name == "MXFP4" else np.frombuffer(np.float16(1).tobytes(), np.uint8)
            blocks[..., place : place + np.size(one)] = one
    rows = normal(ROWS, INPUTS)
    rows[1:5] = 1
    rows[2], rows[3, ::2], rows[4].reshape(-1, 4)[:, :2] = -1, -1, -1
    return pack(name, packed_rows, INPUTS), rows


@pytest.mark.parametrize("name", FORMAT_OF)
def test_all_kinds_of_processors_give_the_same_bits(name):
    """Those that this machine has, also where sums are as large as they can be."""
    matrix, rows = extreme(name)
    expected = products(BY_NAME["plain integers"], matrix, rows)
    weights = dense_rows(matrix, np.arange(OUTPUTS)).astype(np.float64)
    whole = rows[1:5].astype(np.float64) @ weights.T  # these are exact in 8 bits
    assert np.abs(expected[1:5] - whole).max() < 1e-6 * INPUTS * np.abs(weights).max()
    assert OWN in HERE
    for kind in HERE:
        np.testing.assert_array_equal(products(kind, matrix, rows), expected, kind.name)


@pytest.mark.skipif("avx2" not in FEATURES, reason="needs AVX2")
@pytest.mark.parametrize("name", INTEGER_FORMATS)
def test_sums_of_16_bits_that_overflow_are_seen(name):
    """The control: AVX2's sums as if weights had 2 bits. Those of 2 to 5 bits have room for it."""
    avx2, format = BY_NAME["AVX2"], FORMAT_OF[name]

    def add_up(emit, weights, bits, numbers, start):
        return avx2.add_up(emit, weights, 2, numbers, start)

    careless = replace(avx2, name="overflows", add_up=add_up, prepare=KINDS[0].prepare)
    matrix, rows = extreme(name)
    results = products(careless, matrix, rows), products(avx2, matrix, rows)
    has_room = format.bits <= 5 and not format.values
    assert np.array_equal(*results) == has_room


KERNELS = [
    ("AVX512-VNNI", X86, "sapphirerapids", r"vpdpbusd\s.*%zmm"),
    ("AVX-VNNI", X86, "alderlake", r"\{vex\}\s+vpdpbusd\s.*%ymm"),
    ("AVX-VNNI", "x86_64-pc-windows-msvc", "alderlake", r"\{vex\}\s+vpdpbusd\s.*%ymm"),
    ("AVX2", X86, "haswell", r"vpmaddubsw\s.*%ymm"),
    ("NEON with i8mm", ARM, "neoverse-v1", r"\tusdot\s"),
    ("NEON with dotprod", ARM, "cortex-a76", r"\tsdot\s"),
    ("NEON with dotprod", "arm64-apple-macosx", "apple-m1", r"\tsdot\s"),
]


@pytest.mark.parametrize("name", ["Q6_K", "IQ4_NL", "BF16"])
@pytest.mark.parametrize(("kind", "triple", "processor", "instruction"), KERNELS)
def test_what_kernels_compile_to(name, kind, triple, processor, instruction):
    """Products are the kind's own instruction; at most memset and __chkstk are called."""
    parsed, machine = compiled_tile(format_number(name), BY_NAME[kind], triple, processor, "")
    lines = machine.emit_assembly(parsed).splitlines()
    found = [line for line in lines if re.search(instruction, line)]
    groups = FORMAT_OF[name].block // 32
    expected = 0 if name == "BF16" else 8 * groups * BY_NAME[kind].pieces
    assert len(found) >= expected > -1 and bool(found) == bool(expected)
    assert len([line for line in lines if re.match(r"\s+(call|bl)\w*\s", line)]) <= 2


def test_the_kind_follows_the_features():
    for features, name in (
        ("", "plain integers"),
        ("avx2 fma f16c", "AVX2"),
        ("avx2 fma f16c avxvnni", "AVX-VNNI"),
        ("avx2 fma f16c avx512f avx512bw", "AVX2"),
        ("neon dotprod i8mm", "NEON with i8mm"),
        ("neon dotprod", "NEON with dotprod"),
    ):
        assert kind_for({*features.split()}).name == name


@pytest.mark.skipif("avx2" not in FEATURES, reason="needs AVX2")
def test_numba_can_be_told_another_processor():
    """A process of its own, whose kernels are AVX2's."""
    forced = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    command = f"from {kind_for.__module__} import OWN; print(OWN.name)"
    output = subprocess.run(
        [sys.executable, "-c", command], env=os.environ | forced, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert output.strip() == "AVX2"
