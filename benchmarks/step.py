"""What a step takes beside its passes, by vocabulary: in one compiled call, and by parts.

    python benchmarks/step.py -o benchmarks/results/step.json

A target and a draft of two layers of width 64, so that passes are short; their heads' products are
not. A round runs some steps of each way and tree, so ratios are free of drift. Milliseconds a step,
medians of rounds with quartiles: `whole`, of it `rest`, which is all but the passes, `by_parts`.
"""

from __future__ import annotations

import json
import time
from itertools import product
from typing import Any

import numpy as np
import torch
from pages import refill
from reports import new_parser, spread, write_report
from results import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.processor import processor_name
from sequoia_plan.runtime import Sampling, SequoiaDecoder
from sequoia_plan.runtime.captured_step import CapturedStep

PAGE = ROOT / "docs" / "speed.md"
VOCABULARIES, THREADS, STEPS = (64, 49_152, 151_936), (1, 2), 12
TREES = {
    "plain": TokenTree.chain(1),
    "chain of two": TokenTree.chain(2),
    "tree of six": TokenTree.from_parents([-1, 0, 0, 1, 1, 3]),
}
SAMPLINGS = {"0": Sampling(), "0.6": Sampling(0.6), "0.6, top-p 0.9": Sampling(0.6, top_p=0.9)}


class StepByParts(CapturedStep):
    """A step as it runs where no whole step is compiled."""

    def compiled(self, sampling: Sampling) -> None:
        """Nothing runs it in one call."""


def small_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    """A model of two layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def timed_steps(step: CapturedStep, sampling: Sampling) -> dict[str, float]:
    """Milliseconds of a step, and of what is not its passes."""
    length, whole, rest = int(step.sequence.length), [], []
    for _ in range(STEPS):
        started = time.perf_counter()
        step.launch(length, sampling)(length)
        whole.append(1000 * (time.perf_counter() - started))
        if seconds := step.part_seconds(sampling):
            rest.append(whole[-1] - 1000 * sum(seconds[:-1]))
        step.sequence.length.fill_(length)
    if not rest:
        return {"by_parts": float(np.median(whole))}
    return {"whole": float(np.median(whole)), "rest": float(np.median(rest))}


def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for vocabulary, threads in product(VOCABULARIES, THREADS):
        torch.set_num_threads(threads)
        models = [small_model(vocabulary, seed) for seed in (0, 1)]
        for name, tree in TREES.items():
            decoder = SequoiaDecoder(models[0], models[1] if tree.size > 1 else None, tree)
            steps = [decoder.step, StepByParts(decoder.step.models, tree)]
            decoder.step.prefill(torch.arange(20), 64, 0)
            for temperature, sampling in SAMPLINGS.items():
                rounds = [
                    {k: v for step in steps for k, v in timed_steps(step, sampling).items()}
                    for _ in range(options.rounds + 1)
                ][1:]
                ms = {key: np.array([each[key] for each in rounds]) for key in rounds[0]}
                times = {key: spread(values) for key, values in ms.items()}
                setting = figures.setdefault(f"{vocabulary:,}, {threads}", {}).setdefault(name, {})
                setting[f"T = {temperature}"] = times
                print(vocabulary, threads, name, temperature, json.dumps(times), flush=True)
    write_report(options.output, {"processor": processor_name(), "figures": figures})
    refill(PAGE, options.output)


if __name__ == "__main__":
    main()
