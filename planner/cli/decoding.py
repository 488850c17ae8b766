"""Commands that decode: one prompt, or many by several decoders."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import click

from sequoia_plan.planner.cli.options import json_option, model_options, read_sampling, sampling_options
from sequoia_plan.planner.cli.pair import load_pair, warn_if_foreign
from sequoia_plan.planner.cli.terminal import print_json, progress

DEFAULT_PROMPT = "Explain how a refrigerator keeps food cold."


@click.command()
@click.option("--tree", "tree_file", type=click.Path(), default="tree.safetensors", show_default=True)
@model_options
@click.option("--prompt", default=DEFAULT_PROMPT, show_default=True, help="The user's message; - reads it from stdin.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@sampling_options("what the tree was made for")
@click.option("--seed", type=int, default=0, show_default=True)
@json_option
def generate(
    tree_file: str,
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Generate text with a compiled tree."""
    from sequoia_plan.artifacts import load_tree

    tree = load_tree(tree_file)
    made_for = tree.plan.get("settings") or {}
    sampling = read_sampling(settings, made_for)
    text = sys.stdin.read() if prompt == "-" else prompt
    pair = load_pair(target, draft, device, dtype)
    warn_if_foreign(tree.plan, pair)
    measured = made_for.get("verifier", sampling.verifier)
    if measured != sampling.verifier and not sampling.greedy:
        click.echo(f"Warning: the tree was solved for the verifier {measured}, this is {sampling.verifier}; its predictions do not apply", err=True)

    from transformers import TextStreamer

    from sequoia_plan.profiler.prompts import encode
    from sequoia_plan.runtime import SequoiaDecoder

    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    streamer = None if as_json else TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = decoder.generate(
        encode(pair.tokenizer, text), max_new_tokens, seed=seed, eos_token_id=pair.tokenizer.eos_token_id, streamer=streamer, sampling=sampling
    )
    tokens = result.sequences[0, -result.new_tokens :].tolist()
    if as_json:
        print_json(
            {
                "text": pair.tokenizer.decode(tokens, skip_special_tokens=True),
                "tokens": tokens,
                "new_tokens": result.new_tokens,
                "steps": result.steps,
                "tokens_per_step": result.tokens_per_step,
                "seconds": result.seconds,
            }
        )
        return
    expected = tree.plan.get("expected_tokens")
    click.echo(
        f"[{result.new_tokens} tokens, {result.steps} steps, {result.tokens_per_step:.2f} tokens a step"
        + (f" (predicted {expected:.2f})" if expected else "")
        + f", {result.new_tokens / result.seconds:.1f} tokens/s, ended by {result.finish_reason}]",
        err=True,
    )


@click.command()
@click.option("--tree", "tree_file", type=click.Path(), default="tree.safetensors", show_default=True)
@model_options
@click.option("--prompts", type=click.IntRange(min=1), default=12, show_default=True, help="How many of the held-out prompts.")
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="New tokens a prompt, at most.")
@click.option("--only", metavar="NAME", multiple=True, help="A contender; may be repeated. [default: all]")
@sampling_options("what the tree was made for")
@click.option("-o", "--output", type=click.Path(), help="Write the figures there, as JSON.")
@click.option("--report", type=click.Path(), help="Write an HTML page: figures and plots in one file, for mailing.")
@click.option(
    "--with", "others", metavar="FILE.json", type=click.Path(), multiple=True, help="Figures of earlier runs, as of other temperatures, for the page."
)
@json_option
def bench(
    tree_file: str,
    target: str | None,
    draft: str | None,
    device: str | None,
    dtype: str,
    prompts: int,
    tokens: int,
    only: tuple[str, ...],
    output: str | None,
    report: str | None,
    others: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Decode held-out prompts with a compiled tree and its peers, side by side."""
    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.artifacts.cost import add_predictions
    from sequoia_plan.artifacts.files import write_atomically
    from sequoia_plan.planner.report.bench_table import print_table
    from sequoia_plan.planner.solving.baselines import arms
    from sequoia_plan.profiler.bench import compare
    from sequoia_plan.profiler.breakdown import breakdown
    from sequoia_plan.profiler.prompts import held_out

    tree = load_tree(tree_file)
    sampling = read_sampling(settings, tree.plan.get("settings") or {})
    earlier = [_read_figures(path) for path in others]
    trees = arms(tree, sampling.verifier)
    pair = load_pair(target, draft, device, dtype)
    warn_if_foreign(tree.plan, pair)
    texts = held_out(pair.tokenizer, prompts)
    with progress("bench", len(texts)) as advance:
        result = compare(pair, partial(load_pair, target, draft, device, dtype, placement="resident"), trees, sampling, texts, tokens, only, advance)
    add_predictions(result["contenders"], trees, tree.plan, sampling.settings())
    result["tree"] = {"size": tree.size, "depth": tree.depth, "level_widths": tree.level_widths.tolist()}
    result["breakdown"] = {name: round(value, 6) for name, value in breakdown(pair, tree, sampling).items()}
    if output:
        write_atomically(output, (json.dumps(result, indent=1) + "\n").encode())
    if report:
        from sequoia_plan.planner.report.page import page

        write_atomically(report, page(tree, [result, *earlier]).encode())
    if as_json:
        print_json(result)
        return
    print_table(result)
    if report:
        click.echo(f"wrote {report}")
    if output:
        click.echo(f"wrote {output}")


def _read_figures(path: str) -> Any:
    """What an earlier bench wrote."""
    from sequoia_plan.artifacts import SequoiaPlanError
    from sequoia_plan.artifacts.files import read_bytes

    try:
        found = json.loads(read_bytes(path, "figures written by sequoia-plan bench"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {"settings", "models", "hardware", "tree", "contenders"} <= found.keys():
        raise SequoiaPlanError(f"{path}: not figures of bench; expected what sequoia-plan bench -o wrote")
    return found
