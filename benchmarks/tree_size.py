"""Tokens a step against the size of the tree, for shapes of trees, on the embedded pair.

As figure 1 of Sequoia, arXiv 2402.12374.

    sequoia-plan profile --tokens 48 --precision 0% --also temperature=0.6 --latency-seconds 0 \\
        -o build/t.yaml
    python benchmarks/tree_size.py build/t.yaml build/t-temperature=0.6.yaml \\
        -o benchmarks/results/tree_size.json --plot docs/images/tree-size.png
    python benchmarks/tree_size.py build/t.yaml --quick -o build/quick.json   # to see that it runs

Held-out prompts are decoded with every tree; the time is not measured. For the shapes "k chains"
and SpecInfer's, the tree is the one with the most expected tokens, by the profile, in its family.
The finished prompts of every tree are recorded, so that a killed run continues where it was.
--quick takes two sizes and two prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.cost import AcceptanceProbs, expected_tokens
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner import baseline, solve
from sequoia_plan.profiler.bench import RESAMPLES
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import Journal, discard, journal_of
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.load import dtype_name

SIZES = [8, 16, 32, 64, 128, 256, 512]
QUICK_SIZES = SIZES[:2]
DEPTH = 20
TITLES = {
    "ours": "our tree",
    "chains": "k chains",
    "binary": "complete binary tree",
    "specinfer": "SpecInfer's shape",
}
"""The title of each shape."""
SPECINFER_SHAPES = ("chains", "specinfer")
"""Shapes that the `specinfer` verifier decodes, as in their paper."""


def best_known_acceptance(profile: Profile) -> AcceptanceProbs:
    """The profile's acceptance as `solve` takes it: by level and class, by level, or one vector."""
    return profile.acceptance_by_class or profile.acceptance_by_level or profile.acceptance


def trees_by_shape(size: int, profile: Profile) -> dict[str, TokenTree]:
    """A tree of about `size` nodes of each shape.

    SpecInfer's shape has one node a level but for the third, where it branches.
    """
    acceptance = best_known_acceptance(profile)

    def best(trees: Sequence[TokenTree]) -> TokenTree:
        large_trees = [tree for tree in trees if tree.size > size / 2]
        return max(large_trees, key=lambda tree: expected_tokens(tree, acceptance))

    num_chains = sorted({min(2**power, size - 1) for power in range(10)})
    tail = ",1" * (DEPTH - 4)
    return {
        "ours": solve(profile, size, DEPTH, objective="tokens", verifier=profile.verifier).tree,
        "chains": best([baseline(f"chains:{count}", size, DEPTH) for count in num_chains]),
        "binary": baseline("k-ary:2", size, DEPTH),
        "specinfer": best(
            [baseline(f"specinfer:1,1,{count}{tail}", size, DEPTH) for count in num_chains]
        ),
    }


def tokens_of_steps(
    decoder: SequoiaDecoder,
    prompt: list[int],
    tokens: int,
    sampling: Sampling,
    seed: int,
    end_tokens: set[int],
) -> list[int]:
    """The tokens that each whole step adds, until there are `tokens` of them or the text ends."""
    max_tokens = tokens + decoder.step.tree.depth
    step_tokens: list[int] = []
    for step in decoder.steps(torch.tensor(prompt), max_tokens, sampling, seed):
        ends = [place for place, token in enumerate(step.tokens) if token in end_tokens]
        step_tokens.append(ends[0] + 1 if ends else len(step.tokens))
        if ends or sum(step_tokens) >= tokens:
            break
    return step_tokens


def measure(
    pair: Pair,
    profile: Profile,
    sizes: Sequence[int],
    num_prompts: int,
    tokens: int,
    journal_path: Path,
) -> dict[str, Any]:
    """Measured and expected tokens a step of every shape and size, in the profile's setting."""
    sampling = Sampling(**profile.settings)
    prompts = held_out(pair.tokenizer, num_prompts)
    entries = []
    work = [profile.sha256, pair.metadata, num_prompts, tokens, DEPTH]
    with Journal(journal_path, work) as journal:
        for size in sizes:
            for shape, tree in trees_by_shape(size, profile).items():
                settings = dict(profile.settings)
                if shape in SPECINFER_SHAPES:
                    settings["verifier"] = "specinfer"
                steps = decode_prompts(
                    pair, tree, prompts, tokens, Sampling(**settings), journal, f"{size} {shape}"
                )
                mean, interval = mean_with_interval(steps)
                expected = round(expected_tokens(tree, best_known_acceptance(profile)), 4)
                entry = {
                    "shape": shape,
                    "budget": size,
                    "size": tree.size,
                    "depth": tree.depth,
                    "tokens_per_step": mean,
                    "interval": interval,
                    "promised": expected,
                }
                entries.append(entry)
                print(
                    f"T={sampling.temperature} {size:4} {shape:10} {mean:.2f} {interval}, "
                    f"expected {expected:.2f}",
                    flush=True,
                )
    return {
        "settings": {
            "sampling": sampling.settings(),
            "dtype": dtype_name(pair.target.dtype),
            "prompts": num_prompts,
            "tokens": tokens,
        },
        "models": pair.metadata,
        "hardware": fingerprint(pair.target.device),
        "trees": entries,
    }


def decode_prompts(
    pair: Pair,
    tree: TokenTree,
    prompts: Sequence[list[int]],
    tokens: int,
    sampling: Sampling,
    journal: Journal,
    name: str,
) -> list[list[int]]:
    """For each prompt, the tokens of each step with `tree`.

    Args:
        name: names the tree's results in the journal.
    """
    end_tokens = set(pair.end_tokens)
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    steps = []
    for seed, prompt in enumerate(prompts):

        def decode(prompt: list[int] = prompt, seed: int = seed) -> list[int]:
            return tokens_of_steps(decoder, prompt, tokens, sampling, seed, end_tokens)

        steps.append(journal.get(f"{name} {seed}", decode))
    return steps


def mean_with_interval(steps: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
    """Tokens a step over all prompts, and the 95 % bootstrap interval over prompts.

    Args:
        steps: for each prompt, the tokens of each step.
    """
    sums = np.array([[sum(prompt_steps), len(prompt_steps)] for prompt_steps in steps], float)
    rng = np.random.default_rng(0)
    resampled = sums[rng.integers(len(sums), size=(RESAMPLES, len(sums)))].sum(1)
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1], [0.025, 0.975])
    num_tokens, num_steps = sums.sum(0)
    return round(float(num_tokens / num_steps), 4), [round(float(low), 4), round(float(high), 4)]


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot tokens a step over size, one panel for each temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(5 * len(results), 4), sharey=True, squeeze=False
    )
    for panel, result in zip(panels[0], results, strict=True):
        for shape, title in TITLES.items():
            entries = [entry for entry in result["trees"] if entry["shape"] == shape]
            tokens = np.array([entry["tokens_per_step"] for entry in entries])
            low, high = np.array([entry["interval"] for entry in entries]).T
            panel.errorbar(
                [entry["budget"] for entry in entries],
                tokens,
                [tokens - low, high - tokens],
                marker="o",
                markersize=3,
                capsize=2,
                linewidth=1.2,
                label=title,
            )
        temperature = result["settings"]["sampling"]["temperature"]
        panel.set(xscale="log", xlabel="nodes", title=f"temperature {temperature:g}")
        panel.set_xticks(SIZES, map(str, SIZES))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens a step")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Decode and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    sizes = QUICK_SIZES if options.quick else SIZES
    pair = load_pair(draft=options.draft, dtype=options.dtype)
    results = []
    for number, path in enumerate(options.profiles):
        journal_path = journal_of(f"{options.output}.{number}")
        profile = Profile.load(path)
        results.append(measure(pair, profile, sizes, options.prompts, options.tokens, journal_path))
        write_atomically(options.output, (json.dumps(results, indent=1) + "\n").encode())
        discard(journal_path)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
