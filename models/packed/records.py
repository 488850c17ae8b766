"""Arrays and numbers that compiled code reads by name; tuples of arrays take long to compile."""

import functools
from collections.abc import Callable, Mapping
from inspect import getfile
from os.path import dirname
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.ir import Value
from numba import from_dtype, njit, types
from numba.core.dispatcher import Dispatcher
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, lower_getattr_generic, models, register_model, unbox
from numba.np.arrayobj import make_array, populate_array

from sequoia_plan.artifacts.files import follow_sources
from sequoia_plan.models.packed.features import LONG


def compiled(function: Callable[..., object], **flags: object) -> Dispatcher:
    """Compile a function with numba, and keep its code on disk.

    It is compiled again when a source file changes in this folder or in the function's.
    """
    compiled = njit(nogil=True, cache=True, error_model="numpy", **flags)(function)
    folders = {dirname(__file__), dirname(getfile(function))}
    return follow_sources(compiled, *sorted(folders))  # sets have another order in each process


@functools.cache
def kind_of(dtype: np.dtype[np.generic], ndim: int) -> types.Type:
    """numba's type of a contiguous array, or of a number if `ndim` is 0."""
    kind = from_dtype(dtype)
    return types.Array(kind, ndim, "C") if ndim else kind


class RecordType(types.Type):
    """numba's type of a `Record`. `fields`: the type of each, and the index of its first word."""

    bitwidth = 64

    def __init__(self, name: str, fields: Mapping[str, tuple[types.Type, int]]) -> None:
        super().__init__(name)
        self.fields = fields

    @property
    def key(self) -> tuple[object, ...]:
        return self.name, *self.fields.items()


class Record:
    """Contiguous arrays, numbers and other records by name; entries of the arrays may change.

    Compiled code gets the address of `words`, int64, which has for each field, by name, an array's
    address and shape, a number's bits, or a record's address. `fields` keep the memory alive, so an
    array must be given as one, not as a list.
    """

    def __init__(self, **fields: object) -> None:
        kinds, words = dict[str, tuple[types.Type, int]](), list[int]()
        for name, value in sorted(fields.items()):
            if isinstance(value, Record):
                kinds[name] = value._numba_type_, len(words)
                words.append(value.address)
                continue
            array = np.asarray(value)
            assert array.flags.c_contiguous, name
            kinds[name] = kind_of(array.dtype, array.ndim), len(words)
            word = array.ctypes.data if array.ndim else array.view(f"i{array.itemsize}")
            words += [int(word), *array.shape]
        self.fields, self.words = fields, np.array(words, np.int64)
        self.address: int = self.words.ctypes.data
        self._numba_type_: types.Type = RecordType(type(self).__name__, kinds)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copies: the addresses of their own arrays."""
        return functools.partial(type(self), **self.fields), ()


register_model(RecordType)(models.IntegerModel)  # an address


@unbox(RecordType)
def _address_of(kind: RecordType, record: Value, boxing: Any) -> NativeValue:
    """Emit how compiled code gets a record that Python passes to it: as its address."""
    address = boxing.pyapi.object_getattr_string(record, "address")
    value = boxing.pyapi.long_as_longlong(address)
    boxing.pyapi.decref(address)
    return NativeValue(value)


@infer_getattr
class _Fields(AttributeTemplate):
    key = RecordType

    def generic_resolve(self, record: RecordType, name: str) -> types.Type | None:
        kind, _ = record.fields.get(name, (None, 0))
        return kind


@lower_getattr_generic(RecordType)
def _read_field(
    context: Any, builder: ir.IRBuilder, record: RecordType, address: Value, name: str
) -> Value:
    """Emit the reading of a field from the words of the record at an address."""
    kind, first = record.fields[name]

    def word(number: int, of: ir.Type = LONG) -> Value:
        """Load one of the field's words, which LLVM may do once: a record does not change."""
        word_address = builder.add(address, LONG(8 * (first + number)))
        loaded = builder.load(builder.inttoptr(word_address, of.as_pointer()))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if not isinstance(kind, types.Array):
        return word(0, context.get_value_type(kind))
    array = make_array(kind)(context, builder)
    size = context.get_abi_sizeof(array.data.type.pointee)
    shape, strides = [word(1 + axis) for axis in range(kind.ndim)], [LONG(size)]
    for count in shape[:0:-1]:
        strides.insert(0, builder.mul(strides[0], count))
    data = builder.inttoptr(word(0), array.data.type)
    populate_array(array, data, shape, strides, LONG(size), meminfo=None)
    return array._getvalue()
