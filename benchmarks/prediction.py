"""Predictions against measurements on held-out prompts: tokens a step and speed-up.

    sequoia-plan profile --tokens 48 --precision 0% --also temperature=0.6 --also temperature=1 \\
        -o build/t.yaml
    python benchmarks/prediction.py build/t.yaml build/t-temperature=0.6.yaml \\
        build/t-temperature=1.yaml -o build/prediction.json
    python benchmarks/prediction.py build/t.yaml --prompts mt_bench.jsonl -o build/other.json
    python benchmarks/prediction.py --replay --prompts mt_bench.jsonl -o build/large.json
    python benchmarks/prediction.py --replay --texts build/large.json -o build/again.json
    python benchmarks/prediction.py build/t-temperature=0.6.yaml --again -o build/again.json
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

With --replay, large trees at temperature 0: their steps follow from the ranks that the draft gives
to the tokens of the target's text (ranked_texts.py), so nothing is decoded. Acceptance is counted
at the nodes of a profile's small tree, and counted again at those of the tree that was solved from
it, as `profile --tree` does; both promises are compared with the tokens a step of the tree that
each gives. That is done on the prompts that were counted, on the held-out half, on random halves,
and on the held-out half of --prompts. --texts takes the texts of an earlier result.

With --again, at any temperature: each tree writes the profile's prompts, and both promises are
compared with the tokens a step that it yields there.
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
from ranked_texts import (
    NUM_SPLITS,
    RankedText,
    counts_over_texts,
    random_splits,
    ranked_texts,
    record_texts,
    tokens_per_step,
)
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import Acceptance, Profile, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving.solve import Solution
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.bench import bench
from sequoia_plan.profiler.bench_figures import RESAMPLES
from sequoia_plan.profiler.decoding_methods import DecodePrompt, PromptRun
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import journal_of
from sequoia_plan.profiler.latency import CONTEXT, MAX_INTERVAL, LatencyMeter
from sequoia_plan.profiler.observed import TREE, ObservedAcceptance
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.dtype import dtype_name

Floats = NDArray[np.float64]
SIZES = [4, 8, 16, 32, 64]
LARGE_SIZES = [8, 16, 64, 128, 256]
NUM_CHECKED = 3
"""Prompts of each file whose steps are compared with decoding."""
GREEDY = Sampling()
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
            profile, budget=size, depth=options.depth, objective="tokens", verifier=profile.verifier
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
        tokens = {
            model: expected_tokens(tree, Acceptance.given(probs).rates)
            for model, probs in vectors.items()
        }
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


def replay(options: argparse.Namespace) -> dict[str, Any]:
    """The promises for large trees at temperature 0, and the tokens a step over recorded texts."""
    report = json.loads(options.texts.read_text()) if options.texts else record(options)
    tokens = report["settings"]["tokens"]
    texts = ranked_texts(report["built_in"]["texts"])
    other_texts = ranked_texts(report["other"]["texts"])
    entries = []
    for size in options.sizes:
        promised = TwicePromised(size, options.depth, tokens, report["built_in"]["kinds"])
        halves = np.array(
            [promised.errors(texts, part, rest) for part, rest in random_splits(len(texts))]
        )
        solutions = promised.solutions(texts, range(0, len(texts), 2))
        entry: dict[str, Any] = {"size": size}
        for name, solution in solutions.items():
            tree, plan = solution.tree, solution.plan
            number = list(solutions).index(name)
            entry[name] = rounded(
                {
                    "depth": tree.depth,
                    "promised": plan.expected_tokens,
                    "same_prompts": tokens_per_step(tree, texts[::2], tokens),
                    "held_out": tokens_per_step(tree, texts[1::2], tokens),
                    "halves_mean_error": halves[:, number].mean(),
                    "halves_rms_error": np.sqrt(np.square(halves[:, number]).mean()),
                }
            )
            for interval in ("interval", "interval_new_kind"):
                ends = getattr(plan, interval)
                entry[name][interval] = ends and np.round(ends.expected_tokens, 4).tolist()
            if other_texts:
                entry[name]["other"] = round(tokens_per_step(tree, other_texts, tokens), 4)
        entries.append(entry)
    return report | {"halves": 2 * NUM_SPLITS, "trees": entries}


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Read the texts after the built-in prompts, and after the held-out half of a file's."""
    pair = load_pair(draft=options.draft, dtype=options.dtype)
    report: dict[str, Any] = {"models": pair.metadata, "hardware": fingerprint(pair.target.device)}
    num_steps = 0
    files = {"built_in": load(BUILT_IN)[: 2 * options.limit], "other": []}
    if options.prompts:
        files["other"] = held_out_half(load(options.prompts))[: options.limit]
    for name, prompts in files.items():
        prompt_ids = [encode(pair.tokenizer, prompt.text) for prompt in prompts]
        journal = journal_of(options.output.with_suffix(f".{name}.json"))
        texts, num_checked = record_texts(pair, prompt_ids, options.tokens, NUM_CHECKED, journal)
        report[name] = {"kinds": [prompt.kind for prompt in prompts], "texts": texts}
        num_steps += num_checked
    report["settings"] = {
        "dtype": dtype_name(pair.target.dtype),
        "tokens": options.tokens,
        "depth": options.depth,
        "steps_checked": num_steps,
    }
    return report


class TwicePromised:
    """Trees of one size, promised from a small tree's counts and from their own.

    Args:
        size, depth: of the trees, in nodes and at most in levels.
        tokens: of a text that are counted.
        kinds: of the prompts.
    """

    def __init__(self, size: int, depth: int, tokens: int, kinds: Sequence[str]) -> None:
        self.size, self.depth, self.tokens, self.kinds = size, depth, tokens, kinds

    def solutions(self, texts: Sequence[RankedText], places: Sequence[int]) -> dict[str, Solution]:
        """The tree solved from the small tree's counts, and that from the counts of the former."""
        small = self._solve(TREE, texts, places)
        return {"small": small, "again": self._solve(small.tree, texts, places)}

    def errors(
        self, texts: Sequence[RankedText], part: Sequence[int], rest: Sequence[int]
    ) -> list[float]:
        """Promised over measured tokens a step less 1, counted on a part and measured on the rest.

        One error for each of `solutions`.
        """
        measured_texts = [texts[place] for place in rest]
        return [
            solution.plan.expected_tokens
            / tokens_per_step(solution.tree, measured_texts, self.tokens)
            - 1
            for solution in self.solutions(texts, part).values()
        ]

    def _solve(
        self, writer: TokenTree, texts: Sequence[RankedText], places: Sequence[int]
    ) -> Solution:
        """The tree of most expected tokens by the counts at the nodes of `writer`."""
        trials, counts = counts_over_texts(writer, [texts[i] for i in places], self.tokens)
        trials = trials.astype(np.int64)
        off_spine = ObservedAcceptance(trials[..., 1], counts[:, :, 1])
        observed = ObservedAcceptance(trials.sum(2), counts.sum(2), off_spine, tree=writer)
        levels = observed.levels()
        profile = Profile(
            pooled(levels),
            observed.effective_trials(),
            settings=GREEDY.settings(),
            levels=levels,
            kinds=observed.by_kind([self.kinds[i] for i in places]),
        )
        return solve(profile, budget=self.size, depth=self.depth, objective="tokens")


def replay_table(report: Mapping[str, Any]) -> Table:
    """A row for each size: tokens a step, and how far the promises are off."""
    table = Table(
        title="tokens a step, and promised / measured - 1: counted with the small tree | again",
        box=None,
    )
    for title in ("nodes", "held out", "same prompts", "held out", "random halves", "other prompts",
                  "interval of a new kind holds"):  # fmt: skip
        table.add_column(title, justify="right")
    for entry in report["trees"]:
        promises = [entry["small"], entry["again"]]

        def errors(name: str, promises: list[dict[str, Any]] = promises) -> str:
            return " | ".join(
                f"{promise['promised'] / promise[name] - 1:+.1%}" for promise in promises
            )

        halves = " | ".join(f"{promise['halves_mean_error']:+.1%}" for promise in promises)
        row = [str(entry["size"]), f"{entry['again']['held_out']:.2f}", errors("same_prompts"),
               errors("held_out"), halves]  # fmt: skip
        if report["other"]["texts"]:
            low, high = entry["again"]["interval_new_kind"] or (math.nan, math.nan)
            row += [errors("other"), str(low <= entry["again"]["other"] <= high)]
        table.add_row(*row)
    return table


def count_again(
    pair: Pair, profile: Profile, sampling: Sampling, options: argparse.Namespace
) -> dict[str, Any]:
    """Let the tree of every size write the profile's prompts, and compare its tokens a step.

    The tree is solved from the profile. Its promises are by the profile, and by the acceptance that
    is counted on the text that it writes.
    """
    measured_prompts = measuring_half(load(options.prompts or BUILT_IN))[: options.limit]
    prompts = [encode(pair.tokenizer, prompt.text) for prompt in measured_prompts]
    entries = []
    for size in options.sizes:
        tree = solve(
            profile, budget=size, depth=options.depth, objective="tokens", verifier=profile.verifier
        ).tree
        observed = measure_acceptance(
            pair, prompts, [sampling], precision=0.0, tokens_per_prompt=options.tokens, tree=tree
        )[0]
        tokens, steps = observed.trials.sum(1), observed.trials[:, 0]
        # a text that was not at its end has the root of a further step, without that step's tokens
        has_further_root = tokens > options.tokens
        tokens, steps = tokens - has_further_root, steps - has_further_root
        drawn = np.random.default_rng(0).integers(len(prompts), size=(RESAMPLES, len(prompts)))
        resampled = tokens[drawn].sum(1) / steps[drawn].sum(1)
        again = replace(profile, levels=observed.levels(), kinds={}, verifiers={})
        entry = {
            "measured": tokens.sum() / steps.sum(),
            "interval_low": np.quantile(resampled, 0.025),
            "interval_high": np.quantile(resampled, 0.975),
            "by_level": expected_tokens(tree, Acceptance.given(profile.acceptance_by_level).rates),
            "again": expected_tokens(tree, Acceptance.given(again.acceptance_by_level).rates),
        }
        entries.append({"size": size, "depth": tree.depth, "tokens_per_step": rounded(entry)})
    return {
        "profile": acceptance_report(profile),
        "prompts": len(prompts),
        "trees": entries,
    }


def main() -> None:
    """Decode, compare and report."""
    options = read_options()
    if options.replay:
        report = replay(options)
        write_atomically(options.output, (json.dumps(report) + "\n").encode())
        Console(width=180).print(replay_table(report))
        return
    pair = load_pair(draft=options.draft, dtype=options.dtype, device=options.device)
    columns = table_columns(options)
    table = new_table(columns)
    results: list[dict[str, Any]] = []
    for path in options.profiles:
        profile = Profile.load(path)
        sampling = Sampling(**profile.settings)
        result = (count_again if options.again else compare)(pair, profile, sampling, options)
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
    parser.add_argument("profiles", type=Path, nargs="*", help="none with --replay")
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument(
        "--prompts", type=Path, help="a file, of which the held-out half is decoded"
    )
    parser.add_argument(
        "--beside", type=Path, help="a further profile, whose predictions for the trees are added"
    )
    parser.add_argument("--limit", type=int, default=80, help="prompts, at most")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--tokens-only", action="store_true", help="time nothing")
    parser.add_argument("--replay", action="store_true", help="large trees at temperature 0")
    parser.add_argument("--texts", type=Path, help="with --replay, a result, whose texts are taken")
    parser.add_argument(
        "--again", action="store_true", help="acceptance counted again with each tree"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if bool(options.profiles) == options.replay:
        parser.error("expected profiles, or --replay without them")
    options.sizes = options.sizes or (LARGE_SIZES if options.replay or options.again else SIZES)
    options.tokens_only |= options.again
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
    if options.again:
        columns = {"tokens_per_step": ("by_level", "again")}
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
