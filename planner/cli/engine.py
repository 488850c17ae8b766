"""Commands that plan for other engines from files, and what all commands for engines share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import (
    PATH,
    bundle,
    check_outputs,
    count_option,
    file_option,
    json_option,
    options,
    sizes_option,
)
from sequoia_plan.planner.cli.terminal import print_json

if TYPE_CHECKING:
    from sequoia_plan.engines.plan import EnginePlan

DEFAULT_BATCHES = (1, 4, 16)

plan_options = options(
    sizes_option(
        "--batch",
        "batches",
        4096,
        "Requests decoded together, to plan for, as 1,4,16. [default: 1,4,16; with --log, those "
        "within what was timed]",
    ),
    count_option("--most", "max_length", default=8, text="Speculative tokens, at most.", most=64),
)
output_options = bundle(
    "outputs",
    output=file_option("-o", "--output", text="Write the plan there, as YAML."),
    report=file_option(
        "--report", text="Write one HTML file with the curves of throughput; it needs no network."
    ),
    as_json=json_option,
)


@click.group()
def engine() -> None:
    """Plan for another engine: the best number of speculative tokens for each batch size."""


@engine.command()
@file_option(
    "--responses",
    text="Responses of a server with the largest number of tokens, as JSON or JSON lines.",
)
@file_option(
    "--log",
    "logs",
    multiple=True,
    required=True,
    text="A server's log; one for each number of tokens, one without speculation.",
)
@plan_options
@output_options
def sglang(
    responses: str | None,
    logs: tuple[str, ...],
    batches: list[int] | None,
    max_length: int,
    outputs: dict[str, Any],
) -> None:
    """Say which --speculative-num-steps is best, from the logs and responses of SGLang servers.
    No SGLang is run."""
    check_outputs(outputs["output"], outputs["report"], responses, *logs)

    from sequoia_plan.engines.chain import ChainModel
    from sequoia_plan.engines.planning import make_plan
    from sequoia_plan.engines.sglang import (
        acceptance_from_logs,
        launch_options,
        read_log,
        read_responses,
    )
    from sequoia_plan.engines.timing import StepTimes

    server_logs = [read_log(path) for path in dict.fromkeys(logs)]
    acceptance = read_responses(responses) if responses else acceptance_from_logs(server_logs)
    max_length = min(max_length, len(acceptance.accepted))
    times = StepTimes(tuple(step for log in server_logs for step in log.steps))
    timed = [*times.by_batch]
    within = [batch for batch in DEFAULT_BATCHES if timed[0] <= batch <= timed[-1]]
    plan = make_plan(
        [(ChainModel(acceptance, max_length), times)],
        batches or within or timed[-1:],
        launch_options,
        engine="sglang",
    )
    write_plan(plan, **outputs)


@engine.command()
@click.argument("plan_path", metavar="PLAN.yaml", type=PATH)
def settings(plan_path: str) -> None:
    """Print a plan as the settings of vLLM, SGLang, TensorRT-LLM and AIConfigurator, and as
    synthetic acceptance for load tests."""
    from sequoia_plan.engines.plan import EnginePlan
    from sequoia_plan.engines.settings import settings_of

    plan = EnginePlan.load(plan_path)
    for part in plan.contexts:
        place = f" at a context of {part.context} tokens" if part.context else ""
        engine_settings = settings_of(plan, part)
        if not engine_settings:
            click.echo(f"start the engine without speculation{place}")
        for name, purpose, text in engine_settings:
            click.echo(f"{name}, {purpose}{place}:\n    {text}")


def write_plan(
    plan: EnginePlan, output: str | None, as_json: bool, report: str | None = None
) -> None:
    """Write the plan to `output` and its HTML page to `report`, if named, and print the plan."""
    from sequoia_plan.artifacts.files import write_atomically
    from sequoia_plan.planner.report.engine_page import engine_page
    from sequoia_plan.planner.report.engine_table import print_plan

    if output:
        plan.save(output)
    if report:
        write_atomically(report, engine_page(plan).encode())
    if as_json:
        print_json(plan.to_dict())
        return
    print_plan(plan)
    for path in filter(None, (output, report)):
        click.echo(f"wrote {path}")
