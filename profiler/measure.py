"""The profiler: a pair of models in, a profile out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from sequoia_plan.artifacts import Profile
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.profiler.acceptance import LEAST_PROMPTS, Acceptance, measure_acceptance
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, SIZES, LatencyMeter
from sequoia_plan.profiler.prompts import Prompt, encode
from sequoia_plan.runtime import Pair, Sampling

APART = 2
"""Prompts between two rounds of latency."""
ROOM = 1.25
"""Sizes are chosen from the first prompts' acceptance; the final one may be so much better."""


def measure(
    pair: Pair,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    latency_seconds: float = 45.0,
    context: int = CONTEXT,
    on_size: Callable[[int, float], None] = lambda size, median: None,
    on_prompt: Callable[[int, int, Acceptance], None] = lambda done, most, found: None,
    largest: int = SIZES[-1],
    **acceptance: Any,
) -> list[Profile]:
    """Measure acceptance on `prompts` under every setting and latency under the first, all through the decoder.

    Latency is timed between prompts, so that it is that of the whole time and not of its last minute.

    Args:
        latency_seconds: for repeating latency measurements, about.
        context, on_size, largest: see `LatencyMeter`.
        on_prompt, acceptance: options of `measure_acceptance`.

    Raises:
        SequoiaPlanError: if the prompts do not fit the models.
    """
    meter = LatencyMeter(pair, samplings[0], context, on_size, largest)

    def between_prompts(done: int, most: int, found: Acceptance) -> None:
        on_prompt(done, most, found)
        if not meter.benches and done >= LEAST_PROMPTS and found.trials.any():
            meter.begin(ROOM * most_tokens(found))
        elif meter.benches and done % APART == 0 and meter.seconds < latency_seconds:
            meter.round()

    found = measure_acceptance(pair, [encode(pair.tokenizer, p) for p in prompts], samplings, on_prompt=between_prompts, **acceptance)
    if not meter.benches:
        meter.begin(max(map(most_tokens, found)))
    latency = meter.finish(latency_seconds)
    return [
        Profile(
            acceptance=pooled(each.levels()),
            trials=each.worth(),
            latency=latency,
            settings=sampling.settings(),
            models=pair.facts,
            hardware=fingerprint(pair.target.device),
            levels=each.levels(),
        )
        for sampling, each in zip(samplings, found, strict=True)
    ]


def most_tokens(found: Acceptance) -> float:
    """No tree of any size that is timed has more expected tokens: the values of as many of the endless tree's best nodes, by
    level or by one vector for all levels."""
    levels = found.levels()
    by_level = [[count / max(level.trials, 1) for count in level.counts] for level in levels]
    return max(_best_nodes(rows, SIZES[-1]) for rows in (by_level, [pooled(levels)]))


def _best_nodes(rows: Sequence[Sequence[float]], size: int) -> float:
    """The sum of the `size` largest node values; the last of `rows` holds for all deeper levels."""
    total, candidates = 0.0, [(-1.0, 0)]
    for _ in range(size):
        if not candidates:
            break
        value, level = heapq.heappop(candidates)
        total -= value
        for p in rows[min(level, len(rows) - 1)]:
            if p > 0:
                heapq.heappush(candidates, (value * p, level + 1))
    return total
