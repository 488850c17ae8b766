"""Promises against measurements on other prompts, by kind.

    python benchmarks/prediction.py question.jsonl --folder build/t0 -o build/t0.json
    python benchmarks/prediction.py question.jsonl --temperature 0.6 --folder build/t06 -o t06.json
    python benchmarks/prediction.py --per-kind 1 --tokens 8 --seconds 0 --folder build -o few.json

The questions are Spec-Bench's (github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl,
SHA-256 4b6d33e79484...), whose categories of MT-bench are one kind here; without a file they are
the built-in prompts. One half of each kind is profiled, and so are the built-in prompts, as
`sequoia-plan profile` does it. The other half is decoded with both trees beside plain decoding.
What is finished is in the folder, and is not measured again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reports import new_parser, write_report

from sequoia_plan.artifacts import Plan, Profile, TokenTree
from sequoia_plan.artifacts.promise import promise
from sequoia_plan.artifacts.prompts import (
    BUILT_IN,
    Prompt,
    built_in,
    by_kind,
    held_out_half,
    load,
    measuring_half,
)
from sequoia_plan.planner import solve
from sequoia_plan.profiler import measure
from sequoia_plan.profiler.bench import bench
from sequoia_plan.profiler.bench_figures import summary
from sequoia_plan.profiler.decoding_methods import PromptRun, sequoia_method
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling, load_pair

LONG_KINDS = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Categories of Spec-Bench that are kinds of their own; all others are of MT-bench."""


def questions(path: Path | None, per_kind: int) -> list[Prompt]:
    """Twice as many prompts of each kind."""
    prompts = load(path or BUILT_IN)
    if path:
        prompts = [
            Prompt(p.text, p.kind if p.kind in LONG_KINDS else "multi-turn") for p in prompts
        ]
    # a half has its prompts in an order that is spread over the file
    kinds = by_kind(measuring_half(prompts)).values()
    return [prompt for kind in kinds for prompt in kind[: 2 * per_kind]]


def profiled(
    pair: Pair, prompts: list[Prompt], sampling: Sampling, options: argparse.Namespace, name: str
) -> Profile:
    """The profile of some prompts, from the folder if it is there."""
    path = options.folder / f"{name}.yaml"
    if not path.exists():
        profile = measure(
            pair,
            prompts,
            sampling,
            options.seconds,
            tokens_per_prompt=options.tokens,
            journal=options.folder / f"{name}.journal",
        )
        profile.save(path)
    return Profile.load(path)


def report(
    plan: Plan, kinds: list[str], runs: list[PromptRun], plain: list[PromptRun], is_new: bool
) -> dict[str, Any]:
    """Promised and measured speed-ups and tokens a step, in all and by kind."""
    results = {}
    for name in ("all", *dict.fromkeys(kinds)):
        chosen = [i for i, kind in enumerate(kinds) if name in ("all", kind)]
        pair_of_runs = {"plain": [plain[i] for i in chosen], "tree": [runs[i] for i in chosen]}
        measured = summary(pair_of_runs, over=("plain",))["tree"]
        if is_new:
            median, ends = plan.median_speedup, plan.interval_new_kind.predicted_speedup
        else:
            median, ends = promise(plan.text_speedups, [kinds[i] for i in chosen])
        ratio = measured.speedup["plain"]
        results[name] = {
            "prompts": len(chosen),
            "promised": median,
            "interval": ends,
            "measured": ratio.median,
            "interval_of_measured": [ratio.interval_low, ratio.interval_high],
            "is_within": ends[0] <= ratio.median <= ends[1],
            "tokens_per_step": measured.tokens_per_step,
            "promised_tokens": plan.tokens_by_kind.get(name, plan.expected_tokens),
        }
    return results


def main() -> None:
    """Profile, decode and report."""
    parser = new_parser(__doc__)
    parser.add_argument("questions", type=Path, nargs="?")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--per-kind", type=int, default=8, help="prompts of each half, at most")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=45.0, help="for each profile's latency")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    verifier = "traversal" if options.temperature else "sequoia"
    sampling = Sampling(options.temperature, verifier=verifier)
    pair = load_pair(dtype=options.dtype)
    prompts = questions(options.questions, options.per_kind)
    profiles = {
        "own": profiled(pair, measuring_half(prompts), sampling, options, "own"),
        "default": profiled(pair, built_in(), sampling, options, "default"),
    }
    trees = {name: solve(p, budget=768, depth=20).tree for name, p in profiles.items()}
    methods = {
        name: sequoia_method(pair, tree, sampling, options.tokens)
        for name, tree in {"plain": TokenTree.chain(1), **trees}.items()
    }
    held_out = held_out_half(prompts)
    token_ids = [encode(pair.tokenizer, prompt.text) for prompt in held_out]
    kinds = [prompt.kind for prompt in held_out]
    work = [token_ids, options.tokens, {name: profile.sha256 for name, profile in profiles.items()}]
    runs = bench(methods, token_ids, journal=Journal(options.folder / "bench.journal", work))
    results = {
        name: report(tree.plan, kinds, runs[name], runs["plain"], is_new=name == "default")
        for name, tree in trees.items()
    }
    settings = sampling.settings() | {"tokens": options.tokens, "dtype": str(pair.target.dtype)}
    machine = {"models": pair.metadata, "hardware": fingerprint(pair.target.device)}
    write_report(options.output, {"settings": settings} | machine | results)


if __name__ == "__main__":
    main()
