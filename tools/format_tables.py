"""Write the tables of docs/format.md from the declared fields of artifacts.

A maintainers' script, which is not installed. Run it from the repository root:

    python tools/format_tables.py docs/format.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sequoia_plan.artifacts import BenchResult, Plan, Profile
from sequoia_plan.artifacts.counts import Counts, LevelCounts
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.engines.plan import EnginePlan

FILES = {"profile": Profile, "plan": Plan, "bench": BenchResult, "engine": EnginePlan}
"""For each `<!-- table NAME -->` of the page, the struct that it describes."""
TABLE = re.compile(r"<!-- table (\S+) -->\n.*?<!-- end -->", flags=re.DOTALL)
HEADER = "| key | type | meaning |\n|---|---|---|\n"
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
NO_LIMIT = 2**53
"""Whole numbers are limited so that a float can hold them, which the tables do not repeat."""


def with_tables(text: str) -> str:
    """The page with every table as its struct declares it."""
    types = [*FILES.values(), LevelCounts]
    _, structs = msgspec.json.schema_components(types, schema_hook=_custom_schema)
    tables = {name: "\n".join(_rows(cls.__name__, structs)) for name, cls in FILES.items()}
    return TABLE.sub(
        lambda match: f"<!-- table {match[1]} -->\n{HEADER}{tables[match[1]]}\n<!-- end -->", text
    )


def _custom_schema(cls: type) -> dict[str, Any]:
    """The schema of a type that has its own form in files."""
    return {"type": "array", "items": {"$ref": "/LevelCounts"} if cls is Counts else {}}


def _rows(struct: str, structs: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A row for each field of a struct, and after it those of the struct that the field holds."""
    schema = structs.pop(struct, {"properties": {}})  # each struct is described once
    for key, value in schema["properties"].items():
        name = f"{prefix}{key}"
        missing = "" if key in schema["required"] else ", optional"
        yield f"| `{name}` | {_words(value)}{missing} | {value.get('description', '')} |"
        yield from _inner_rows(value, structs, name)


def _inner_rows(value: Any, structs: dict[str, Any], name: str) -> Iterator[str]:
    """The rows of the structs within a field's type."""
    if "$ref" in value:
        yield from _rows(value["$ref"].rpartition("/")[2], structs, f"{name}.")
    for option in value.get("anyOf", ()):
        yield from _inner_rows(option, structs, name)
    if isinstance(value.get("items"), dict):
        yield from _inner_rows(value["items"], structs, f"{name}[]")
    if isinstance(value.get("additionalProperties"), dict):
        yield from _inner_rows(value["additionalProperties"], structs, f"{name}.NAME")


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
