"""What a long text costs: steps, first tokens and memory, and a tree against plain decoding.

    python benchmarks/contexts.py -o benchmarks/results/contexts.json
    python benchmarks/contexts.py --dtype auto --context 256 --context 4096 -o build/contexts.json

The parts of a step are timed after random tokens, all trees in each round. Then texts of three
kinds are decoded: pages of Python's documentation, its code, and the built-in prompts one after the
other. The last token before the new ones is the same at all contexts of a text: only how much text
stands before it differs. Plain decoding and the tree take turns.
"""

from __future__ import annotations

import argparse as code
import resource
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
from sequoia_plan.runtime.captured_step import CapturedStep

CONTEXTS = (256, 1024, 2048, 4096, 7168)
GREEDY = Sampling()
TREES = {
    "1": TokenTree.chain(1),
    "2": TokenTree.chain(2),
    "6": TokenTree.from_parents([-1, 0, 0, 1, 1, 2]),
}


@torch.inference_mode()
def step_milliseconds(pair: Pair, contexts: list[int], rounds: int) -> dict[str, Any]:
    """By context and tree: the parts of a step; and what the cache takes."""
    steps = {"6": CapturedStep.of(pair.target, pair.draft, TREES["6"])}
    steps |= {name: steps["6"].with_tree(tree) for name, tree in TREES.items() if name != "6"}
    figures: dict[str, Any] = {}
    for context in contexts:
        step = steps["6"]
        started = time.perf_counter()
        step.prefill(random_prompt(pair, context), 8, seed=0)
        figures[str(context)] = {"prompt_s": round(time.perf_counter() - started, 3)}
        samples = [
            {name: time_parts(s, s.extent(context - 1), GREEDY) for name, s in steps.items()}
            for _ in range(rounds + 1)
        ][1:]  # the first warms up
        for name in steps:
            parts = samples[0][name]
            figures[str(context)][name] = {
                part: spread([1000 * sample[name][part] for sample in samples]) for part in parts
            }
        cache: Any = step.sequence.target
        arrays = [cache.keys, cache.values] if hasattr(cache, "keys") else cache.blocks
        figures[str(context)]["cache_mb"] = round(sum(a.nbytes for a in arrays) / 1e6)
        print(context, figures[str(context)], flush=True)
    return figures


def texts_of(tokenizer: Any, length: int, count: int) -> dict[str, list[list[int]]]:
    """By kind, token ids of texts of one length."""
    prompts = [prompt.text for prompt in load(BUILT_IN) if isinstance(prompt.text, str)]
    order = np.random.default_rng(0).permutation(len(prompts))
    whole = {
        "documentation": "\n".join(pages.topics.values()),
        "code": Path(code.__file__).read_text(),
        "prompts": "\n\n".join(prompts[i] for i in order),
    }
    texts = {}
    for kind, text in whole.items():
        tokens = tokenizer(text)["input_ids"]
        while len(tokens) < length:
            tokens = tokens + tokens
        starts = np.linspace(0, min(len(tokens), 40 * length) - length, count).astype(int)
        texts[kind] = [tokens[start : start + length] for start in starts]
    return texts


def decode(decoder: SequoiaDecoder, prompt: list[int], tokens: int, **options: Any) -> Any:
    """Seconds to the first tokens; tokens and seconds of the steps after them."""
    started, counts, seconds = time.perf_counter(), [], []
    with closing(decoder.steps(torch.tensor(prompt), tokens, GREEDY, **options)) as steps:
        for output in steps:
            counts.append(len(output.tokens))
            seconds.append(time.perf_counter() - started)
    return seconds[0], sum(counts[1:]), len(counts) - 1, seconds[-1] - seconds[0]


def text_figures(pair: Pair, contexts: list[int], count: int, tokens: int) -> dict[str, Any]:
    """By kind and context: speeds, tokens a step, and the tree over plain decoding."""
    tree = SequoiaDecoder(pair.target, pair.draft, TREES["6"])
    plain = tree.with_tree(TREES["1"])
    figures: dict[str, Any] = {}
    for kind, texts in texts_of(pair.tokenizer, max(contexts), count).items():
        for context in contexts:
            runs = []
            for text in texts:
                prompt = text[-context:]
                first, made, steps, seconds = decode(tree, prompt, tokens)
                _, plain_made, _, plain_seconds = decode(plain, prompt, tokens, reuse_prefix=True)
                runs.append((first, plain_made / plain_seconds, made / seconds, made / steps))
            firsts, plains, trees, per_step = np.array(runs).T
            figures.setdefault(kind, {})[str(context)] = {
                "first_token_s": spread(firsts),
                "plain_tokens_s": spread(plains, 1),
                "tree_tokens_s": spread(trees, 1),
                "tokens_a_step": spread(per_step),
                "over_plain": spread(trees / plains),
            }
            print(kind, context, figures[kind][str(context)], flush=True)
    return figures


def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--dtype", action="append", help="auto, bfloat16; repeatable")
    parser.add_argument("--placement", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, action="append", help="tokens, repeatable")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=int, default=3, help="of each kind; 0 times steps alone")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contexts, figures = options.context or list(CONTEXTS), {}
    for dtype in options.dtype or ["auto", "bfloat16"]:
        pair = load_pair(dtype=dtype, placement=options.placement)
        figures[dtype] = {"steps": step_milliseconds(pair, contexts, options.rounds)}
        if options.texts:
            figures[dtype]["texts"] = text_figures(pair, contexts, options.texts, options.tokens)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        figures[dtype]["peak_gb"] = round(peak, 2)
    report = {"hardware": fingerprint("cpu"), "threads": options.threads, "figures": figures}
    write_report(options.output, report)


if __name__ == "__main__":
    main()
