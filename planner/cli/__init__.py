"""The command line. The one package that knows every layer, and only inside its commands: `--help` stays instant."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import click

from sequoia_plan.planner.cli.decoding import bench, generate
from sequoia_plan.planner.cli.profiling import profile
from sequoia_plan.planner.cli.trees import export_command, import_command, show, solve

EXTRAS = {"torch": "runtime", "transformers": "runtime", "accelerate": "gguf", "gguf": "gguf", "matplotlib": "plot"}
"""Which extra of this package brings what a command may lack."""


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Turn errors that a user can meet into one line and an exit code."""
        from sequoia_plan.artifacts.errors import SequoiaPlanError

        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a full disk or a closed pipe shows here, not when Python ends
            return result
        except SequoiaPlanError as error:
            _fail(ctx, str(error), error.exit_code)
        except BrokenPipeError:
            _forget_stdout()  # the reader has seen enough
            ctx.exit(1)
        except OSError as error:
            _forget_stdout()
            _fail(ctx, f"{error.filename or 'output'}: {error.strerror or error}; free some space, or name another file")
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


def _forget_stdout() -> None:
    """What is left in the buffer goes nowhere, so that Python does not complain when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sequoia-plan")
def main() -> None:
    """Compile speculation trees: measure a draft and a target, solve for the best token tree, decode with it exactly."""


for _command in (profile, solve, show, generate, bench, export_command, import_command):
    main.add_command(_command)
