"""Write the tables of docs/format.md from the declared fields of artifacts.

A maintainers' script, which is not installed. Run it from the repository root:

    python tools/format_tables.py docs/format.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from sequoia_plan.artifacts import BenchResult, Plan, Profile
from sequoia_plan.artifacts.counts import Counts, LevelCounts
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.schema import Artifact

FILES = {"profile": Profile, "plan": Plan, "bench": BenchResult}
"""For each `<!-- table NAME -->` of the page, the struct that it describes."""
TABLE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", flags=re.DOTALL)
HEADER = "| key | type | meaning |\n|---|---|---|\n"
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
MAX_FOLDED = 6
"""Fields of a struct that is described within one row."""
NO_LIMIT = 2**53
"""Whole numbers are limited so that a float can hold them, which the tables do not repeat."""


def with_tables(text: str) -> str:
    """The page with every table as its struct declares it."""
    types = [*FILES.values(), LevelCounts]
    _, structs = msgspec.json.schema_components(types, schema_hook=_custom_schema)
    for cls in _subclasses(Artifact):
        if cls.__module__.startswith(Artifact.__module__.rpartition(".")[0]):  # engines have others
            structs.get(cls.__name__, {})["meanings"] = field_meanings(cls)
    tables = {name: "\n".join(_rows(cls.__name__, structs)) for name, cls in FILES.items()}
    return TABLE.sub(
        lambda match: f"<!-- table {match[1]} -->\n{HEADER}{tables[match[1]]}\n<!-- end -->", text
    )


def field_meanings(cls: type) -> dict[str, str]:
    """What the fields of a struct mean, by their key in files: the text in their annotations."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        field.encode_name: next(
            (text for text in get_args(hints[field.name]) if isinstance(text, str)), ""
        )
        for field in msgspec.structs.fields(cls)
    }


def _subclasses(cls: type) -> Iterator[type]:
    """All classes that are derived from a class."""
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _custom_schema(cls: type) -> dict[str, Any]:
    """The schema of a type that has its own form in files."""
    return {"type": "array", "items": {"$ref": "/LevelCounts"} if cls is Counts else {}}


def _rows(struct: str, structs: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A row for each field of a struct, and after it those of the struct that the field holds."""
    schema = structs.pop(struct)  # each struct is described once
    for key, value in schema["properties"].items():
        name, text = f"{prefix}{key}", schema["meanings"][key]
        inner, place = _struct_within(value)
        if is_small := inner in structs and _is_small(structs[inner]):
            text += _folded(structs.pop(inner))
        yield f"| `{name}` | {_words(value)}{_optional(key, schema)} | {text} |"
        if inner in structs and not is_small:
            yield from _rows(inner, structs, f"{name}{place}.")


def _struct_within(value: Any) -> tuple[str, str]:
    """The struct that a field's type holds, if any, and where: [] for a list, .NAME by name."""
    if "$ref" in value:
        return value["$ref"].rpartition("/")[2], ""
    for inner, place in (("items", "[]"), ("additionalProperties", ".NAME")):
        if isinstance(value.get(inner), dict):
            struct, further = _struct_within(value[inner])
            return struct, place + further
    return max((_struct_within(option) for option in value.get("anyOf", ())), default=("", ""))


def _is_small(schema: Any) -> bool:
    """Whether a struct has so few fields, none of them a struct, that it needs no rows."""
    values = schema["properties"].values()
    return len(values) <= MAX_FOLDED and not any(_struct_within(value)[0] for value in values)


def _folded(schema: Any) -> str:
    """The fields of a struct within the row of the field that holds it."""
    fields = [
        f"`{key}` ({_words(value)}{_optional(key, schema)}): {schema['meanings'][key]}"
        for key, value in schema["properties"].items()
    ]
    return ". Keys: " + "; ".join(fields)


def _optional(key: str, schema: Any) -> str:
    """What follows a field's type if it may be missing."""
    return "" if key in schema["required"] else ", optional"


def _words(value: Any) -> str:
    """A JSON schema's type in words."""
    if "anyOf" in value:
        options = [_words(option) for option in value["anyOf"] if option.get("type") != "null"]
        return " or ".join(options)
    if "enum" in value:
        return " or ".join(f"`{option}`" for option in value["enum"])
    kind = value.get("type", "object")
    if "prefixItems" in value:
        return f"[{', '.join(map(_words, value['prefixItems']))}]"
    if kind == "array":
        return f"list of {_words(value['items'])}" if value["items"] else "list"
    if kind == "object" and value.get("additionalProperties"):
        return f"mapping to {_words(value['additionalProperties'])}"
    words = {"object": "mapping", "string": "text", "boolean": "true or false"}
    limits = [
        f"{sign} {value[name]:g}"
        for name, sign in LIMITS.items()
        if value.get(name, NO_LIMIT) < NO_LIMIT
    ]
    return " ".join([words.get(kind, kind), " and ".join(limits)]).strip()


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_atomically(page, with_tables(page.read_text()).encode())
