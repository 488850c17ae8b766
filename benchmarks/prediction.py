"""Prediction against truth on held-out prompts of the embedded pair: tokens a step and speed-up, by temperature and tree size.

    python benchmarks/prediction.py -o benchmarks/results/prediction.json
    python benchmarks/prediction.py --quick -o build/prediction.json      # one temperature, two sizes, two prompts: to see that it runs

Acceptance is measured on the built-in prompts, by rank over all levels and by level; latency once. For each size the tree of most
tokens is solved from the one vector, decodes the held-out prompts beside plain decoding, and its figures are put next to what the one
vector and the rows by level promise. `counted` is the vector of the paper's method, one-level trees.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import Profile
from sequoia_plan.planner import solve
from sequoia_plan.planner.objective import StepTime, expected_tokens
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.bench import bench, ours, settings_and_hardware, summary
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.prompts import built_in, encode
from sequoia_plan.runtime import Pair, Sampling, load_pair

TEMPERATURES = [0.0, 0.6, 1.0]
SIZES = [4, 8, 16, 32, 64]


def compare(pair: Pair, profile: Profile, counted: list[float], sampling: Sampling, sizes: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
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
        promised = {kind: expected_tokens(tree, p) for kind, p in (("one_vector", profile.acceptance), ("by_level", profile.by_level), ("counted", counted))}
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
    parser.add_argument("--prompts", type=int, default=35)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    temperatures, sizes, texts = TEMPERATURES, SIZES, built_in()
    if options.quick:
        temperatures, sizes, texts, options.prompts, options.tokens = [0.6], [4, 8], texts[:2], 2, 8
    pair = load_pair(dtype=options.dtype, device=options.device)
    samplings = [Sampling(temperature) for temperature in temperatures]
    work = {"precision": 0.0, "tokens_per_prompt": options.tokens}
    profiles = measure(pair, texts, samplings, 0.0 if options.quick else 30.0, **work)
    counts = measure_acceptance(pair, [encode(pair.tokenizer, text) for text in texts], samplings, method="decoding", **work)

    console, results = Console(width=130), []
    table = Table(title="tokens a step, then speed-up over plain decoding: measured, and promised less measured", box=None)
    for column in ("T", "nodes", "measured", "one vector", "by level", "counted", "measured x", "interval", "one vector", "by level"):
        table.add_column(column, justify="right", no_wrap=True)
    for sampling, profile, counted in zip(samplings, profiles, counts, strict=True):
        vector = (counted.counts.sum((0, 1)) / counted.trials.sum()).tolist()
        entries = compare(pair, profile, vector, sampling, sizes, options)
        results.append(
            {"temperature": sampling.temperature, "acceptance": profile.acceptance, "by_level": profile.by_level, "counted": vector, "trees": entries}
        )
        for entry in entries:
            tokens, speed = entry["tokens_per_step"], entry["speedup"]
            cells = [f"{tokens['measured']:.3f}", *(f"{tokens[kind] / tokens['measured'] - 1:+.1%}" for kind in ("one_vector", "by_level", "counted"))]
            clock = speed["measured"]
            cells += [f"{clock['median']:.3f}", f"{clock['interval_low']:.3f}-{clock['interval_high']:.3f}"]
            cells += [f"{speed[kind] / clock['median'] - 1:+.1%}" for kind in ("one_vector", "by_level")]
            table.add_row(str(sampling.temperature), str(entry["size"]), *cells)
    report = settings_and_hardware(pair, samplings[0], options.prompts, options.tokens) | {"results": results}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
