"""Commands that decode: one prompt, or many prompts by several methods."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import click

from sequoia_plan.planner.cli.options import (
    check_outputs,
    json_option,
    model_options,
    read_sampling,
    sampling_options,
    seed_option,
    tree_option,
    whole_text,
)
from sequoia_plan.planner.cli.pair import load_pair, warn_if_foreign
from sequoia_plan.planner.cli.terminal import print_json, printable, progress

DEFAULT_PROMPT = "Explain how a refrigerator keeps food cold."
CHAT_HELP = "In place of --prompt: a conversation, as a list of messages with role and content."
PROMPTS_HELP = "As for profile, which leaves every second prompt for this. [default: built-in]"
ONLY_HELP = "Only this method; docs/profiling.md has the names. [default: all]"
ASSISTANT_HELP = (
    "The draft of Hugging Face assisted, if it is to be another. It must be a language model: "
    "transformers' assisted generation takes no EAGLE draft. It can use a model's own MTP heads "
    '(use_mtp) and DFlash drafts (speculation_type="dflash"), and bench uses neither. '
    "[default: --draft; for smollm2-135m-eagle3, smollm2-135m-draft]"
)
REPORT_HELP = "Write one HTML file with figures and plots; it needs no network."
EARLIER_HELP = "Figures of an earlier run, as at another temperature, for the page."


@click.command()
@tree_option
@model_options
@click.option(
    "--prompt",
    callback=whole_text,
    help=f"The user's message; - reads it from stdin. [default: {DEFAULT_PROMPT}]",
)
@click.option("--system", callback=whole_text, help="A system message before it.")
@click.option("--chat", metavar="FILE.json", type=click.Path(), help=CHAT_HELP)
@click.option("--raw", is_flag=True, help="The prompt as it is, without the model's chat template.")
@click.option(
    "--stop",
    metavar="TEXT",
    multiple=True,
    callback=whole_text,
    help="End once this text was generated.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="New tokens, at most.",
)
@sampling_options("what the tree was made for")
@seed_option
@json_option
def generate(
    tree_file: str,
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    offload: str | None,
    memory: str | None,
    prompt: str | None,
    system: str | None,
    chat: str | None,
    raw: bool,
    stop: tuple[str, ...],
    max_new_tokens: int,
    seed: int,
    as_json: bool,
    **sampling_values: Any,
) -> None:
    """Generate text with a compiled tree."""
    from sequoia_plan.artifacts import load_tree

    if chat and (prompt is not None or raw):
        raise click.UsageError(
            "--chat FILE holds the whole conversation: leave --prompt and --raw out"
        )
    if raw and system:
        raise click.UsageError("--raw takes the prompt as it is: leave --system out, or --raw")
    tree = load_tree(tree_file)
    sampling = read_sampling(sampling_values, tree.plan.settings)
    text = _read_stdin() if prompt == "-" else DEFAULT_PROMPT if prompt is None else prompt
    messages = _read_chat(chat) if chat else [{"role": "user", "content": text}]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    pair = load_pair(target, draft, device, dtype, offload, memory)
    warn_if_foreign(tree.plan, pair)
    solved_verifier = tree.plan.settings.get("verifier", sampling.verifier)
    if solved_verifier != sampling.verifier and not sampling.greedy:
        click.echo(
            f"Warning: the tree was solved for the verifier {solved_verifier}, "
            f"this is {sampling.verifier}; its predictions do not apply",
            err=True,
        )

    from transformers import TextStreamer

    from sequoia_plan.profiler.prompts import encode
    from sequoia_plan.runtime import SequoiaDecoder

    decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
    streamer = None
    if not as_json:

        class Printer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                """Print text; a terminal gets no control characters that it would obey."""
                is_terminal = sys.stdout.isatty()
                super().on_finalized_text(printable(text) if is_terminal else text, stream_end)

        streamer = Printer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    token_ids = pair.tokenizer(text)["input_ids"] if raw else encode(pair.tokenizer, messages)
    generation = decoder.generate(
        token_ids,
        max_new_tokens,
        seed=seed,
        streamer=streamer,
        sampling=sampling,
        stop_strings=list(stop),
    )
    if as_json:
        new_tokens = generation.sequences[0, -generation.new_tokens :].tolist()
        print_json(
            {
                "text": generation.text,
                "tokens": new_tokens,
                "new_tokens": generation.new_tokens,
                "steps": generation.steps,
                "tokens_per_step": generation.tokens_per_step,
                "seconds": generation.seconds,
                "finish_reason": generation.finish_reason,
            }
        )
        return
    expected_tokens = tree.plan.expected_tokens
    click.echo(
        f"[{generation.new_tokens} tokens, {generation.steps} steps, "
        f"{generation.tokens_per_step:.2f} tokens a step"
        + (f" (predicted {expected_tokens:.2f})" if expected_tokens else "")
        + f", {generation.new_tokens / generation.seconds:.1f} tokens/s, "
        f"ended by {generation.finish_reason}]",
        err=True,
    )


@click.command()
@tree_option
@model_options
@click.option("--prompts", metavar="FILE", type=click.Path(), help=PROMPTS_HELP)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=12,
    show_default=True,
    help="Prompts, at most.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="New tokens a prompt, at most.",
)
@click.option("--only", metavar="NAME", multiple=True, help=ONLY_HELP)
@click.option("--assistant", metavar="ID|DIR|FILE", help=ASSISTANT_HELP)
@sampling_options("what the tree was made for")
@click.option("-o", "--output", type=click.Path(), help="Write the figures there, as JSON.")
@click.option("--report", type=click.Path(), help=REPORT_HELP)
@click.option(
    "--with",
    "earlier",
    metavar="FILE.json",
    type=click.Path(),
    multiple=True,
    help=EARLIER_HELP,
)
@json_option
def bench(
    tree_file: str,
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    offload: str | None,
    memory: str | None,
    prompts: str | None,
    limit: int,
    tokens: int,
    only: tuple[str, ...],
    assistant: str | None,
    output: str | None,
    report: str | None,
    earlier: tuple[str, ...],
    as_json: bool,
    **sampling_values: Any,
) -> None:
    """Decode held-out prompts with a compiled tree and other methods in turn. With -o, a killed
    run goes on where it was."""
    from msgspec.structs import replace

    from sequoia_plan.artifacts import BenchResult, load_tree
    from sequoia_plan.artifacts.bench_result import Breakdown
    from sequoia_plan.artifacts.files import write_atomically
    from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load
    from sequoia_plan.planner.report.bench_table import print_table
    from sequoia_plan.planner.solving.baselines import bench_trees
    from sequoia_plan.profiler.bench import check_names, compare
    from sequoia_plan.profiler.breakdown import breakdown
    from sequoia_plan.profiler.journal import discard, exclusive, journal_of
    from sequoia_plan.profiler.prompts import check_lengths, encode
    from sequoia_plan.runtime.pair import DEFAULT_DRAFT, LANGUAGE_MODEL

    check_outputs(output, report, tree_file, prompts, *earlier)
    if output:
        click.get_current_context().with_resource(exclusive(output))
    check_names(only)
    all_prompts = load(prompts or BUILT_IN)
    tree = load_tree(tree_file)
    sampling = read_sampling(sampling_values, tree.plan.settings)
    earlier_results = [BenchResult.load(path) for path in earlier]
    method_trees = bench_trees(tree, sampling.verifier)
    if assistant is None and target is None and draft in (None, DEFAULT_DRAFT):
        assistant = LANGUAGE_MODEL
    pair = load_pair(target, draft, device, dtype, offload, memory)
    warn_if_foreign(tree.plan, pair)
    if prompts:
        check_lengths(prompts, all_prompts, pair)
    half = held_out_half(all_prompts)[:limit]
    token_ids = [encode(pair.tokenizer, prompt.text) for prompt in half]

    journal = journal_of(output) if output else None
    with progress("bench", len(token_ids)) as on_prompt:
        load_transformers_pair = partial(
            load_pair, target, draft, device, dtype, placement="resident"
        )
        result = compare(
            pair,
            load_transformers_pair,
            tree,
            method_trees,
            sampling,
            token_ids,
            tokens,
            only,
            on_prompt,
            journal=journal,
            assistant=assistant,
            kinds=[prompt.kind for prompt in half],
        )
    figures = breakdown(pair, tree, sampling)
    rounded_figures = {name: round(figure, 6) for name, figure in figures.items()}
    result = replace(result, breakdown=Breakdown(**rounded_figures))
    if output:
        result.save(output)
        discard(journal)
    if report:
        from sequoia_plan.planner.report.page import page

        write_atomically(report, page(tree, [result, *earlier_results]).encode())
    if as_json:
        print_json(result.to_dict())
        return
    print_table(result)
    if report:
        click.echo(f"wrote {report}")
    if output:
        click.echo(f"wrote {output}")


def _read_stdin() -> str:
    """Read the prompt from stdin, which must be UTF-8 text."""
    from sequoia_plan.artifacts import SequoiaPlanError

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise SequoiaPlanError(
            f"--prompt -: stdin is not UTF-8 text (byte {error.start}); expected text"
        ) from error


def _read_chat(path: str) -> list[dict[str, str]]:
    """Read a conversation from a JSON file: a list of messages, or an object that has the list
    under `messages`."""
    from sequoia_plan.artifacts import SequoiaPlanError
    from sequoia_plan.artifacts.files import read_bytes
    from sequoia_plan.artifacts.prompts import read_messages

    data = read_bytes(path, "a JSON list of messages")
    try:
        document = json.loads(data)
        return read_messages(document["messages"] if isinstance(document, dict) else document)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        expected = 'a JSON list of {"role": ..., "content": ...} with a user message'
        raise SequoiaPlanError(f"{path}: not a conversation; expected {expected}") from error
