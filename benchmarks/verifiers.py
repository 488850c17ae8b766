"""The verifiers side by side on the embedded pair: tokens a step with the same tree, and rejections by children drawn.

    python benchmarks/verifiers.py --profile build/profile.yaml -o benchmarks/results/verifiers.json
    python benchmarks/verifiers.py --quick -o build/verifiers.json     # a few minutes less exact, to see that it runs

The tree has `--budget` nodes and is solved for tokens from the profile's acceptance. All verifiers decode the same held-out
prompts. Rejection rates are not counted but computed: at positions of text the target wrote, the verifier says how probable
it is that none of k drawn children is accepted. The plot goes to docs/images/rejection.png,
with --quick next to the JSON. A run that was stopped goes on when started again.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

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
CHILDREN = [1, 2, 3, 4, 6, 8, 12, 16]
TYPICAL = [0.35, 0.09, 0.045, 0.04, 0.023, 0.019, 0.014, 0.015]
"""Stands in for a profile with --quick."""


def tokens_per_step(pair: Pair, decoder: SequoiaDecoder, prompts: list[list[int]], tokens: int, sampling: Sampling) -> dict[str, float]:
    """All tokens over all steps, with the standard error of that ratio over prompts."""
    results = [decoder.generate(p, tokens, seed=seed, eos_token_id=pair.end_tokens, sampling=sampling) for seed, p in enumerate(prompts)]
    steps = sum(r.steps for r in results)
    ratio = sum(r.new_tokens for r in results) / steps
    n = len(results)
    error = math.sqrt(sum((r.new_tokens - ratio * r.steps) ** 2 for r in results) * n / max(n - 1, 1)) / steps
    return {"tokens_per_step": round(ratio, 4), "standard_error": round(error, 4)}


@torch.inference_mode()
def rejection_rates(pair: Pair, prompts: list[list[int]], tokens: int, sampling: Sampling) -> dict[str, list[float]]:
    """For each verifier the probability that none of 1, 2, ... children is accepted, averaged over positions."""
    plain = SequoiaDecoder(pair.target, None, TokenTree.chain(1))
    generator = torch.Generator().manual_seed(0)
    covered = getattr(pair.draft, "covered_tokens", None)
    stars = {k: TreeIndex.of(TokenTree.star(k)) for k in CHILDREN}
    rates = {name: [0.0] * len(CHILDREN) for name in VERIFIERS}
    positions = 0
    for seed, prompt in enumerate(prompts):
        ids = plain.generate(prompt, tokens, seed=seed, eos_token_id=pair.end_tokens, sampling=sampling).sequences
        written = slice(len(prompt) - 1, ids.shape[1] - 1)
        p, q = (rule(model(ids).logits[0, written]) for rule, model in ((sampling.target, pair.target), (sampling.draft, pair.draft)))
        positions += len(p)
        for at, (name, verifier) in ((at, item) for at in range(len(p)) for item in VERIFIERS.items()):
            drawn = verifier.drawing(q[at : at + 1], CHILDREN[-1], generator)
            for i, (k, star) in enumerate(stars.items()):
                verdict = verifier.judge(lambda nodes, law=p[at]: law.expand(len(nodes), -1), q[at : at + 1], drawn[:, :k], star, covered)
                rates[name][i] += float(verdict.ends[0])
    return {name: [round(total / positions, 5) for total in totals] for name, totals in rates.items()}


def plot(rates: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Rejection rate against children drawn, one panel a temperature: the paper's Figure 3."""
    from matplotlib.figure import Figure

    found = [rate for curves in rates.values() for curve in curves.values() for rate in curve]
    ticks = [tick / 100 for tick in (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90) if min(found) <= tick / 100 <= max(found)]
    figure = Figure(figsize=(3.2 * len(rates), 3.2), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(rates), sharey=True, squeeze=False)[0], rates.items(), strict=True):
        for name, curve in curves.items():
            axes.plot(CHILDREN, curve, marker="o", markersize=3, linestyle="--" if name == "traversal" else "-", label=name)
        axes.set(xscale="log", yscale="log", title=title, xlabel="children drawn")
        axes.set_xticks(CHILDREN, [str(k) for k in CHILDREN], minor=False)
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("probability that all are rejected")
    figure.axes[-1].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=Path("build/profile.yaml"), help="its acceptance shapes the tree")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="two prompts x 8 tokens, one temperature, a typical acceptance vector")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens = 2, 8
    settings = SETTINGS[1:2] if options.quick else SETTINGS
    pair = load_pair(draft=LANGUAGE_MODEL, dtype=options.dtype)
    prompts = held_out(pair.tokenizer, options.prompts)
    tree = solve(TYPICAL if options.quick else Profile.load(options.profile), options.budget, options.depth, objective="tokens").tree
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)

    report: dict[str, Any] = {
        "settings": {"dtype": str(pair.target.dtype), "prompts": len(prompts), "tokens": options.tokens, "quick": options.quick},
        "hardware": fingerprint("cpu"),
        "models": pair.facts,
        "tree": {"parents": tree.parents.tolist(), "expected_tokens": tree.plan.expected_tokens},
        "tokens_per_step": {},
        "rejection_rate": {"children": CHILDREN},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.output.exists():  # go on with what an earlier run left
        before = json.loads(options.output.read_text())
        if {**before, "tokens_per_step": {}, "rejection_rate": report["rejection_rate"]} == report:
            report = before
    for temperature, top_p in settings:
        title = f"T {temperature}, top-p {top_p}"
        found = report["tokens_per_step"].setdefault(title, {})
        for name in VERIFIERS:
            if name not in found:
                found[name] = tokens_per_step(pair, decoder, prompts, options.tokens, Sampling(temperature, top_p, verifier=name))
                print(title, name, found[name], flush=True)
                write(options.output, report)
        if top_p == 1 and title not in report["rejection_rate"]:
            report["rejection_rate"][title] = rejection_rates(pair, prompts, options.tokens, Sampling(temperature))
            write(options.output, report)
    rates = {title: curves for title, curves in report["rejection_rate"].items() if title != "children"}
    plot(rates, options.output.with_suffix(".png") if options.quick else Path(__file__).parents[1] / "docs/images/rejection.png")
    table = Table(title=f"tokens a step, {tree.size} nodes, depth {tree.depth}; {len(prompts)} prompts x {options.tokens} tokens")
    for column in ("", *VERIFIERS):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for title, found in report["tokens_per_step"].items():
        table.add_row(title, *(f"{found[name]['tokens_per_step']:.3f} ± {found[name]['standard_error']:.3f}" for name in VERIFIERS))
    Console(width=110).print(table)


def write(path: Path, report: dict[str, Any]) -> None:
    """After every arm, so that a run that was stopped goes on where it was."""
    write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
