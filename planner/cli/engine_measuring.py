"""Commands that run an engine to plan for it: `sequoia-plan engine vllm` and `llamacpp`."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.engine import (
    DEFAULT_BATCHES,
    output_options,
    plan_options,
    write_plan,
)
from sequoia_plan.planner.cli.options import (
    NAME,
    bundle,
    check_outputs,
    count_option,
    file_option,
    json_option,
    sizes_option,
)
from sequoia_plan.planner.cli.terminal import status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sequoia_plan.engines.plan import ChainAcceptance, EnginePlan
    from sequoia_plan.engines.pool import EnginePool

LOOKUP = "ngram-simple"
SPEC_TYPES = ["draft-simple", "draft-eagle3", "draft-mtp", LOOKUP]
DEFAULT_LIMIT = 48


run_options = bundle(
    "run",
    path=file_option(
        "--prompts",
        "path",
        text="As for profile: every second prompt is measured on, the others verify. "
        "[default: built-in]",
    ),
    limit=count_option(
        "--limit",
        default=None,
        text=f"Prompts to measure on, at most, and as many to verify on. [default: "
        f"{DEFAULT_LIMIT}; "
        "all for ngram-simple of llama.cpp]",
    ),
    tokens=count_option("--tokens", default=64, text="New tokens a prompt, at most.", least=4),
    temperature=click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="Temperature of sampling; 0 is greedy.",
    ),
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
        help="Then measure the best choice, its neighbours, no speculation and the engine's "
        "defaults on "
        "other prompts.",
    ),
)


def read_json(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    value = None
    with suppress(ValueError):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise click.BadParameter(f'found {text}, expected a JSON object, as {{"dtype": "float32"}}')
    return value


@click.command()
@click.option(
    "--target",
    metavar="ID|DIR",
    type=NAME,
    required=True,
    help="Target model, as vLLM is given it.",
)
@click.option("--draft", metavar="ID|DIR", type=NAME, help="Draft model, as vLLM is given it.")
@click.option(
    "--method",
    default="draft_model",
    type=NAME,
    show_default=True,
    help="vLLM's name of the drafting method: draft_model, eagle3, mtp, ngram, ...",
)
@file_option("--python", metavar="PATH", text="The Python that has vLLM. [default: this one]")
@click.option(
    "--engine-args",
    metavar="JSON",
    type=read_json,
    default="{}",
    help='Further arguments of vllm.LLM, as {"dtype": "float32", "tensor_parallel_size": 2}.',
)
@click.option(
    "--speculative-args",
    metavar="JSON",
    type=read_json,
    default="{}",
    help='Further entries of the speculative config, as {"prompt_lookup_max": 4}.',
)
@click.option(
    "--metrics",
    metavar="URL|FILE",
    type=NAME,
    help="Acceptance from a running server's counters: its address, or a file of its "
    "/metrics page. "
    "No acceptance is measured then.",
)
@run_options
@plan_options
@output_options
def vllm(
    target: str,
    draft: str | None,
    method: str,
    python: str | None,
    engine_args: dict[str, Any],
    speculative_args: dict[str, Any],
    metrics: str | None,
    batches: list[int] | None,
    max_length: int,
    run: dict[str, Any],
    outputs: dict[str, Any],
) -> None:
    """Measure a target and a draft in your vLLM, and say which num_speculative_tokens is best."""
    check_outputs(outputs["output"], outputs["report"], metrics, run["path"])

    from sequoia_plan.engines.counters import chain_acceptance, fetch
    from sequoia_plan.engines.vllm import VllmPool, speculative_config

    acceptance = chain_acceptance(fetch(metrics), metrics) if metrics else None
    if acceptance:
        max_length = min(max_length, len(acceptance.accepted))
    batches = batches or list(DEFAULT_BATCHES)
    new_pool = partial(
        VllmPool,
        target=target,
        draft=draft,
        python=python or sys.executable,
        speculative=speculative_config(method, draft, speculative_args),
        options={"max_num_seqs": max(batches)} | engine_args,
    )
    run["limit"] = run["limit"] or DEFAULT_LIMIT
    plan = _measured_plan(new_pool, run, batches, max_length, outputs["output"], acceptance)
    write_plan(plan, **outputs)


def split_words(text: str) -> list[str]:
    """Split words as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise click.BadParameter(f"{error} in {text!r}, expected options as for a shell") from error


@click.command()
@file_option("--target", metavar="T.gguf", required=True, text="Target model, a GGUF file.")
@file_option("--draft", metavar="D.gguf", text="Draft model, a GGUF file.")
@click.option(
    "--spec-type",
    type=click.Choice(SPEC_TYPES),
    default="draft-simple",
    show_default=True,
    help="How tokens are drafted.",
)
@file_option(
    "--server", metavar="PATH", default="llama-server", show_default=True, text="The program."
)
@click.option(
    "--server-args",
    metavar="OPTIONS",
    default="",
    type=split_words,
    help="Further options of llama-server, as '-ngl 99 -t 8'.",
)
@count_option(
    "--most",
    "max_length",
    default=None,
    text="Drafted tokens, at most. [default: 8; 48 for ngram-simple]",
    most=64,
)
@run_options
@file_option("-o", "--output", text="Write the plan there, as YAML.")
@json_option
def llamacpp(
    target: str,
    draft: str | None,
    spec_type: str,
    server: str,
    server_args: list[str],
    max_length: int | None,
    output: str | None,
    as_json: bool,
    run: dict[str, Any],
) -> None:
    """Measure a target and a draft in your llama.cpp, and say which n-max and p-min are best."""
    if not draft and spec_type not in ("draft-mtp", LOOKUP):
        raise click.UsageError(
            f"--spec-type {spec_type}: needs a draft model; name its GGUF file with --draft"
        )
    if draft and spec_type == LOOKUP:
        raise click.UsageError(f"--draft: has no effect, {LOOKUP} drafts without a model")
    check_outputs(output, None, run["path"], target, draft)

    from sequoia_plan.engines.llama_server import find_build
    from sequoia_plan.engines.llamacpp import LlamaCppPool

    if spec_type != LOOKUP:  # a few texts hold most of what lookups are worth
        run["limit"] = run["limit"] or DEFAULT_LIMIT
    max_length = max_length or (48 if spec_type == LOOKUP else 8)
    new_pool = partial(
        LlamaCppPool,
        target=target,
        draft=draft,
        build=find_build(server),
        spec_type=spec_type,
        arguments=server_args,
    )
    plan = _measured_plan(new_pool, run, [1], max_length, output)
    write_plan(plan, output, as_json)


def _measured_plan(
    new_pool: Callable[..., EnginePool],
    run: dict[str, Any],
    batches: Sequence[int],
    max_length: int,
    output: str | None,
    acceptance: ChainAcceptance | None = None,
) -> EnginePlan:
    """Run engines to make a plan, and to verify it."""
    from sequoia_plan.engines.planning import measure, plan_of, verify_plan
    from sequoia_plan.engines.workload import Workload

    contexts, should_verify = run.pop("contexts") or [0], run.pop("should_verify")
    with (
        status("") as report_status,
        new_pool(
            workload=Workload.load(**run), max_context=max(contexts), report_status=report_status
        ) as pool,
    ):
        measurements, seconds = measure(pool, batches, max_length, contexts, acceptance)
        plan = plan_of(pool, measurements, batches, seconds)
        if output:
            plan.save(output)  # the measurements are not lost if the verification fails
        return verify_plan(pool, plan) if should_verify else plan
