"""Commands that plan for other engines from files, and what all commands for engines share."""

from __future__ import annotations

from collections.abc import Sequence
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
    refuse_given,
    sizes_option,
)
from sequoia_plan.planner.cli.terminal import print_json

if TYPE_CHECKING:
    from sequoia_plan.engines.plan import ChainAcceptance, EnginePlan
    from sequoia_plan.engines.timing import StepTimes

DEFAULT_BATCHES = (1, 4, 16)

plan_options = options(
    sizes_option(
        "--batch",
        "batches",
        4096,
        "Requests decoded together, to plan for, as 1,4,16. [default: 1,4,16; with --log or "
        "--times, "
        "those within what was timed]",
    ),
    count_option("--most", "max_length", default=8, text="Speculative tokens, at most.", most=64),
    file_option(
        "--times",
        "times_path",
        metavar="PLAN.yaml",
        text="Step times of an earlier plan; no engine is run then.",
    ),
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
    text="A server's log; one for each number of tokens, one without speculation.",
)
@plan_options
@output_options
def sglang(
    responses: str | None,
    logs: tuple[str, ...],
    batches: list[int] | None,
    max_length: int,
    times_path: str | None,
    outputs: dict[str, Any],
) -> None:
    """Say which --speculative-num-steps is best, from the logs and responses of SGLang servers.
    No SGLang is run."""
    if not logs and not (responses and times_path):
        raise click.UsageError(
            "give --log of servers with and without speculation, "
            "or --responses of one with it and an earlier plan with --times"
        )
    if times_path and responses:
        refuse_given("--times has step times and --responses acceptance", "logs")
    check_outputs(outputs["output"], outputs["report"], times_path, responses, *logs)

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
    if times_path:
        plan = replan(times_path, "sglang", acceptance, batches, max_length)
    else:
        times = StepTimes(tuple(step for log in server_logs for step in log.steps))
        plan = make_plan(
            [(ChainModel(acceptance, max_length), times)],
            batches or default_batches(times),
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


def replan(
    times_path: str,
    engine_name: str,
    acceptance: ChainAcceptance,
    batches: Sequence[int] | None,
    max_length: int,
) -> EnginePlan:
    """Make a plan from new acceptance counts and the step times of an earlier plan."""
    from msgspec.structs import replace

    from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
    from sequoia_plan.engines import sglang, vllm
    from sequoia_plan.engines.chain import ChainModel
    from sequoia_plan.engines.plan import ContextPlan, EnginePlan
    from sequoia_plan.engines.planning import make_plan
    from sequoia_plan.engines.timing import StepTimes

    earlier = EnginePlan.load(times_path)
    if earlier.engine != engine_name:
        raise ArgumentError(
            f"--times {times_path}: holds step times of {earlier.engine}, expected a plan for "
            f"{engine_name}; another engine takes other times"
        )

    speculative = earlier.settings.get("speculative")
    if engine_name == "vllm" and not isinstance(speculative, dict):
        raise SequoiaPlanError(
            f"--times {times_path}: settings.speculative: found {speculative!r:.40}, expected "
            "vLLM's speculative config; make the plan again"
        )

    def launch_options(part: ContextPlan) -> tuple[str, ...]:
        """The options to start the engine with, as those of the earlier plan."""
        if engine_name == "sglang":
            return sglang.launch_options(part)
        return vllm.launch_options(speculative or {}, part.schedule)

    model = ChainModel(acceptance, max_length)
    times = [StepTimes(part.steps, part.context) for part in earlier.contexts]
    plan = make_plan(
        [(model, context_times) for context_times in times],
        batches or default_batches(times[0]),
        launch_options,
        engine=engine_name,
    )
    return replace(earlier, contexts=plan.contexts, seconds=0.0, tool=plan.tool)


def default_batches(times: StepTimes) -> list[int]:
    """The batch sizes to plan for where none are named: default ones within what was timed."""
    timed = [*times.by_batch]
    within = [batch for batch in DEFAULT_BATCHES if timed[0] <= batch <= timed[-1]]
    return within or timed[-1:]


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
