"""What people see: progress on stderr, figures on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr when that is a terminal; silent otherwise."""
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


@contextmanager
def progress(text: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr when that is a terminal; silent otherwise."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)

        def say(done: int | None = None, total: int | None = None, text: str | None = None) -> None:
            progress.update(task, completed=done, total=total, description=text)

        yield say


def print_json(value: Any) -> None:
    click.echo(json.dumps(value))


def numbers(values: Any) -> str:
    return " ".join(f"{v:.3f}" for v in values)


def curve(points: Any) -> str:
    return "  ".join(f"{n}: {seconds * 1000:.1f} ms" for n, seconds in points.items())
