"""`sequoia-plan diagnose`: why speculation does or does not pay in llama.cpp or vLLM."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import (
    NAME,
    bundle,
    check_outputs,
    count_option,
    file_option,
    json_option,
    sizes_option,
)
from sequoia_plan.planner.cli.terminal import print_json, status

if TYPE_CHECKING:
    from sequoia_plan.engines.plan import EnginePlan
    from sequoia_plan.engines.workload import Workload

prompts_option = file_option(
    "--prompts",
    "path",
    text="As for profile: every second prompt is measured on, the others verify. "
    "[default: built-in]",
)
tokens_option = count_option("--tokens", default=64, text="New tokens a prompt, at most.", least=8)
run_options = bundle(
    "run",
    path=prompts_option,
    limit=count_option(
        "--limit", default=48, text="Prompts to measure on, at most, and as many to verify on."
    ),
    tokens=tokens_option,
    contexts=sizes_option(
        "--context",
        "contexts",
        1 << 20,
        "Tokens of every prompt, to plan for each, as 512,4096; other prompts come before shorter "
        "ones. [default: prompts as they are]",
    ),
    should_verify=click.option(
        "--verify",
        "should_verify",
        is_flag=True,
        help="Then measure the best choices, no speculation and the default on other prompts.",
    ),
    max_length=count_option(
        "--most", "max_length", default=8, text="Drafted tokens, at most.", most=64
    ),
)
output_options = bundle(
    "outputs",
    report=file_option("--report", text="Write one HTML file with curves; it needs no network."),
    as_json=json_option,
)


@click.group(invoke_without_command=True)
@click.option("--url", type=NAME, help="A server that runs; nothing is changed there.")
@click.option("--api-key", "key", type=NAME, help="The key that a running server asks for.")
@prompts_option
@count_option("--limit", default=12, text="Prompts to send to a llama-server, at most.")
@tokens_option
@output_options
@click.pass_context
def diagnose(
    context: click.Context,
    url: str | None,
    key: str | None,
    path: str | None,
    limit: int,
    tokens: int,
    outputs: dict[str, Any],
) -> None:
    """Say why speculation does or does not pay in an engine, which setting is best, and what would
    help. Name an engine to start it, or a server that runs with --url."""
    if context.invoked_subcommand:
        return
    if not url:
        raise click.UsageError("give an engine, llamacpp or vllm, or --url of a running server")
    check_outputs(None, outputs["report"], path)

    from sequoia_plan.engines.live import diagnose_server
    from sequoia_plan.engines.workload import Workload

    with status("") as report_status:
        workload = Workload.load(path, limit, tokens)
        write(diagnose_server(url, key or "", workload, report_status), **outputs)


def read_json(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    value = None
    with suppress(ValueError):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise click.BadParameter(f'found {text}, expected a JSON object, as {{"dtype": "float32"}}')
    return value


@diagnose.command()
@bundle(
    "engine",
    target=click.option(
        "--target", metavar="ID|DIR", type=NAME, required=True, help="As vLLM is given it."
    ),
    python=file_option(
        "--python",
        metavar="PATH",
        text="The Python that has vLLM. [default: this one]",
        default=sys.executable,
    ),
    options=click.option(
        "--engine-args",
        "options",
        metavar="JSON",
        type=read_json,
        default="{}",
        help='Further arguments of vllm.LLM, as {"dtype": "float32", "tensor_parallel_size": 2}.',
    ),
)
@click.option("--draft", metavar="ID|DIR", type=NAME, help="As vLLM is given it.")
@click.option(
    "--method",
    default="draft_model",
    type=NAME,
    show_default=True,
    help="vLLM's name of the drafting method: draft_model, eagle3, mtp, ngram, ...",
)
@click.option(
    "--speculative-args",
    metavar="JSON",
    type=read_json,
    default="{}",
    help='Further entries of the speculative config, as {"prompt_lookup_max": 4}.',
)
@sizes_option(
    "--batch",
    "batches",
    4096,
    "Requests decoded together, to plan for.",
    default="1,4,16",
    show_default=True,
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Temperature of sampling; 0 is greedy.",
)
@run_options
@output_options
def vllm(
    engine: dict[str, Any],
    draft: str | None,
    method: str,
    speculative_args: dict[str, Any],
    batches: list[int],
    temperature: float,
    run: dict[str, Any],
    outputs: dict[str, Any],
) -> None:
    """Measure a target and a draft in your vLLM, by batch size."""
    check_outputs(None, outputs["report"], run["path"])

    from sequoia_plan.engines.planning import measure, plan_of, verify_plan
    from sequoia_plan.engines.vllm import VllmPool, speculative_config

    contexts, should_verify, max_length, workload = read_run(run, temperature)
    engine["options"] = {"max_num_seqs": max(batches)} | engine["options"]
    with (
        status("") as report_status,
        VllmPool(
            **engine,
            draft=draft,
            workload=workload,
            max_context=max(contexts),
            report_status=report_status,
            speculative=speculative_config(method, draft, speculative_args),
        ) as pool,
    ):
        measurements = measure(pool, batches, max_length, contexts)
        plan = plan_of(pool, measurements, batches)
        plan = verify_plan(pool, plan) if should_verify else plan
    write(plan, **outputs)


def split_words(text: str) -> list[str]:
    """Split words as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise click.BadParameter(f"{error} in {text!r}, expected options as for a shell") from error


@diagnose.command()
@bundle(
    "engine",
    target=file_option("-m", "--target", metavar="T.gguf", required=True, text="Target model."),
    draft=file_option("-md", "--draft", metavar="D.gguf", text="Draft model. [default: none]"),
    arguments=click.option(
        "--server-args",
        "arguments",
        metavar="OPTIONS",
        default="",
        type=split_words,
        help="Further options of llama-server, as '-ngl 99 -t 8'.",
    ),
)
@click.option(
    "--spec-type",
    metavar="TYPE,...",
    type=NAME,
    help="Types as llama-server takes them; those of n-gram besides ngram-simple are measured as "
    "they are. [default: the draft's, and ngram-simple]",
)
@file_option(
    "--server", metavar="PATH", default="llama-server", show_default=True, text="The program."
)
@run_options
@output_options
def llamacpp(
    engine: dict[str, Any],
    spec_type: str | None,
    server: str,
    run: dict[str, Any],
    outputs: dict[str, Any],
) -> None:
    """Measure a target, and a draft if there is one, in your llama.cpp; for one request, greedy."""
    target, draft = engine["target"], engine["draft"]
    check_outputs(None, outputs["report"], run["path"], target, draft)

    from sequoia_plan.engines.diagnosis import diagnosed
    from sequoia_plan.engines.llama_server import find_build
    from sequoia_plan.engines.llamacpp import LlamaCppPool
    from sequoia_plan.engines.planning import plan_of, verify_plan
    from sequoia_plan.engines.spec_types import is_recurrent, split_types
    from sequoia_plan.planner.report.engine_tree import planned_tree

    contexts, should_verify, max_length, workload = read_run(run)
    build = find_build(server)
    draft_type, other_types = split_types(spec_type, build.types, target, draft)
    with (
        status("") as report_status,
        LlamaCppPool(
            **engine,
            workload=workload,
            max_context=max(contexts),
            report_status=report_status,
            build=build,
            draft_type=draft_type,
            other_types=other_types,
        ) as pool,
    ):
        measurements = [pool.measure(max_length, context) for context in contexts]
        plan = plan_of(pool, measurements, [1])
        tree = partial(planned_tree, branching=1 if is_recurrent(target) else None)
        plan = diagnosed(plan, measurements, workload.kinds, tree)
        plan = verify_plan(pool, plan) if should_verify else plan
    write(plan, **outputs)


def read_run(
    run: dict[str, Any], temperature: float = 0.0
) -> tuple[list[int], bool, int, Workload]:
    """The contexts, whether to verify, the longest chain, and the prompts."""
    from sequoia_plan.engines.workload import Workload

    contexts, should_verify = run.pop("contexts") or [0], run.pop("should_verify")
    return (
        contexts,
        should_verify,
        run.pop("max_length"),
        Workload.load(**run, temperature=temperature),
    )


def write(plan: EnginePlan, report: str | None, as_json: bool) -> None:
    """Write the plan's HTML page to `report`, if named, and print the plan."""
    from sequoia_plan.artifacts.files import write_atomically
    from sequoia_plan.planner.report.engine_page import engine_page
    from sequoia_plan.planner.report.engine_table import print_plan

    if report:
        write_atomically(report, engine_page(plan).encode())
    if as_json:
        print_json(plan.to_dict())
        return
    print_plan(plan)
    if report:
        click.echo(f"wrote {report}")
