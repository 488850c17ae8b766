"""Output in the terminal: progress on stderr, figures on stdout."""

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""A control character that is neither a line end nor a tab."""


SECONDS_BETWEEN_LINES = 10.0
"""Of progress, where stderr is no terminal."""


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


def warn(message: Warning | str) -> None:
    """Print a warning on stderr, without the code that gave it."""
    click.echo(printable(f"Warning: {message}"), err=True)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr; yield a function that sets its text.

    Where stderr is no terminal, the text becomes a line now and then.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    with console.status(text) as spinner:
        yield spinner.update


def _lines() -> Callable[[str], None]:
    """A function that prints texts on stderr, one in `SECONDS_BETWEEN_LINES`."""
    last = time.monotonic()

    def show(text: str) -> None:
        """Print the text if it is time."""
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            click.echo(text, err=True)

    return show


@contextmanager
def progress(text: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr; yield a function that sets how many items are completed, and
    further fields of the bar. Where stderr is no terminal, a line now and then says the same."""
    from rich.console import Console
    from rich.progress import Progress

    console, show = Console(stderr=True), _lines()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=total)

        def update(completed: int | None = None, **fields: Any) -> None:
            """Set the number of completed items, and further fields."""
            bar.update(task, completed=completed, **fields)
            if not console.is_terminal:
                state = bar.tasks[0]
                show(f"{state.description} ({state.completed:.0f} of {state.total:.0f})")

        yield update


def print_json(value: Any) -> None:
    """Print one JSON value on one line of stdout."""
    click.echo(json.dumps(value))
