"""Plans that are wrong about the machine or the text, beside plain decoding and the true plan.

    python benchmarks/clock.py -o benchmarks/results/clock.json   # --quick: two prompts, 24 tokens

Embedded pair, greedy, with one thread and two. The true plan has the acceptance of the catalog's
profile, or of a second pair's, and the latencies of this machine; each other one is wrong in one
way. Every decoder has
its own clock, and all decode a prompt in turn, so ratios are free of drift. The first prompt, in
which they time the machine, does not count. Speeds over plain decoding: medians over prompts with
quartiles.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import torch
from msgspec import structs
from pages import refill
from reports import new_parser, spread, write_report
from results import ROOT

from sequoia_plan.artifacts import Acceptance, Latency, Profile, TokenTree, load_tree
from sequoia_plan.artifacts.processor import processor_name
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load
from sequoia_plan.artifacts.tree_file import CATALOG
from sequoia_plan.planner.solving.solve import solve
from sequoia_plan.profiler.latency import LatencyMeter
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair

PAGE, CATALOG_TREE = ROOT / "docs" / "lookup.md", "smollm2-135m-epyc-2-cores-t0"
PROMPTS, TOKENS, THREADS, MAX_NODES = 12, 128, (1, 2), 64


def measured(pair: Pair, seconds: float) -> Latency:
    """The latencies of this machine with as many threads as PyTorch has now."""
    meter = LatencyMeter(pair, Sampling(), max_size=MAX_NODES)
    meter.begin(8.0)
    return meter.finish(seconds)


def tree_for(profile: Profile, **settings: Any) -> TokenTree:
    """The tree that a profile is solved for."""
    return solve(profile, budget=MAX_NODES, depth=20, **settings).tree


def wrong_plans(profile: Profile, other_threads: Latency) -> dict[str, TokenTree]:
    """The true plan of a profile, and those that are wrong in one way."""
    latency = profile.latency
    assert latency

    def with_times(rows: float = 1.0, draft: float = 1.0) -> TokenTree:
        """The tree where passes over several rows, and draft passes, take so many times as long."""
        first = latency.target[1]
        target = {n: max(first, rows * s) for n, s in latency.target.items()} | {1: first}
        drafts = {n: draft * s for n, s in latency.draft.items()}
        changed = structs.replace(latency, target=target, draft=drafts)
        return tree_for(structs.replace(profile, latency=changed))

    all_accepted = structs.replace(profile, acceptance=Acceptance.given([0.95]), lookup=None)
    size = max(latency.target)  # of larger trees a plan predicts no times
    largest = solve(profile, budget=size, depth=20, objective="tokens").tree
    forced = TokenTree(largest.parents, structs.replace(largest.plan, objective="speed"))
    return {
        "true": tree_for(profile),
        "passes over several rows a tenth": with_times(rows=0.1),
        "passes over several rows ten times": with_times(rows=10.0),
        "draft passes free": with_times(draft=1e-3),
        "0.95 accepted everywhere": tree_for(all_accepted),
        "of another processor": load_tree(CATALOG_TREE),
        "of the other number of threads": tree_for(structs.replace(profile, latency=other_threads)),
        "the largest tree forced": forced,
    }


def tokens_per_second(decoder: SequoiaDecoder, prompt: list[int], tokens: int) -> float:
    """The speed after the first step."""
    count, started = 0, 0.0
    prompt_ids = torch.tensor(prompt)
    with closing(decoder.steps(prompt_ids, tokens, Sampling(), timed=True)) as steps:
        for output in islice(steps, tokens):
            count += len(output.tokens) if started else 0
            started = started or time.perf_counter()
    return count / (time.perf_counter() - started)


def figures_of(
    pair: Pair, trees: dict[str, TokenTree], prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    """By plan: nodes, promised and measured speed over plain decoding."""
    plain = SequoiaDecoder(pair.target, None, TokenTree.chain(1))
    decoders = {name: SequoiaDecoder(pair.target, pair.draft, tree) for name, tree in trees.items()}
    order, speeds = deque({"plain": plain, **decoders}.items()), []
    for prompt in prompts:
        speeds.append({name: tokens_per_second(d, prompt, tokens) for name, d in order})
        order.rotate(-1)
    figures = {}
    for name, tree in trees.items():
        ratios = np.array([of_prompt[name] / of_prompt["plain"] for of_prompt in speeds[1:]])
        promised = round(tree.plan.predicted_speedup or 1.0, 3)
        figures[name] = dict(nodes=tree.size, promised=promised, over_plain=spread(ratios))
        print(name, figures[name])
    return figures


def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--target", help="of a second pair, with two threads")
    parser.add_argument("--profile", help="of that pair")
    options = parser.parse_args()
    num_prompts, tokens, seconds = (2, 24, 2.0) if options.quick else (PROMPTS, TOKENS, 20.0)
    texts = [prompt.text for prompt in held_out_half(load(BUILT_IN))][: num_prompts + 1]
    pairs: dict[str, Any] = {"": (None, CATALOG / "profiles" / f"{CATALOG_TREE}.yaml", THREADS)}
    if options.target:
        pairs["1.5B, "] = options.target, options.profile, THREADS[1:]
    figures = {}
    for name, (target, profile, numbers) in pairs.items():
        loaded, latencies = {}, {}
        for threads in THREADS:
            torch.set_num_threads(threads)
            loaded[threads] = load_pair(target)
            latencies[threads] = measured(loaded[threads], seconds)
        prompts = [encode(loaded[1].tokenizer, text) for text in texts]
        for threads in numbers:
            torch.set_num_threads(threads)
            true = structs.replace(Profile.load(profile), latency=latencies[threads])
            trees = wrong_plans(true, latencies[3 - threads])
            by_plan = figures_of(loaded[threads], trees, prompts, tokens)
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            beside = {"true, with a busy core beside": trees["true"]}
            by_plan |= figures_of(loaded[threads], beside, prompts, tokens)
            busy.kill()
            figures[f"{name}threads: {threads}"] = by_plan
    report = {"processor": processor_name(), "prompts": num_prompts, "tokens": tokens}
    write_report(options.output, report | {"figures": figures})
    refill(PAGE, options.output)


if __name__ == "__main__":
    main()
