"""What a processor multiplies integers with: exact sums of unsigned bytes by signed ones.

`OWN` is the kind of the processor that numba compiles for, which NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES may change. Sums are whole numbers, so all kinds give the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from llvmlite import ir
from llvmlite.ir import Value

from sequoia_plan.models.packed.features import BYTE, FEATURES, HALF_WORD, WORD
from sequoia_plan.models.packed.formats import QUAD
from sequoia_plan.models.packed.vectors import Emitter

SIGNS = -0x7F7F7F80  # the upper bit of each byte of a word
Weights: TypeAlias = Value | tuple[Value, Value]
"""A vector of weights as products read it: for AVX2's 8 bits, their sizes and the signed bytes."""


@dataclass(frozen=True)
class Instructions:
    """A kind of processor, and the functions that emit its instructions for a tile's products.

    `add_up(emit, weights, bits, numbers, start)` gives the int32 sum of products for each output.
    A vector of `weights` has a word for each output, four unsigned bytes (of so many bits) for four
    inputs, as `prepare(emit, vector, bits)` returns it. They are multiplied by the signed bytes at
    the address `numbers`; for kinds that take weights less 128, the int32 at `start` is 128 times
    the sum of these bytes. `look_up(emit, words, table)`: of each byte, its entry in a table of 16.
    """

    name: str
    lanes: int  # 32-bit words of a vector
    pieces: int  # vectors of outputs whose weights of a group are in registers at once
    float_rows: int  # rows whose sums, by a tile of floats, are in registers at once
    needs: tuple[str, ...]  # features, as LLVM names them
    add_up: Callable[[Emitter, Sequence[Weights], int, Value, Value], Value]
    look_up: Callable[[Emitter, Value, Sequence[int]], Value]
    prepare: Callable[[Emitter, Value, int], Weights] = lambda emit, word, bits: word


def _splat_quads(emit: Emitter, numbers: Value, count: int) -> list[Value]:
    """Load `count` words of four bytes each; each is a vector that has its word in all lanes."""
    return [emit.load_splat(emit.at(numbers, QUAD * index), WORD) for index in range(count)]


def _shuffled_quads(emit: Emitter, numbers: Value, count: int) -> list[Value]:
    """The same from one load, which LLVM turns into NEON's products by a lane of a vector."""
    words = emit.load(numbers, ir.VectorType(WORD, count), align=4)
    kind = ir.VectorType(WORD, emit.lanes)
    return [
        emit.builder.shuffle_vector(words, words, ir.Constant(kind, [index] * emit.lanes))
        for index in range(count)
    ]


def _as_bytes(emit: Emitter, words: Value) -> Value:
    """The bits of a vector of words as a vector of bytes."""
    return emit.builder.bitcast(words, ir.VectorType(BYTE, 4 * emit.lanes))


def _add_up_vnni(
    emit: Emitter, weights: Sequence[Weights], bits: int, numbers: Value, start: Value
) -> Value:
    """See `Instructions`: vpdpbusd adds the four products of a word's bytes to an int32."""
    total, name = emit.words(0), f"llvm.x86.avx512.vpdpbusd.{32 * emit.lanes}"
    for quad, inputs in zip(weights, _splat_quads(emit, numbers, len(weights)), strict=True):
        total = emit.call(name, emit.word_vector, total, quad, inputs)
    return total


def _prepare_avx2(emit: Emitter, weights: Value, bits: int) -> Weights:
    """Weights of 8 bits, less 128: their sizes and the signed bytes. Others as they are."""
    if bits < 8:
        return weights
    signed = _as_bytes(emit, emit.builder.xor(weights, emit.words(SIGNS)))
    return emit.call(f"llvm.abs.v{4 * emit.lanes}i8", signed.type, signed, ir.IntType(1)(0)), signed


def _add_up_avx2(
    emit: Emitter, weights: Sequence[Weights], bits: int, numbers: Value, start: Value
) -> Value:
    """See `Instructions`: vpmaddubsw adds two products in int16, vpmaddwd two of these in int32."""
    builder, sums = emit.builder, None
    total = emit.load_splat(start, WORD) if bits == 8 else None
    # the largest pair is 2 * 127 times a weight: so many pairs have room in an int16
    together = max(32767 // (254 * ((1 << bits) - 1)), 1)
    halves = ir.VectorType(HALF_WORD, 2 * emit.lanes)
    ones = ir.Constant(halves, [1] * halves.count)
    for index, inputs in enumerate(_splat_quads(emit, numbers, len(weights))):
        quad, signed_inputs = weights[index], _as_bytes(emit, inputs)
        if bits == 8:  # two products would exceed int16: sizes of weights less 128 do not
            quad, signs = quad
            name, kind = "llvm.x86.avx2.psign.b", signed_inputs.type
            signed_inputs = emit.call(name, kind, signed_inputs, signs)
        pair = _as_bytes(emit, quad), signed_inputs
        products = emit.call("llvm.x86.avx2.pmadd.ub.sw", halves, *pair)
        sums = products if sums is None else builder.add(sums, products)
        if (index + 1) % together == 0 or index + 1 == len(weights):
            words = emit.call("llvm.x86.avx2.pmadd.wd", emit.word_vector, sums, ones)
            total, sums = words if total is None else builder.add(total, words), None
    return total


def _prepare_signed(emit: Emitter, weights: Value, bits: int) -> Value:
    """Unsigned bytes less 128, as signed bytes."""
    return emit.builder.xor(weights, emit.words(SIGNS))


def _add_up_neon(
    name: str, emit: Emitter, weights: Sequence[Weights], bits: int, numbers: Value, start: Value
) -> Value:
    """See `Instructions`: `usdot`, or `sdot` of weights less 128, adds four products of bytes."""
    total = emit.load_splat(start, WORD) if name == "sdot" else emit.words(0)
    for quad, inputs in zip(weights, _shuffled_quads(emit, numbers, len(weights)), strict=True):
        pair = _as_bytes(emit, quad), _as_bytes(emit, inputs)
        total = emit.call(f"llvm.aarch64.neon.{name}.v4i32.v16i8", emit.word_vector, total, *pair)
    return total


def _add_up_anywhere(
    emit: Emitter, weights: Sequence[Weights], bits: int, numbers: Value, start: Value
) -> Value:
    """See `Instructions`: byte by byte, with instructions that every processor has."""
    builder, total = emit.builder, emit.words(0)
    for quad, inputs in zip(weights, _splat_quads(emit, numbers, len(weights)), strict=True):
        for byte in range(QUAD):
            weight = builder.and_(builder.lshr(quad, emit.words(8 * byte)), emit.words(255))
            number = builder.shl(inputs, emit.words(24 - 8 * byte))
            number = builder.ashr(number, emit.words(24))  # with its sign
            total = builder.add(total, builder.mul(weight, number))
    return total


def _look_up_with(name: str) -> Callable[[Emitter, Value, Sequence[int]], Value]:
    """`look_up` by LLVM's instruction of this name, which has a table for each 16 bytes."""

    def look_up(emit: Emitter, words: Value, table: Sequence[int]) -> Value:
        indices = _as_bytes(emit, words)
        entries = ir.Constant(indices.type, [*table] * (indices.type.count // len(table)))
        values = emit.call(name, indices.type, entries, indices)
        return emit.builder.bitcast(values, emit.word_vector)

    return look_up


def _look_up_anywhere(emit: Emitter, words: Value, table: Sequence[int]) -> Value:
    """`look_up` by selection: each bit of the bytes chooses between the entries that are left."""
    builder, indices = emit.builder, _as_bytes(emit, words)

    def constant(value: int) -> Value:
        return ir.Constant(indices.type, [value] * indices.type.count)

    entries = [constant(value) for value in table]
    for bit in map(constant, (1, 2, 4, 8)):
        is_set = builder.icmp_unsigned("==", builder.and_(indices, bit), bit)
        pairs = zip(entries[::2], entries[1::2], strict=True)
        entries = [builder.select(is_set, odd, even) for even, odd in pairs]
    return builder.bitcast(entries[0], emit.word_vector)


_avx2_look_up = _look_up_with("llvm.x86.avx2.pshuf.b")
_neon_look_up = _look_up_with("llvm.aarch64.neon.tbl1.v16i8")
KINDS = (
    Instructions("AVX512-VNNI", 16, 2, 8, ("avx512vnni", "avx512bw"), _add_up_vnni,
                 _look_up_with("llvm.x86.avx512.pshuf.b.512")),
    Instructions("AVX-VNNI", 8, 1, 3, ("avxvnni", "fma", "f16c"), _add_up_vnni, _avx2_look_up),
    Instructions("AVX2", 8, 1, 3, ("avx2", "fma", "f16c"), _add_up_avx2, _avx2_look_up,
                 _prepare_avx2),
    Instructions("NEON with i8mm", 4, 2, 3, ("i8mm",), partial(_add_up_neon, "usdot"),
                 _neon_look_up),
    Instructions("NEON with dotprod", 4, 2, 3, ("dotprod",), partial(_add_up_neon, "sdot"),
                 _neon_look_up, _prepare_signed),
    Instructions("plain integers", 4, 1, 3, (), _add_up_anywhere, _look_up_anywhere),
)  # fmt: skip
"""Each is taken where the ones before it cannot be."""


def kind_for(features: set[str]) -> Instructions:
    """The one of `KINDS` for a processor with these features, as LLVM names them."""
    return next(kind for kind in KINDS if features.issuperset(kind.needs))


OWN = kind_for(FEATURES)
