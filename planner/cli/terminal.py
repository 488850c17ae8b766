"""What people see: progress on stderr, figures on stdout."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, Ctrl-C ends the process at once while numba is imported or compiles: LLVM calls back into Python, where an exception is lost."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours:  # another thread may not set it, and a background job ignores it
        yield
        return
    signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(number: int, frame: FrameType | None) -> None:
    caller = frame
    while caller and not str(caller.f_globals.get("__name__")).startswith(("numba.", "llvmlite.")):
        caller = caller.f_back
    if not caller:
        signal.default_int_handler(number, frame)
    from rich.console import Console

    Console(stderr=True).show_cursor()
    click.echo("\nAborted!", err=True)  # as click says it
    os._exit(1)


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
