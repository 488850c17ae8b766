"""Predictions against measurements on held-out prompts: tokens a step and speed-up.

    sequoia-plan profile --tokens 48 --precision 0% --also temperature=0.6 --also temperature=1 \\
        -o build/t.yaml
    python benchmarks/prediction.py build/t.yaml build/t-temperature=0.6.yaml \\
        build/t-temperature=1.yaml -o build/prediction.json
    python benchmarks/prediction.py build/t.yaml --prompts mt_bench.jsonl -o build/other.json
    python benchmarks/prediction.py build/t.yaml --quick -o build/quick.json   # to see that it runs

The models are the embedded pair. With --prompts, the held-out half of a file's prompts is decoded.
--quick takes two sizes and two prompts.

For each profile and size, the tree of most expected tokens is solved from the profile and decodes
the held-out prompts beside plain decoding. Its measured figures are put next to the predictions by
one vector, by the rows by level, and by the rows by level and class of the parent.

Two sets of prompts differ. So acceptance is measured on the held-out prompts as well, and its
predictions for the same trees, by level and by class, are put beside. The error of the profile's
predictions is luck with prompts and all else; the error of these is all else alone.

Latencies are timed anew, every size after each prompt: those of the profile may be hours old, and a
shared machine changes by the minute. With --tokens-only nothing is timed: tokens a step do not
depend on the machine's other work.
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
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.bench import RESAMPLES, DecodePrompt, PromptRun, bench
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, MAX_INTERVAL, LatencyMeter
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.load import dtype_name

Floats = NDArray[np.float64]
SIZES = [4, 8, 16, 32, 64]
TABLE_COLUMNS = {
    "tokens_per_step": ("one_vector", "by_level", "by_class", "same_prompts", "same_by_class"),
    "step_time": ("promised",),
    "speedup": ("one_vector", "by_level", "by_class"),
}
"""The columns of the table: each measured figure, and the predictions that it is compared with."""


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
            if end_tokens.intersection(step.tokens):
                ends = [step.tokens.index(end) for end in end_tokens if end in step.tokens]
                step_tokens[-1] = min(ends) + 1
                break
        seconds = time.perf_counter() - started
        return PromptRun(sum(step_tokens), len(step_tokens), seconds, step_tokens[0], first_seconds)

    return decode


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
    tokens, passes = [run.tokens for run in runs], [run.passes for run in runs]
    numbers = np.array([tokens, passes, ratios], float)
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
    """The figures over prompts.

    Args:
        tokens: float64 [..., prompts], new tokens.
        passes: float64 [..., prompts], passes of the target.
        ratios: float64 [..., prompts], a step's time over a plain step's.
    """
    tokens_per_step = tokens.sum(-1) / passes.sum(-1)
    step_time = np.nanmedian(ratios, -1)
    return {
        "tokens_per_step": tokens_per_step,
        "step_time": step_time,
        "speedup": tokens_per_step / step_time,
    }


def seconds_per_step(run: PromptRun) -> float:
    """The mean time of the steps after the first, whose time includes the prefill's.

    NaN if there is no other step.
    """
    num_later_steps = (run.passes or 1) - 1
    if not num_later_steps:
        return math.nan
    return (run.seconds - run.first_seconds) / num_later_steps


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
        str(size): solve(
            profile, size, options.depth, objective="tokens", verifier=profile.verifier
        ).tree
        for size in options.sizes
    }
    runs, times = decode_and_time(pair, profile, sampling, prompts, trees, options)
    held_out_profile = measure_held_out(pair, profile, sampling, prompts, options.tokens)
    vectors = acceptance_by_model(profile, held_out_profile)
    if options.beside:
        vectors["beside"] = Profile.load(options.beside).acceptance_by_level
    entries = []
    for name, tree in trees.items():
        figures_of_tree = measured_figures(runs[name], runs.get("plain", runs[name]))
        tokens = {model: expected_tokens(tree, probs) for model, probs in vectors.items()}
        figures_of_tree["tokens_per_step"] |= rounded(tokens)
        if times is None:
            figures_of_tree = {"tokens_per_step": figures_of_tree["tokens_per_step"]}
        else:
            step_time = times.step_seconds(tree) / times.plain_seconds()
            speedups = {model: value / step_time for model, value in tokens.items()}
            figures_of_tree["step_time"] |= rounded({"promised": step_time})
            figures_of_tree["speedup"] |= rounded(speedups)
        entries.append({"size": tree.size, "depth": tree.depth} | figures_of_tree)
    return {
        "profile": acceptance_report(profile),
        "held_out": acceptance_report(held_out_profile),
        "prompts": len(prompts),
        "trees": entries,
    }


def decode_and_time(
    pair: Pair,
    profile: Profile,
    sampling: Sampling,
    prompts: Sequence[list[int]],
    trees: Mapping[str, TokenTree],
    options: argparse.Namespace,
) -> tuple[dict[str, list[PromptRun]], StepTime | None]:
    """Decode the prompts with every tree, and time every size after each prompt.

    Returns:
        The runs of each tree, and of "plain" decoding; and the step times. With --tokens-only,
        neither plain decoding nor step times.
    """
    decoded_trees = dict(trees)
    if not options.tokens_only:
        decoded_trees = {"plain": TokenTree.chain(1)} | decoded_trees
    decoders = {
        name: decode_whole_steps(pair, tree, sampling, options.tokens)
        for name, tree in decoded_trees.items()
    }
    if options.tokens_only:
        return bench(decoders, prompts), None
    meter = LatencyMeter(pair, sampling, CONTEXT, max_size=max(options.sizes))
    meter.begin(math.inf)

    def time_every_size(num_prompts: int) -> None:
        for _ in range(MAX_INTERVAL):
            meter.round()

    runs = bench(decoders, prompts, on_prompt=time_every_size)
    acceptance = profile.acceptance_by_level or profile.acceptance
    return runs, StepTime(meter.finish(seconds=0.0), acceptance=acceptance)


def measure_held_out(
    pair: Pair, profile: Profile, sampling: Sampling, prompts: Sequence[list[int]], tokens: int
) -> Profile:
    """The profile with the acceptance that is measured on the held-out prompts."""
    acceptance = measure_acceptance(
        pair, prompts, [sampling], precision=0.0, tokens_per_prompt=tokens
    )[0]
    levels = acceptance.levels()
    return replace(profile, acceptance=pooled(levels), levels=levels, kinds={})


def acceptance_by_model(profile: Profile, held_out_profile: Profile) -> dict[str, Any]:
    """The acceptance by each model's name, as `expected_tokens` takes it."""
    by_level, same_by_level = profile.acceptance_by_level, held_out_profile.acceptance_by_level
    return {
        "one_vector": profile.acceptance,
        "by_level": by_level,
        "by_class": profile.acceptance_by_class or by_level,
        "same_prompts": same_by_level,
        "same_by_class": held_out_profile.acceptance_by_class or same_by_level,
    }


def acceptance_report(profile: Profile) -> dict[str, Any]:
    """The acceptance of a profile, for the result."""
    return {
        "vector": profile.acceptance,
        "by_level": np.round(profile.acceptance_by_level, 5).tolist(),
        "by_class": np.round(profile.acceptance_by_class, 5).tolist(),
        "level_trials": [level.trials for level in profile.levels],
        "off_spine_trials": [
            level.off_spine.trials if level.off_spine else 0 for level in profile.levels
        ],
    }


def main() -> None:
    """Decode, compare and report."""
    options = read_options()
    pair = load_pair(draft=options.draft, dtype=options.dtype, device=options.device)
    columns = table_columns(options)
    table = new_table(columns)
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
        }
        if options.prompts:
            settings["file"] = options.prompts.name
        hardware = fingerprint(pair.target.device)
        header = {"settings": settings, "models": pair.metadata, "hardware": hardware}
        results.append(header | result)
        write_atomically(options.output, (json.dumps(results, indent=1) + "\n").encode())
        for entry in result["trees"]:
            table.add_row(str(sampling.temperature), str(entry["size"]), *cells(entry, columns))
    Console(width=180).print(table)


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profiles", type=Path, nargs="+")
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument(
        "--prompts", type=Path, help="a file, of which the held-out half is decoded"
    )
    parser.add_argument(
        "--beside", type=Path, help="a further profile, whose predictions for the trees are added"
    )
    parser.add_argument("--limit", type=int, default=80, help="prompts, at most")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--tokens-only", action="store_true", help="time nothing")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.limit, options.tokens = [4, 8], 2, 8
    return options


def table_columns(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The columns that the options leave: each figure, and its predictions."""
    columns = {}
    for figure, models in TABLE_COLUMNS.items():
        if options.tokens_only and figure != "tokens_per_step":
            continue
        has_beside = options.beside and "by_level" in models
        columns[figure] = (*models, "beside") if has_beside else models
    return columns


def new_table(columns: Mapping[str, Sequence[str]]) -> Table:
    """The table without rows."""
    table = Table(
        title="measured (95 % interval over prompts), and predicted less measured; a step's time "
        "is in plain steps",
        box=None,
    )
    titles = ["T", "nodes"]
    for figure, models in columns.items():
        titles += [figure, *models]
    for title in titles:
        table.add_column(title.replace("_", " "), justify="right", no_wrap=True)
    return table


def cells(entry: Mapping[str, Any], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """A tree's row: each figure with its interval, and the error of each prediction."""
    texts = []
    for figure, models in columns.items():
        numbers = entry[figure]
        measured = numbers["measured"]
        interval = f"({numbers['interval_low']:.2f}-{numbers['interval_high']:.2f})"
        texts.append(f"{measured:.2f} {interval}")
        texts += [f"{numbers[model] / measured - 1:+.1%}" for model in models]
    return texts


if __name__ == "__main__":
    main()
