"""Arrays and numbers that compiled code reads by name; tuples of arrays take long to compile."""

import functools
from os.path import dirname
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, lower_getattr_generic, models, register_model, unbox
from numba.np.arrayobj import make_array, populate_array

from sequoia_plan.artifacts.files import follow_sources
from sequoia_plan.models.packed.features import LONG


def compiled(function: Any, **flags: Any) -> Any:
    """Compile a function, and keep the code while no source beside it or this one changes."""
    compiled = njit(nogil=True, cache=True, error_model="numpy", **flags)(function)
    folders = {dirname(__file__), dirname(function.__code__.co_filename)}
    return follow_sources(compiled, *sorted(folders))  # sets have another order in each process


@functools.cache
def kind_of(dtype: Any, ndim: int) -> types.Type:
    """The type of a contiguous array, or of a number."""
    kind = from_dtype(dtype)
    return types.Array(kind, ndim, "C") if ndim else kind


class RecordType(types.Type):
    """The type of a record. `fields`: the type of each, and its place among the record's words."""

    bitwidth = 64

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        super().__init__(name)
        self.fields = fields

    @property
    def key(self) -> Any:
        return self.name, *self.fields.items()


class Record:
    """Contiguous arrays, numbers and other records by name; entries of the arrays may change.

    `words` has of each field an array's address and shape, a number's bits, or a record's address.
    Fields keep the memory alive, so an array must be given as one, not as a list.
    """

    def __init__(self, **fields: Any) -> None:
        kinds, words = dict[str, Any](), list[int]()
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
        self._numba_type_: Any = RecordType(type(self).__name__, kinds)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __reduce__(self) -> Any:
        """For pickle and copies: the addresses of their own arrays."""
        return functools.partial(type(self), **self.fields), ()


register_model(RecordType)(models.IntegerModel)  # an address


@unbox(RecordType)
def _address_of(kind: Any, record: Any, c: Any) -> NativeValue:
    """A record's address."""
    address = c.pyapi.object_getattr_string(record, "address")
    value = c.pyapi.long_as_longlong(address)
    c.pyapi.decref(address)
    return NativeValue(value)


@infer_getattr
class _Fields(AttributeTemplate):
    key = RecordType

    def generic_resolve(self, record: Any, name: str) -> Any:
        return record.fields.get(name, (None,))[0]


@lower_getattr_generic(RecordType)
def _read_field(context: Any, builder: Any, record: Any, address: Any, name: str) -> Any:
    """Read a field, which LLVM may do once: a record does not change."""
    kind, place = record.fields[name]

    def word(number: int, of: ir.Type = LONG) -> Any:
        at = builder.add(address, LONG(8 * (place + number)))
        loaded = builder.load(builder.inttoptr(at, of.as_pointer()))
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
