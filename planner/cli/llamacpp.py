"""`sequoia-plan engine llamacpp`: which n-max and p-min llama.cpp should draft with."""

from __future__ import annotations

import shlex

import click

from sequoia_plan.planner.cli.engine import (
    CONTEXT_HELP,
    load_workload,
    workload_options,
    write_plan,
)
from sequoia_plan.planner.cli.options import check_outputs, json_option, parse_contexts
from sequoia_plan.planner.cli.terminal import status

TYPE_HELP = (
    "How tokens are drafted: draft-simple, draft-eagle3, draft-mtp (or eagle3, mtp), ngram-simple."
)
MOST_HELP = "Drafted tokens, at most. [default: 8; 48 for ngram-simple]"
DEFAULT_LIMIT = 48
LIMIT_NOTE = f" [default: {DEFAULT_LIMIT}; all for ngram-simple]"
SERVER_HELP = "The program llama-server. [default: the one on the PATH]"
SERVER_ARGS_HELP = "Further options of llama-server, as '-ngl 99 -t 8'."
TOGETHER_HELP = "Servers kept in memory at a time. [default: 4 on a CPU, else 1]"
VERIFY_HELP = (
    "Then measure the choice, its neighbours, none and llama.cpp's defaults on other prompts."
)


@click.command()
@click.option("--target", metavar="T.gguf", required=True, help="Target model, a GGUF file.")
@click.option("--draft", metavar="D.gguf", help="Draft model, a GGUF file.")
@click.option("--spec-type", default="draft-simple", show_default=True, help=TYPE_HELP)
@click.option("--server", metavar="PATH", help=SERVER_HELP)
@click.option("--server-args", metavar="OPTIONS", default="", help=SERVER_ARGS_HELP)
@click.option("--most", "max_length", type=click.IntRange(1, 64), help=MOST_HELP)
@workload_options(min_prompts=2, limit=None, limit_note=LIMIT_NOTE)
@click.option("--context", "contexts", metavar="N,N,...", help=CONTEXT_HELP)
@click.option("--together", "max_servers", type=click.IntRange(min=1), help=TOGETHER_HELP)
@click.option("--verify", "should_verify", is_flag=True, help=VERIFY_HELP)
@click.option("-o", "--output", type=click.Path(), help="Write the plan there, as YAML.")
@json_option
def llamacpp(
    target: str,
    draft: str | None,
    spec_type: str,
    server: str | None,
    server_args: str,
    max_length: int | None,
    prompts: str | None,
    limit: int | None,
    tokens: int,
    temperature: float,
    contexts: str | None,
    max_servers: int | None,
    should_verify: bool,
    output: str | None,
    as_json: bool,
) -> None:
    """Measure a target and a draft in your llama.cpp, and say which n-max and p-min are best."""
    from sequoia_plan.artifacts import ArgumentError
    from sequoia_plan.engines import llamacpp_plan
    from sequoia_plan.engines.drafting import LOOKUP, TYPES, WITHOUT_DRAFT
    from sequoia_plan.engines.llamacpp import ServerPool, check_model, find_build

    planned = [spec_type, f"draft-{spec_type}"]
    if not any(name in TYPES for name in planned):
        raise ArgumentError(
            f"--spec-type {spec_type}: cannot be planned; expected one of {', '.join(TYPES)}"
        )
    if not draft and not any(name in WITHOUT_DRAFT for name in planned):
        raise ArgumentError(
            f"--spec-type {spec_type}: needs a draft model; name its GGUF file with --draft, "
            f"or use one of {', '.join(WITHOUT_DRAFT)}"
        )
    try:
        arguments = shlex.split(server_args)
    except ValueError as error:
        raise ArgumentError(
            f"--server-args {server_args}: {error}; expected options as for a shell"
        ) from error
    context_sizes = parse_contexts(contexts) or [0]
    check_outputs(output, prompts, target, draft)
    check_model("--target", target)
    if draft:
        check_model("--draft", draft)
    build, spec_type = find_build(server, spec_type)
    max_length = max_length or (48 if spec_type == LOOKUP else 8)
    if limit is None and spec_type != LOOKUP:  # a few texts hold most of what lookups are worth
        limit = DEFAULT_LIMIT
    workload, measuring, held_out = load_workload(prompts, limit, tokens, temperature)
    with (
        status("") as report_status,
        ServerPool(
            build,
            target,
            draft,
            workload,
            arguments,
            max_servers,
            report_status,
            max(context_sizes),
        ) as pool,
    ):
        measurements, seconds = llamacpp_plan.measure(
            pool, spec_type, max_length, measuring, context_sizes
        )
        plan = llamacpp_plan.make_plan(pool, spec_type, max_length, measurements, seconds)
        if output:
            plan.save(output)  # the measurements are not lost if the verification fails
        if should_verify:
            plan = llamacpp_plan.verify_plan(pool, plan, held_out)
    write_plan(plan, output, None, as_json)
