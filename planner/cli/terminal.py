"""Output in the terminal: progress on stderr, figures on stdout."""

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""A control character that is neither a line end nor a tab."""


def prepare_streams() -> None:
    """Let stdout and stderr take any text, also where they are closed or not UTF-8.

    A closed one (`>&-`) becomes the null device. Characters that an encoding lacks are written as
    escapes.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """Text with control characters as escapes, except line ends and tabs.

    A terminal would obey them: models and file names may hold any.
    """
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr if that is a terminal; yield a function that sets its text."""
    from rich.console import Console

    with Console(stderr=True).status(text) as spinner:
        yield spinner.update


@contextmanager
def progress(text: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr if that is a terminal; yield a function that sets how many
    items are completed, and further fields of the bar."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda completed=None, **fields: bar.update(task, completed=completed, **fields)


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout."""
    click.echo(json.dumps(value))
