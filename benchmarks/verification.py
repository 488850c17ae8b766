"""How well the fitted cost of verification predicts trees that were not in the fit: judging and keeping, on the embedded pair.

    python benchmarks/verification.py -o benchmarks/results/verification.json
    python benchmarks/verification.py --quick -o build/verification.json     # fewer rounds, to see that it runs

Each setting is fitted as `sequoia-plan profile` does it, then the trees are timed by `breakdown`, in which verification follows the target's
pass as it does when decoding.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import StepTime
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner import solve
from sequoia_plan.profiler.breakdown import breakdown
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, LatencyMeter
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import Pair, Sampling, load_pair

VECTOR = [0.41, 0.1, 0.06, 0.045, 0.03, 0.025, 0.02, 0.015]
"""The embedded pair's acceptance at temperature 0.6, rounded."""
TREES = {
    "chain of 8": TokenTree.chain(8),
    "star of 8": TokenTree.star(8),
    "3 x 3": bushy(13, 3),
    "solved, 16": solve(VECTOR, 16, 8, objective="tokens").tree,
    "solved, 64": solve(VECTOR, 64, 10, objective="tokens").tree,
}
SETTINGS = {"traversal": Sampling(0.6), "sequoia": Sampling(0.6, verifier="sequoia"), "greedy": Sampling()}


def compare(pair: Pair, sampling: Sampling, largest: int, rounds: int) -> dict[str, Any]:
    """The fit, and each tree's seconds as predicted and as measured."""
    meter = LatencyMeter(pair, sampling, CONTEXT, largest=largest)
    meter.sizes = [1, 2, largest]  # passes do not matter here; the shapes are as large as the largest size
    meter.begin(float("inf"))
    for _ in range(rounds):
        meter.round()
    latency = meter.finish(0.0)
    found = {}
    for name, tree in TREES.items():
        parts = breakdown(pair, tree, sampling, rounds=rounds)
        found[name] = {"predicted": StepTime(latency).verification(tree), "measured": parts["verify"] + parts["keep"], "step": parts["step"]}
    return {"fit": asdict(latency.verification) if latency.verification else None, "trees": found}


def main() -> None:
    """Fit, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20, help="how often everything is timed (default: %(default)s)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    pair = load_pair(draft=options.draft, dtype=options.dtype, device=options.device)
    report: dict[str, Any] = {"hardware": fingerprint(options.device), "models": pair.facts, "settings": {}}
    table = Table(title="verification, ms: predicted, measured, and their difference as a share of the step", box=None)
    for column in ("", "tree", "predicted", "measured", "difference", "of the step"):
        table.add_column(column, justify="left" if column in ("", "tree") else "right")
    for name, sampling in SETTINGS.items():
        print(name, flush=True)
        found = report["settings"][name] = compare(pair, sampling, 8 if options.quick else 64, 5 if options.quick else options.rounds)
        for tree, times in found["trees"].items():
            off = times["predicted"] - times["measured"]
            shown = f"{1000 * times['predicted']:.2f}", f"{1000 * times['measured']:.2f}", f"{off / times['measured']:+.0%}", f"{off / times['step']:+.1%}"
            table.add_row(name, tree, *shown)
        write_atomically(options.output, (json.dumps(report, indent=1) + "\n").encode())
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
