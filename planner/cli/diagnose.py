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
    bundle,
    check_outputs,
    count_option,
    file_option,
    json_option,
    name_option,
    sizes_option,
)
from sequoia_plan.planner.cli.terminal import print_json, status

if TYPE_CHECKING:
    from collections.abc import Callable

    from sequoia_plan.engines.plan import EnginePlan

prompts_option = file_option(
    "--prompts",
    "path",
    text="As for profile: every second prompt is measured on, the others verify. "
    "[default: built-in]",
)
run_options = bundle(
    "run",
    path=prompts_option,
    limit=count_option(
        "--limit", default=48, text="Prompts to measure on, at most, and as many to verify on."
    ),
    tokens=count_option("--tokens", default=32, text="New tokens a prompt, at most.", least=8),
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
        help="Then measure the best choices and no speculation on other prompts.",
    ),
    max_length=count_option(
        "--most", "max_length", default=8, text="Drafted tokens, at most.", most=64
    ),
)
output_options = bundle(
    "outputs",
    report=file_option("--report", text="Write one HTML file; it needs no network."),
    as_json=json_option,
)


@click.group(invoke_without_command=True)
@bundle(
    "server",
    address=name_option("--url", "address", text="A server; nothing is changed there."),
    key=name_option("--api-key", "key", text="The key that it asks for."),
    model=name_option("--model", text="The model's name, of a router."),
)
@prompts_option
@output_options
@click.pass_context
def diagnose(
    context: click.Context, server: dict[str, Any], path: str | None, outputs: dict[str, Any]
) -> None:
    """Say why speculation does or does not pay in an engine, which setting is best, and what would
    help. Name an engine to start it, or a server that runs with --url."""
    if context.invoked_subcommand:
        return
    if not server["address"]:
        raise click.UsageError("give an engine, llamacpp or vllm, or --url of a running server")
    check_outputs(None, outputs["report"], path)

    from sequoia_plan.engines.live import diagnose_server
    from sequoia_plan.engines.llama_server import Server
    from sequoia_plan.engines.pool import Workload

    with status("") as report_status:
        workload = Workload.load(path, limit=12, tokens=64)
        write(diagnose_server(Server(**server), workload, report_status), **outputs)


def read_json(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    with suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise click.BadParameter(f'found {text}, expected a JSON object, as {{"dtype": "float32"}}')


@diagnose.command()
@bundle(
    "engine",
    target=name_option("--target", metavar="ID|DIR", required=True, text="As vLLM is given it."),
    python=file_option(
        "--python",
        metavar="PATH",
        text="The Python that has vLLM. [default: this one]",
        default=sys.executable,
    ),
    speculative=click.option(
        "--speculative-config",
        "speculative",
        metavar="JSON",
        type=read_json,
        required=True,
        help="vLLM's own, without a number of tokens, as "
        '{"method": "draft_model", "model": "draft"}.',
    ),
    options=click.option(
        "--engine-args",
        "options",
        metavar="JSON",
        type=read_json,
        default="{}",
        help='Further arguments of vllm.LLM, as {"dtype": "float32", "tensor_parallel_size": 2}.',
    ),
    batches=sizes_option(
        "--batch",
        "batches",
        4096,
        "Requests decoded together, to plan for.",
        default="1,4,16",
        show_default=True,
    ),
    temperature=click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="Temperature of sampling; 0 is greedy.",
    ),
)
@run_options
@output_options
def vllm(engine: dict[str, Any], run: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Measure a target and a draft in your vLLM, by batch size."""
    from sequoia_plan.engines.vllm import VllmPool

    engine["draft"] = engine["speculative"].get("model")
    check_outputs(None, outputs["report"], run["path"], engine["target"], engine["draft"])
    engine["options"] = {"max_num_seqs": max(engine["batches"])} | engine["options"]
    diagnose_engine(VllmPool, engine, run, outputs)


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
@name_option(
    "--spec-type",
    metavar="TYPE,...",
    text="Types as llama-server takes them; those of n-gram besides ngram-simple are measured as "
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
    from sequoia_plan.engines.diagnosis import diagnosed
    from sequoia_plan.engines.llama_server import find_build
    from sequoia_plan.engines.llamacpp import LlamaCppPool
    from sequoia_plan.engines.spec_types import is_recurrent, split_types
    from sequoia_plan.planner.report.engine_tree import planned_tree

    target, draft = engine["target"], engine["draft"]
    check_outputs(None, outputs["report"], run["path"], target, draft)
    engine["draft_type"], engine["other_types"] = split_types(spec_type, target, draft)
    engine["build"] = find_build(server, spec_type or engine["draft_type"] or "none")
    engine["is_recurrent"] = is_recurrent(target)
    tree = partial(planned_tree, branching=1 if engine["is_recurrent"] else None)
    diagnose_engine(LlamaCppPool, engine, run, outputs, partial(diagnosed, tree=tree))


def diagnose_engine(
    pool_class: Any,
    engine: dict[str, Any],
    run: dict[str, Any],
    outputs: dict[str, Any],
    add_details: Callable[[EnginePlan, Any], EnginePlan] = lambda plan, measurements: plan,
) -> None:
    """Measure in engines that are started, verify the plan if it is wished, and write it."""
    from sequoia_plan.engines.planning import plan_of, verify_plan
    from sequoia_plan.engines.pool import Workload

    engine["workload"] = Workload.load(run["path"], run["limit"], run["tokens"])
    engine["contexts"] = run["contexts"] or [0]
    engine["max_length"] = run["max_length"]
    with status("") as report_status, pool_class(**engine, report_status=report_status) as pool:
        measurements = pool.measure()
        plan = add_details(plan_of(pool, measurements), measurements)
        if run["should_verify"]:
            plan = verify_plan(pool, plan)
    write(plan, **outputs)


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
