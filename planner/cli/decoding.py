"""Commands that decode: one prompt, or many prompts by several methods."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from sequoia_plan.planner.cli.options import (
    check_outputs,
    count_option,
    file_option,
    json_option,
    model_options,
    name_option,
    read_sampling,
    sampling_options,
    tree_option,
)
from sequoia_plan.planner.cli.pair import load_pair, warn_if_foreign
from sequoia_plan.planner.cli.terminal import print_json, printable, progress, warn

DEFAULT_TREE, CATALOG_TREE = "tree.safetensors", "smollm2-135m-epyc-2-cores-t0"
DEFAULT_PROMPT = "Explain how a refrigerator keeps food cold."

optional_tree_option = file_option(
    "--tree",
    "tree_file",
    text="A tree file, or a catalog name. [default: tree.safetensors; where there is none, the "
    "catalog's tree for the embedded pair, and plain decoding for others]",
    metavar="TREE",
)


@click.command()
@optional_tree_option
@model_options
@click.option(
    "--prompt", help=f"The user's message; - reads it from stdin. [default: {DEFAULT_PROMPT}]"
)
@click.option("--raw", is_flag=True, help="Go on from the prompt, without the chat template.")
@click.option(
    "--interactive",
    is_flag=True,
    help="A chat: each line of stdin is a message, until the end of stdin (Ctrl-D).",
)
@count_option("--max-new-tokens", default=128, text="New tokens, at most.")
@click.option("--stop", multiple=True, help="End before this text; several may be given.")
@sampling_options
@file_option("--json-schema", text="Only texts that this JSON schema allows.")
@name_option("--regex", text="Only texts that match this regular expression.")
@file_option("--grammar", text="Only texts of this grammar (GBNF).")
@count_option("--seed", default=None, text="Makes sampling repeatable.", least=0, most=2**63 - 1)
@click.option(
    "--repeatable",
    "seed",
    flag_value=0,
    help="The same as --seed 0: trees are chosen by planned times, and not by this machine's.",
)
@json_option
def generate(
    tree_file: str | None,
    models: dict[str, Any],
    prompt: str | None,
    raw: bool,
    interactive: bool,
    max_new_tokens: int,
    stop: tuple[str, ...],
    sampling: dict[str, Any],
    json_schema: str | None,
    regex: str | None,
    grammar: str | None,
    seed: int | None,
    as_json: bool,
) -> None:
    """Generate text with a compiled tree."""
    from sequoia_plan.artifacts.files import read_text

    if interactive and (as_json or raw or prompt == "-"):
        raise click.UsageError(
            "--interactive: found with --json, --raw or --prompt -, expected none of them"
        )
    tree, tree_remark = tree_for(tree_file, models)  # no remark on a tree that was asked for
    settings = read_sampling(sampling, tree.plan.settings)
    sources = {
        "json_schema": json_schema and read_text(json_schema, "a JSON schema"),
        "regex": regex,
        "ebnf": grammar and read_text(grammar, "a grammar"),
    }
    is_constrained = any(source is not None for source in sources.values())
    if prompt == "-":
        prompt = _read_stdin()
    pair = pair_for(tree, tree_remark, models)
    solved_verifier = tree.plan.settings.get("verifier", settings.verifier)
    if solved_verifier != settings.verifier and not settings.greedy:
        warn(
            f"the tree was solved for the verifier {solved_verifier}, "
            f"this is {settings.verifier}; its predictions do not apply"
        )

    from transformers import TextStreamer

    from sequoia_plan.profiler.prompts import encode
    from sequoia_plan.runtime import Generation, Grammar, SequoiaDecoder

    class Printer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            """Print text; a terminal gets no control characters that it would obey."""
            super().on_finalized_text(printable(text) if sys.stdout.isatty() else text, stream_end)

    printer = Printer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
    constraint = Grammar(pair.tokenizer, **sources) if is_constrained else None

    def answer(messages: Any) -> Generation:
        """Generate after the messages."""
        return decoder.generate(
            messages if raw else encode(pair.tokenizer, messages),
            max_new_tokens,
            seed=seed,
            streamer=None if as_json else printer,
            sampling=settings,
            stop_strings=stop,
            constraint=constraint,
            reuse_prefix=True,
        )

    if interactive:
        messages: list[dict[str, str]] = []
        for message in _typed_messages(prompt):
            messages.append({"role": "user", "content": message})
            generation = answer(messages)
            messages.append({"role": "assistant", "content": str(generation.text)})
            _print_figures(generation, tree.plan.expected_tokens)
        return
    generation = answer(DEFAULT_PROMPT if prompt is None else prompt)
    if as_json:
        new_tokens = generation.sequences[0, -generation.new_tokens :].tolist()
        names = ("text", "new_tokens", "steps", "tokens_per_step", "seconds", "finish_reason")
        print_json({name: getattr(generation, name) for name in names} | {"tokens": new_tokens})
        return
    _print_figures(generation, tree.plan.expected_tokens)


def pair_for(tree: Any, tree_remark: str, models: dict[str, Any]) -> Any:
    """The pair; says the remark of `tree_for`, or else what the tree's plan does not fit."""
    pair = load_pair(**models)
    if tree_remark:
        click.echo(tree_remark, err=True)
    else:
        warn_if_foreign(tree.plan, pair)
    return pair


def tree_for(tree_file: str | None, models: dict[str, Any]) -> tuple[Any, str]:
    """The TokenTree that is asked for, and what a user should know about it if none was.

    `models`: the options `target` and `draft`; where plain decoding is all there is, the draft of
    these becomes "none".
    """
    from sequoia_plan.artifacts import TokenTree, load_tree

    if tree_file or Path(DEFAULT_TREE).exists():
        return load_tree(tree_file or DEFAULT_TREE), ""
    advice = "`sequoia-plan profile` and `solve` make one for this machine"
    if models["target"] is None and models["draft"] is None:
        tree = load_tree(CATALOG_TREE)
        return tree, f"no {DEFAULT_TREE} here: decoding with {CATALOG_TREE}; {advice}"
    models["draft"] = models["draft"] or "none"  # plain decoding drafts nothing
    return TokenTree.chain(1), f"no {DEFAULT_TREE} here: plain decoding; {advice}"


def _print_figures(generation: Any, predicted_tokens: float | None) -> None:
    """Print the figures of a generation on stderr."""
    click.echo(
        f"[{generation.new_tokens} tokens, {generation.steps} steps, "
        f"{generation.tokens_per_step:.2f} tokens a step"
        + (f" (predicted {predicted_tokens:.2f})" if predicted_tokens else "")
        + f", {generation.new_tokens / generation.seconds:.1f} tokens/s, "
        f"ended by {generation.finish_reason}]",
        err=True,
    )


@click.command()
@tree_option
@model_options
@file_option(
    "--prompts",
    text="As for profile, which leaves every second prompt for this. [default: built-in]",
)
@count_option("--limit", default=12, text="Prompts, at most.")
@count_option("--tokens", default=64, text="New tokens a prompt, at most.")
@click.option(
    "--only",
    metavar="NAME",
    multiple=True,
    help="Only this method; docs/profiling.md has the names. [default: all]",
)
@file_option("-o", "--output", text="Write the figures there, as JSON.")
@file_option("--report", text="Write one HTML file with figures and plots; it needs no network.")
@json_option
def bench(
    tree_file: str,
    models: dict[str, Any],
    prompts: str | None,
    limit: int,
    tokens: int,
    only: tuple[str, ...],
    output: str | None,
    report: str | None,
    as_json: bool,
) -> None:
    """Decode held-out prompts with a compiled tree and other methods in turn, as the tree was made
    for. With -o, a killed run goes on where it was."""
    from msgspec.structs import replace

    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.artifacts.bench_result import Breakdown
    from sequoia_plan.artifacts.files import write_atomically
    from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load
    from sequoia_plan.planner.report.bench_table import print_result
    from sequoia_plan.planner.solving.baselines import bench_trees
    from sequoia_plan.profiler.bench import check_names, compare
    from sequoia_plan.profiler.breakdown import breakdown
    from sequoia_plan.profiler.journal import exclusive
    from sequoia_plan.profiler.prompts import check_lengths, encode
    from sequoia_plan.runtime.pair import DEFAULT_DRAFT, INT8, LANGUAGE_MODEL, NO_DRAFT

    check_outputs(output, report, tree_file, prompts)
    journal = click.get_current_context().with_resource(exclusive(output)) if output else None
    check_names(only)
    all_prompts = load(prompts or BUILT_IN)
    tree = load_tree(tree_file)
    settings = read_sampling({}, tree.plan.settings)
    pair = load_pair(**models)
    warn_if_foreign(tree.plan, pair)
    if prompts:
        check_lengths(prompts, all_prompts, pair)
    half = held_out_half(all_prompts)[:limit]
    token_ids = [encode(pair.tokenizer, prompt.text) for prompt in half]
    resident = {name: models[name] for name in ("target", "draft", "device", "dtype")}
    if models["draft"] == INT8:
        resident["draft"] = NO_DRAFT  # the copy is compiled, and transformers runs modules
    # transformers' assisted generation takes language models only
    if resident["target"] is None and resident["draft"] in (None, DEFAULT_DRAFT):
        resident["draft"] = LANGUAGE_MODEL

    with progress("bench", len(token_ids)) as on_prompt:
        result = compare(
            pair,
            partial(load_pair, **resident, placement="resident"),
            tree,
            bench_trees(tree, settings.verifier),
            settings,
            token_ids,
            tokens,
            only,
            on_prompt,
            journal=journal,
            kinds=[prompt.kind for prompt in half],
        )
    figures = {name: round(n, 6) for name, n in breakdown(pair, tree, settings).items()}
    result = replace(result, breakdown=Breakdown(**figures))
    if output and journal:
        result.save(output)
        journal.unlink(missing_ok=True)
    if report:
        from sequoia_plan.planner.report.page import page

        write_atomically(report, page(tree, result).encode())
    if as_json:
        print_json(result.to_dict())
        return
    print_result(result)
    for path in filter(None, (report, output)):
        click.echo(f"wrote {path}")


def _typed_messages(first: str | None) -> Iterator[str]:
    """The first message, if there is one, and the lines of stdin that are not empty."""
    if first:
        yield first
    while True:
        try:
            line = click.prompt("", prompt_suffix="> ", err=True, default="", show_default=False)
        except click.Abort:  # the end of stdin
            return
        if line.strip():
            yield line


def _read_stdin() -> str:
    """Read the prompt from stdin, which must be UTF-8 text."""
    from sequoia_plan.artifacts import SequoiaPlanError

    if sys.stdin is None:
        raise SequoiaPlanError("--prompt -: stdin is closed; expected text")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise SequoiaPlanError(
            f"--prompt -: stdin is not UTF-8 text (byte {error.start}); expected text"
        ) from error
