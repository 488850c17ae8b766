"""The command line. Only this package knows every layer, and it imports the heavy ones inside its
commands, so that `--help` stays instant."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import click

from sequoia_plan.planner.cli.decoding import bench, generate
from sequoia_plan.planner.cli.doctor import doctor
from sequoia_plan.planner.cli.engine import engine
from sequoia_plan.planner.cli.engine_measuring import llamacpp, vllm
from sequoia_plan.planner.cli.profiling import profile
from sequoia_plan.planner.cli.terminal import interruptible, prepare_streams, printable
from sequoia_plan.planner.cli.trees import export_command, import_command, show, solve

EXTRAS = {
    "torch": "runtime",
    "transformers": "runtime",
    "accelerate": "offload",
    "psutil": "offload",
    "gguf": "gguf",
    "matplotlib": "plot",
}
"""Optional module -> the extra of this package that installs it."""


class _Group(click.Group):
    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command. If its output cannot be written, end with one line and exit code 1."""
        prepare_streams()
        try:
            try:
                with interruptible():
                    return super().main(*args, **options)
            finally:
                sys.stdout.flush()  # the last output may fail only when it leaves the buffer
        except OSError as error:
            # Python complains at exit about output left in the buffer, so it goes to devnull.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):  # a reader that closed the pipe is no error
                place, reason = error.filename or "output", error.strerror or error
                advice = "free some space, or name another file"
                click.echo(f"Error: {place}: {reason}; {advice}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; our own errors, a missing module, values that nobody foresaw and a lack
        of memory become one line on stderr and an exit code."""
        from sequoia_plan.artifacts.errors import SequoiaPlanError

        try:
            return super().invoke(ctx)
        except SequoiaPlanError as error:
            _fail(ctx, str(error), error.exit_code)
        except ModuleNotFoundError as error:
            module = (error.name or "").split(".")[0]
            if module not in EXTRAS:
                raise
            install = f"pip install 'sequoia-plan[{EXTRAS[module]}]'"
            needs = f"{ctx.invoked_subcommand} needs {module}, which is not installed"
            _fail(ctx, f"{needs}: {install}")
        except (OverflowError, UnicodeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            _fail(
                ctx, f"a value of the input cannot be used ({reason:.200}); check files and options"
            )
        except MemoryError:
            advice = "ask for less (a smaller budget, tree or context)"
            _fail(ctx, f"there is not enough memory for that; {advice}")


def _fail(ctx: click.Context, message: str, exit_code: int = 1) -> None:
    """Print an error on stderr, and end the command with an exit code."""
    click.echo(f"Error: {printable(message)}", err=True)
    ctx.exit(exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sequoia-plan")
def main() -> None:
    """Compile speculation trees: measure a draft and a target, solve for the best token tree,
    decode with it exactly."""


for _command in (
    profile,
    solve,
    show,
    generate,
    bench,
    engine,
    export_command,
    import_command,
    doctor,
):
    main.add_command(_command)
engine.add_command(vllm)
engine.add_command(llamacpp)
