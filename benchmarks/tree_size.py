"""Tokens a step against the size of the tree, for shapes of trees (as figure 1 of Sequoia, arXiv 2402.12374), on the embedded pair.

    sequoia-plan profile --tokens 48 --precision 0% --also temperature=0.6 --latency-seconds 0 -o build/t.yaml
    python benchmarks/tree_size.py build/t.yaml build/t-temperature=0.6.yaml -o benchmarks/results/tree_size.json --plot docs/images/tree-size.png
    python benchmarks/tree_size.py build/t.yaml --quick -o build/quick.json      # two sizes, two prompts: to see that it runs

Held-out prompts are decoded with every tree; how long that takes is not looked at. Of k chains and SpecInfer's shape, the member of the family
that the profile promises most of at that size is taken. Every prompt's finished trees are kept, so that a killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.cost import Acceptance, expected_tokens
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner import baseline, solve
from sequoia_plan.profiler.bench import RESAMPLES
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import Journal, discard, journal_of
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.load import dtype_name

SIZES = [8, 16, 32, 64, 128, 256, 512]
DEPTH = 20
SHAPES = {"ours": "our tree", "chains": "k chains", "binary": "complete binary tree", "specinfer": "SpecInfer's shape"}


def acceptance(profile: Profile) -> Acceptance:
    """By level and class, by level, or one vector: what `solve` goes by."""
    return profile.by_class or profile.by_level or profile.acceptance


def shapes(size: int, profile: Profile) -> dict[str, TokenTree]:
    """A tree of about `size` nodes of each shape; SpecInfer's is one node a level but for the third, where it branches."""

    def best(trees: Sequence[TokenTree]) -> TokenTree:
        return max((tree for tree in trees if tree.size > size / 2), key=lambda tree: expected_tokens(tree, acceptance(profile)))

    lanes = sorted({min(2**power, size - 1) for power in range(10)})
    return {
        "ours": solve(profile, size, DEPTH, objective="tokens", verifier=profile.verifier).tree,
        "chains": best([baseline(f"chains:{count}", size, DEPTH) for count in lanes]),
        "binary": baseline("k-ary:2", size, DEPTH),
        "specinfer": best([baseline(f"specinfer:1,1,{count}" + ",1" * (DEPTH - 4), size, DEPTH) for count in lanes]),
    }


def steps_and_tokens(decoder: SequoiaDecoder, prompt: list[int], tokens: int, sampling: Sampling, seed: int, ends: set[int]) -> list[int]:
    """How many tokens each whole step brought, up to the one that brings `tokens` or the text's end."""
    import torch

    made: list[int] = []
    for step in decoder.steps(torch.tensor(prompt), tokens + decoder.tree.depth, sampling, seed):
        found = [place for place, token in enumerate(step.tokens) if token in ends]
        made.append(found[0] + 1 if found else len(step.tokens))
        if found or sum(made) >= tokens:
            break
    return made


def measured(pair: Pair, profile: Profile, sizes: Sequence[int], prompts: int, tokens: int, journal: Path) -> dict[str, Any]:
    """Tokens a step of every shape and size under the profile's setting, with 95 % bootstrap intervals over prompts, and what was promised."""
    sampling, ends = Sampling(**profile.settings), set(pair.end_tokens)
    ids = held_out(pair.tokenizer, prompts)
    entries = []
    with Journal(journal, [profile.sha256, pair.facts, prompts, tokens, DEPTH]) as kept:
        for size in sizes:
            for name, tree in shapes(size, profile).items():
                rule = Sampling(**profile.settings | {"verifier": "specinfer"}) if name in ("chains", "specinfer") else sampling
                decoder = SequoiaDecoder(pair.target, pair.draft, tree)
                steps = [
                    kept.get(f"{size} {name} {seed}", lambda d=decoder, p=prompt, s=seed, r=rule: steps_and_tokens(d, p, tokens, r, s, ends))  # type: ignore[misc]
                    for seed, prompt in enumerate(ids)
                ]
                sums = np.array([[sum(each), len(each)] for each in steps], float)
                drawn = sums[np.random.default_rng(0).integers(len(sums), size=(RESAMPLES, len(sums)))].sum(1)
                low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
                total = sums.sum(0)
                entry = {"shape": name, "budget": size, "size": tree.size, "depth": tree.depth, "tokens_per_step": round(float(total[0] / total[1]), 4)}
                entry |= {"interval": [round(float(low), 4), round(float(high), 4)], "promised": round(expected_tokens(tree, acceptance(profile)), 4)}
                entries.append(entry)
                print(
                    f"T={sampling.temperature} {size:4} {name:10} {entry['tokens_per_step']:.2f} {entry['interval']}, promised {entry['promised']:.2f}",
                    flush=True,
                )
    settings = {"sampling": sampling.settings(), "dtype": dtype_name(pair.target.dtype), "prompts": prompts, "tokens": tokens}
    return {"settings": settings, "models": pair.facts, "hardware": fingerprint(pair.target.device), "trees": entries}


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a step over size, one panel for each temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), figsize=(5 * len(results), 4), sharey=True, squeeze=False)
    for panel, result in zip(panels[0], results, strict=True):
        for name, title in SHAPES.items():
            mine = [entry for entry in result["trees"] if entry["shape"] == name]
            sizes, found = [entry["budget"] for entry in mine], np.array([entry["tokens_per_step"] for entry in mine])
            low, high = np.array([entry["interval"] for entry in mine]).T
            panel.errorbar(sizes, found, [found - low, high - found], marker="o", markersize=3, capsize=2, linewidth=1.2, label=title)
        panel.set(xscale="log", xlabel="nodes", title=f"temperature {result['settings']['sampling']['temperature']:g}")
        panel.set_xticks(SIZES, map(str, SIZES))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens a step")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Decode and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, nargs="+")
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens = 2, 8
    pair = load_pair(draft=options.draft, dtype=options.dtype)
    results = []
    for number, path in enumerate(options.profiles):
        journal = journal_of(f"{options.output}.{number}")
        results.append(measured(pair, Profile.load(path), SIZES[:2] if options.quick else SIZES, options.prompts, options.tokens, journal))
        write_atomically(options.output, (json.dumps(results, indent=1) + "\n").encode())
        discard(journal)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
