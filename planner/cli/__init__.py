"""The command line. Only this package knows every layer, and it imports the heavy ones inside its
commands, so that `--help` stays instant."""

import click

from sequoia_plan.planner.cli.decoding import bench, generate
from sequoia_plan.planner.cli.diagnose import diagnose
from sequoia_plan.planner.cli.doctor import doctor
from sequoia_plan.planner.cli.errors import CommandGroup
from sequoia_plan.planner.cli.exchange import export_command, import_command
from sequoia_plan.planner.cli.profiling import profile
from sequoia_plan.planner.cli.serving import serve
from sequoia_plan.planner.cli.trees import show, solve


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sequoia-plan")
def main() -> None:
    """Compile speculation trees: measure a draft and a target, solve for the best token tree,
    decode with it exactly."""


for _command in (
    profile,
    solve,
    show,
    generate,
    serve,
    bench,
    diagnose,
    export_command,
    import_command,
    doctor,
):
    main.add_command(_command)
