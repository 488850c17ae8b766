"""Typed artifacts: each field is declared once, and reading, checking, writing and the tables of docs/format.md follow from that.

A field is declared as `name: Annotated[type, field("what it means", ...)] = default`. Types are those msgspec knows; ranges are given by
`Meta(ge=..., title="how an error calls it")`.
"""

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
from sequoia_plan.artifacts.facts import check_facts

S = TypeVar("S", bound="Artifact")

Size = Annotated[int, Meta(ge=1, title="a whole number >= 1")]
Count = Annotated[int, Meta(ge=0, title="a whole number >= 0")]
Number = Annotated[float, Meta(ge=0, title="a number >= 0")]
Seconds = Annotated[float, Meta(gt=0, title="seconds > 0")]
Facts = dict[str, Any]
"""Anything that JSON can hold, see `facts.check_facts`."""


def field(meaning: str, *, key: str = "", check: Callable[[Any, str], None] | None = None, keys: type[Artifact] | None = None, always: bool = False) -> Meta:
    """What is said of a field beside its type.

    Args:
        meaning: for docs/format.md.
        key: its place in the file, dots between sections; the field's name if empty.
        check: takes the value and its name in errors, in place of the check by type.
        keys: declares the known keys of a free mapping.
        always: written also where it has its default value.
    """
    return Meta(description=meaning, extra={"key": key, "check": check, "keys": keys, "always": always})


class Artifact(Struct, frozen=True, repr_omit_defaults=True):
    """A struct that is checked when it is made, from a file or in Python.

    Raises:
        SequoiaPlanError: naming the field, what was found and what was expected.
    """

    PREFIX: ClassVar[str] = ""
    """What names in errors begin with."""
    ORDER: ClassVar[tuple[str, ...]] = ()
    """Every field, in the order they are written in; as declared if empty."""

    def __post_init__(self) -> None:
        for each in declared(type(self)):
            each.read(getattr(self, each.name), self.PREFIX)

    @classmethod
    def read(cls: type[S], document: Any, name: str) -> S:
        """The struct in a file's `document`, which errors call `name`; keys that are not declared go to the field `other`, if there is one."""
        if not isinstance(document, Mapping):
            raise SequoiaPlanError(f"{name}: found {document!r:.60}, expected a mapping")
        values: dict[str, Any] = {}
        for each in declared(cls):
            if each.name == "other":
                known = {every.key[0] for every in declared(cls)}
                values["other"] = {key: value for key, value in document.items() if key not in known}
                check_facts(values["other"], name)
                continue
            value = _look_up(document, each, name)
            if value is None and not each.required:
                continue
            values[each.name] = each.read(value, name)
        return cls(**values)

    def facts(self) -> dict[str, Any]:
        """The file's document: plain lists, mappings, numbers and text; what has its default value is left out."""
        document: dict[str, Any] = {}
        for each in _in_order(type(self)):
            value = getattr(self, each.name)
            if each.name == "other":
                document |= value
            elif each.always or value != each.default:
                section = document
                for part in each.key[:-1]:
                    section = section.setdefault(part, {})
                section[each.key[-1]] = value.facts() if isinstance(value, Artifact) else _plain(value)
        return document


@dataclass(frozen=True)
class Declared:
    """A field as declared: its place in the file, its type, and what a value must be."""

    name: str
    key: tuple[str, ...]
    kind: types.Type
    meaning: str
    default: Any
    required: bool
    always: bool
    check: Callable[[Any, str], None] | None
    keys: type[Artifact] | None

    def read(self, value: Any, prefix: str) -> Any:
        """`value` as the field has it; refused if the field cannot have it."""
        name = ".".join(filter(None, (prefix, *self.key)))
        if value is None and not self.required and self.default is None:
            return None
        if self.check is not None:
            self.check(value, name)
            return _tuples(value)
        if self.keys is not None:
            self.keys.read(value, name)
        return read(value, self.kind, name)


@lru_cache(maxsize=64)
def declared(cls: type[Artifact]) -> tuple[Declared, ...]:
    """The fields of a struct, in order."""
    described: Any = types.type_info(cls)
    found = []
    for each in described.fields:
        kind: types.Type = each.type
        said: dict[str, Any] = {}
        while isinstance(kind, types.Metadata):
            said |= (kind.extra or {}) | {"meaning": (kind.extra_json_schema or {}).get("description", said.get("meaning", ""))}
            if kind.extra_json_schema and "title" in kind.extra_json_schema:
                break
            kind = kind.type
        default = each.default if each.default is not NODEFAULT else None if each.default_factory is NODEFAULT else each.default_factory()
        key = tuple((said.get("key") or each.name).split("."))
        known = (said.get("meaning", ""), default, each.required, said.get("always", False), said.get("check"), said.get("keys"))
        found.append(Declared(each.name, key, kind, *known))
    return tuple(found)


def read(value: Any, kind: types.Type, name: str) -> Any:
    """`value` as the type `kind` has it: lists as tuples, mappings as structs, whole numbers as floats where floats are declared.

    Raises:
        SequoiaPlanError: naming the innermost place that is wrong, what was found and what was expected.
    """
    inner, title = _unwrapped(kind)
    if isinstance(inner, types.UnionType):
        options = [each for each in inner.types if not isinstance(each, types.NoneType)]
        return None if value is None and len(options) < len(inner.types) else read(value, options[0], name)
    if isinstance(inner, types.AnyType):
        check_facts(value, name)
        return value
    if not _holds(value, inner):
        raise SequoiaPlanError(f"{name}: found {value!r:.60}, expected {title or expected(inner)}")
    if isinstance(inner, types.StructType):
        made: Any = inner.cls
        return made.read(value, name) if isinstance(value, Mapping) else value
    if isinstance(inner, types.FloatType):
        return float(value)
    if isinstance(inner, types.VarTupleType):
        return tuple(read(item, inner.item_type, f"{name}[{place}]") for place, item in enumerate(value))
    if isinstance(inner, types.TupleType):
        return tuple(read(item, each, f"{name}[{place}]") for place, (item, each) in enumerate(zip(value, inner.item_types, strict=True)))
    if isinstance(inner, types.DictType):
        for key in value:
            if not _holds(key, _unwrapped(inner.key_type)[0]):
                raise SequoiaPlanError(f"{name}: found the key {key!r:.60}, expected {expected(inner.key_type)}")
        return {key: read(item, inner.value_type, f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]") for key, item in value.items()}
    return value


def expected(kind: types.Type) -> str:
    """A type in words, for errors and tables."""
    inner, title = _unwrapped(kind)
    if title:
        return title
    if isinstance(inner, types.UnionType):
        return " or ".join(expected(each) for each in inner.types if not isinstance(each, types.NoneType))
    if isinstance(inner, types.LiteralType):
        return " or ".join(map(str, inner.values))
    if isinstance(inner, types.VarTupleType):
        return f"a list: {expected(inner.item_type)}"
    if isinstance(inner, types.TupleType):
        return f"[{', '.join(map(expected, inner.item_types))}]"
    if isinstance(inner, types.DictType):
        return "a mapping" if isinstance(inner.value_type, types.AnyType) else f"a mapping of {expected(inner.key_type)} to {expected(inner.value_type)}"
    words: dict[Any, str] = {types.IntType: "a whole number", types.FloatType: "a number", types.BoolType: "true or false", types.StrType: "text"}
    return words.get(type(inner), "any fact" if isinstance(inner, types.AnyType) else "a mapping")


def table(cls: type[Artifact], prefix: str) -> str:
    """The fields as a Markdown table; the keys begin with `prefix`."""
    rows = ["| key | type | meaning |", "|---|---|---|"]
    for each in _in_order(cls):
        if each.name != "other":
            missing = "" if each.required else "; may be missing"
            rows.append(f"| `{'.'.join((*filter(None, [prefix]), *each.key))}` | {expected(each.kind)}{missing} | {each.meaning} |")
    return "\n".join(rows) + "\n"


def _in_order(cls: type[Artifact]) -> list[Declared]:
    """The fields in the order they are written in."""
    return sorted(declared(cls), key=lambda each: cls.ORDER.index(each.name) if cls.ORDER else 0)


def _look_up(document: Mapping[str, Any], each: Declared, name: str) -> Any:
    """The value of a field in a document with sections; None if it is not there."""
    for depth, part in enumerate(each.key[:-1]):
        document = document.get(part)  # type: ignore[assignment]
        if not isinstance(document, Mapping):
            if document is None and not each.required:
                return None
            raise SequoiaPlanError(f"{'.'.join(filter(None, (name, *each.key[: depth + 1])))}: found {document!r:.60}, expected a mapping")
    return document.get(each.key[-1])


def _unwrapped(kind: types.Type) -> tuple[Any, str]:
    """The type itself, with the limits that stand around it, and what errors call it."""
    title = ""
    while isinstance(kind, types.Metadata):
        title = title or (kind.extra_json_schema or {}).get("title", "")
        kind = kind.type
    return kind, title


def _holds(value: Any, kind: types.Type) -> bool:
    """Is `value` of this type, its items aside?"""
    if isinstance(kind, types.IntType):
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63 and _within(value, kind)
    if isinstance(kind, types.FloatType):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max and _within(value, kind)
    if isinstance(kind, types.StrType):
        return isinstance(value, str) and value.isprintable() and (kind.pattern is None or re.search(kind.pattern, value) is not None)
    if isinstance(kind, types.BoolType):
        return isinstance(value, bool)
    if isinstance(kind, types.LiteralType):
        return isinstance(value, str) and value in kind.values
    if isinstance(kind, types.VarTupleType):
        return isinstance(value, (list, tuple)) and len(value) >= (kind.min_length or 0)
    if isinstance(kind, types.TupleType):
        return isinstance(value, (list, tuple)) and len(value) == len(kind.item_types)
    if isinstance(kind, types.StructType):
        return isinstance(value, (Mapping, kind.cls))
    return isinstance(value, Mapping) and len(value) >= (kind.min_length or 0) if isinstance(kind, types.DictType) else True


def _within(value: float, kind: Any) -> bool:
    """Is `value` within the limits of `kind`?"""
    limits = ((kind.ge, lambda v, k: v >= k), (kind.gt, lambda v, k: v > k), (kind.le, lambda v, k: v <= k), (kind.lt, lambda v, k: v < k))
    return all(limit is None or holds(value, limit) for limit, holds in limits)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Tuples as lists, structs as mappings, mappings copied."""
    if isinstance(value, Artifact):
        return value.facts()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
