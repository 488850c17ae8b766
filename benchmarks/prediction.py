"""Prediction against truth on held-out prompts of the embedded pair: tokens a step and speed-up, by temperature and tree size.

    sequoia-plan profile --tokens 48 --precision 0% --also temperature=0.6 --also temperature=1 -o build/t.yaml
    python benchmarks/prediction.py build/t.yaml build/t-temperature=0.6.yaml build/t-temperature=1.yaml -o build/prediction.json
    python benchmarks/prediction.py build/t.yaml --prompts mt_bench.jsonl -o build/other.json   # the held-out half of a file's prompts
    python benchmarks/prediction.py build/t.yaml --quick -o build/quick.json      # two sizes, two prompts: to see that it runs

For each profile and size the tree of most tokens is solved from the profile, decodes the held-out prompts beside plain decoding, and its
figures are put next to what the one vector, the rows by level and the rows by level and class of the parent promise. Two prompts differ, and
so do two sets of prompts: acceptance is measured on the held-out ones as well, and what that promises of the same trees, by level and by
class, is put beside. The first difference is luck with prompts and all else, the second all else. Latencies are timed anew, every size after each prompt: the
profile's may be hours old, and a shared machine changes by the minute. With --tokens-only nothing is timed: tokens a step do not depend on
the machine's other work.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.cost import StepTime, expected_tokens
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.bench import RESAMPLES, Decode, Run, bench
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, RAREST, LatencyMeter
from sequoia_plan.profiler.prompts import BUILT_IN, encode, held_out_half, load
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.load import dtype_name

Floats = NDArray[np.float64]
SIZES = [4, 8, 16, 32, 64]
SHOWN = {
    "tokens_per_step": ("one_vector", "by_level", "by_class", "same_prompts", "same_by_class"),
    "step_time": ("promised",),
    "speedup": ("one_vector", "by_level", "by_class"),
}
"""What the table has of each tree: a figure, and which promises of it."""


def whole_steps(pair: Pair, tree: TokenTree, sampling: Sampling, tokens: int) -> Decode:
    """Our decoder until the step that brings `tokens` or the text's end. A prediction is of whole steps; a cut last one of a short text
    would count for less."""
    decoder, ends = SequoiaDecoder(pair.target, pair.draft, tree), set(pair.end_tokens)

    def decode(prompt: list[int], seed: int) -> Run:
        started, made, first_seconds = time.perf_counter(), list[int](), 0.0
        for step in decoder.steps(torch.tensor(prompt), tokens, sampling, seed):
            first_seconds = first_seconds or time.perf_counter() - started
            made.append(len(step.tokens))
            if ends.intersection(step.tokens):
                made[-1] = min(step.tokens.index(end) for end in ends if end in step.tokens) + 1
                break
        return Run(sum(made), len(made), time.perf_counter() - started, made[0], first_seconds)

    return decode


def found(mine: Sequence[Run], plain: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Tokens a step, a step's time in plain steps, and the speed-up, which is one by the other; with 95 % bootstrap intervals over prompts.

    The time is the median over prompts of its ratio to a plain step's, taken prompt by prompt: neither drift nor a busy second counts.
    """
    ratios = [seconds_a_step(run) / seconds_a_step(beside) for run, beside in zip(mine, plain, strict=True)]
    numbers = np.array([[run.tokens for run in mine], [run.passes for run in mine], ratios], float)
    drawn = np.random.default_rng(0).integers(len(mine), size=(RESAMPLES, len(mine)))
    whole, resampled = figures(*numbers), figures(*numbers[:, drawn])
    low, high = ({name: np.quantile(sample, at) for name, sample in resampled.items()} for at in (0.025, 0.975))
    return {name: rounded({"measured": whole[name], "interval_low": low[name], "interval_high": high[name]}) for name in whole}


def figures(tokens: Floats, passes: Floats, ratios: Floats) -> dict[str, Floats]:
    """Of each prompt's, float64 [..., prompts]."""
    per_step, step_time = tokens.sum(-1) / passes.sum(-1), np.nanmedian(ratios, -1)
    return {"tokens_per_step": per_step, "step_time": step_time, "speedup": per_step / step_time}


def seconds_a_step(run: Run) -> float:
    """After the first, whose time is not told from the prefill's; NaN if there was no other."""
    later = (run.passes or 1) - 1
    return (run.seconds - run.first_seconds) / later if later else math.nan


def rounded(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: round(float(number), 4) for name, number in numbers.items()}


def compare(pair: Pair, profile: Profile, sampling: Sampling, options: argparse.Namespace) -> dict[str, Any]:
    """What was promised of every size's tree, and what was found."""
    given = held_out_half(load(options.prompts or BUILT_IN))[: options.limit]
    prompts = [encode(pair.tokenizer, prompt.text) for prompt in given]
    trees = {str(size): solve(profile, size, options.depth, objective="tokens", verifier=profile.verifier).tree for size in options.sizes}
    beside = {} if options.tokens_only else {"plain": TokenTree.chain(1)}
    decoders = {name: whole_steps(pair, tree, sampling, options.tokens) for name, tree in (beside | trees).items()}
    meter = LatencyMeter(pair, sampling, CONTEXT, largest=max(options.sizes))
    if not options.tokens_only:
        meter.begin(math.inf)

    def every_size(done: int) -> None:
        for _ in range(0 if options.tokens_only else RAREST):
            meter.round()

    runs = bench(decoders, prompts, on_prompt=every_size)
    times = None if options.tokens_only else StepTime(meter.finish(seconds=0.0), acceptance=profile.by_level or profile.acceptance)
    levels = measure_acceptance(pair, prompts, [sampling], precision=0.0, tokens_per_prompt=options.tokens)[0].levels()
    same = replace(profile, acceptance=pooled(levels), levels=levels, kinds={})
    vectors = {"one_vector": profile.acceptance, "by_level": profile.by_level, "by_class": profile.by_class or profile.by_level}
    vectors |= {"same_prompts": same.by_level, "same_by_class": same.by_class or same.by_level}
    if options.beside:
        vectors["beside"] = Profile.load(options.beside).by_level
    entries = []
    for name, tree in trees.items():
        entry = found(runs[name], runs.get("plain", runs[name]))
        tokens = {kind: expected_tokens(tree, p) for kind, p in vectors.items()}
        entry["tokens_per_step"] |= rounded(tokens)
        if times is None:
            entry = {"tokens_per_step": entry["tokens_per_step"]}
        else:
            step_time = times.step(tree) / times.plain()
            entry["step_time"] |= rounded({"promised": step_time})
            entry["speedup"] |= rounded({kind: f / step_time for kind, f in tokens.items()})
        entries.append({"size": tree.size, "depth": tree.depth} | entry)
    measured = {
        where: {
            "vector": p.acceptance,
            "by_level": np.round(p.by_level, 5).tolist(),
            "by_class": np.round(p.by_class, 5).tolist(),
            "level_trials": [level.trials for level in p.levels],
            "off_spine_trials": [level.off.trials if level.off else 0 for level in p.levels],
        }
        for where, p in (("profile", profile), ("held_out", same))
    }
    return measured | {"prompts": len(prompts), "trees": entries}


def main() -> None:
    """Decode, compare and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path, nargs="+")
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--prompts", type=Path, help="a file, of which the held-out half is decoded")
    parser.add_argument("--beside", type=Path, help="a further profile, which promises what it does of the same trees")
    parser.add_argument("--limit", type=int, default=80, help="prompts, at most")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--tokens-only", action="store_true", help="time nothing")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.limit, options.tokens = [4, 8], 2, 8
    pair = load_pair(draft=options.draft, dtype=options.dtype, device=options.device)
    console, results = Console(width=180), list[dict[str, Any]]()
    shown = {
        name: (*kinds, *(["beside"] if options.beside and "by_level" in kinds else []))
        for name, kinds in SHOWN.items()
        if name == "tokens_per_step" or not options.tokens_only
    }
    table = Table(title="measured (95 % interval over prompts), and promised less measured; a step's time is in plain steps", box=None)
    for column in ("T", "nodes", *(title for name, kinds in shown.items() for title in (name, *kinds))):
        table.add_column(column.replace("_", " "), justify="right", no_wrap=True)
    for profile in map(Profile.load, options.profiles):
        sampling = Sampling(**profile.settings)
        result = compare(pair, profile, sampling, options)
        made = {"sampling": sampling.settings(), "dtype": dtype_name(pair.target.dtype), "prompts": result.pop("prompts"), "tokens": options.tokens}
        made |= {"file": options.prompts.name} if options.prompts else {}
        results.append({"settings": made, "models": pair.facts, "hardware": fingerprint(pair.target.device)} | result)
        write_atomically(options.output, (json.dumps(results, indent=1) + "\n").encode())
        for entry in result["trees"]:
            cells = [str(sampling.temperature), str(entry["size"])]
            for name, kinds in shown.items():
                of = entry[name]
                cells += [f"{of['measured']:.2f} ({of['interval_low']:.2f}-{of['interval_high']:.2f})"]
                cells += [f"{of[kind] / of['measured'] - 1:+.1%}" for kind in kinds]
            table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
