"""What a long text costs: steps, prompts and memory, and trees against plain decoding.

    python benchmarks/contexts.py -o benchmarks/results/contexts.json

One thread. The parts of a step are timed after random tokens, all trees in each round. Then texts
of three kinds are decoded: Python's documentation, its code, and the built-in prompts one after the
other. The last token before the new ones is the same at all contexts of a text: only how much text
stands before it differs. Plain decoding and the trees take turns.
"""

from __future__ import annotations

import argparse as code
import time
from contextlib import closing
from pathlib import Path
from pydoc_data import topics as pages
from typing import Any

import numpy as np
import torch
from reports import new_parser, spread, write_report

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.prompts import BUILT_IN, load
from sequoia_plan.profiler.breakdown import time_parts
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.timing import random_prompt
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair

CONTEXTS, TEXT_CONTEXTS = (256, 1024, 2048, 4096, 7168), (256, 4096)
TEXTS, TOKENS, GREEDY = 2, 64, Sampling()
TREES = {
    "6": TokenTree.from_parents([-1, 0, 0, 1, 1, 2]),
    "2": TokenTree.chain(2),
    "1": TokenTree.chain(1),
}


@torch.inference_mode()
def step_figures(pair: Pair, decoders: dict[str, SequoiaDecoder], rounds: int) -> dict[str, Any]:
    """By context: seconds of a prompt, the cache's megabytes, and milliseconds of steps by tree."""
    steps, figures = {name: decoder.step for name, decoder in decoders.items()}, {}
    for context in CONTEXTS:
        started = time.perf_counter()
        steps["6"].prefill(random_prompt(pair, context), 8, seed=0)
        seconds = time.perf_counter() - started
        samples = [
            {name: time_parts(s, s.extent(context - 1), GREEDY) for name, s in steps.items()}
            for _ in range(rounds + 1)
        ][1:]  # the first warms up
        cache: Any = steps["6"].sequence.target
        figures[str(context)] = {
            "prompt_s": round(seconds, 3),
            "cache_mb": round((cache.keys.nbytes + cache.values.nbytes) / 1e6),
        } | {
            name: {part: spread([1000 * s[name][part] for s in samples]) for part in parts}
            for name, parts in samples[0].items()
        }
        print(context, figures[str(context)], flush=True)
    return figures


def texts_of(tokenizer: Any, length: int) -> dict[str, list[list[int]]]:
    """By kind, token ids of texts of one length."""
    prompts = [prompt.text for prompt in load(BUILT_IN) if isinstance(prompt.text, str)]
    whole = {
        "documentation": "\n".join(pages.topics.values()),
        "code": Path(code.__file__).read_text(),
        "prompts": "\n\n".join(np.random.default_rng(0).permutation(prompts)),
    }
    texts = {}
    for kind, text in whole.items():
        tokens = tokenizer(text)["input_ids"] * 2
        starts = np.linspace(0, min(len(tokens), 40 * length) - length, TEXTS).astype(int)
        texts[kind] = [tokens[start : start + length] for start in starts]
    return texts


def decode(decoder: SequoiaDecoder, prompt: list[int]) -> tuple[int, int, float]:
    """Tokens, steps and seconds after the first step."""
    counts, seconds = [], []
    with closing(decoder.steps(torch.tensor(prompt), TOKENS, GREEDY, reuse_prefix=True)) as steps:
        for output in steps:
            counts.append(len(output.tokens))
            seconds.append(time.perf_counter())
    return sum(counts[1:]), len(counts) - 1, seconds[-1] - seconds[0]


def text_figures(pair: Pair, decoders: dict[str, SequoiaDecoder]) -> dict[str, Any]:
    """By kind, context and tree: speed, tokens a step, and speed over plain decoding."""
    figures: dict[str, Any] = {}
    for kind, texts in texts_of(pair.tokenizer, max(TEXT_CONTEXTS)).items():
        for context in TEXT_CONTEXTS:
            runs = [[decode(d, text[-context:]) for d in decoders.values()] for text in texts]
            made, steps, seconds = np.array(runs).T  # [trees, texts] each
            speeds = made / seconds
            figures.setdefault(kind, {})[str(context)] = {
                name: {
                    "tokens_s": spread(speeds[number], 1),
                    "tokens_a_step": spread(made[number] / steps[number]),
                    "over_plain": spread(speeds[number] / speeds[-1]),
                }
                for number, name in enumerate(decoders)
            }
            print(kind, context, figures[kind][str(context)], flush=True)
    return figures


def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", action="append", help="repeatable")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for dtype in options.dtype or ("auto", "bfloat16"):
        pair = load_pair(dtype=dtype)
        decoder = SequoiaDecoder(pair.target, pair.draft, TREES["6"])
        decoders = {name: decoder.with_tree(tree) for name, tree in TREES.items()}
        steps = step_figures(pair, decoders, options.rounds)
        figures[dtype] = {"steps": steps, "texts": text_figures(pair, decoders)}
    write_report(options.output, {"hardware": fingerprint("cpu"), "figures": figures})


if __name__ == "__main__":
    main()
