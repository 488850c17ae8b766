"""Writes the reference of the Python API as Markdown, for the site: `make docs` runs it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import msgspec
from format_tables import field_meanings

from sequoia_plan.artifacts.schema import Artifact

WIDTH = 120
CODE_WIDTH = 100
PAGE = """# The Python API

These are the public names, which the packages export. Fields of artifacts refer to each other by
their keys in files, as in [file formats](../../docs/format.md).

{}
"""
PACKAGES = {
    "artifacts": "Trees, plans, profiles and results: what is written to files. Without torch.",
    "planner": "From a profile to a tree with a proof. Without torch.",
    "profiler": "From models on this machine to a profile.",
    "runtime": "From a tree to tokens: the models and the decoder.",
}
"""What each package is for, in the order of the page."""
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes")


def reference() -> str:
    """The whole page, one section a package."""
    sections = []
    for package, meaning in PACKAGES.items():
        module = importlib.import_module(f"sequoia_plan.{package}")
        sections.append(f"## sequoia_plan.{package}\n\n{meaning}")
        sections += [_entry(name, getattr(module, name)) for name in module.__all__]
    return PAGE.format("\n\n".join(sections))


def _entry(name: str, value: Any) -> str:
    """Heading, signature and docstring of one public name."""
    if inspect.isclass(value):
        return _class_entry(name, value)
    if inspect.isroutine(value):
        return f"### {name}\n\n{_signature(name, value)}\n\n{_markdown(value.__doc__)}"
    return f"### {name}\n\n`{type(value).__name__}`. {_docstring_of_value(name, value)}"


def _class_entry(name: str, value: type) -> str:
    """A class: how it is made, its fields, its properties, and a heading for each method."""
    parts = [f"### {name}"]
    if not issubclass(value, Exception):
        parts.append(_signature(name, value))
    parts.append(_markdown(value.__doc__))
    if issubclass(value, Artifact):
        meanings = field_meanings(value)
        items = [
            f"`{field.name}`: {meanings[field.encode_name]}."
            for field in msgspec.structs.fields(value)
        ]
        parts.append("**Fields**\n\n" + _bullets(items))
    members = {key: member for key, member in vars(value).items() if not key.startswith("_")}
    properties = {
        key: getattr(member, "fget", None) or member.func  # type: ignore[union-attr]
        for key, member in members.items()
        if isinstance(member, (property, functools.cached_property))
    }
    if properties:
        items = [
            f"`{key}`: {_paragraph(inspect.getdoc(getter) or '')}"
            for key, getter in properties.items()
        ]
        parts.append("**Properties**\n\n" + _bullets(items))
    for key, member in members.items():
        function = getattr(member, "__func__", member)  # of a class method
        if inspect.isfunction(function):
            parts.append(f"#### {name}.{key}")
            parts.append(_signature(f"{name}.{key}", getattr(value, key)))
            parts.append(_markdown(function.__doc__))
    return "\n\n".join(parts)


def _signature(name: str, value: Callable[..., Any]) -> str:
    """How a name is called, as a block of code; a struct's types are in its fields' meanings."""
    is_struct = inspect.isclass(value) and issubclass(value, Artifact)
    parameters: list[str] = []
    signature = inspect.signature(value)
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        is_typed = parameter.annotation is not parameter.empty and not is_struct
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        text = stars + parameter.name + (f": {parameter.annotation}" if is_typed else "")
        if parameter.default is not parameter.empty:
            text += (" = " if is_typed else "=") + _default_text(parameter.default)
        parameters.append(text)
    result = ""
    if not inspect.isclass(value) and signature.return_annotation is not signature.empty:
        result = f" -> {signature.return_annotation}"
    call = f"{name}({', '.join(parameters)}){result}"
    if len(call) > CODE_WIDTH:
        lines = "".join(f"    {parameter},\n" for parameter in parameters)
        call = f"{name}(\n{lines}){result}"
    return f"```py\n{call}\n```"


def _default_text(default: Any) -> str:
    """A parameter's default, as code; "..." for an object that is made for each call."""
    if isinstance(default, Artifact):
        module = sys.modules[type(default).__module__]
        return next(name for name, value in vars(module).items() if value is default)
    if isinstance(default, str):
        return json.dumps(default)
    text = repr(default)
    return "..." if text.startswith("<") else text


def _docstring_of_value(name: str, value: Any) -> str:
    """The docstring below the assignment that makes a public value, in its type's module."""
    tree = ast.parse(inspect.getsource(sys.modules[type(value).__module__]))
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        is_assignment = isinstance(statement, ast.Assign) and isinstance(
            statement.targets[0], ast.Name
        )
        if is_assignment and statement.targets[0].id == name:  # type: ignore[attr-defined]
            docstring = ast.literal_eval(following.value)  # type: ignore[attr-defined]
            return _markdown(docstring)
    raise ValueError(f"{name}: no assignment with a docstring")


def _markdown(docstring: str | None) -> str:
    """A docstring as Markdown: its sections are lists, code stays indented, prose is wrapped."""
    assert docstring is not None  # tests/test_docs.py names what lacks one
    parts = []
    for paragraphs in _sections(inspect.cleandoc(docstring)):
        heading = paragraphs[0].removesuffix(":")
        if heading in SECTIONS:
            parts.append(f"**{heading}**")
            lines = textwrap.dedent("\n".join(paragraphs[1:])).strip("\n")
            items = re.split(r"\n(?=\S)", lines)
            is_list = heading not in ("Returns", "Yields")
            parts.append(_bullets([_named(item) for item in items]) if is_list else _wrap(lines))
        else:
            blocks = re.split(r"\n\n+(?=\S)|\n\n+(?=    )", "\n".join(paragraphs).strip("\n"))
            parts += [block if block.startswith("    ") else _wrap(block) for block in blocks]
    return "\n\n".join(part for part in parts if part)


def _sections(docstring: str) -> list[list[str]]:
    """The lines of a docstring: those before the first section, then of each section."""
    sections: list[list[str]] = [[]]
    for line in docstring.splitlines():
        if line.endswith(":") and line[:-1] in SECTIONS:
            sections.append([line])
        else:
            sections[-1].append(line)
    return sections


def _named(item: str) -> str:
    """An entry of a section, with its name as code."""
    name, colon, meaning = item.partition(":")
    if not colon:
        return item
    names = ", ".join(f"`{part.strip()}`" for part in name.split(","))
    return f"{names}:{meaning}"


def _bullets(items: list[str]) -> str:
    """A list in Markdown."""
    return "\n".join(_wrap(item, "- ", "  ") for item in items)


def _wrap(text: str, first: str = "", others: str = "") -> str:
    """A paragraph in lines of the documentation's width."""
    return textwrap.fill(
        _paragraph(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paragraph(text: str) -> str:
    """All words of a text on one line."""
    return " ".join(text.split())


if __name__ == "__main__":
    print(reference(), end="")
