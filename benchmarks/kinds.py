"""How often the interval for prompts of a new kind holds: each kind is predicted from the others.

    python benchmarks/kinds.py --temperature 0 -o build/kinds.json
    python benchmarks/kinds.py --temperature 0 --prompts mt_bench.jsonl -o build/kinds.json

The first command takes the kinds of the built-in prompts. The second one adds those of a file: its
kinds are predicted from the built-in prompts as well, and the built-in ones from the file's.

Acceptance is measured once, prompt by prompt. For each kind and size, the tree of most expected
tokens is solved from the counts of the other kinds. The two intervals of its plan are compared with
the expected tokens of the same tree by the acceptance of the kind itself.

A tree is chosen by the numbers that predict its tokens, so the prediction may be too high. To
measure that, the same prompts are cut in two at random: the tree of each half is valued by its own
half and by the other one. The average difference is the effect of the choice; luck with the halves
cancels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import Profile
from sequoia_plan.artifacts.cost import expected_tokens
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.artifacts.prompts import BUILT_IN, load
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import discard, journal_of
from sequoia_plan.profiler.observed import ObservedAcceptance
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.models.load import dtype_name

SIZES = (3, 8, 16, 64)
DEPTH = 10
NUM_SPLITS = 100
INTERVALS = ("like_the_profiled", "of_a_new_kind")
MeasuredPrompts = tuple[ObservedAcceptance, list[str]]
"""Acceptance prompt by prompt, and the kind of each prompt."""


def profile_of(measured: MeasuredPrompts, mask: Any) -> Profile:
    """The profile of some of the prompts.

    Args:
        mask: for each prompt, whether it is among them.
    """
    acceptance, prompt_kinds = measured
    part = acceptance.part(np.array(mask, bool))
    kinds = [kind for kind, is_taken in zip(prompt_kinds, mask, strict=True) if is_taken]
    levels = part.levels()
    return Profile(
        acceptance=pooled(levels),
        trials=part.effective_trials(),
        levels=levels,
        kinds=part.by_kind(kinds),
    )


def predict_kinds(source: MeasuredPrompts, target: MeasuredPrompts) -> Iterator[dict[str, Any]]:
    """Predict each kind of `target` from the prompts of `source` that are of other kinds."""
    source_kinds, target_kinds = source[1], target[1]
    for kind in dict.fromkeys(target_kinds):
        other_kinds = profile_of(source, [source_kind != kind for source_kind in source_kinds])
        own_kind = profile_of(target, [target_kind == kind for target_kind in target_kinds])
        own_acceptance = own_kind.acceptance_by_class or own_kind.acceptance_by_level
        for size in SIZES:
            tree = solve(other_kinds, size, DEPTH, objective="tokens").tree
            plan = tree.plan
            assert plan.interval and plan.interval_new_kind and plan.expected_tokens
            yield {
                "kind": kind,
                "size": size,
                "promised": round(plan.expected_tokens, 4),
                "found": round(expected_tokens(tree, own_acceptance), 4),
                "like_the_profiled": rounded(plan.interval.expected_tokens),
                "of_a_new_kind": rounded(plan.interval_new_kind.expected_tokens),
            }


def rounded(ends: tuple[float, float] | None) -> list[float]:
    """The ends of an interval to four digits; empty for None."""
    return [round(end, 4) for end in ends or ()]


def gain_by_choice(measured: MeasuredPrompts, num_prompts: int) -> dict[int, tuple[float, float]]:
    """How much more tokens a tree is predicted from the prompts it was chosen by than from others.

    Args:
        num_prompts: prompts in each of two parts that share none.

    Returns:
        For each size, the mean gain as a share, and its standard error.
    """
    rng = np.random.default_rng(0)
    gains: dict[int, list[float]] = {size: [] for size in SIZES}
    total = len(measured[1])
    for _ in range(NUM_SPLITS):
        order = rng.permutation(total)
        parts = order[:num_prompts], order[num_prompts : 2 * num_prompts]
        halves = [profile_of(measured, np.isin(np.arange(total), part)) for part in parts]
        first, second = (half.acceptance_by_level for half in halves)
        for size in SIZES:
            first_tree, second_tree = (
                solve(acceptance, size, DEPTH, objective="tokens").tree
                for acceptance in (first, second)
            )
            own = expected_tokens(first_tree, first) + expected_tokens(second_tree, second)
            crossed = expected_tokens(first_tree, second) + expected_tokens(second_tree, first)
            gains[size].append(own / crossed - 1)
    return {size: mean_with_error(size_gains) for size, size_gains in gains.items()}


def mean_with_error(gains: Sequence[float]) -> tuple[float, float]:
    """The mean over splits, and its standard error."""
    return round(float(np.mean(gains)), 5), round(float(np.std(gains) / NUM_SPLITS**0.5), 5)


def coverage(entries: Sequence[dict[str, Any]], interval: str) -> tuple[int, float]:
    """How many intervals hold the kind's own expected tokens, and their mean relative half width.

    Args:
        entries: of `predict_kinds`.
        interval: one of INTERVALS.
    """
    num_held = 0
    half_widths = []
    for entry in entries:
        low, high = entry[interval]
        num_held += low <= entry["found"] <= high
        half_widths.append((high - low) / 2 / entry["promised"])
    return num_held, float(np.mean(half_widths))


def main() -> None:
    """Measure, predict and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    pair = load_pair(draft=options.draft, dtype=options.dtype)
    sampling = Sampling(options.temperature)
    files = {"built-in": BUILT_IN}
    if options.prompts:
        files[options.prompts.stem] = options.prompts
    measured: dict[str, MeasuredPrompts] = {}
    journals = []
    for name, path in files.items():
        prompts = load(path)
        if not all(prompt.kind for prompt in prompts):
            parser.error(
                f"--prompts {path}: found a prompt without a kind, expected `kind` or `category` "
                "in every line"
            )
        journals.append(journal_of(f"{options.output}.{name}"))
        acceptance = measure_acceptance(
            pair,
            [encode(pair.tokenizer, prompt.text) for prompt in prompts],
            [sampling],
            precision=0.0,
            tokens_per_prompt=options.tokens,
            journal=journals[-1],
        )[0]
        measured[name] = acceptance, [str(prompt.kind) for prompt in prompts]
    result: dict[str, Any] = {
        "settings": {
            "sampling": sampling.settings(),
            "dtype": dtype_name(pair.target.dtype),
            "tokens": options.tokens,
        },
        "models": pair.metadata,
        "hardware": fingerprint(pair.target.device),
    }
    result["predictions"], predictions_table = report_predictions(measured)
    result["flattered_by_choice"], gains_table = report_gains(measured)
    write_atomically(options.output, (json.dumps(result, indent=1) + "\n").encode())
    for journal in journals:
        discard(journal)
    Console(width=120).print(predictions_table, gains_table)


def report_predictions(
    measured: dict[str, MeasuredPrompts],
) -> tuple[list[dict[str, Any]], Table]:
    """The predictions of every file's kinds from every file, as JSON and as a table."""
    results = []
    table = Table(
        "kinds of",
        "from",
        "nodes",
        "like the profiled",
        "half width",
        "of a new kind",
        "half width",
        box=None,
    )
    for target in measured:
        for source in measured:
            entries = list(predict_kinds(measured[source], measured[target]))
            is_same = source == target
            source_title = "the other kinds" if is_same else source
            results.append({"from": source_title, "kinds_of": target, "kinds": entries})
            for size in SIZES:
                size_entries = [entry for entry in entries if entry["size"] == size]
                cells = []
                for interval in INTERVALS:
                    num_held, half_width = coverage(size_entries, interval)
                    cells += [f"{num_held} of {len(size_entries)}", f"{half_width:.0%}"]
                source_cell = "its other kinds" if is_same else source
                table.add_row(target, source_cell, str(size), *cells)
    return results, table


def report_gains(measured: dict[str, MeasuredPrompts]) -> tuple[list[dict[str, Any]], Table]:
    """The effect of the choice for every file, as JSON and as a table."""
    results = []
    table = Table("chosen from prompts", *(f"{size} nodes" for size in SIZES), box=None)
    for name, prompts in measured.items():
        total = len(prompts[1])
        for num_prompts in (total // 4, total // 2):
            gains = gain_by_choice(prompts, num_prompts)
            results.append({"prompts": name, "in_each_half": num_prompts, "by_size": gains})
            cells = [f"{gain:+.2%} (+- {error:.2%})" for gain, error in gains.values()]
            table.add_row(f"{num_prompts} {name}", *cells)
    return results, table


if __name__ == "__main__":
    main()
