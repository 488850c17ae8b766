"""Commands that plan for other engines: how many tokens vLLM or SGLang should draft."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import json_option, options
from sequoia_plan.planner.cli.terminal import print_json, status

if TYPE_CHECKING:
    from sequoia_plan.artifacts.engine_plan import ChainAcceptance, EnginePlan, Range

METRICS_HELP = "Acceptance from a running server's counters: its address, or a file of its /metrics page. No acceptance is measured then."
BEFORE_HELP = "An earlier reading of the same server, as a file: only what it did since counts."
TIMES_HELP = "Step times of an earlier plan; no engine is run then."

plan_options = options(
    click.option("--batch", "batches", default="1,4,16", show_default=True, metavar="N,N,...", help="Requests decoded together, to plan for."),
    click.option("--most", type=click.IntRange(1, 64), default=8, show_default=True, help="Speculative tokens, at most."),
    click.option("--times", metavar="PLAN.yaml", type=click.Path(), help=TIMES_HELP),
    click.option("-o", "--output", type=click.Path(), help="Write the plan there, as YAML."),
    click.option("--report", type=click.Path(), help="Write one HTML file with the curves of throughput; it needs no network."),
    json_option,
)


@click.group()
def engine() -> None:
    """Plan for another engine: the best number of speculative tokens for each batch size."""


@engine.command()
@click.option("--target", metavar="ID|DIR", help="Target model, as vLLM is given it.")
@click.option("--draft", metavar="ID|DIR", help="Draft model, as vLLM is given it.")
@click.option("--method", default="draft_model", show_default=True, help="What vLLM calls the kind of draft: draft_model, eagle3, mtp, ngram, ...")
@click.option("--prompts", metavar="FILE", type=click.Path(), help="As for profile: every second prompt is measured on, the others verify. [default: built-in]")
@click.option("--limit", type=click.IntRange(min=1), default=48, show_default=True, help="Prompts to measure on, at most, and as many to verify on.")
@click.option("--tokens", type=click.IntRange(min=4), default=64, show_default=True, help="New tokens a prompt, at most.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Of sampling; 0 is greedy.")
@click.option("--python", metavar="PATH", help="The Python that has vLLM. [default: this one, else python3]")
@click.option("--engine-args", metavar="JSON", help='Further arguments of vllm.LLM, as {"dtype": "float32", "tensor_parallel_size": 2}.')
@click.option("--speculative-args", metavar="JSON", help='Further entries of the speculative config, as {"prompt_lookup_max": 4}.')
@click.option("--metrics", metavar="URL|FILE", help=METRICS_HELP)
@click.option("--metrics-before", metavar="FILE", type=click.Path(), help=BEFORE_HELP)
@click.option("--together", type=click.IntRange(min=1), help="Engines kept in memory at a time, to be timed in turn. [default: 4 on a CPU, else 1]")
@click.option("--verify", is_flag=True, help="Then measure the best number, its neighbours and no speculation on other prompts.")
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
    together: int | None,
    verify: bool,
    batches: str,
    most: int,
    times: str | None,
    output: str | None,
    report: str | None,
    as_json: bool,
) -> None:
    """Measure a target and a draft in the vLLM of your environment, and say which num_speculative_tokens is best."""
    sizes, more, arguments = _sizes(batches), _mapping("--speculative-args", speculative_args), _mapping("--engine-args", engine_args)
    if metrics_before and not metrics:
        raise click.UsageError("--metrics-before needs the later reading: add --metrics")
    if times and verify:
        raise click.UsageError("--times runs no engine, and --verify needs one: leave one of them out")
    if not metrics and not target:
        raise click.UsageError("name the models with --target and --draft, or a server with --metrics")
    if times and not metrics:
        raise click.UsageError("--times has no acceptance: add --metrics, or leave it out to measure both")
    _check_outputs(output, report, times, metrics, metrics_before, prompts)

    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.artifacts.plan import tool
    from sequoia_plan.planner.engines import counters, planning
    from sequoia_plan.planner.engines import vllm as engines

    if target and not times and not draft and method not in engines.WITHOUT_DRAFT:
        raise ArgumentError(f"--method {method}: needs a draft model; name it with --draft, or use one of {', '.join(engines.WITHOUT_DRAFT)}")
    acceptance = None
    if metrics:
        (after, page), before = counters.fetch(metrics), counters.fetch(metrics_before)[0] if metrics_before else None
        acceptance = counters.acceptance(after, before, metrics, page)
        most = min(most, len(acceptance.accepted))
    speculative = engines.config(method, draft, more)
    if acceptance and (times or not target):
        if not times:
            _say_acceptance(acceptance, most, as_json)
            return

        def lines(earlier: EnginePlan, ranges: Sequence[Range]) -> tuple[str, ...]:
            return engines.lines(speculative if target else earlier_config(earlier), ranges, True)

        plan = _replanned(times, acceptance, sizes, most, lines)
    else:
        assert target
        work, measuring, held_out = _work(prompts, limit, tokens, temperature)
        arguments = {"max_num_seqs": max(sizes)} | arguments
        with status("") as say, engines.Engines(engines.find_python(python), target, work, speculative, arguments, together, say) as running:
            acceptance, steps, seconds = planning.measure(running, sizes, most, measuring, acceptance)
            known = {
                "engine": "vllm",
                "version": running.facts["version"],
                "method": method,
                "target": target,
                "draft": draft or "",
                "settings": {"temperature": temperature, "tokens": tokens, "prompts": len(measuring), "engine": arguments, "speculative": speculative},
                "seconds": round(seconds, 1),
            }
            takes = running.facts["schedule"]
            plan = planning.decide(acceptance, steps, sizes, most, lambda ranges: engines.lines(speculative, ranges, takes), **known, tool=tool())
            if output:
                plan.save(output)  # what was measured is not lost if verifying fails
            if verify:
                plan = planning.verify(running, plan, held_out)
    _finish(plan, output, report, as_json)


@engine.command()
@click.option("--responses", metavar="FILE", type=click.Path(), help="Responses of a server with the largest number of tokens, as JSON or JSON lines.")
@click.option("--log", "logs", metavar="FILE", type=click.Path(), multiple=True, help="A server's log; one for each number of tokens, one without speculation.")
@plan_options
def sglang(
    responses: str | None, logs: tuple[str, ...], batches: str, most: int, times: str | None, output: str | None, report: str | None, as_json: bool
) -> None:
    """Say which --speculative-num-steps is best, from what SGLang servers logged and answered. No SGLang is run."""
    sizes = _sizes(batches)
    if not responses and not logs:
        raise click.UsageError("give --responses of a server with speculation, and --log of servers with and without it")
    _check_outputs(output, report, times, responses, *logs)

    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.artifacts.plan import tool
    from sequoia_plan.planner.engines import planning
    from sequoia_plan.planner.engines import sglang as engines

    read = {log: engines.read_log(log) for log in logs}
    acceptance = engines.read_responses(responses) if responses else None
    if acceptance is None:
        length, steps, means = max(read.values(), key=lambda each: each[0])
        if not length:
            raise ArgumentError("--log: no server ran with speculation; add the log of one that did, or --responses")
        drafts = sum(step.batch * step.steps for step in steps)
        acceptance = engines.of_mean(sum(means[step.batch] * step.batch * step.steps for step in steps) / drafts, length, drafts)
    most = min(most, len(acceptance.accepted))
    timed = tuple(step for _, steps, _ in read.values() for step in steps)
    if times:
        plan = _replanned(times, acceptance, sizes, most, lambda earlier, ranges: engines.lines(ranges))
    elif not {0} < {step.speculative_tokens for step in timed}:
        if logs:
            raise ArgumentError("--log: the best number needs times with and without speculation; give the log of a server without it and of one with it")
        _say_acceptance(acceptance, most, as_json)
        return
    else:
        plan = planning.decide(acceptance, timed, sizes, most, engines.lines, engine="sglang", tool=tool())
    _finish(plan, output, report, as_json)


def earlier_config(plan: EnginePlan) -> dict[str, Any]:
    """The speculative config that an earlier plan was measured with.

    Raises:
        ArgumentError: if the plan's file was edited and holds none that an engine could take.
    """
    from sequoia_plan.artifacts import ArgumentError

    found = plan.settings.get("speculative") or {"method": plan.method} | ({"model": plan.draft} if plan.draft else {})
    if not isinstance(found, Mapping):
        raise ArgumentError(f"--times: settings.speculative: found {found!r:.60}, expected a mapping of vLLM's speculative config")
    return dict(found)


def _replanned(
    times: str, acceptance: ChainAcceptance, sizes: list[int], most: int, lines: Callable[[EnginePlan, Sequence[Range]], tuple[str, ...]]
) -> EnginePlan:
    """A plan from an earlier one's times and other counts; `lines` takes the earlier plan, too."""
    from sequoia_plan.artifacts.engine_plan import EnginePlan
    from sequoia_plan.artifacts.plan import tool
    from sequoia_plan.planner.engines import planning

    earlier = EnginePlan.load(times)
    names = ("engine", "version", "method", "target", "draft", "settings")
    known = {name: getattr(earlier, name) for name in names}
    return planning.decide(acceptance, planning.steps_of(earlier, times), sizes, most, partial(lines, earlier), **known, tool=tool())


def _work(prompts: str | None, limit: int, tokens: int, temperature: float) -> tuple[Any, list[int], list[int]]:
    """What is decoded, and the numbers of the prompts to measure on and to verify on."""
    from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
    from sequoia_plan.planner.engines.vllm import Work

    every = load(prompts or BUILT_IN)
    measuring, others = measuring_half(every)[:limit], held_out_half(every)[:limit]
    work = Work([prompt.text for prompt in (*measuring, *others)], tokens, temperature)
    return work, list(range(len(measuring))), list(range(len(measuring), len(measuring) + len(others)))


def _sizes(text: str) -> list[int]:
    """1,4,16 -> [1, 4, 16]"""
    from sequoia_plan.artifacts import ArgumentError

    parts = text.split(",")
    if not all(part.strip().isdigit() and 0 < int(part) <= 4096 for part in parts):
        raise ArgumentError(f"--batch {text}: expected batch sizes from 1 to 4096 with commas between, as 1,4,16")
    return sorted({int(part) for part in parts})


def _mapping(name: str, text: str | None) -> dict[str, Any]:
    from sequoia_plan.artifacts import ArgumentError

    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ArgumentError(f'{name} {text}: not a JSON object; expected one as {{"dtype": "float32"}}')
    return found


def _check_outputs(output: str | None, report: str | None, *inputs: str | None) -> None:
    from sequoia_plan.artifacts.files import check_writable, refuse_to_replace

    for path in filter(None, (output, report)):
        check_writable(path)
        refuse_to_replace(path, *inputs)


def _say_acceptance(acceptance: ChainAcceptance, most: int, as_json: bool) -> None:
    """What counts tell without times."""
    from sequoia_plan.planner.engines.chain import tokens
    from sequoia_plan.planner.report.engine_table import acceptance_lines

    found = tokens(acceptance, most)
    if as_json:
        print_json({"acceptance": acceptance.facts(), "survival": acceptance.survival, "tokens_per_step": found.mean.tolist(), "plan": None})
        return
    for line in acceptance_lines(acceptance, found.mean):
        click.echo(line)
    click.echo("which number is best depends on step times, too: name the models, or an earlier plan with --times")


def _finish(plan: EnginePlan, output: str | None, report: str | None, as_json: bool) -> None:
    from sequoia_plan.planner.report.engine_table import print_plan

    if output:
        plan.save(output)
    if report:
        from sequoia_plan.artifacts.files import write_atomically
        from sequoia_plan.planner.report.engine_page import page

        write_atomically(report, page(plan).encode())
    if as_json:
        print_json(plan.facts())
        return
    print_plan(plan)
    for path in filter(None, (output, report)):
        click.echo(f"wrote {path}")
