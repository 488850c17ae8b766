"""What a plan promises: figures over the profiled prompts, with intervals, also by kind."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.counts import ALL_KINDS, ClassCounts, Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import Interval
from sequoia_plan.artifacts.promise import MIN_PROMPTS, Ends, Values, interval_of_new_kind, promise
from sequoia_plan.artifacts.state import LEAST_SPEEDUP
from sequoia_plan.artifacts.step_time import StepTime

MORE_TRIALS = 50
"""Trials that are as all prompts, beside those of a kind."""


def promised_figures(tokens: Values, speedups: Values) -> dict[str, Any]:
    """The figures of a plan over prompts, from tokens a step and speed-up of each, if known.

    No speed-up is below `LEAST_SPEEDUP`, because a text falls back to plain decoding.
    """
    speedups = {
        kind: tuple(np.maximum(of_kind, LEAST_SPEEDUP).tolist())
        for kind, of_kind in speedups.items()
    }

    def bounded(ends: Ends | None) -> Ends | None:
        """The ends of a speed-up's interval, none below the least one."""
        return ends and (max(ends[0], LEAST_SPEEDUP), max(ends[1], LEAST_SPEEDUP))

    def promised(values: Values) -> tuple[Any, Any]:
        """Median and interval for as many prompts as were profiled; few of them are one kind."""
        names = [kind for kind, of_kind in values.items() for _ in of_kind]
        if len(names) < len(values) + MIN_PROMPTS:
            values = {"": [v for of_kind in values.values() for v in of_kind]}
            names = [""] * len(names)
        return promise(values, names) if names else (None, None)

    median, speedup_ends = promised(speedups)
    ends = promised(tokens)[1], bounded(speedup_ends)
    new_kind = interval_of_new_kind(tokens), bounded(interval_of_new_kind(speedups))
    by_kind = {kind: promise(speedups, [kind] * len(s)) for kind, s in speedups.items()}
    by_kind.pop(ALL_KINDS, None)
    return {
        "text_speedups": speedups,
        "median_speedup": median,
        "speedup_by_kind": {kind: middle for kind, (middle, _) in by_kind.items()},
        "interval_by_kind": {k: bounded(pair) for k, (_, pair) in by_kind.items() if pair},
        "interval": Interval(0.95, *ends) if any(ends) else None,
        "interval_new_kind": Interval(0.95, *new_kind) if any(new_kind) else None,
    }


def single_tree_figures(
    tree: TokenTree, profile: Profile, times: StepTime | None
) -> dict[str, Any]:
    """What the plan of a single tree promises."""
    if tree.size == 1:
        return {}
    tokens, speedups = {}, {}
    for kind, (_, ratios_of_prompts) in ratios_by_kind(profile).items():
        rates = [scaled(profile.acceptance.rates, ratios) for ratios in ratios_of_prompts]
        tokens[kind] = sorted(expected_tokens(tree, of_prompt) for of_prompt in rates)
        if times and math.isfinite(times.step_seconds(tree)):
            factor = times.plain_seconds() / times.step_seconds(tree)
            speedups[kind] = tuple(factor * value for value in tokens[kind])
    return promised_figures(tokens, speedups)


def ratios_by_kind(profile: Profile) -> dict[str, tuple[Floats, list[Floats]]]:
    """How many times as often as over all prompts each rank is accepted: by kind, and by prompt.

    Returns for each kind its ratios, float64 [ranks], and those of its prompts. `MORE_TRIALS` keep
    a kind's ratios near 1 if it has few counts; prompts that will be decoded differ by chance, too.
    """
    counts = profile.acceptance.counts
    if counts is None:
        return {}
    expected = counts.accepted.sum((0, 1)) / counts.trials.sum()

    def ratios(prompts: Sequence[ClassCounts], more_trials: int = 0) -> Floats:
        """The ratios of some prompts together, float64 [ranks]."""
        trials = sum(prompt.trials for prompt in prompts)
        accepted = sum((np.array(prompt.counts) for prompt in prompts), np.zeros(expected.shape))
        rates = (accepted + more_trials * expected) / max(trials + more_trials, 1)
        return np.where(expected > 0, rates / np.maximum(expected, 1e-300), 1.0)

    return {
        kind: (ratios(prompts, MORE_TRIALS), [ratios([prompt]) for prompt in prompts])
        for kind, prompts in profile.prompts.items()
    }


def scaled(rates: Floats, ratios: Floats) -> Floats:
    """The rates [..., ranks] times the ratios, with sums of at most 1."""
    result = rates * ratios[: rates.shape[-1]]
    return result / np.maximum(1.0, result.sum(-1, keepdims=True))
