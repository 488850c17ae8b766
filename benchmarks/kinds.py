"""Does the interval for prompts of a new kind hold? Every kind in turn is left out and predicted from the others.

    python benchmarks/kinds.py --temperature 0 -o build/kinds.json                         # the built-in prompts' eight kinds
    python benchmarks/kinds.py --temperature 0 --prompts mt_bench.jsonl -o build/kinds.json  # and those of a file, each from the other's

Acceptance is measured once, prompt by prompt. For each kind and size the tree of most tokens is solved from the other kinds' counts, and the
two intervals of its plan are compared with the tokens that the acceptance measured on the kind itself gives for the same tree. A file's kinds
are predicted from the built-in prompts as well, and the built-in ones from the file's.

A tree is chosen by the numbers that promise its worth, so it may promise too much. The same prompts are cut in two at random: the tree of
each half is valued by its own half and by the other. The average difference is what the choice adds; luck with the halves cancels.
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
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import discard, journal_of
from sequoia_plan.profiler.observed import Acceptance
from sequoia_plan.profiler.prompts import BUILT_IN, encode, load
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.models.load import dtype_name

SIZES, DEPTH, SPLITS = (3, 8, 16, 64), 10, 100
Measured = tuple[Acceptance, list[str]]
"""Acceptance prompt by prompt, and each prompt's kind."""


def profiled(measured: Measured, chosen: Any) -> Profile:
    """What `profile` would say of the chosen prompts (a mask)."""
    found = measured[0].part(np.array(chosen, bool))
    kinds = [kind for kind, taken in zip(measured[1], chosen, strict=True) if taken]
    return Profile(pooled(found.levels()), found.effective_trials(), levels=found.levels(), kinds=found.by_kind(kinds))


def predictions(source: Measured, target: Measured) -> Iterator[dict[str, Any]]:
    """Every kind of `target`, predicted from those prompts of `source` that are not of it."""
    for kind in dict.fromkeys(target[1]):
        others = profiled(source, [each != kind for each in source[1]])
        own = profiled(target, [each == kind for each in target[1]])
        for size in SIZES:
            tree = solve(others, size, DEPTH, objective="tokens").tree
            plan = tree.plan
            assert plan.interval and plan.interval_new_kind and plan.expected_tokens
            ends = {"like_the_profiled": plan.interval.expected_tokens, "of_a_new_kind": plan.interval_new_kind.expected_tokens}
            numbers = {"promised": plan.expected_tokens, "found": expected_tokens(tree, own.by_class or own.by_level)}
            intervals = {name: [round(end, 4) for end in each or ()] for name, each in ends.items()}
            yield {"kind": kind, "size": size, **{name: round(number, 4) for name, number in numbers.items()}, **intervals}


def flattered(measured: Measured, prompts: int) -> dict[int, tuple[float, float]]:
    """Of each size, how much more than from other prompts a tree promises from those it was chosen by, as a share, and the standard error.

    Args:
        prompts: in each of two parts that share none.
    """
    rng, gains = np.random.default_rng(0), dict[int, list[float]]()
    for _ in range(SPLITS):
        order = rng.permutation(len(measured[1]))
        halves = [profiled(measured, np.isin(np.arange(len(order)), part)) for part in (order[:prompts], order[prompts : 2 * prompts])]
        for size in SIZES:
            trees = [solve(half.by_level, size, DEPTH, objective="tokens").tree for half in halves]
            own, other = ([expected_tokens(tree, half.by_level) for tree, half in zip(trees, valued, strict=True)] for valued in (halves, halves[::-1]))
            gains.setdefault(size, []).append(sum(own) / sum(other) - 1)
    return {size: (round(float(np.mean(each)), 5), round(float(np.std(each) / SPLITS**0.5), 5)) for size, each in gains.items()}


def held(entries: Sequence[dict[str, Any]], interval: str) -> tuple[int, float]:
    """How many of the intervals hold what was found, and half their width as a share of what is promised, on average."""
    inside = sum(entry[interval][0] <= entry["found"] <= entry[interval][1] for entry in entries)
    return inside, float(np.mean([(entry[interval][1] - entry[interval][0]) / 2 / entry["promised"] for entry in entries]))


def main() -> None:
    """Measure, predict and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--draft", help="as for sequoia-plan profile")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    pair, sampling = load_pair(draft=options.draft, dtype=options.dtype), Sampling(options.temperature)
    measured: dict[str, Measured] = {}
    journals = []
    for name, path in {"built-in": BUILT_IN, **({options.prompts.stem: options.prompts} if options.prompts else {})}.items():
        prompts = load(path)
        if not all(prompt.kind for prompt in prompts):
            parser.error(f"--prompts {path}: found a prompt without a kind, expected `kind` or `category` in every line")
        ids, journal = [encode(pair.tokenizer, prompt.text) for prompt in prompts], journal_of(f"{options.output}.{name}")
        found = measure_acceptance(pair, ids, [sampling], precision=0.0, tokens_per_prompt=options.tokens, journal=journal)[0]
        measured[name] = found, [str(prompt.kind) for prompt in prompts]
        journals.append(journal)
    made = {"sampling": sampling.settings(), "dtype": dtype_name(pair.target.dtype), "tokens": options.tokens}
    result: dict[str, Any] = {"settings": made, "models": pair.facts, "hardware": fingerprint(pair.target.device), "predictions": []}
    table = Table("kinds of", "from", "nodes", "like the profiled", "half width", "of a new kind", "half width", box=None)
    for source, target in [(a, b) for b in measured for a in measured]:
        entries = list(predictions(measured[source], measured[target]))
        result["predictions"].append({"from": "the other kinds" if source == target else source, "kinds_of": target, "kinds": entries})
        for size in SIZES:
            mine = [entry for entry in entries if entry["size"] == size]
            cells = []
            for interval in ("like_the_profiled", "of_a_new_kind"):
                inside, width = held(mine, interval)
                cells += [f"{inside} of {len(mine)}", f"{width:.0%}"]
            table.add_row(target, "its other kinds" if source == target else source, str(size), *cells)
    result["flattered_by_choice"] = []
    chosen = Table("chosen from prompts", *(f"{size} nodes" for size in SIZES), box=None)
    for name, each in measured.items():
        for prompts in (len(each[1]) // 4, len(each[1]) // 2):
            gains = flattered(each, prompts)
            result["flattered_by_choice"].append({"prompts": name, "in_each_half": prompts, "by_size": gains})
            chosen.add_row(f"{prompts} {name}", *(f"{gain:+.2%} (+- {error:.2%})" for gain, error in gains.values()))
    write_atomically(options.output, (json.dumps(result, indent=1) + "\n").encode())
    for journal in journals:
        discard(journal)
    Console(width=120).print(table, chosen)


if __name__ == "__main__":
    main()
