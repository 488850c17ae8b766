"""What a draft made from the target costs, and how often it is accepted.

The draft is a copy of the embedded target in 8 bits; its layers and its head are in several forms.

    python benchmarks/selfdraft.py -o benchmarks/results/selfdraft.json
    python benchmarks/selfdraft.py --quick -o build/selfdraft.json    # to see that it runs

A round times each model's pass once, so ratios of times are free of drift. A pass is timed alone
and with the drawing of its nodes' children. Acceptance is that of a node's first child: the
probability that a token drawn from the draft is accepted, along answers that the target wrote at
temperature 0.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prompts import built_in
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, SizeTimer, random_prompt, timed
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.draft import self_draft
from sequoia_plan.runtime.draft.draft_file import load_draft
from sequoia_plan.runtime.models.int8 import Int8Linear
from sequoia_plan.runtime.pair import LANGUAGE_MODEL, embedded_draft
from sequoia_plan.runtime.step import TreeStep

WIDTHS = (1, 2, 4, 8)
HEAD_SIZES = (8192, 16384, 24576, 32768)
TEMPERATURE = 0.6
PREPACKED_TARGET = "target, repacked"
PASS_TOKENS = 8
"""Tokens that `logits_in_narrow_passes` reads at a time."""


def with_head(draft: Any, d2t: Tensor, target: Any) -> Any:
    """The same layers under a head for some of the target's tokens, `d2t` (int64 [tokens])."""
    narrow = copy.copy(draft)
    narrow._modules = dict(draft._modules)
    head_rows = target.get_output_embeddings().weight[d2t]
    narrow.lm_head = Int8Linear(head_rows, None, draft.dtype)
    narrow.d2t = d2t
    return narrow


def model_variants(pair: Pair) -> dict[str, Any]:
    """Models by name: the target as loaded and prepacked, and drafts made from it."""
    target, draft = pair.target, pair.draft
    with patch.object(self_draft, "can_fuse", lambda *_: False):
        without_fused_layers = self_draft.self_draft(target)
    prepacked = load_pair(draft=self_draft.INT8, dtype="bfloat16", placement="repacked").target
    models = {
        "target, as loaded": target,
        PREPACKED_TARGET: prepacked,
        "int8, transformers' layers": without_fused_layers,
        "int8": draft,
    }
    for size in HEAD_SIZES:
        name = f"int8, head of the first {size:,} tokens"
        models[name] = with_head(draft, torch.arange(size), target)
    frequent_tokens = load_draft(embedded_draft(LANGUAGE_MODEL), target).d2t
    name = f"int8, head of the {len(frequent_tokens):,} tokens used most"
    models[name] = with_head(draft, frequent_tokens, target)
    return models


@torch.inference_mode()
def time_passes(pair: Pair, models: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Milliseconds of a draft pass, alone and with drawing at each temperature.

    Returns:
        For each model, way of drawing and number of tokens in `WIDTHS`: median, first quartile and
        third quartile.
    """
    prompt = random_prompt(pair, CONTEXT)
    samplings = {"T=0": Sampling(), f"T={TEMPERATURE}": Sampling(TEMPERATURE)}
    parts = ("pass", *samplings)
    milliseconds: dict[str, Any] = {name: {part: {} for part in parts} for name in models}
    for width in WIDTHS:
        timers = {}
        for name, model in models.items():
            step = TreeStep(pair.target, model, TokenTree.chain(2))
            timers[name] = SizeTimer(step, width, Sampling(), prompt)
        seconds: dict[tuple[str, str], list[float]] = {
            (name, part): [] for name in models for part in parts
        }
        for _ in range(rounds + 1):
            for name, timer in timers.items():
                for part in parts:
                    run: Callable[[], Any] = partial(forward, timer)
                    if part in samplings:
                        timer.sampling = samplings[part]
                        run = timer.draft_pass
                    seconds[name, part].append(timed(pair.target.device, run)[1])
        for (name, part), round_seconds in seconds.items():
            quantiles = np.quantile(round_seconds[1:], [0.5, 0.25, 0.75])  # the first warms up
            milliseconds[name][part][width] = [round(1000 * float(q), 3) for q in quantiles]
    return milliseconds


def forward(timer: SizeTimer) -> Tensor:
    """The draft pass without the drawing."""
    step = timer.step
    assert step.drafter is not None
    output = step.drafter.forward(timer.draft_input, step.sequence, timer.columns, timer.previous)
    return output.logits


@torch.inference_mode()
def measure_acceptance(
    pair: Pair, models: dict[str, Any], prompts: Sequence[list[int]], tokens: int
) -> dict[str, Any]:
    """Acceptance of a node's first child at temperature 0 and at `TEMPERATURE`.

    It is the mean over the positions of answers of at most `tokens` tokens.
    """
    decoder = SequoiaDecoder(pair.target, None, TokenTree.chain(1))
    sums = {name: np.zeros(2) for name in models}
    num_positions = 0
    for prompt in prompts:
        text = decoder.generate(
            torch.tensor(prompt), tokens, eos_token_id=pair.end_tokens
        ).sequences
        positions = slice(len(prompt) - 1, text.shape[1] - 1)
        answer = text[0, len(prompt) :]
        target_logits = pair.target(text).logits[0, positions].float()
        target_probs = torch.softmax(target_logits / TEMPERATURE, -1)
        num_positions += len(answer)
        for name, model in models.items():
            logits = logits_in_narrow_passes(model, text)[positions].float()
            most_probable, draft_probs = logits.argmax(-1), torch.softmax(logits / TEMPERATURE, -1)
            d2t = getattr(model, "d2t", None)
            if d2t is None:
                overlap = torch.minimum(draft_probs, target_probs).sum()
            else:
                most_probable = d2t[most_probable]
                overlap = torch.minimum(draft_probs, target_probs[:, d2t]).sum()
            sums[name] += [float((most_probable == answer).sum()), float(overlap)]
    report: dict[str, Any] = {"positions": num_positions}
    for name, model_sums in sums.items():
        greedy, sampled = (round(value / num_positions, 4) for value in model_sums)
        report[name] = {"T=0": greedy, f"T={TEMPERATURE}": sampled}
    return report


def logits_in_narrow_passes(model: Any, text: Tensor) -> Tensor:
    """[tokens, vocabulary], in passes over a few tokens, as a draft reads them."""
    cache = DynamicCache()
    outputs = [
        model(part, past_key_values=cache, use_cache=True) for part in text.split(PASS_TOKENS, 1)
    ]
    return torch.cat([output.logits[0] for output in outputs])


def main() -> None:
    """Measure and report."""
    options = make_parser().parse_args()
    rounds, num_prompts, tokens = options.rounds, options.prompts, options.tokens
    if options.quick:
        rounds, num_prompts, tokens = 2, 1, 16
    pair = load_pair(draft=self_draft.INT8, dtype="bfloat16", placement="resident")
    models = model_variants(pair)
    report: dict[str, Any] = {}
    if options.only and options.output.exists():
        report = json.loads(options.output.read_text())
    report |= {"hardware": fingerprint("cpu"), "models": pair.metadata}
    if options.only != "acceptance":
        report["milliseconds"] = time_passes(pair, models, rounds)
    if options.only != "passes":
        prompts = [encode(pair.tokenizer, prompt.text) for prompt in built_in()[:num_prompts]]
        report["acceptance"] = measure_acceptance(pair, models, prompts, tokens)
    write_atomically(options.output, (json.dumps(report, indent=1) + "\n").encode())
    show(report)


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="how often each pass is timed (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts", type=int, default=16, help="for acceptance (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="of an answer, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        choices=["passes", "acceptance"],
        help="leave the other part of the output file as it is",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser


def show(report: dict[str, Any]) -> None:
    """Print medians of passes alone, of passes with drawing at one width, and acceptance."""
    temperatures = ("T=0", f"T={TEMPERATURE}")
    table = Table(title="draft passes, ms; and the first child's acceptance", box=None)
    table.add_column("")
    columns = [str(width) for width in WIDTHS]
    columns += [f"4, {temperature}" for temperature in temperatures]
    columns += [f"p[1], {temperature}" for temperature in temperatures]
    for column in columns:
        table.add_column(column, justify="right")
    times, acceptance = report.get("milliseconds", {}), report.get("acceptance", {})
    for name in times or acceptance:
        if name == "positions":
            continue
        medians = {
            (part, int(width)): quantiles[0]
            for part, quantiles_by_width in times.get(name, {}).items()
            for width, quantiles in quantiles_by_width.items()
        }
        shown = [("pass", width) for width in WIDTHS]
        shown += [(temperature, 4) for temperature in temperatures]
        cells = [f"{medians[key]:.1f}" if key in medians else "" for key in shown]
        cells += [f"{probability:.3f}" for probability in acceptance.get(name, {}).values()]
        table.add_row(name, *cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
