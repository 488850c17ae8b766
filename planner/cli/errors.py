"""The one place that renders errors: a line on stderr, and exit code 2 for wrong usage, else 1."""

import errno
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from sequoia_plan.planner.cli.terminal import prepare_streams, printable, warn

EXTRAS = {
    "torch": "runtime",
    "transformers": "runtime",
    "accelerate": "offload",
    "psutil": "runtime",
    "gguf": "gguf",
    "matplotlib": "plot",
    "starlette": "serve",
    "uvicorn": "serve",
    "h11": "serve",
}
"""Optional module -> the extra of this package that installs it."""


class CommandGroup(click.Group):
    """A group of commands whose errors end in one line."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command; output that cannot be written ends it in one line."""
        prepare_streams()
        with suppress(ValueError):  # not in the main thread
            # so that what is unfinished is removed
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            try:
                with warnings.catch_warnings():
                    warnings.showwarning = lambda message, *_: warn(message)
                    return super().main(*args, **options)
            finally:
                sys.stdout.flush()  # the last output may fail only when it leaves the buffer
        except OSError as error:
            # Python complains at exit about output left in the buffer, so it goes to devnull.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):  # a reader that closed the pipe is no error
                text = f"{error.filename or 'output'}: {error.strerror or error}"
                advice = "free some space, or " * (error.errno == errno.ENOSPC)
                click.echo(f"Error: {text}; {advice}name another file", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; whatever it raises becomes a line."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, OSError):
            raise  # click renders its own, and `main` those of files
        except Exception as error:
            if "no compiled object yet" in str(error):  # a signal came, and numba lost it
                raise click.Abort from error
            click.echo(f"Error: {printable(_text(error, ctx))}", err=True)
            ctx.exit(getattr(error, "exit_code", 1))


def _text(error: Exception, ctx: click.Context) -> str:
    """What an error says: our own as they are, others with the place that raised them."""
    from sequoia_plan.artifacts.errors import SequoiaPlanError

    if isinstance(error, SequoiaPlanError):
        return str(error)
    module = (getattr(error, "name", None) or "").split(".")[0]
    if isinstance(error, ModuleNotFoundError) and module in EXTRAS:
        install = f"pip install 'sequoia-plan[{EXTRAS[module]}]'"
        return f"{ctx.invoked_subcommand} needs {module}, which is not installed: {install}"
    if isinstance(error, MemoryError):
        return "not enough memory; ask for less (a smaller budget, tree or context)"
    place = traceback.extract_tb(error.__traceback__)[-1]
    reason = (str(error).splitlines() or [""])[0]
    return (
        f"{type(error).__name__}: {reason:.200} ({Path(place.filename).name}, line "
        f"{place.lineno}); check files and options, and report it with the output of "
        "sequoia-plan doctor"
    )
