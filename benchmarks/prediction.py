"""Prediction against truth on held-out prompts of the embedded pair: tokens a step and speed-up, by temperature and tree size.

    python benchmarks/prediction.py -o benchmarks/results/prediction.json
    python benchmarks/prediction.py --quick -o build/prediction.json      # one temperature, two sizes, two prompts: to see that it runs

Acceptance is measured on the built-in prompts, by rank over all levels and by level; latency once. For each size the tree of most
tokens is solved from the one vector, decodes the held-out prompts beside plain decoding, and its figures are put next to what the one
vector and the rows by level promise. `counted` is the vector of the paper's method, one-level trees. Acceptance does not depend on what else
the machine does: it is kept beside the output, so that `--acceptance-only` can run at any time and a second run measures the rest.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import Profile
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.planner import solve
from sequoia_plan.planner.objective import StepTime, expected_tokens
from sequoia_plan.profiler.acceptance import Acceptance, measure_acceptance
from sequoia_plan.profiler.bench import bench, ours, settings_and_hardware, summary
from sequoia_plan.profiler.latency import measure_latency
from sequoia_plan.profiler.prompts import built_in, encode
from sequoia_plan.runtime import Pair, Sampling, load_pair

TEMPERATURES = [0.0, 0.6, 1.0]
SIZES = [4, 8, 16, 32, 64]
COUNTED = 0.6
"""The temperature at which acceptance is counted, too, as the paper does."""


def facts(found: Acceptance) -> dict[str, Any]:
    """What was measured, and half the relative 95 % interval of what it predicts."""
    levels = found.levels()
    by_level = [[round(count / max(level.trials, 1), 5) for count in level.counts] for level in levels]
    return {"vector": pooled(levels), "by_level": by_level, "trials": [level.trials for level in levels], "precision": round(found.precision(), 4)}


def compare(pair: Pair, profile: Profile, counted: Any, sampling: Sampling, sizes: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a size: what was promised and what was found."""
    assert profile.latency is not None
    times = StepTime(profile.latency)
    trees = {str(size): solve(profile, size, options.depth, objective="tokens").tree for size in sizes}
    decoders = {"plain": ours(pair, solve(profile, 1, 1, objective="tokens").tree, sampling, options.tokens)}
    decoders |= {name: ours(pair, tree, sampling, options.tokens) for name, tree in trees.items()}
    prompts = [encode(pair.tokenizer, text) for text in built_in(held_out=True)[: options.prompts]]
    found = summary(bench(decoders, prompts), ["plain"])
    entries = []
    for name, tree in trees.items():
        vectors = {"one_vector": profile.acceptance, "by_level": profile.by_level} | ({"counted": counted} if counted else {})
        promised = {kind: expected_tokens(tree, p) for kind, p in vectors.items()}
        ratio = times.plain() / times.step(tree)
        entries.append(
            {
                "size": tree.size,
                "depth": tree.depth,
                "tokens_per_step": {"measured": found[name]["tokens_per_step"]} | {kind: round(tokens, 4) for kind, tokens in promised.items()},
                "speedup": {"measured": found[name]["speedup"]["plain"]} | {kind: round(tokens * ratio, 4) for kind, tokens in promised.items()},
            }
        )
    return entries


def main() -> None:
    """Measure, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=20, help="held-out ones, to decode")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--acceptance-only", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    temperatures, sizes, texts = TEMPERATURES, SIZES, built_in()
    if options.quick:
        temperatures, sizes, texts, options.prompts, options.tokens = [0.6], [4, 8], texts[:2], 2, 8
    pair = load_pair(dtype=options.dtype, device=options.device)
    samplings = [Sampling(temperature) for temperature in temperatures]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    ids = [encode(pair.tokenizer, text) for text in texts]

    def acceptance(method: str, samplings: list[Sampling]) -> dict[float, Acceptance]:
        kept, options_ = options.output.with_suffix(f".{method}.journal"), {"precision": 0.0, "tokens_per_prompt": options.tokens}
        found = measure_acceptance(pair, ids, samplings, method=method, journal=kept, **options_)
        return {sampling.temperature: each for sampling, each in zip(samplings, found, strict=True)}

    computed = acceptance("forced", samplings)
    counted = acceptance("decoding", [Sampling(COUNTED)])
    if options.acceptance_only:
        return
    latency = measure_latency(pair, samplings[0], math.inf, 0.0 if options.quick else 30.0, largest=sizes[-1])

    console, results = Console(width=130), list[dict[str, Any]]()
    table = Table(title="tokens a step, then speed-up over plain decoding: measured, and promised less measured", box=None)
    for column in ("T", "nodes", "measured", "one vector", "by level", "counted", "measured x", "interval", "one vector", "by level"):
        table.add_column(column, justify="right", no_wrap=True)
    report = settings_and_hardware(pair, samplings[0], options.prompts, options.tokens) | {"results": results}
    for sampling in samplings:
        forced, decoding = computed[sampling.temperature], counted.get(sampling.temperature)
        profile = Profile(pooled(forced.levels()), latency=latency, levels=forced.levels())
        entries = compare(pair, profile, pooled(decoding.levels()) if decoding else None, sampling, sizes, options)
        results.append({"temperature": sampling.temperature, "forced": facts(forced), "decoding": decoding and facts(decoding), "trees": entries})
        write_atomically(options.output, (json.dumps(report, indent=1) + "\n").encode())
        for entry in entries:
            tokens, speed = entry["tokens_per_step"], entry["speedup"]
            cells = [
                f"{tokens['measured']:.3f}",
                *(f"{tokens[kind] / tokens['measured'] - 1:+.1%}" if kind in tokens else "" for kind in ("one_vector", "by_level", "counted")),
            ]
            clock = speed["measured"]
            cells += [f"{clock['median']:.3f}", f"{clock['interval_low']:.3f}-{clock['interval_high']:.3f}"]
            cells += [f"{speed[kind] / clock['median'] - 1:+.1%}" for kind in ("one_vector", "by_level")]
            table.add_row(str(sampling.temperature), str(entry["size"]), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
