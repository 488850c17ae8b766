"""Vectors of numbers in LLVM's terms, for the intrinsics of products and attention."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from llvmlite.ir import Value
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue
from numba.core.typing import Signature
from numba.extending import intrinsic

from sequoia_plan.models.packed.features import BYTE, HALF_WORD, LONG, WORD, multiplies_bfloats

LANES = 16
"""Numbers in a vector: 512 bits in float32. LLVM splits them where the processor's are shorter."""
FLOAT, HALF = ir.FloatType(), ir.HalfType()
FLOATS = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(WORD, LANES)


class _BFloat16(ir.Type):
    """LLVM's bfloat16, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


BFLOAT = _BFloat16()
BFLOATS = ir.VectorType(BFLOAT, 2 * LANES)


class Emitter:
    """Emits an intrinsic's instructions on vectors of `lanes` float32 numbers or 32-bit words.

    A `Value` is LLVM's name of a result; addresses are such values, of int64.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int = LANES) -> None:
        self.builder, self.lanes = builder, lanes
        self.float_vector, self.word_vector = (ir.VectorType(k, lanes) for k in (FLOAT, WORD))

    def at(self, address: Value, *terms: Value | int | tuple[Value, int]) -> Value:
        """`address` plus all terms, each a number of bytes, or (index, bytes of an entry)."""
        for term in terms:
            if isinstance(term, tuple):
                term = self.builder.mul(term[0], LONG(term[1]))
            address = self.builder.add(address, LONG(term) if isinstance(term, int) else term)
        return address

    def load(self, address: Value, kind: ir.Type, align: int = 1) -> Value:
        """The value of this type at an address."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        """Write a value to an address."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=align)

    def splat(self, number: Value) -> Value:
        """A vector that has one number in all lanes."""
        empty = ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined)
        one = self.builder.insert_element(empty, number, WORD(0))
        return self.builder.shuffle_vector(one, empty, self.words(0))

    def load_splat(self, address: Value, kind: ir.Type) -> Value:
        """The number at an address, in all lanes."""
        return self.splat(self.load(address, kind, align=4))

    def words(self, number: int) -> Value:
        """An integer in all lanes."""
        return ir.Constant(self.word_vector, [number] * self.lanes)

    def numbers(self, number: float) -> Value:
        """A number in floating point in all lanes."""
        return ir.Constant(self.float_vector, [number] * self.lanes)

    def memory(self, vectors: int) -> Value:
        """The address of memory for so many vectors of 16, which the function has to itself."""
        pointer = cgutils.alloca_once(self.builder, ir.ArrayType(FLOATS, vectors))
        return self.builder.ptrtoint(pointer, LONG)

    def prefetch(self, address: Value, count: int) -> None:
        """Prefetch `count` bytes from an address on into the processor's first cache."""
        for start in range(0, count, 64):
            line = self.builder.inttoptr(self.at(address, start), BYTE.as_pointer())
            self.call("llvm.prefetch.p0i8", ir.VoidType(), line, WORD(0), WORD(3), WORD(1))

    def call(self, name: str, result: ir.Type, *values: Value) -> Value:
        """Call an intrinsic of LLVM by its name."""
        module = self.builder.module
        kinds = [value.type for value in values]
        function = module.globals.get(name)
        function = function or ir.Function(module, ir.FunctionType(result, kinds), name)
        return self.builder.call(function, values)

    def fma(self, left: Value, right: Value, total: Value) -> Value:
        """left * right + total, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.float_vector, left, right, total)

    def variables(self, count: int, address: Value | None = None) -> list[Value]:
        """Pointers to vectors of float32: 0 at first, or what is at an address.

        LLVM keeps them in registers where it can.
        """
        values = [self.numbers(0.0)] * count
        if address:
            values = self.load_vectors(address, count, self.float_vector)
        variables = [cgutils.alloca_once(self.builder, self.float_vector) for _ in values]
        for value, variable in zip(values, variables, strict=True):
            self.builder.store(value, variable)  # not at the function's start: a loop does it again
        return variables

    def add_product(self, left: Value, right: Value, variable: Value) -> None:
        """Add left * right to what `variable` (see `variables`) points to.

        Of words, which are pairs of bfloat16 numbers, both products are added, the upper one first.
        """
        builder, total = self.builder, self.builder.load(variable)
        if left.type == self.float_vector:
            total = self.fma(left, right, total)
        elif multiplies_bfloats(self.lanes):
            pairs = (builder.bitcast(pair, BFLOATS) for pair in (left, right))
            total = self.call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)
        else:
            for numbers in zip(self.halves(left), self.halves(right), strict=True):
                total = self.fma(*numbers, total)
        builder.store(total, variable)

    def halves(self, pairs: Value) -> list[Value]:
        """The upper and the lower number of pairs in bfloat16, as float32."""
        upper = self.builder.and_(pairs, self.words(-1 << 16))
        lower = self.builder.shl(pairs, self.words(16))
        return [self.builder.bitcast(half, self.float_vector) for half in (upper, lower)]

    def larger(self, value: Value, bound: Value) -> Value:
        """The larger of two vectors' numbers; the second one's in place of NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", value, bound), value, bound)

    def bfloats(self, value: Value) -> Value:
        """float32 numbers rounded to bfloat16, ties to even, as int16."""
        builder, kind = self.builder, ir.VectorType(HALF_WORD, self.lanes)
        if multiplies_bfloats(self.lanes):
            name, rounded = "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFLOAT, LANES)
            return builder.bitcast(self.call(name, rounded, value), kind)
        bits = builder.bitcast(value, self.word_vector)
        sixteen, one, most = map(self.words, (16, 1, 0x7FFF))
        odd = builder.and_(builder.lshr(bits, sixteen), one)
        bits = builder.add(builder.add(bits, odd), most)
        return builder.trunc(builder.lshr(bits, sixteen), kind)

    def load_vectors(self, address: Value, count: int, kind: ir.Type) -> list[Value]:
        """`count` vectors of this type, of float32 or words, that lie side by side."""
        return [self.load(self.at(address, 4 * self.lanes * i), kind) for i in range(count)]

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """A loop whose body is what is emitted inside; yields the index."""
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def floats(self, address: Value, kind: str) -> Value:
        """A vector of numbers of a kind ("float32" or "float16") as float32."""
        if kind == "float32":
            return self.load(address, self.float_vector)
        halves = self.load(address, ir.VectorType(HALF, self.lanes))
        return self.builder.fpext(halves, self.float_vector)


def emitted(
    literals: int = 0, counts: int = 0, result: types.Type = types.void
) -> Callable[[Callable[..., Value | None]], Callable[..., Value]]:
    """Make a numba intrinsic of `emit(emitter, value, ..., literal, ...)`, which emits its code.

    Its arguments are int64; the last `literals` must be known when a caller is compiled. With
    `counts`, the argument before these is a count from 1 to `counts`: there is code for each, which
    `emit` writes for the count as its last literal. `result` is the type of the value that `emit`
    returns. numba's cache on disk finds callers if both stand at the top of a module.
    """

    def intrinsic_of(emit: Callable[..., Value | None]) -> Callable[..., Value]:
        """The intrinsic, with the function's name."""

        @functools.wraps(emit)  # for its signature
        def typed(context: Any, *arguments: types.Type) -> tuple[Signature, Callable[..., Value]]:
            num_values = len(arguments) - literals
            constants = arguments[num_values:]
            if not all(isinstance(constant, types.IntegerLiteral) for constant in constants):
                raise RequireLiteralValue("the last arguments")
            numbers = [constant.literal_value for constant in constants]

            def codegen(
                context: Any, builder: ir.IRBuilder, signature: Signature, values: Sequence[Value]
            ) -> Value:
                inputs, returned = values[:num_values], None
                if not counts:
                    returned = emit(Emitter(builder), *inputs, *numbers)
                for number in range(1, counts + 1):
                    with builder.if_then(builder.icmp_unsigned("==", inputs[-1], LONG(number))):
                        emit(Emitter(builder), *inputs[:-1], *numbers, number)
                return context.get_dummy_value() if returned is None else returned

            return result(*[types.int64] * num_values, *constants), codegen

        return intrinsic(prefer_literal=True)(typed)

    return intrinsic_of


@intrinsic
def call(context, function, values):
    """Call the compiled function at the address `function` with a tuple of int64 values."""

    def codegen(
        context: Any, builder: ir.IRBuilder, signature: Signature, arguments: Sequence[Value]
    ) -> Value:
        address, packed = arguments
        unpacked = cgutils.unpack_tuple(builder, packed)
        kind = ir.FunctionType(ir.VoidType(), [LONG] * len(unpacked))
        builder.call(builder.inttoptr(address, kind.as_pointer()), unpacked)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(values))), codegen
