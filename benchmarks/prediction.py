"""Predictions against measurements on held-out prompts: tokens a step and speed-up.

    sequoia-plan profile --tokens 48 --precision 0% -o build/t.yaml
    sequoia-plan profile --tokens 48 --precision 0% --temperature 0.6 -o build/t06.yaml
    python benchmarks/prediction.py build/t.yaml build/t06.yaml -o build/errors.json
    python benchmarks/prediction.py build/t.yaml --sizes 4 --limit 2 --tokens 8 -o build/few.json

For each profile and size, the tree of most expected tokens is solved from the profile and decodes
the held-out half of the prompts beside plain decoding. Its measured figures are put next to the
predictions by one vector, by the rates by level, and by the rates by level and node class.

Two sets of prompts differ. So acceptance is measured on the held-out prompts as well, and its
predictions for the same trees are put beside. The error of the profile's predictions is luck with
prompts and all else; the error of these is all else alone.

Latencies are timed anew, every size after each prompt: those of the profile may be hours old, and a
shared machine changes by the minute.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from reports import new_parser, write_report

from sequoia_plan.artifacts import Acceptance, Profile, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import solve
from sequoia_plan.profiler.bench import bench
from sequoia_plan.profiler.bench_figures import RESAMPLES
from sequoia_plan.profiler.decoding_methods import DecodePrompt, PromptRun
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import MAX_INTERVAL, LatencyMeter
from sequoia_plan.profiler.measure import measure_acceptance
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.dtype import dtype_name

Floats = NDArray[np.float64]


def decode_whole_steps(
    pair: Pair, tree: TokenTree, sampling: Sampling, tokens: int
) -> DecodePrompt:
    """Our decoder, until the step that reaches `tokens` or the text's end.

    A prediction is of whole steps; the last step of a short text would count for less if it were
    cut.
    """
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    end_tokens = set(pair.end_tokens)

    def decode(prompt: list[int], seed: int) -> PromptRun:
        started = time.perf_counter()
        step_tokens: list[int] = []
        first_seconds = 0.0
        for step in decoder.steps(torch.tensor(prompt), tokens, sampling, seed):
            first_seconds = first_seconds or time.perf_counter() - started
            step_tokens.append(len(step.tokens))
            if ends := [step.tokens.index(end) for end in end_tokens if end in step.tokens]:
                step_tokens[-1] = min(ends) + 1
                break
        seconds = time.perf_counter() - started
        return PromptRun(sum(step_tokens), len(step_tokens), seconds, step_tokens[0], first_seconds)

    return decode


def seconds_per_step(run: PromptRun) -> float:
    """The mean time of the steps after the first, whose time includes the prefill's.

    NaN if there is no other step.
    """
    num_later_steps = (run.passes or 1) - 1
    return (run.seconds - run.first_seconds) / num_later_steps if num_later_steps else math.nan


def measured_figures(
    runs: Sequence[PromptRun], plain_runs: Sequence[PromptRun]
) -> dict[str, dict[str, float]]:
    """Tokens a step, a step's time in plain steps, and the speed-up, their quotient.

    Each has a 95 % bootstrap interval over prompts. The time is the median over prompts of its
    ratio to a plain step's, taken prompt by prompt: neither drift nor a busy second counts.
    """
    ratios = [
        seconds_per_step(run) / seconds_per_step(plain_run)
        for run, plain_run in zip(runs, plain_runs, strict=True)
    ]
    numbers = np.array([[run.tokens for run in runs], [run.passes for run in runs], ratios], float)
    drawn = np.random.default_rng(0).integers(len(runs), size=(RESAMPLES, len(runs)))
    measured, resampled = figures(*numbers), figures(*numbers[:, drawn])
    return {
        name: rounded(
            {
                "measured": value,
                "interval_low": np.quantile(resampled[name], 0.025),
                "interval_high": np.quantile(resampled[name], 0.975),
            }
        )
        for name, value in measured.items()
    }


def figures(tokens: Floats, passes: Floats, ratios: Floats) -> dict[str, Floats]:
    """The figures over prompts, from float64 [..., prompts]."""
    tokens_per_step = tokens.sum(-1) / passes.sum(-1)
    step_time = np.nanmedian(ratios, -1)
    speedup = tokens_per_step / step_time
    return {"tokens_per_step": tokens_per_step, "step_time": step_time, "speedup": speedup}


def rounded(numbers: Mapping[str, Any]) -> dict[str, float]:
    """The numbers to four digits."""
    return {name: round(float(number), 4) for name, number in numbers.items()}


def compare(
    pair: Pair, profile: Profile, sampling: Sampling, options: argparse.Namespace
) -> dict[str, Any]:
    """Predictions and measurements for the tree of every size."""
    held_out = held_out_half(load(options.prompts or BUILT_IN))[: options.limit]
    prompts = [encode(pair.tokenizer, prompt.text) for prompt in held_out]
    trees = {
        str(size): solve(profile, budget=size, depth=options.depth, objective="tokens").tree
        for size in options.sizes
    }
    runs, times = decode_and_time(pair, profile, sampling, prompts, trees, options.tokens)
    observed = measure_acceptance(
        pair, prompts, sampling, precision=0.0, tokens_per_prompt=options.tokens
    )
    of_held_out = Acceptance.counted(observed.totals())
    by_class = profile.acceptance
    rates = {
        "one_vector": by_class.pooled()[None, None],
        "by_level": by_class.with_one_class().rates,
        "by_class": by_class.rates,
        "same_prompts": of_held_out.with_one_class().rates,
    }
    entries = []
    for name, tree in trees.items():
        entry = measured_figures(runs[name], runs["plain"])
        tokens = {model: expected_tokens(tree, rates[model]) for model in rates}
        step_time = times.step_seconds(tree) / times.plain_seconds()
        speedups = {model: value / step_time for model, value in tokens.items()}
        entry["tokens_per_step"] |= rounded(tokens)
        entry["step_time"] |= rounded({"predicted": step_time})
        entry["speedup"] |= rounded(speedups)
        entries.append({"size": tree.size, "depth": tree.depth} | entry)
    return {
        "profile": by_class.to_file(),
        "held_out": of_held_out.to_file(),
        "prompts": len(prompts),
        "trees": entries,
    }


def decode_and_time(
    pair: Pair,
    profile: Profile,
    sampling: Sampling,
    prompts: Sequence[list[int]],
    trees: Mapping[str, TokenTree],
    tokens: int,
) -> tuple[dict[str, list[PromptRun]], StepTime]:
    """Decode the prompts plainly and with every tree, and time every size after each prompt."""
    decoders = {
        name: decode_whole_steps(pair, tree, sampling, tokens)
        for name, tree in {"plain": TokenTree.chain(1), **trees}.items()
    }
    meter = LatencyMeter(pair, sampling, max_size=max(tree.size for tree in trees.values()))
    meter.begin(math.inf)

    def time_every_size(num_prompts: int) -> None:
        for _ in range(MAX_INTERVAL):
            meter.round()

    runs = bench(decoders, prompts, on_prompt=time_every_size)
    times = StepTime.from_measured(replace(profile, latency=meter.finish(seconds=0.0)))
    assert times is not None
    return runs, times


def main() -> None:
    """Decode, compare and report."""
    parser = new_parser(__doc__)
    parser.add_argument("profiles", type=Path, nargs="+")
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=Path, help="a file, whose held-out half is decoded")
    parser.add_argument("--limit", type=int, default=80, help="prompts, at most")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    pair = load_pair(draft=options.draft, dtype=options.dtype, device=options.device)
    results: list[dict[str, Any]] = []
    for path in options.profiles:
        profile = Profile.load(path)
        sampling = Sampling(**profile.settings)
        result = compare(pair, profile, sampling, options)
        settings = {
            "sampling": sampling.settings(),
            "dtype": dtype_name(pair.target.dtype),
            "prompts": result.pop("prompts"),
            "tokens": options.tokens,
            "file": options.prompts and options.prompts.name,
        }
        hardware = fingerprint(pair.target.device)
        results.append(
            {"settings": settings, "models": pair.metadata, "hardware": hardware} | result
        )
        write_report(options.output, results)


if __name__ == "__main__":
    main()
