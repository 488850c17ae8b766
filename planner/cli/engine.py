"""Commands that plan for other engines: how many tokens vLLM or SGLang should draft."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import (
    Decorator,
    check_outputs,
    json_option,
    options,
    parse_contexts,
    parse_sizes,
)
from sequoia_plan.planner.cli.terminal import print_json, status

if TYPE_CHECKING:
    from sequoia_plan.engines.plan import ChainAcceptance, EnginePlan, StepSeconds
    from sequoia_plan.engines.planning import LaunchLines
    from sequoia_plan.engines.vllm import Workload

BATCH_HELP = (
    "Requests decoded together, to plan for. [default: 1,4,16; with --log or --times, those within "
    "what was timed]"
)
DEFAULT_BATCHES = (1, 4, 16)
MAX_BATCH = 4096
CONTEXT_HELP = (
    "Tokens of every prompt, to plan for each, as 512,4096; other prompts come before shorter "
    "ones. [default: prompts as they are]"
)
TIMES_HELP = "Step times of an earlier plan; no engine is run then."
REPORT_HELP = "Write one HTML file with the curves of throughput; it needs no network."
METHOD_HELP = "vLLM's name of the drafting method: draft_model, eagle3, mtp, ngram, ..."
PROMPTS_HELP = (
    "As for profile: every second prompt is measured on, the others verify. [default: built-in]"
)
LIMIT_HELP = "Prompts to measure on, at most, and as many to verify on."
TEMPERATURE_HELP = "Temperature of sampling; 0 is greedy."
PYTHON_HELP = "The Python that has vLLM. [default: this one, else python3]"
ENGINE_ARGS_HELP = (
    'Further arguments of vllm.LLM, as {"dtype": "float32", "tensor_parallel_size": 2}.'
)
SPECULATIVE_ARGS_HELP = 'Further entries of the speculative config, as {"prompt_lookup_max": 4}.'
METRICS_HELP = (
    "Acceptance from a running server's counters: its address, or a file of its /metrics page. "
    "No acceptance is measured then."
)
METRICS_BEFORE_HELP = (
    "An earlier metrics page of the same server, as a file: only what the server did since counts."
)
TOGETHER_HELP = (
    "Engines kept in memory at a time, to be timed alternately. [default: 4 on a CPU, else 1]"
)
VERIFY_HELP = "Then measure the best number, its neighbours and no speculation on other prompts."
RESPONSES_HELP = "Responses of a server with the largest number of tokens, as JSON or JSON lines."
LOG_HELP = "A server's log; one for each number of tokens, one without speculation."

plan_options = options(
    click.option(
        "--batch",
        "batches",
        metavar="N,N,...",
        help=BATCH_HELP,
    ),
    click.option(
        "--most",
        "max_length",
        type=click.IntRange(1, 64),
        default=8,
        show_default=True,
        help="Speculative tokens, at most.",
    ),
    click.option("--times", "times_path", metavar="PLAN.yaml", type=click.Path(), help=TIMES_HELP),
    click.option("-o", "--output", type=click.Path(), help="Write the plan there, as YAML."),
    click.option("--report", type=click.Path(), help=REPORT_HELP),
    json_option,
)


def workload_options(min_prompts: int, limit: int | None = 48, limit_note: str = "") -> Decorator:
    """The options of what an engine decodes to be measured."""
    return options(
        click.option("--prompts", metavar="FILE", type=click.Path(), help=PROMPTS_HELP),
        click.option(
            "--limit",
            type=click.IntRange(min=min_prompts),
            default=limit,
            show_default=limit is not None,
            help=LIMIT_HELP + limit_note,
        ),
        click.option(
            "--tokens",
            type=click.IntRange(min=4),
            default=64,
            show_default=True,
            help="New tokens a prompt, at most.",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(min=0),
            default=0.0,
            show_default=True,
            help=TEMPERATURE_HELP,
        ),
    )


@click.group()
def engine() -> None:
    """Plan for another engine: the best number of speculative tokens for each batch size."""


@engine.command()
@click.option("--target", metavar="ID|DIR", help="Target model, as vLLM is given it.")
@click.option("--draft", metavar="ID|DIR", help="Draft model, as vLLM is given it.")
@click.option("--method", default="draft_model", show_default=True, help=METHOD_HELP)
@workload_options(min_prompts=1)
@click.option("--python", metavar="PATH", help=PYTHON_HELP)
@click.option("--engine-args", metavar="JSON", help=ENGINE_ARGS_HELP)
@click.option("--speculative-args", metavar="JSON", help=SPECULATIVE_ARGS_HELP)
@click.option("--metrics", metavar="URL|FILE", help=METRICS_HELP)
@click.option("--metrics-before", metavar="FILE", type=click.Path(), help=METRICS_BEFORE_HELP)
@click.option("--context", "contexts", metavar="N,N,...", help=CONTEXT_HELP)
@click.option("--together", "max_engines", type=click.IntRange(min=1), help=TOGETHER_HELP)
@click.option("--verify", "should_verify", is_flag=True, help=VERIFY_HELP)
@plan_options
def vllm(
    target: str | None,
    draft: str | None,
    method: str,
    prompts: str | None,
    limit: int,
    tokens: int,
    temperature: float,
    python: str | None,
    engine_args: str | None,
    speculative_args: str | None,
    metrics: str | None,
    metrics_before: str | None,
    contexts: str | None,
    max_engines: int | None,
    should_verify: bool,
    batches: str,
    max_length: int,
    times_path: str | None,
    output: str | None,
    report: str | None,
    as_json: bool,
) -> None:
    """Measure a target and a draft in your vLLM, and say which num_speculative_tokens is best."""
    batch_sizes = _parse_batches(batches)
    context_sizes = parse_contexts(contexts)
    config_entries = _parse_json_object("--speculative-args", speculative_args)
    engine_options = _parse_json_object("--engine-args", engine_args)
    if metrics_before and not metrics:
        raise click.UsageError("--metrics-before needs the later reading: add --metrics")
    if times_path and should_verify:
        raise click.UsageError(
            "--times runs no engine, and --verify needs one: leave one of them out"
        )
    if not metrics and not target:
        raise click.UsageError(
            "name the models with --target and --draft, or a server with --metrics"
        )
    if contexts and (times_path or not target):
        raise click.UsageError(
            "--context is for timing an engine: name the models with --target and --draft, "
            "and leave --times out"
        )
    if times_path and not metrics:
        raise click.UsageError(
            "--times has no acceptance: add --metrics, or leave it out to measure both"
        )
    check_outputs(output, report, times_path, metrics, metrics_before, prompts)

    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.artifacts.plan import tool_version
    from sequoia_plan.engines import planning
    from sequoia_plan.engines.vllm import (
        METHODS_WITHOUT_DRAFT,
        EnginePool,
        find_python,
        launch_options,
        speculative_config,
    )

    needs_draft = target and not times_path and method not in METHODS_WITHOUT_DRAFT
    if needs_draft and not draft:
        raise ArgumentError(
            f"--method {method}: needs a draft model; name it with --draft, "
            f"or use one of {', '.join(METHODS_WITHOUT_DRAFT)}"
        )
    acceptance = _acceptance_from_metrics(metrics, metrics_before) if metrics else None
    if acceptance:
        max_length = min(max_length, len(acceptance.accepted))
    config = speculative_config(method, draft, config_entries)
    if acceptance and times_path:
        earlier = _load_times(times_path, "vllm")
        plan = _replan(
            earlier,
            times_path,
            acceptance,
            batch_sizes,
            max_length,
            lambda schedule: launch_options(
                config if target else _earlier_config(earlier), schedule, accepts_schedule=True
            ),
        )
    elif acceptance and not target:
        _print_acceptance(acceptance, max_length, as_json)
        return
    else:
        assert target
        workload, measuring, held_out = load_workload(prompts, limit, tokens, temperature)
        batch_sizes = batch_sizes or list(DEFAULT_BATCHES)
        engine_options = {"max_num_seqs": max(batch_sizes)} | engine_options
        settings = {
            "temperature": temperature,
            "tokens": tokens,
            "prompts": len(measuring),
            "engine": engine_options,
            "speculative": config,
        }
        with (
            status("") as report_status,
            EnginePool(
                find_python(python),
                target,
                workload,
                config,
                engine_options,
                max_engines,
                report_status,
            ) as pool,
        ):
            counts, steps, seconds = planning.measure(
                pool, batch_sizes, max_length, measuring, acceptance, context_sizes or [0]
            )
            plan = planning.make_plan(
                counts,
                steps,
                batch_sizes,
                max_length,
                lambda schedule: launch_options(config, schedule, pool.info["accepts_schedule"]),
                engine="vllm",
                version=pool.info["version"],
                method=method,
                target=target,
                draft=draft or "",
                settings=settings,
                seconds=round(seconds, 1),
                tool=tool_version(),
            )
            if output:
                plan.save(output)  # the measurements are not lost if the verification fails
            if should_verify:
                plan = planning.verify_plan(pool, plan, held_out)
    write_plan(plan, output, report, as_json)


@engine.command()
@click.option("--responses", metavar="FILE", type=click.Path(), help=RESPONSES_HELP)
@click.option("--log", "logs", metavar="FILE", type=click.Path(), multiple=True, help=LOG_HELP)
@plan_options
def sglang(
    responses: str | None,
    logs: tuple[str, ...],
    batches: str,
    max_length: int,
    times_path: str | None,
    output: str | None,
    report: str | None,
    as_json: bool,
) -> None:
    """Say which --speculative-num-steps is best, from the logs and responses of SGLang servers.
    No SGLang is run."""
    batch_sizes = _parse_batches(batches)
    if not responses and not logs:
        raise click.UsageError(
            "give --responses of a server with speculation, "
            "and --log of servers with and without it"
        )
    check_outputs(output, report, times_path, responses, *logs)

    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.artifacts.plan import tool_version
    from sequoia_plan.engines import planning
    from sequoia_plan.engines.sglang import (
        acceptance_from_logs,
        launch_flags,
        read_log,
        read_responses,
    )

    server_logs = [read_log(path) for path in dict.fromkeys(logs)]
    if responses:
        acceptance = read_responses(responses)
    else:
        acceptance = acceptance_from_logs(server_logs)
    max_length = min(max_length, len(acceptance.accepted))
    steps = tuple(step for log in server_logs for step in log.steps)
    if times_path:
        earlier = _load_times(times_path, "sglang")
        batch_sizes = batch_sizes or _default_batches(earlier.steps)
        flags = partial(launch_flags, batches=batch_sizes)
        plan = _replan(earlier, times_path, acceptance, batch_sizes, max_length, flags)
    elif {0} < {step.speculative_tokens for step in steps}:
        batch_sizes = batch_sizes or _default_batches(steps)
        plan = planning.make_plan(
            acceptance,
            steps,
            batch_sizes,
            max_length,
            partial(launch_flags, batches=batch_sizes),
            engine="sglang",
            tool=tool_version(),
        )
    elif logs:
        raise ArgumentError(
            "--log: the best number needs times with and without speculation; "
            "give the log of a server without it and of one with it"
        )
    else:
        _print_acceptance(acceptance, max_length, as_json)
        return
    write_plan(plan, output, report, as_json)


@engine.command()
@click.argument("plan_path", metavar="PLAN.yaml", type=click.Path())
@json_option
def settings(plan_path: str, as_json: bool) -> None:
    """Print a plan as the settings of vLLM, SGLang, TensorRT-LLM and AIConfigurator, and as
    synthetic acceptance for load tests."""
    from sequoia_plan.engines.plan import EnginePlan
    from sequoia_plan.engines.settings import settings_of

    parts = EnginePlan.load(plan_path).parts()
    by_context = {part.context: settings_of(part) for part in parts}
    if as_json:
        print_json(
            [
                asdict(setting) | ({"context": context} if context else {})
                for context, engine_settings in by_context.items()
                for setting in engine_settings
            ]
        )
        return
    for context, engine_settings in by_context.items():
        place = f" at a context of {context} tokens" if context else ""
        if not engine_settings:
            click.echo(f"start the engine without speculation{place}")
        for setting in engine_settings:
            click.echo(f"{setting.engine}, {setting.purpose}{place}:\n    {setting.text}")


def _acceptance_from_metrics(metrics: str, metrics_before: str | None) -> ChainAcceptance:
    """Reads how far chains were accepted from the counters on a server's metrics page."""
    from sequoia_plan.engines.counters import chain_acceptance, fetch

    after, page = fetch(metrics)
    before = fetch(metrics_before)[0] if metrics_before else None
    return chain_acceptance(after, before, metrics, page)


def _replan(
    earlier: EnginePlan,
    times_path: str,
    acceptance: ChainAcceptance,
    batch_sizes: list[int] | None,
    max_length: int,
    launch_lines: LaunchLines,
) -> EnginePlan:
    """Makes a plan from new acceptance counts and the step times of an earlier plan."""
    from sequoia_plan.artifacts.plan import tool_version
    from sequoia_plan.engines.planning import make_plan, steps_of_plan

    return make_plan(
        acceptance,
        steps_of_plan(earlier, times_path),
        batch_sizes or _default_batches(earlier.steps),
        max_length,
        launch_lines,
        engine=earlier.engine,
        version=earlier.version,
        method=earlier.method,
        target=earlier.target,
        draft=earlier.draft,
        settings=earlier.settings,
        tool=tool_version(),
    )


def _load_times(path: str, engine: str) -> EnginePlan:
    """Loads an earlier plan for its step times."""
    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.engines.plan import EnginePlan

    plan = EnginePlan.load(path)
    if plan.engine != engine:
        raise ArgumentError(
            f"--times {path}: holds step times of {plan.engine}, expected a plan for {engine}; "
            "another engine takes other times"
        )
    return plan


def _default_batches(steps: Sequence[StepSeconds]) -> list[int]:
    """The batch sizes to plan for where none are named: default ones within what was timed."""
    timed = [step.batch for step in steps]
    if not timed:
        return list(DEFAULT_BATCHES)
    within = [batch for batch in DEFAULT_BATCHES if min(timed) <= batch <= max(timed)]
    return within or [max(timed)]


def _earlier_config(plan: EnginePlan) -> dict[str, Any]:
    """vLLM's speculative config, without a number of tokens, that an earlier plan was made with."""
    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.engines.vllm import speculative_config

    config = plan.settings.get("speculative") or speculative_config(plan.method, plan.draft, {})
    if not isinstance(config, Mapping):
        raise ArgumentError(
            f"--times: settings.speculative: found {config!r:.60}, "
            "expected a mapping of vLLM's speculative config"
        )
    return dict(config)


def load_workload(
    path: str | None, limit: int | None, tokens: int, temperature: float
) -> tuple[Workload, list[int], list[int]]:
    """Loads the prompts that engines decode, in two parts: to measure on, and held out.

    The plan's prediction is checked on the prompts that are held out.
    """
    from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
    from sequoia_plan.engines.vllm import Workload

    prompts = load(path or BUILT_IN)
    measuring, held_out = measuring_half(prompts)[:limit], held_out_half(prompts)[:limit]
    texts = [prompt.text for prompt in (*measuring, *held_out)]
    indices = list(range(len(texts)))
    workload = Workload(texts, tokens, temperature)
    return workload, indices[: len(measuring)], indices[len(measuring) :]


def _parse_batches(text: str | None) -> list[int] | None:
    """Parses the value of --batch."""
    return parse_sizes("--batch", text, "batch sizes", MAX_BATCH, "1,4,16")


def _parse_json_object(option: str, text: str | None) -> dict[str, Any]:
    """Parses an option's JSON object; the object is empty without the option."""
    from sequoia_plan.artifacts import ArgumentError

    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArgumentError(
            f'{option} {text}: not a JSON object; expected one as {{"dtype": "float32"}}'
        )
    return value


def _print_acceptance(acceptance: ChainAcceptance, max_length: int, as_json: bool) -> None:
    """Prints acceptance, and expected tokens a step, for which no step times are needed."""
    from sequoia_plan.engines.chain import tokens_by_length
    from sequoia_plan.planner.report.engine_table import acceptance_lines

    mean_tokens: Sequence[float] = tokens_by_length(acceptance, max_length).mean.tolist()
    if as_json:
        print_json(
            {
                "acceptance": acceptance.to_dict(),
                "survival": acceptance.survival,
                "tokens_per_step": mean_tokens,
                "plan": None,
            }
        )
        return
    for line in acceptance_lines(acceptance, mean_tokens):
        click.echo(line)
    click.echo(
        "which number is best depends on step times, too: "
        "name the models, or an earlier plan with --times"
    )


def write_plan(plan: EnginePlan, output: str | None, report: str | None, as_json: bool) -> None:
    """Writes the plan to `output` and its HTML page to `report`, if named, and prints the plan."""
    from sequoia_plan.planner.report.engine_table import print_plan

    if output:
        plan.save(output)
    if report:
        from sequoia_plan.artifacts.files import write_atomically
        from sequoia_plan.planner.report.engine_page import engine_page

        write_atomically(report, engine_page(plan).encode())
    if as_json:
        print_json(plan.to_dict())
        return
    print_plan(plan)
    for path in filter(None, (output, report)):
        click.echo(f"wrote {path}")
