"""What a processor multiplies integers with: exact sums of unsigned bytes by signed ones.

`OWN` is the kind of the processor that numba compiles for, which NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES may change. Sums are whole numbers, so all kinds give the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value

from sequoia_plan.models.packed.features import BYTE, FEATURES, HALF_WORD, WORD
from sequoia_plan.models.packed.formats import QUAD
from sequoia_plan.models.packed.vectors import Emitter

SIGNS = -0x7F7F7F80
"""The upper bit of each byte of a word."""


@dataclass(frozen=True)
class Instructions:
    """A kind of processor: vectors of `lanes` words, of `needs`, features as LLVM names them.

    Its functions emit code with a `vectors.Emitter`. `pieces` vectors of outputs have their weights
    of a group, and `float_rows` rows their sums of a tile, in registers at once. `add_up(emit,
    weights, bits, numbers, start)` adds up products: vectors of words of weights, each as
    `prepare(emit, weights, bits)` returns it, by the signed bytes at the address `numbers`, the
    first four by the first weights, and so on. The int32 at the address `start` is 128 times the
    sum of these bytes. `look_up(emit, words, table)`: of each byte, what a table of 16 has.
    """

    name: str
    lanes: int
    pieces: int
    float_rows: int
    needs: tuple[str, ...]
    add_up: Callable[[Emitter, Sequence[Any], int, Value, Value], Value]
    look_up: Callable[[Emitter, Value, Sequence[int]], Value]
    prepare: Callable[[Emitter, Value, int], Any] = lambda emit, weights, bits: weights


def _fours(emit: Emitter, numbers: Value, count: int) -> list[Value]:
    """Four bytes after the other, each four in all lanes."""
    return [emit.load_splat(emit.at(numbers, QUAD * place), WORD) for place in range(count)]


def _four_of_a_vector(emit: Emitter, numbers: Value, count: int) -> list[Value]:
    """The same from one load: NEON multiplies by a lane of a vector."""
    words = emit.load(numbers, ir.VectorType(WORD, count), align=4)
    kind = ir.VectorType(WORD, emit.lanes)
    return [
        emit.builder.shuffle_vector(words, words, ir.Constant(kind, [place] * emit.lanes))
        for place in range(count)
    ]


def _as(emit: Emitter, value: Value, kind: ir.IntType) -> Value:
    """The bits of words as a vector of bytes or half words."""
    return emit.builder.bitcast(value, ir.VectorType(kind, 4 * emit.lanes * 8 // kind.width))


def _add_up_vnni(
    emit: Emitter, weights: Sequence[Any], bits: int, numbers: Value, start: Value
) -> Value:
    """vpdpbusd adds the products of four bytes."""
    total, name = emit.words(0), f"llvm.x86.avx512.vpdpbusd.{32 * emit.lanes}"
    for quad, four in zip(weights, _fours(emit, numbers, len(weights)), strict=True):
        total = emit.call(name, emit.word_vector, total, quad, four)
    return total


def _prepare_avx2(emit: Emitter, weights: Value, bits: int) -> Any:
    """Of bytes, less 128: the sizes, and the signed ones; others as they are."""
    if bits < 8:
        return weights
    signed = _as(emit, emit.builder.xor(weights, emit.words(SIGNS)), BYTE)
    return emit.call(f"llvm.abs.v{4 * emit.lanes}i8", signed.type, signed, ir.IntType(1)(0)), signed


def _add_up_avx2(
    emit: Emitter, weights: Sequence[Any], bits: int, numbers: Value, start: Value
) -> Value:
    """vpmaddubsw adds two products in 16 bits, which it must not exceed; vpmaddwd two of these."""
    builder, sums = emit.builder, None
    total = emit.load_splat(start, WORD) if bits == 8 else None
    # a pair is 127 times the two largest weights; sizes of bytes less 128 leave room for one
    together = max(32767 // (254 * ((1 << bits) - 1)), 1)
    for place, four in enumerate(_fours(emit, numbers, len(weights))):
        quad, numbers = weights[place], _as(emit, four, BYTE)
        if bits == 8:
            quad, signed = quad
            numbers = emit.call("llvm.x86.avx2.psign.b", numbers.type, numbers, signed)
        halves = ir.VectorType(HALF_WORD, 2 * emit.lanes)
        products = emit.call("llvm.x86.avx2.pmadd.ub.sw", halves, _as(emit, quad, BYTE), numbers)
        sums = products if sums is None else builder.add(sums, products)
        if (place + 1) % together == 0 or place + 1 == len(weights):
            ones = ir.Constant(halves, [1] * halves.count)
            words = emit.call("llvm.x86.avx2.pmadd.wd", emit.word_vector, sums, ones)
            total, sums = words if total is None else builder.add(total, words), None
    return total


def _prepare_signed(emit: Emitter, weights: Value, bits: int) -> Any:
    """Weights less 128."""
    return emit.builder.xor(weights, emit.words(SIGNS))


def _add_up_neon(
    name: str, emit: Emitter, weights: Sequence[Any], bits: int, numbers: Value, start: Value
) -> Value:
    """`sdot`, of weights less 128, or `usdot` adds the products of four bytes."""
    total = emit.load_splat(start, WORD) if name == "sdot" else emit.words(0)
    for quad, four in zip(weights, _four_of_a_vector(emit, numbers, len(weights)), strict=True):
        pair = _as(emit, quad, BYTE), _as(emit, four, BYTE)
        total = emit.call(f"llvm.aarch64.neon.{name}.v4i32.v16i8", emit.word_vector, total, *pair)
    return total


def _add_up_anywhere(
    emit: Emitter, weights: Sequence[Any], bits: int, numbers: Value, start: Value
) -> Value:
    """Byte by byte, with what every processor has."""
    builder, total = emit.builder, emit.words(0)
    for quad, four in zip(weights, _fours(emit, numbers, len(weights)), strict=True):
        for byte in range(QUAD):
            weight = builder.and_(builder.lshr(quad, emit.words(8 * byte)), emit.words(255))
            number = builder.shl(four, emit.words(24 - 8 * byte))
            number = builder.ashr(number, emit.words(24))
            total = builder.add(total, builder.mul(weight, number))
    return total


def _look_up_with(name: str) -> Callable[[Emitter, Value, Sequence[int]], Value]:
    """An instruction that has a table of 16 bytes for each 16 indices."""

    def look_up(emit: Emitter, words: Value, table: Sequence[int]) -> Value:
        indices = _as(emit, words, BYTE)
        entries = ir.Constant(indices.type, [*table] * (indices.type.count // len(table)))
        values = emit.call(name, indices.type, entries, indices)
        return emit.builder.bitcast(values, emit.word_vector)

    return look_up


def _look_up_anywhere(emit: Emitter, words: Value, table: Sequence[int]) -> Value:
    """Each bit chooses between halves of what is left."""
    builder, indices = emit.builder, _as(emit, words, BYTE)

    def constant(value: int) -> Value:
        return ir.Constant(indices.type, [value] * indices.type.count)

    entries = [constant(value) for value in table]
    for place in map(constant, (1, 2, 4, 8)):
        is_set = builder.icmp_unsigned("==", builder.and_(indices, place), place)
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
