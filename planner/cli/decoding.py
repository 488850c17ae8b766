"""Commands that decode: one prompt, or many by several decoders."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import click

from sequoia_plan.planner.cli.options import json_option, model_options, read_sampling, sampling_options, seed_option, tree_option
from sequoia_plan.planner.cli.pair import load_pair, warn_if_foreign
from sequoia_plan.planner.cli.terminal import print_json, progress

DEFAULT_PROMPT = "Explain how a refrigerator keeps food cold."
ASSISTANT_HELP = (
    "The draft of Hugging Face assisted, if it is to be another: transformers uses none that reads the target's hidden states. "
    "[default: --draft; for smollm2-135m-eagle3, smollm2-135m-draft]"
)


@click.command()
@tree_option
@model_options
@click.option("--prompt", help=f"The user's message; - reads it from stdin. [default: {DEFAULT_PROMPT}]")
@click.option("--system", help="A system message before it.")
@click.option("--chat", metavar="FILE.json", type=click.Path(), help="In place of --prompt: a conversation, as a list of messages with role and content.")
@click.option("--raw", is_flag=True, help="The prompt as it is, without the model's chat template.")
@click.option("--stop", metavar="TEXT", multiple=True, help="End once this text was generated.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="New tokens, at most.")
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
    **settings: Any,
) -> None:
    """Generate text with a compiled tree."""
    from sequoia_plan.artifacts import load_tree

    if chat and (prompt is not None or raw):
        raise click.UsageError("--chat FILE holds the whole conversation: leave --prompt and --raw out")
    if raw and system:
        raise click.UsageError("--raw takes the prompt as it is: leave --system out, or --raw")
    tree = load_tree(tree_file)
    sampling = read_sampling(settings, tree.plan.settings)
    text = _stdin() if prompt == "-" else DEFAULT_PROMPT if prompt is None else prompt
    messages = _read_chat(chat) if chat else [{"role": "user", "content": text}]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    pair = load_pair(target, draft, device, dtype, offload, memory)
    warn_if_foreign(tree.plan, pair)
    measured = tree.plan.settings.get("verifier", sampling.verifier)
    if measured != sampling.verifier and not sampling.greedy:
        click.echo(f"Warning: the tree was solved for the verifier {measured}, this is {sampling.verifier}; its predictions do not apply", err=True)

    from transformers import TextStreamer

    from sequoia_plan.profiler.prompts import encode
    from sequoia_plan.runtime import SequoiaDecoder

    decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
    streamer = None if as_json else TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = pair.tokenizer(text)["input_ids"] if raw else encode(pair.tokenizer, messages)
    result = decoder.generate(ids, max_new_tokens, seed=seed, streamer=streamer, sampling=sampling, stop_strings=list(stop))
    tokens = result.sequences[0, -result.new_tokens :].tolist()
    if as_json:
        print_json(
            {
                "text": result.text,
                "tokens": tokens,
                "new_tokens": result.new_tokens,
                "steps": result.steps,
                "tokens_per_step": result.tokens_per_step,
                "seconds": result.seconds,
                "finish_reason": result.finish_reason,
            }
        )
        return
    expected = tree.plan.expected_tokens
    click.echo(
        f"[{result.new_tokens} tokens, {result.steps} steps, {result.tokens_per_step:.2f} tokens a step"
        + (f" (predicted {expected:.2f})" if expected else "")
        + f", {result.new_tokens / result.seconds:.1f} tokens/s, ended by {result.finish_reason}]",
        err=True,
    )


@click.command()
@tree_option
@model_options
@click.option("--prompts", metavar="FILE", type=click.Path(), help="As for profile, which leaves every second prompt for this. [default: built-in]")
@click.option("--limit", type=click.IntRange(min=1), default=12, show_default=True, help="Prompts, at most.")
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="New tokens a prompt, at most.")
@click.option("--only", metavar="NAME", multiple=True, help="Only this way of decoding; docs/profiling.md has the names. [default: all]")
@click.option("--assistant", metavar="ID|DIR|FILE", help=ASSISTANT_HELP)
@sampling_options("what the tree was made for")
@click.option("-o", "--output", type=click.Path(), help="Write the figures there, as JSON.")
@click.option("--report", type=click.Path(), help="Write one HTML file with figures and plots; it needs no network.")
@click.option(
    "--with",
    "others",
    metavar="FILE.json",
    type=click.Path(),
    multiple=True,
    help="Figures of an earlier run, as at another temperature, for the page.",
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
    others: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Decode held-out prompts with a compiled tree and other methods in turn. With -o, a killed run goes on where it was."""
    from msgspec.structs import replace

    from sequoia_plan.artifacts import BenchResult, load_tree
    from sequoia_plan.artifacts.bench_result import Breakdown
    from sequoia_plan.artifacts.files import check_writable, refuse_to_replace, write_atomically
    from sequoia_plan.planner.report.bench_table import print_table
    from sequoia_plan.planner.solving.baselines import arms
    from sequoia_plan.profiler.bench import compare
    from sequoia_plan.profiler.breakdown import breakdown
    from sequoia_plan.profiler.journal import discard, journal_of
    from sequoia_plan.profiler.prompts import check_lengths, encode, held_out, held_out_half, load
    from sequoia_plan.runtime.pair import DEFAULT_DRAFT, LANGUAGE_MODEL

    for path in filter(None, (output, report)):
        check_writable(path)
        refuse_to_replace(path, tree_file, prompts, *others)
    given = load(prompts) if prompts else None
    tree = load_tree(tree_file)
    sampling = read_sampling(settings, tree.plan.settings)
    earlier = [BenchResult.load(path) for path in others]
    trees = arms(tree, sampling.verifier)
    if assistant is None and target is None and draft in (None, DEFAULT_DRAFT):
        assistant = LANGUAGE_MODEL
    pair = load_pair(target, draft, device, dtype, offload, memory)
    warn_if_foreign(tree.plan, pair)
    if prompts and given:
        check_lengths(prompts, given, pair)
    texts = held_out(pair.tokenizer, limit) if given is None else [encode(pair.tokenizer, prompt.text) for prompt in held_out_half(given)[:limit]]
    journal = journal_of(output) if output else None
    with progress("bench", len(texts)) as advance:
        reference = partial(load_pair, target, draft, device, dtype, placement="resident")
        result = compare(pair, reference, tree, trees, sampling, texts, tokens, only, advance, journal=journal, assistant=assistant)
    result = replace(result, breakdown=Breakdown(**{name: round(seconds, 6) for name, seconds in breakdown(pair, tree, sampling).items()}))
    if output:
        result.save(output)
        discard(journal)
    if report:
        from sequoia_plan.planner.report.page import page

        write_atomically(report, page(tree, [result, *earlier]).encode())
    if as_json:
        print_json(result.facts())
        return
    print_table(result)
    if report:
        click.echo(f"wrote {report}")
    if output:
        click.echo(f"wrote {output}")


def _stdin() -> str:
    """The prompt that a pipe or a person gives."""
    from sequoia_plan.artifacts import SequoiaPlanError

    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise SequoiaPlanError(f"--prompt -: stdin is not UTF-8 text (byte {error.start}); expected text") from error


def _read_chat(path: str) -> list[dict[str, str]]:
    """The conversation in a JSON file: a list of messages, or an object that has it under `messages`."""
    from sequoia_plan.artifacts import SequoiaPlanError
    from sequoia_plan.artifacts.files import read_bytes
    from sequoia_plan.profiler.prompts import read_messages

    data = read_bytes(path, "a JSON list of messages")
    try:
        found = json.loads(data)
        return read_messages(found["messages"] if isinstance(found, dict) else found)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        expected = 'a JSON list of {"role": ..., "content": ...} with a user message'
        raise SequoiaPlanError(f"{path}: not a conversation; expected {expected}") from error
