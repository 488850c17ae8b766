"""How well the fitted cost of verification predicts trees that were not in the fit.

    python benchmarks/verification.py -o benchmarks/results/verification.json
    python benchmarks/verification.py --quick -o build/verification.json     # fewer rounds

It uses the embedded pair; the cost includes committing the accepted path. Each setting is fitted as
`sequoia-plan profile` does it. Then `breakdown` times the trees, and verification follows the
target's pass there as it does when decoding.
"""

from __future__ import annotations

import argparse
import json
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
"""The embedded pair's acceptance vector at temperature 0.6, rounded."""
TREES = {
    "chain of 8": TokenTree.chain(8),
    "star of 8": TokenTree.star(8),
    "3 x 3": bushy(13, 3),
    "solved, 16": solve(VECTOR, 16, 8, objective="tokens").tree,
    "solved, 64": solve(VECTOR, 64, 10, objective="tokens").tree,
}
SETTINGS = {
    "traversal": Sampling(0.6),
    "sequoia": Sampling(0.6, verifier="sequoia"),
    "greedy": Sampling(),
}


def compare(pair: Pair, sampling: Sampling, max_size: int, rounds: int) -> dict[str, Any]:
    """The fitted cost, and each tree's seconds as predicted and as measured.

    Args:
        max_size: nodes of the largest tree in the fit.
        rounds: how often everything is timed.
    """
    meter = LatencyMeter(pair, sampling, CONTEXT, max_size=max_size)
    # the times of passes do not matter here; the trees in the fit are as large as the largest size
    meter.sizes = [1, 2, max_size]
    meter.begin(float("inf"))
    for _ in range(rounds):
        meter.round()
    latency = meter.finish(0.0)
    step_time = StepTime(latency)
    seconds_of_tree = {}
    for name, tree in TREES.items():
        parts = breakdown(pair, tree, sampling, rounds=rounds)
        seconds_of_tree[name] = {
            "predicted": step_time.verification_seconds(tree),
            "measured": parts["verify"] + parts["commit"],
            "step": parts["step"],
        }
    fit = latency.verification.to_dict() if latency.verification else None
    return {"fit": fit, "trees": seconds_of_tree}


def add_rows(table: Table, name: str, comparison: dict[str, Any]) -> None:
    """Add one row for each tree of one setting."""
    for tree, seconds in comparison["trees"].items():
        difference = seconds["predicted"] - seconds["measured"]
        table.add_row(
            name,
            tree,
            f"{1000 * seconds['predicted']:.2f}",
            f"{1000 * seconds['measured']:.2f}",
            f"{difference / seconds['measured']:+.0%}",
            f"{difference / seconds['step']:+.1%}",
        )


def main() -> None:
    """Fit, measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rounds",
        type=int,
        default=20,
        help="how often everything is timed (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    max_size, rounds = (8, 5) if options.quick else (64, options.rounds)
    pair = load_pair(draft=options.draft, dtype=options.dtype, device=options.device)
    report: dict[str, Any] = {
        "hardware": fingerprint(options.device),
        "models": pair.metadata,
        "settings": {},
    }
    table = Table(
        title="verification, ms: predicted, measured, and their difference as a share of the step",
        box=None,
    )
    for column in ("", "tree", "predicted", "measured", "difference", "of the step"):
        table.add_column(column, justify="left" if column in ("", "tree") else "right")
    for name, sampling in SETTINGS.items():
        print(name, flush=True)
        comparison = compare(pair, sampling, max_size, rounds)
        report["settings"][name] = comparison
        add_rows(table, name, comparison)
        write_atomically(options.output, (json.dumps(report, indent=1) + "\n").encode())
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
