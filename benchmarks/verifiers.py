"""The verifiers side by side on the embedded pair: tokens a step, and rejections by children drawn.

    python benchmarks/verifiers.py --profile build/profile.yaml -o benchmarks/results/verifiers.json
    python benchmarks/verifiers.py --quick -o build/verifiers.json   # minutes: to see that it runs

The tree has `--budget` nodes and is solved for tokens from the profile's acceptance. All verifiers
decode the same held-out prompts with it. Rejection rates are not counted but computed: at positions
of text that the target wrote, the verifier gives the probability that none of k drawn children is
accepted. The plot goes to docs/images/rejection.png, with --quick next to the JSON. A run that was
stopped continues when it is started again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner import solve
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.pair import LANGUAGE_MODEL
from sequoia_plan.runtime.verify import VERIFIERS, TreeIndex

SETTINGS = [(0.2, 1.0), (0.6, 1.0), (1.0, 1.0), (1.0, 0.9), (1.0, 0.8)]
"""Temperature and top-p: the paper's robustness tables."""
QUICK_SETTINGS = SETTINGS[1:2]
NUM_CHILDREN = [1, 2, 3, 4, 6, 8, 12, 16]
TYPICAL_ACCEPTANCE = [0.35, 0.09, 0.045, 0.04, 0.023, 0.019, 0.014, 0.015]
"""Stands in for a profile with --quick."""
PLOT = Path(__file__).parents[1] / "docs/images/rejection.png"
TICKS = [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
"""Rejection rates that the plot may label."""


def tokens_per_step(
    pair: Pair, decoder: SequoiaDecoder, prompts: list[list[int]], tokens: int, sampling: Sampling
) -> dict[str, float]:
    """All tokens over all steps, with the standard error of that ratio over prompts."""
    results = [
        decoder.generate(prompt, tokens, seed=seed, eos_token_id=pair.end_tokens, sampling=sampling)
        for seed, prompt in enumerate(prompts)
    ]
    num_steps = sum(result.steps for result in results)
    ratio = sum(result.new_tokens for result in results) / num_steps
    squares = sum((result.new_tokens - ratio * result.steps) ** 2 for result in results)
    n = len(results)
    error = math.sqrt(squares * n / max(n - 1, 1)) / num_steps
    return {"tokens_per_step": round(ratio, 4), "standard_error": round(error, 4)}


@torch.inference_mode()
def rejection_rates(
    pair: Pair, prompts: list[list[int]], tokens: int, sampling: Sampling
) -> dict[str, list[float]]:
    """For each verifier, the probability that none of 1, 2, ... children is accepted.

    It is the mean over all positions of the text that the target writes after the prompts.
    """
    generator = torch.Generator().manual_seed(0)
    d2t = getattr(pair.draft, "d2t", None)
    stars = [TreeIndex.of(TokenTree.star(count)) for count in NUM_CHILDREN]
    totals = {name: [0.0] * len(NUM_CHILDREN) for name in VERIFIERS}
    num_positions = 0
    for target_probs, draft_probs in probs_at_positions(pair, prompts, tokens, sampling):
        num_positions += 1
        for name, verifier in VERIFIERS.items():
            drawn = verifier.drawing(draft_probs, NUM_CHILDREN[-1], generator)
            for i, (count, star) in enumerate(zip(NUM_CHILDREN, stars, strict=True)):
                acceptance = verifier.acceptance(
                    lambda nodes, probs=target_probs: probs.expand(len(nodes), -1),
                    draft_probs,
                    drawn[:, :count],
                    star,
                    d2t,
                )
                totals[name][i] += float(acceptance.end_probs[0])
    return {
        name: [round(total / num_positions, 5) for total in sums] for name, sums in totals.items()
    }


def probs_at_positions(
    pair: Pair, prompts: list[list[int]], tokens: int, sampling: Sampling
) -> Iterator[tuple[Tensor, Tensor]]:
    """The target's and the draft's probabilities at each position of text that the target writes.

    Yields:
        Two tensors, each [1, vocabulary].
    """
    plain = SequoiaDecoder(pair.target, None, TokenTree.chain(1))
    for seed, prompt in enumerate(prompts):
        ids = plain.generate(
            prompt, tokens, seed=seed, eos_token_id=pair.end_tokens, sampling=sampling
        ).sequences
        written = slice(len(prompt) - 1, ids.shape[1] - 1)
        target_probs = sampling.target_probs(pair.target(ids).logits[0, written])
        draft_probs = sampling.draft_probs(pair.draft(ids).logits[0, written])
        yield from zip(target_probs.split(1), draft_probs.split(1), strict=True)


def plot(rates_by_title: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Plot rejection rates against children drawn, a panel for each temperature: Figure 3."""
    from matplotlib.figure import Figure

    rates = [
        rate for curves in rates_by_title.values() for curve in curves.values() for rate in curve
    ]
    ticks = [tick for tick in TICKS if min(rates) <= tick <= max(rates)]
    num_panels = len(rates_by_title)
    figure = Figure(figsize=(3.2 * num_panels, 3.2), layout="constrained")
    panels = figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(panels, rates_by_title.items(), strict=True):
        for name, curve in curves.items():
            style = "--" if name == "traversal" else "-"
            axes.plot(NUM_CHILDREN, curve, marker="o", markersize=3, linestyle=style, label=name)
        axes.set(xscale="log", yscale="log", title=title, xlabel="children drawn")
        axes.set_xticks(NUM_CHILDREN, [str(count) for count in NUM_CHILDREN], minor=False)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("probability that all are rejected")
    figure.axes[-1].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure and report."""
    options = read_options()
    pair = load_pair(draft=LANGUAGE_MODEL, dtype=options.dtype)
    prompts = held_out(pair.tokenizer, options.prompts)
    acceptance = TYPICAL_ACCEPTANCE if options.quick else Profile.load(options.profile)
    tree = solve(acceptance, options.budget, options.depth, objective="tokens").tree
    report = new_report(pair, prompts, tree, options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.output.exists():
        report = report_to_continue(json.loads(options.output.read_text()), report)
    measure(report, pair, prompts, tree, options)
    rates = {
        title: curves for title, curves in report["rejection_rate"].items() if title != "children"
    }
    plot(rates, options.output.with_suffix(".png") if options.quick else PLOT)
    print_table(report, tree, len(prompts), options.tokens)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profile",
        type=Path,
        default=Path("build/profile.yaml"),
        help="its acceptance shapes the tree",
    )
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two prompts x 8 tokens, one temperature, a typical acceptance vector",
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens = 2, 8
    return options


def new_report(
    pair: Pair, prompts: list[list[int]], tree: TokenTree, options: argparse.Namespace
) -> dict[str, Any]:
    """The result without any measurement."""
    return {
        "settings": {
            "dtype": str(pair.target.dtype),
            "prompts": len(prompts),
            "tokens": options.tokens,
            "quick": options.quick,
        },
        "hardware": fingerprint("cpu"),
        "models": pair.metadata,
        "tree": {"parents": tree.parents.tolist(), "expected_tokens": tree.plan.expected_tokens},
        "tokens_per_step": {},
        "rejection_rate": {"children": NUM_CHILDREN},
    }


def report_to_continue(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The report of an earlier run if it was of the same work, else the new one."""
    measurements = {name: new[name] for name in ("tokens_per_step", "rejection_rate")}
    return old if old | measurements == new else new


def measure(
    report: dict[str, Any],
    pair: Pair,
    prompts: list[list[int]],
    tree: TokenTree,
    options: argparse.Namespace,
) -> None:
    """Fill in what the report lacks, and write it after every measurement."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    for temperature, top_p in QUICK_SETTINGS if options.quick else SETTINGS:
        title = f"T {temperature}, top-p {top_p}"
        results = report["tokens_per_step"].setdefault(title, {})
        for name in VERIFIERS:
            if name not in results:
                sampling = Sampling(temperature, top_p, verifier=name)
                results[name] = tokens_per_step(pair, decoder, prompts, options.tokens, sampling)
                print(title, name, results[name], flush=True)
                write(options.output, report)
        if top_p == 1 and title not in report["rejection_rate"]:
            sampling = Sampling(temperature)
            rates = rejection_rates(pair, prompts, options.tokens, sampling)
            report["rejection_rate"][title] = rates
            write(options.output, report)


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the report as JSON."""
    write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())


def print_table(report: dict[str, Any], tree: TokenTree, num_prompts: int, tokens: int) -> None:
    """Print tokens a step, with standard errors."""
    shape = f"{tree.size} nodes, depth {tree.depth}"
    table = Table(title=f"tokens a step, {shape}; {num_prompts} prompts x {tokens} tokens")
    for column in ("", *VERIFIERS):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for title, results in report["tokens_per_step"].items():
        cells = [
            f"{results[name]['tokens_per_step']:.3f} ± {results[name]['standard_error']:.3f}"
            for name in VERIFIERS
        ]
        table.add_row(title, *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
