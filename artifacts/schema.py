"""Artifacts: typed structs whose fields are declared once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import NODEFAULT, Meta, Struct
from msgspec import inspect as types

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.metadata import check_metadata

S = TypeVar("S", bound="Artifact")

Size = Annotated[int, Meta(ge=1, title="a whole number >= 1")]
Count = Annotated[int, Meta(ge=0, title="a whole number >= 0")]
Number = Annotated[float, Meta(ge=0, title="a number >= 0")]
Seconds = Annotated[float, Meta(ge=1e-12, le=1e12, title="seconds from 1e-12 to 1e12")]
Metadata = dict[str, Any]
"""Anything that JSON can hold; `metadata.check_metadata` says what is refused."""

UNDECLARED = "undeclared"
"""A field of this name takes every key of a file that the struct does not declare."""


def field(
    meaning: str,
    *,
    key: str = "",
    check: Callable[[Any, str], None] | None = None,
    keys: type[Artifact] | None = None,
    always: bool = False,
) -> Meta:
    """Describe a field beyond its type."""
    extra = {"key": key, "check": check, "keys": keys, "always": always}
    return Meta(description=meaning, extra=extra)


class Artifact(Struct, frozen=True, repr_omit_defaults=True):
    """A struct that is checked when it is made, whether from a file or in Python."""

    PREFIX: ClassVar[str] = ""
    """The section that precedes a field's key in errors."""
    ORDER: ClassVar[tuple[str, ...]] = ()
    """Names of all fields in the order of the file; if empty, the order of declaration."""

    def __post_init__(self) -> None:
        """Check the value of every field."""
        for spec in field_specs(type(self)):
            spec.convert(getattr(self, spec.name), self.PREFIX)

    @classmethod
    def from_dict(cls: type[S], document: Any, name: str) -> S:
        """Make the struct from a file's mapping."""
        if not isinstance(document, Mapping):
            raise SequoiaPlanError(f"{name}: found {document!r:.60}, expected a mapping")
        specs = field_specs(cls)
        values: dict[str, Any] = {}
        for spec in specs:
            if spec.name == UNDECLARED:
                declared_keys = {declared.key[0] for declared in specs}
                undeclared = {k: v for k, v in document.items() if k not in declared_keys}
                check_metadata(undeclared, name)
                values[UNDECLARED] = undeclared
                continue
            value = _look_up(document, spec, name)
            if value is not None or spec.required:
                values[spec.name] = spec.convert(value, name)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The file's mapping of plain lists, mappings, numbers and text, without default values."""
        document: dict[str, Any] = {}
        for spec in _in_file_order(type(self)):
            value = getattr(self, spec.name)
            if spec.name == UNDECLARED:
                document |= value
            elif spec.always or value != spec.default:
                section = document  # then the section within it that holds the field
                for part in spec.key[:-1]:
                    section = section.setdefault(part, {})
                section[spec.key[-1]] = _plain(value)
        return document


@dataclass(frozen=True)
class FieldSpec:
    """A declared field of an artifact. `field` explains the last four attributes."""

    name: str
    key: tuple[str, ...]
    field_type: types.Type
    default: Any
    required: bool
    meaning: str
    always: bool
    check: Callable[[Any, str], None] | None
    keys: type[Artifact] | None

    def convert(self, value: Any, prefix: str) -> Any:
        """Check a value and convert it to the field's type."""
        name = _dotted(prefix, *self.key)
        if value is None and not self.required and self.default is None:
            return None
        if self.check is not None:
            self.check(value, name)
            return _tuples(value)
        if self.keys is not None:
            self.keys.from_dict(value, name)
        return convert(value, self.field_type, name)


@lru_cache(maxsize=64)
def field_specs(cls: type[Artifact]) -> tuple[FieldSpec, ...]:
    """The declared fields of an artifact's class, in the order of declaration.

    The arguments of `field(...)` are in the metadata that msgspec keeps with each field's type.
    """
    struct: Any = types.type_info(cls)
    specs = []
    for declared in struct.fields:
        field_type, extra = _split_description(declared.type)
        default = None
        if declared.default is not NODEFAULT:
            default = declared.default
        elif declared.default_factory is not NODEFAULT:
            default = declared.default_factory()
        specs.append(
            FieldSpec(
                name=declared.name,
                key=tuple((extra.get("key") or declared.name).split(".")),
                field_type=field_type,
                default=default,
                required=declared.required,
                meaning=extra.get("meaning", ""),
                always=extra.get("always", False),
                check=extra.get("check"),
                keys=extra.get("keys"),
            )
        )
    return tuple(specs)


def _split_description(field_type: types.Type) -> tuple[types.Type, dict[str, Any]]:
    """Separate a field's type from the arguments of `field(...)` that it was declared with.

    Both `field` and `Meta` wrap the type in a layer of metadata. A layer with a title is one of
    `Meta`. It says how errors call the type, so it stays with the type.
    """
    extra: dict[str, Any] = {}
    while isinstance(field_type, types.Metadata):
        json_schema = field_type.extra_json_schema or {}
        extra |= field_type.extra or {}
        extra["meaning"] = json_schema.get("description", extra.get("meaning", ""))
        if "title" in json_schema:
            break
        field_type = field_type.type
    return field_type, extra


def convert(value: Any, value_type: types.Type, name: str) -> Any:
    """Check a value and convert it to a type.

    Lists become tuples, mappings become structs, and whole numbers become floats where the type is
    a float.
    """
    inner, title = _unwrapped(value_type)
    if isinstance(inner, types.UnionType):
        options = _without_none(inner)  # artifacts have unions of one type and None only
        if value is None and len(options) < len(inner.types):
            return None
        return convert(value, options[0], name)
    if isinstance(inner, types.AnyType):
        check_metadata(value, name)
        return value
    if not _is_instance(value, inner):
        description = title or describe_type(inner)
        raise SequoiaPlanError(f"{name}: found {value!r:.60}, expected {description}")
    if isinstance(inner, types.StructType):
        struct: Any = inner.cls
        return struct.from_dict(value, name) if isinstance(value, Mapping) else value
    if isinstance(inner, types.CustomType):
        custom_type: Any = inner.cls
        is_read = isinstance(value, custom_type)
        return value if is_read else custom_type.from_file(value, name)
    if isinstance(inner, types.FloatType):
        return float(value)
    if isinstance(inner, types.VarTupleType):
        return tuple(
            convert(item, inner.item_type, f"{name}[{index}]") for index, item in enumerate(value)
        )
    if isinstance(inner, types.TupleType):
        typed_items = zip(value, inner.item_types, strict=True)
        return tuple(
            convert(item, item_type, f"{name}[{index}]")
            for index, (item, item_type) in enumerate(typed_items)
        )
    if isinstance(inner, types.DictType):
        return _convert_mapping(value, inner, name)
    return value


def _convert_mapping(
    mapping: Mapping[Any, Any], mapping_type: types.DictType, name: str
) -> dict[Any, Any]:
    """Check the keys of a mapping, and convert its values."""
    key_type, _ = _unwrapped(mapping_type.key_type)
    for key in mapping:
        if not _is_instance(key, key_type):
            description = describe_type(mapping_type.key_type)
            raise SequoiaPlanError(f"{name}: found the key {key!r:.60}, expected {description}")
    converted = {}
    for key, item in mapping.items():
        item_name = f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]"
        converted[key] = convert(item, mapping_type.value_type, item_name)
    return converted


def describe_type(value_type: types.Type) -> str:
    """A type in words, for errors and for the tables of docs/format.md."""
    inner, title = _unwrapped(value_type)
    if title:
        return title
    if isinstance(inner, types.UnionType):
        return " or ".join(map(describe_type, _without_none(inner)))
    if isinstance(inner, types.LiteralType):
        return " or ".join(map(str, inner.values))
    if isinstance(inner, types.VarTupleType):
        return f"a list: {describe_type(inner.item_type)}"
    if isinstance(inner, types.TupleType):
        return f"[{', '.join(map(describe_type, inner.item_types))}]"
    if isinstance(inner, types.DictType) and not isinstance(inner.value_type, types.AnyType):
        key, value = describe_type(inner.key_type), describe_type(inner.value_type)
        return f"a mapping of {key} to {value}"
    words: dict[Any, str] = {
        types.CustomType: "a list",
        types.IntType: "a whole number",
        types.FloatType: "a number",
        types.BoolType: "true or false",
        types.StrType: "text",
        types.AnyType: "anything that JSON can hold",
    }
    return words.get(type(inner), "a mapping")


def markdown_table(cls: type[Artifact], prefix: str) -> str:
    """The fields of a struct as a Markdown table, with `prefix` before their keys."""
    rows = ["| key | type | meaning |", "|---|---|---|"]
    for spec in _in_file_order(cls):
        if spec.name != UNDECLARED:
            key = _dotted(prefix, *spec.key)
            missing = "" if spec.required else "; may be missing"
            rows.append(f"| `{key}` | {describe_type(spec.field_type)}{missing} | {spec.meaning} |")
    return "\n".join(rows) + "\n"


def _in_file_order(cls: type[Artifact]) -> list[FieldSpec]:
    """The fields in the order in which a file has them."""
    specs = field_specs(cls)
    if not cls.ORDER:
        return list(specs)
    return sorted(specs, key=lambda spec: cls.ORDER.index(spec.name))


def _look_up(document: Mapping[str, Any], spec: FieldSpec, name: str) -> Any:
    """The value of a field in a file's mapping; None if the key is missing."""
    section: Any = document
    for depth, part in enumerate(spec.key[:-1], 1):
        section = section.get(part)
        if not isinstance(section, Mapping):
            if section is None and not spec.required:
                return None
            place = _dotted(name, *spec.key[:depth])
            raise SequoiaPlanError(f"{place}: found {section!r:.60}, expected a mapping")
    return section.get(spec.key[-1])


def _dotted(*parts: str) -> str:
    """The parts that are not empty, with dots between them."""
    return ".".join(filter(None, parts))


def _unwrapped(wrapped_type: types.Type) -> tuple[Any, str]:
    """The type without the layers of metadata around it, and its title, if a layer has one."""
    title = ""
    while isinstance(wrapped_type, types.Metadata):
        title = title or (wrapped_type.extra_json_schema or {}).get("title", "")
        wrapped_type = wrapped_type.type
    return wrapped_type, title


def _without_none(union: types.UnionType) -> list[types.Type]:
    """The types of a union except None."""
    return [option for option in union.types if not isinstance(option, types.NoneType)]


def _is_instance(value: Any, value_type: types.Type) -> bool:
    """Whether a value has this type and range. Items of lists and mappings are not looked at."""
    if isinstance(value_type, types.IntType):
        is_int64 = isinstance(value, int) and -(2**63) <= value < 2**63
        return is_int64 and not isinstance(value, bool) and _is_in_range(value, value_type)
    if isinstance(value_type, types.FloatType):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        return abs(value) <= sys.float_info.max and _is_in_range(value, value_type)
    if isinstance(value_type, types.StrType):
        if not isinstance(value, str) or not value.isprintable():
            return False
        return value_type.pattern is None or re.search(value_type.pattern, value) is not None
    if isinstance(value_type, types.BoolType):
        return isinstance(value, bool)
    if isinstance(value_type, types.LiteralType):
        return isinstance(value, str) and value in value_type.values
    if isinstance(value_type, types.VarTupleType):
        return isinstance(value, (list, tuple)) and len(value) >= (value_type.min_length or 0)
    if isinstance(value_type, types.TupleType):
        return isinstance(value, (list, tuple)) and len(value) == len(value_type.item_types)
    if isinstance(value_type, types.StructType):
        return isinstance(value, (Mapping, value_type.cls))
    if isinstance(value_type, types.DictType):
        return isinstance(value, Mapping) and len(value) >= (value_type.min_length or 0)
    return True


def _is_in_range(value: float, number_type: types.IntType | types.FloatType) -> bool:
    """Whether a number is within the bounds that its type was declared with."""
    return (
        (number_type.ge is None or value >= number_type.ge)
        and (number_type.gt is None or value > number_type.gt)
        and (number_type.le is None or value <= number_type.le)
        and (number_type.lt is None or value < number_type.lt)
    )


def _tuples(value: Any) -> Any:
    """Nested lists as nested tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Tuples as lists, structs as mappings, mappings copied."""
    if isinstance(value, Artifact):
        return value.to_dict()
    if hasattr(value, "to_file"):
        return value.to_file()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
