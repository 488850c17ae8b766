"""The command line. The one package that knows every layer, and only inside its commands: `--help` stays instant."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import click

from sequoia_plan.planner.cli.decoding import bench, generate
from sequoia_plan.planner.cli.engine import engine
from sequoia_plan.planner.cli.profiling import profile
from sequoia_plan.planner.cli.terminal import interruptible
from sequoia_plan.planner.cli.trees import export_command, import_command, show, solve

EXTRAS = {"torch": "runtime", "transformers": "runtime", "accelerate": "offload", "psutil": "offload", "gguf": "gguf", "matplotlib": "plot"}
"""Which extra of this package brings what a command may lack."""


class _Group(click.Group):
    def main(self, *args: Any, **options: Any) -> Any:
        """Say in one line that output cannot be written; it may be as late as when the last of it leaves the buffer."""
        try:
            try:
                with interruptible():
                    return super().main(*args, **options)
            finally:
                sys.stdout.flush()
        except OSError as error:
            with suppress(OSError, ValueError):  # what is left in the buffer goes nowhere, or Python would complain when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):  # then the reader has seen enough
                click.echo(f"Error: {error.filename or 'output'}: {error.strerror or error}; free some space, or name another file", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Turn our own errors, and what is not installed, into one line and an exit code."""
        from sequoia_plan.artifacts.errors import SequoiaPlanError

        try:
            return super().invoke(ctx)
        except SequoiaPlanError as error:
            _fail(ctx, str(error), error.exit_code)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing not in EXTRAS:
                raise
            _fail(ctx, f"{ctx.invoked_subcommand} needs {missing}, which is not installed: pip install 'sequoia-plan[{EXTRAS[missing]}]'")
        except MemoryError:
            _fail(ctx, "there is not enough memory for that; ask for less (a smaller budget, tree or context)")


def _fail(ctx: click.Context, text: str, code: int = 1) -> None:
    click.echo(f"Error: {text}", err=True)
    ctx.exit(code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sequoia-plan")
def main() -> None:
    """Compile speculation trees: measure a draft and a target, solve for the best token tree, decode with it exactly."""


for _command in (profile, solve, show, generate, bench, engine, export_command, import_command):
    main.add_command(_command)
