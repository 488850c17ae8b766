"""Decoding speed on the embedded pair: Hugging Face `generate`, our plain decoding, and a compiled tree, side by side.

    python benchmarks/decode.py --tree build/tree.safetensors --prompts 20 --tokens 128 -o benchmarks/results/decode.json

All arms decode the same held-out prompts in the same dtype, interleaved prompt by prompt. Hugging Face runs the target
as transformers loads it; our arms run it as our runtime does. Speeds are medians over prompts, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.prompts import built_in, encode
from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.models import load_target

HUGGING_FACE, PLAIN, TREE = "Hugging Face generate", "plain decoding (ours)", "token tree (ours)"


def arms(tree: TokenTree, dtype: str, tokens: int, temperature: float, top_p: float) -> tuple[dict[str, Callable[[list[int], int], tuple[int, int]]], Any]:
    """Each arm decodes a prompt with a seed and says how many tokens it made in how many target passes."""
    pair = load_pair(dtype=dtype)
    target, tokenizer, _ = load_target(None, "cpu", pair.target.dtype)
    eos = tokenizer.eos_token_id

    def hugging_face(prompt: list[int], seed: int) -> tuple[int, int]:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {"do_sample": False}
        made = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, eos_token_id=eos, **sampling).shape[1] - len(prompt)
        return made, made

    def ours(decoder: SequoiaDecoder) -> Callable[[list[int], int], tuple[int, int]]:
        def decode(prompt: list[int], seed: int) -> tuple[int, int]:
            result = decoder.generate(prompt, tokens, temperature, top_p, seed, eos)
            return result.new_tokens, result.steps

        return decode

    decoders = {PLAIN: SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(1)), TREE: SequoiaDecoder(pair.target, pair.draft, tree)}
    return {HUGGING_FACE: hugging_face} | {name: ours(decoder) for name, decoder in decoders.items()}, pair


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path("build/tree.safetensors"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, help="default: what the tree was made for")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    tree = load_tree(options.tree)
    settings = tree.plan.get("settings", {})
    temperature = settings.get("temperature", 0.0) if options.temperature is None else options.temperature
    runs, pair = arms(tree, options.dtype, options.tokens, temperature, settings.get("top_p", 1.0))

    prompts = [encode(pair.tokenizer, text) for text in built_in(held_out=True)[: options.prompts]]
    for run in runs.values():
        run(prompts[0][:8], 0)
    samples: dict[str, list[tuple[int, int, float]]] = {name: [] for name in runs}
    for seed, prompt in enumerate(prompts):
        order = list(runs)[seed % len(runs) :] + list(runs)[: seed % len(runs)]
        for name in order:
            started = time.perf_counter()
            made, steps = runs[name](prompt, seed)
            samples[name].append((made, steps, time.perf_counter() - started))

    report = {
        "settings": {"temperature": temperature, "dtype": str(pair.target.dtype), "prompts": len(prompts), "tokens": options.tokens},
        "hardware": fingerprint("cpu"),
        "tree": {"size": tree.size, "depth": tree.depth, "level_widths": tree.level_widths.tolist()},
        "predicted": {"tokens_per_step": tree.plan.get("expected_tokens"), "speedup_over_plain": tree.plan.get("predicted_speedup")},
        "arms": {name: summary(values, samples[PLAIN], samples[HUGGING_FACE]) for name, values in samples.items()},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print_report(report)


def summary(values: list[tuple[int, int, float]], plain: list[tuple[int, int, float]], hugging_face: list[tuple[int, int, float]]) -> dict[str, Any]:
    """Medians over prompts with quartiles; ratios are taken prompt by prompt, so that drift cancels."""

    def speeds(runs: list[tuple[int, int, float]]) -> list[float]:
        return [made / seconds for made, _, seconds in runs]

    def spread(numbers: list[float]) -> dict[str, float]:
        low, middle, high = statistics.quantiles(numbers, n=4)
        return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}

    return {
        "tokens_per_second": spread(speeds(values)),
        "tokens_per_step": round(sum(v[0] for v in values) / sum(v[1] for v in values), 3),
        "over_plain": spread([a / b for a, b in zip(speeds(values), speeds(plain), strict=True)]),
        "over_hugging_face": spread([a / b for a, b in zip(speeds(values), speeds(hugging_face), strict=True)]),
    }


def print_report(report: dict[str, Any]) -> None:
    """The small table."""
    console = Console(width=110)
    table = Table(title="same prompts, same dtype: temperature {temperature}, {dtype}, {prompts} prompts x {tokens} tokens".format(**report["settings"]))
    for column in ("", "tokens/s", "tokens a step", "over plain", "over Hugging Face"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, arm in report["arms"].items():
        rates, plain, hugging_face = arm["tokens_per_second"], arm["over_plain"], arm["over_hugging_face"]
        cells = [f"{rates['median']:.1f} ({rates['low']:.1f}-{rates['high']:.1f})", f"{arm['tokens_per_step']:.2f}"]
        cells += [f"{r['median']:.2f}x ({r['low']:.2f}-{r['high']:.2f})" for r in (plain, hugging_face)]
        table.add_row(name, *cells)
    console.print(table)
    predicted = report["predicted"]
    if predicted["speedup_over_plain"] is not None:
        console.print(
            f"predicted: {predicted['tokens_per_step']:.2f} tokens a step, {predicted['speedup_over_plain']:.2f}x over plain decoding; "
            f"measured: {report['arms'][TREE]['tokens_per_step']:.2f} and {report['arms'][TREE]['over_plain']['median']:.2f}x",
            soft_wrap=True,
        )


if __name__ == "__main__":
    main()
