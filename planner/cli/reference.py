"""The reference of the command line as Markdown: `python -m sequoia_plan.planner.cli.reference > docs/cli.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from sequoia_plan.planner.cli import main

PAGE = """# The command line

This page is made from the commands themselves by `python -m sequoia_plan.planner.cli.reference > docs/cli.md`; a test
compares the two. `sequoia-plan COMMAND --help` says the same in the terminal.

{}

## Exit codes

0: the command did what it was asked. 1: it could not, and one line on stderr says why and what was expected. 2: the
command line itself is wrong.
"""


def reference() -> str:
    """The whole page, one section a command."""
    return PAGE.format("\n\n".join(_section(name, command) for name, command in commands(main)))


def commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command with its whole name, those of groups after each other."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _section(name: str, command: click.Command) -> str:
    arguments = [p.metavar or str(p.name).upper() for p in command.params if isinstance(p, click.Argument)]
    rows = [_row(p) for p in command.params if isinstance(p, click.Option)]
    usage = " ".join(["sequoia-plan", name, *arguments, "[OPTIONS]"])
    return f"## {name}\n\n`{usage}`\n\n{command.help}\n\n| option | value | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows)


def _row(option: click.Option) -> str:
    """Names, kind of value, default, meaning. Where click knows no default, the help text may end in `[default: ...]`."""
    help_text, written = re.fullmatch(r"(.*?)(?:\s*\[default: (.*)\])?", option.help or "", re.DOTALL).groups()  # type: ignore[union-attr]
    default = "required" if option.required else str(option.default) if option.show_default else written or ""
    cells = [", ".join(f"`{name}`" for name in option.opts), _value(option), default, help_text]
    return "| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", r"\|") for cell in cells) + " |"


def _value(option: click.Option) -> str:
    """What the option takes, in words."""
    kind, repeated = option.type, ", may be repeated" if option.multiple else ""
    if option.is_flag:
        return ""
    if option.metavar:
        return f"`{option.metavar}`{repeated}"
    if isinstance(kind, click.Choice):
        return "one of " + ", ".join(f"`{choice}`" for choice in kind.choices) + repeated
    least = f" >= {kind.min:g}" if isinstance(kind, (click.IntRange, click.FloatRange)) and kind.min is not None else ""
    words = {"integer range": "integer", "float range": "number", "float": "number", "path": "file"}
    return words.get(kind.name, kind.name) + least + repeated


if __name__ == "__main__":
    print(reference(), end="")
