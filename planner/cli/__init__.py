"""The command line. The one package that knows every layer, and only inside its commands: `--help` stays instant."""

from __future__ import annotations

from typing import Any

import click

from sequoia_plan.planner.cli.decoding import bench, generate
from sequoia_plan.planner.cli.profiling import profile
from sequoia_plan.planner.cli.trees import export_command, import_command, show, solve


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Turn our own errors into one line and an exit code."""
        from sequoia_plan.artifacts.errors import SequoiaPlanError

        try:
            return super().invoke(ctx)
        except SequoiaPlanError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sequoia-plan")
def main() -> None:
    """Compile speculation trees: measure a draft and a target, solve for the best token tree, decode with it exactly."""


for _command in (profile, solve, show, generate, bench, export_command, import_command):
    main.add_command(_command)
