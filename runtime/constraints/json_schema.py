"""What xgrammar does not enforce of a JSON schema is refused by name, not left out."""

import json
import re
from collections.abc import Iterator
from typing import Any

ANNOTATIONS = (
    "title description default examples example $schema $id $comment $defs definitions deprecated "
    "readOnly writeOnly discriminator"
)
"""Keywords that allow and forbid nothing by themselves."""
TAKEN_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Where one of these is, xgrammar looks at nothing else."""
ENFORCED_BY_TYPE = {
    "integer": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum",
    "string": "pattern format minLength maxLength",
    "array": "items prefixItems unevaluatedItems minItems maxItems",
    "object": "properties required additionalProperties unevaluatedProperties minProperties "
    "maxProperties propertyNames",
}
DROPPED_BESIDE = {
    "pattern": "format minLength maxLength",
    "format": "minLength maxLength",
    "multipleOf": "minimum maximum exclusiveMinimum exclusiveMaximum",
    "propertyNames": "properties additionalProperties unevaluatedProperties",
}
"""A keyword, and those that xgrammar drops beside it."""
FORMATS = (
    "date time date-time duration email hostname ipv4 ipv6 uri uri-reference uri-template uuid "
    "json-pointer relative-json-pointer"
)
LOOKAHEAD = r"\(\?[=!]"
ESCAPED = r'["\x00-\x1f]|\\[\\tnrfvxuc0]'
"""What JSON escapes in a string, and xgrammar writes as it is."""
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
TYPES |= {dict: "object", type(None): "null"}
Schema = dict[str, Any]  # a JSON schema: values by keyword


def refuse_unenforced(schema: object, root: Schema) -> None:
    """Raise ValueError for a part of `schema` that texts might not follow; `root` is the whole."""
    if not isinstance(schema, dict):
        return
    if unenforced := next(_unenforced(schema, root), ""):
        raise ValueError(f"{unenforced} is not enforced, so texts might not follow it")
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions"):
            value = list(value.values())
        elif name in (*ANNOTATIONS.split(), "const", "enum") or name.startswith("x-"):
            continue
        for inner_schema in value if isinstance(value, list) else [value]:
            refuse_unenforced(inner_schema, root)


def _unenforced(schema: Schema, root: Schema) -> Iterator[str]:
    """Yield, for a message, what xgrammar does not enforce of a schema, without its subschemas."""
    types, ref = _types(schema), schema.get("$ref", "#")
    enforced = {"type", *" ".join(ENFORCED_BY_TYPE.get(name, "") for name in types).split()}
    for name in DROPPED_BESIDE.keys() & schema:
        enforced -= set(DROPPED_BESIDE[name].split())
    for name in TAKEN_ALONE:
        if name in schema:
            is_typed = {TYPES[type(value)] for value in _values(schema)} <= types
            enforced = {name, "type"} if is_typed and name in ("const", "enum") else {name}
            break
    names = [
        name for name in schema if name not in ANNOTATIONS.split() and not name.startswith("x-")
    ]
    for name in names:
        if name not in enforced:
            beside = " and ".join(name for name in names if name in enforced)
            yield f"{name} {f'beside {beside}' if beside else 'without a type'}"
    if ref != "#" and not ref.startswith("#/"):
        yield f"$ref {ref}"
    options = schema.get("oneOf", ())
    for number, option in enumerate(options):
        if not all(_exclude(option, other, root) for other in options[:number]):
            yield "oneOf of schemas that may both allow a value"
    if len(schema.get("allOf", ())) > 1:
        yield "allOf of several schemas"
    for name in schema.get("required", ()):
        if name not in schema.get("properties", ()):
            yield f"required {name!r}, which is none of the properties,"
    if re.search(f"{LOOKAHEAD}|{ESCAPED}", schema.get("pattern", "")):
        yield "pattern with a lookahead, a quote, a backslash or a control character"
    if schema.get("format", "date") not in FORMATS.split():
        yield f"format {schema['format']}"
    if schema.get("multipleOf", 1) % 1 or ("multipleOf" in schema and "number" in types):
        yield "multipleOf a fraction, or of numbers"


def _types(schema: Schema) -> set[str]:
    """The types that a schema names, else those that xgrammar infers; "number" has "integer"."""
    inferred = "object" if "properties" in schema else "array" if "items" in schema else []
    types = schema.get("type", inferred)
    types = {types} if isinstance(types, str) else set(types)
    return types | ({"integer"} if "number" in types else set())


def _values(schema: Schema) -> list[object]:
    """The only values that a schema allows, if it lists them."""
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _exclude(one: Schema, other: Schema, root: Schema) -> bool:
    """Is it certain, by types, values or required properties, that no value suits both schemas?"""
    both = _resolved(one, root), _resolved(other, root)
    values, other_values = ({json.dumps(value) for value in _values(schema)} for schema in both)
    types, other_types = (
        ({TYPES[type(value)] for value in _values(schema)} or _types(schema)) for schema in both
    )
    if values and other_values and not values & other_values:
        return True
    if types and other_types and not types & other_types:
        return True
    required, other_required = (
        {name: schema["properties"][name] for name in schema.get("required", ())} for schema in both
    )
    return any(
        _exclude(required[name], other_required[name], root)
        for name in required.keys() & other_required
    )


def _resolved(schema: Schema, root: Schema) -> Schema:
    """The schema that a chain of references (`$ref`: "#/name/name") leads to in `root`."""
    while "$ref" in schema:
        names, schema = schema["$ref"].split("/")[1:], root
        for name in names:
            schema = schema[name]
    return schema
