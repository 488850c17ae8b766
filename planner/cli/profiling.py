"""`sequoia-plan profile`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import (
    check_outputs,
    count_option,
    file_option,
    json_option,
    model_options,
    output_option,
    read_sampling,
    sampling_options,
    sizes_option,
)
from sequoia_plan.planner.cli.pair import load_pair
from sequoia_plan.planner.cli.terminal import print_json, progress, warn

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Profile, TokenTree

ACCEPTANCE_SECONDS = 100.0
"""Acceptance is counted for so long, unless a precision is asked for."""
DEFAULT_PRECISION, LATENCY_SECONDS = 0.07, 45.0
"""Seconds for repeating latency measurements, at each context."""
MIN_FITTING_ACCEPTANCE = 0.02
"""A draft whose acceptance at the root is below this does not fit its target. Where layer ids are
off by one, about a quarter is still accepted."""


def read_percent(text: str) -> float:
    """Read "2.5%" or "0.025" as 0.025."""
    try:
        fraction = float(text.rstrip("% ")) / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise click.BadParameter(
            f"found {text!r}, expected a percentage, as 2%, from 0% to below 100%"
        )
    return fraction


@click.command()
@model_options
@sampling_options
@file_option(
    "--prompts",
    text="JSONL (text, messages or turns; kind) or plain text; every second is left for bench. "
    "[default: built-in]",
)
@count_option("--tokens", default=64, text="New tokens a prompt, at most.")
@click.option(
    "--precision",
    metavar="PERCENT",
    type=read_percent,
    help="Stop once predicted tokens a step are known to within this, at 95 %. [default: 7%, or "
    f"what {ACCEPTANCE_SECONDS:.0f} seconds give]",
)
@file_option(
    "--tree",
    "tree_file",
    text="Count acceptance as this tree meets it: it writes the text. For trees of more than 16 "
    "nodes, once solve has made one. [default: a tree of 10 nodes; 65 if streamed]",
    metavar="TREE",
)
@sizes_option(
    "--context",
    "contexts",
    1 << 20,
    default="128",
    show_default=True,
    text="Tokens in the KV cache when latency is measured; with several, as 256,4096, solve makes "
    "a tree for each, and a text takes the one that suits its length.",
)
@output_option("profile.yaml", "profile")
@json_option
def profile(
    models: dict[str, Any],
    sampling: dict[str, Any],
    prompts: str | None,
    tokens: int,
    precision: float | None,
    tree_file: str | None,
    contexts: list[int],
    output: str,
    as_json: bool,
) -> None:
    """Measure acceptance and latency on this machine. A killed run goes on where it was."""
    from dataclasses import replace

    from sequoia_plan.artifacts.prompts import BUILT_IN, load, measuring_half
    from sequoia_plan.planner.report.profile_summary import describe_profile
    from sequoia_plan.profiler import measure
    from sequoia_plan.profiler.journal import exclusive
    from sequoia_plan.profiler.prompts import check_lengths

    settings = read_sampling(sampling)
    if sampling["verifier"] is None:  # the best one, or the simplest where all agree
        settings = replace(settings, verifier="sequoia" if settings.greedy else "traversal")
    tree = _read_tree(tree_file) if tree_file else None
    check_outputs(output, None, prompts, tree_file)
    journal = click.get_current_context().with_resource(exclusive(output))
    all_prompts = load(prompts or BUILT_IN)
    pair = load_pair(**models)
    if prompts:
        check_lengths(prompts, all_prompts, pair)
    measured_prompts = measuring_half(all_prompts)

    with progress("acceptance", len(measured_prompts)) as update:

        def on_size(size: int, seconds: float) -> None:
            update(description=f"latency: {size} nodes {seconds * 1000:.1f} ms")

        def on_prompt(completed: int, total: int, acceptance: Any) -> None:
            text = f"acceptance: known to within {acceptance.precision():.1%}"
            update(completed, total=total, description=text)

        measured = measure(
            pair,
            measured_prompts,
            settings,
            LATENCY_SECONDS,
            contexts,
            on_size=on_size,
            on_prompt=on_prompt,
            tree=tree,
            precision=DEFAULT_PRECISION if precision is None else precision,
            acceptance_seconds=ACCEPTANCE_SECONDS if precision is None else math.inf,
            tokens_per_prompt=tokens,
            journal=journal,
        )
    measured.save(output)
    journal.unlink(missing_ok=True)
    accepted_at_root = float(measured.acceptance.rates[0, 0].sum())
    if accepted_at_root < MIN_FITTING_ACCEPTANCE:
        warn(
            f"of the draft's proposals for the next token {accepted_at_root:.1%} are accepted; it "
            "was probably made for another target, or it reads other hidden states than it was "
            "trained on"
        )
    if as_json:
        assert measured.latency
        print_json(
            {
                "output": output,
                "acceptance": measured.acceptance.pooled().tolist(),
                "verifier": measured.verifier,
                "prompts": {kind: len(texts) for kind, texts in measured.prompts.items()},
                "target": measured.latency.target,
                "draft": measured.latency.draft,
            }
        )
        return
    click.echo(_describe_prompts(measured, len(measured_prompts), len(all_prompts)))
    for line in describe_profile(measured):
        click.echo(line)
    click.echo(f"wrote {output}; next: sequoia-plan solve {output}")


def _describe_prompts(profile: Profile, num_half: int, num_all: int) -> str:
    """Which prompts were measured, and why the others of the file were not."""
    numbers = {kind: len(prompts) for kind, prompts in profile.prompts.items()}
    used = sum(numbers.values())
    text = f"prompts     {used} of {num_all}"
    if len(numbers) > 1:
        text += f" ({', '.join(f'{number} {kind}' for kind, number in numbers.items())})"
    if used < num_half:
        text += f"; {num_half - used} left out (known well enough, or time was up: --precision)"
    return f"{text}; every second one is for bench"


def _read_tree(path: str) -> TokenTree:
    """The tree with which profiling writes text; of a file with trees by match, that for none."""
    from sequoia_plan.artifacts import TokenTree, load_tree

    tree = TokenTree(load_tree(path).parents)
    if tree.size == 1:
        raise click.UsageError(f"--tree {path}: found a tree of 1 node, expected one that drafts")
    return tree
