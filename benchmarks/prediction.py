"""Prediction against truth on held-out prompts of the embedded pair: tokens a step and speed-up, by temperature and tree size.

    sequoia-plan profile --temperature 0.6 -o build/t06.yaml                    # likewise for other temperatures
    sequoia-plan profile --temperature 0.6 --method decoding -o build/counted.yaml
    python benchmarks/prediction.py build/t06.yaml --counted build/counted.yaml -o benchmarks/results/prediction.json
    python benchmarks/prediction.py build/t06.yaml --quick -o build/prediction.json      # two sizes, two prompts: to see that it runs

For each profile and size the tree of most tokens is solved from the profile, by level, decodes the held-out prompts beside plain
decoding, and its figures are put next to what the one vector and the rows by level promise. Latencies are timed anew, one round
after each prompt: the profile's may be hours old, and a shared machine changes by the minute. `--counted` are profiles by the
paper's method, one-level trees; each is compared where its temperature is that of a profile.
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
from sequoia_plan.planner import solve
from sequoia_plan.planner.objective import StepTime, expected_tokens
from sequoia_plan.profiler.bench import bench, ours, settings_and_hardware, summary
from sequoia_plan.profiler.latency import CONTEXT, LatencyMeter
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import Pair, Sampling, load_pair

SIZES = [4, 8, 16, 32, 64]


def compare(pair: Pair, profile: Profile, counted: Profile | None, sampling: Sampling, sizes: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a size: what was promised and what was found."""
    trees = {str(size): solve(profile, size, options.depth, objective="tokens").tree for size in sizes}
    decoders = {"plain": ours(pair, solve(profile, 1, 1, objective="tokens").tree, sampling, options.tokens)}
    decoders |= {name: ours(pair, tree, sampling, options.tokens) for name, tree in trees.items()}
    meter = LatencyMeter(pair, sampling, CONTEXT, largest=sizes[-1])
    meter.begin(math.inf)
    found = summary(bench(decoders, held_out(pair.tokenizer, options.prompts), on_prompt=lambda done: meter.round()), ["plain"])
    times = StepTime(meter.finish(seconds=0.0))
    entries = []
    for name, tree in trees.items():
        vectors = {"one_vector": profile.acceptance, "by_level": profile.by_level} | ({"counted": counted.acceptance} if counted else {})
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
    """Decode, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, nargs="+")
    parser.add_argument("--counted", type=Path, action="append", default=[])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    sizes = SIZES
    if options.quick:
        sizes, options.prompts, options.tokens = [4, 8], 2, 8
    counted = {profile.settings["temperature"]: profile for profile in map(Profile.load, options.counted)}
    pair = load_pair(dtype=options.dtype, device=options.device)
    console, results = Console(width=130), list[dict[str, Any]]()
    table = Table(title="tokens a step, then speed-up over plain decoding: measured, and promised less measured", box=None)
    for column in ("T", "nodes", "measured", "one vector", "by level", "counted", "measured x", "interval", "one vector", "by level"):
        table.add_column(column, justify="right", no_wrap=True)
    for profile in map(Profile.load, options.profiles):
        sampling = Sampling(**profile.settings)
        alike = counted.get(sampling.temperature)
        entries = compare(pair, profile, alike, sampling, sizes, options)
        facts = {"vector": profile.acceptance, "worth_trials": profile.trials, "by_level": [[round(p, 5) for p in row] for row in profile.by_level]}
        facts |= {"level_trials": [level.trials for level in profile.levels], "counted": alike and {"vector": alike.acceptance, "worth_trials": alike.trials}}
        results.append(settings_and_hardware(pair, sampling, options.prompts, options.tokens) | facts | {"trees": entries})
        write_atomically(options.output, (json.dumps(results, indent=1) + "\n").encode())
        for entry in entries:
            tokens, speed = entry["tokens_per_step"], entry["speedup"]
            cells = [f"{tokens['measured']:.3f}"]
            cells += [f"{tokens[kind] / tokens['measured'] - 1:+.1%}" if kind in tokens else "" for kind in ("one_vector", "by_level", "counted")]
            clock = speed["measured"]
            cells += [f"{clock['median']:.3f}", f"{clock['interval_low']:.3f}-{clock['interval_high']:.3f}"]
            cells += [f"{speed[kind] / clock['median'] - 1:+.1%}" for kind in ("one_vector", "by_level")]
            table.add_row(str(sampling.temperature), str(entry["size"]), *cells)
    console.print(table)


if __name__ == "__main__":
    main()
