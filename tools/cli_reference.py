"""Writes the reference of the command line as Markdown, for the site: `make docs` runs it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from sequoia_plan.planner.cli import main

PAGE = """# The command line

`sequoia-plan COMMAND --help` says the same in the terminal.

{}

## Exit codes

0: the command did what it was asked. 1: it could not, and one line on stderr says why and what
was expected. 2: the command line itself is wrong.
"""

VALUE_WORDS = {
    "integer range": "integer",
    "float range": "number",
    "float": "number",
    "path": "file",
}
"""click's name of a type of value -> what the page calls it."""


def reference() -> str:
    """The whole page, one section a command."""
    sections = [_section(name, command) for name, command in commands(main)]
    return PAGE.format("\n\n".join(sections))


def commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yields every command with its full name, as ("diagnose vllm", command).

    A group is one if it runs without a subcommand.
    """
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            if command.invoke_without_command:
                yield f"{prefix}{name}", command
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _section(name: str, command: click.Command) -> str:
    """Heading, usage, description and the table of options of one command."""
    arguments = [
        parameter.metavar or str(parameter.name).upper()
        for parameter in command.params
        if isinstance(parameter, click.Argument)
    ]
    usage = " ".join(["sequoia-plan", name, *arguments, "[OPTIONS]"])
    options = [option for option in command.params if isinstance(option, click.Option)]
    table = "\n".join(
        [
            "| option | value | default | meaning |",
            "|---|---|---|---|",
            *map(_row, options),
        ]
    )
    description = inspect.cleandoc(command.help or "")
    return f"## {name}\n\n`{usage}`\n\n{description}\n\n{table}"


def _row(option: click.Option) -> str:
    """One row of the table: names, value, default, meaning.

    Where click knows no default, the help text may end in `[default: ...]`.
    """
    text = re.fullmatch(r"(.*?)(?:\s*\[default: (.*)\])?", option.help or "", re.DOTALL)
    assert text is not None  # both parts may be empty
    meaning, default_in_help = text.groups()
    if option.required:
        default = "required"
    elif option.show_default:
        default = str(option.default)
    else:
        default = default_in_help or ""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    cells = [names, _value(option), default, meaning]
    one_line_cells = [re.sub(r"\s+", " ", cell).replace("|", r"\|") for cell in cells]
    return "| " + " | ".join(one_line_cells) + " |"


def _value(option: click.Option) -> str:
    """The value that an option takes, in words; empty for a flag."""
    value_type = option.type
    repetition = ", may be repeated" if option.multiple else ""
    if option.is_flag:
        return ""
    if option.metavar:
        return f"`{option.metavar}`{repetition}"
    if isinstance(value_type, click.Choice):
        choices = ", ".join(f"`{choice}`" for choice in value_type.choices)
        return f"one of {choices}{repetition}"
    minimum = ""
    if isinstance(value_type, (click.IntRange, click.FloatRange)) and value_type.min is not None:
        minimum = f" >= {value_type.min:g}"
    return VALUE_WORDS.get(value_type.name, value_type.name) + minimum + repetition


if __name__ == "__main__":
    print(reference(), end="")
