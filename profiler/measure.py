"""The profiler: a pair of models in, a profile out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from sequoia_plan.artifacts import Judged, Profile
from sequoia_plan.artifacts.cost import most_expected_tokens
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.artifacts.profile import tally
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.profiler.acceptance import finished_prompts, results
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, SIZES, LatencyMeter
from sequoia_plan.profiler.observed import LEAST_PROMPTS, Acceptance
from sequoia_plan.profiler.prompts import Prompt, encode
from sequoia_plan.runtime import Pair, Sampling

PROMPTS_PER_ROUND = 2
"""Prompts from one round of latency to the next."""
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
    verifiers: Sequence[Sequence[str]] = (),
    **acceptance: Any,
) -> list[Profile]:
    """Measure acceptance on `prompts` and verification under every setting, and the passes' latency under the first, all through the decoder.

    Latency is timed between prompts, so that it is that of the whole time and not of its last minute.

    Args:
        latency_seconds: for repeating latency measurements, about.
        context, on_size, largest: see `LatencyMeter`.
        verifiers: for each setting, further verifiers to measure along with its own; none if empty. At temperature 0 all decide alike.
        on_prompt: called after each prompt with how many there were, how many there may be, and what was found so far.
        acceptance: options of `finished_prompts`.

    Raises:
        SequoiaPlanError: if the prompts do not fit the models.
    """
    along = verifiers or [()] * len(samplings)
    further = [[replace(one, verifier=name) for name in names if not one.greedy] for one, names in zip(samplings, along, strict=True)]
    every = list(dict.fromkeys([*samplings, *itertools.chain.from_iterable(further)]))
    meter = LatencyMeter(pair, samplings[0], context, on_size, largest, every)
    measured: Mapping[int, Acceptance] = {}
    for now in finished_prompts(pair, [encode(pair.tokenizer, prompt.text) for prompt in prompts], every, **acceptance):
        on_prompt(now.done, now.most, now.latest)
        measured = now.found
        if not meter.timers and now.done >= LEAST_PROMPTS and now.latest.trials.any():
            meter.begin(ROOM * most_tokens(now.latest))
        elif meter.timers and now.done % PROMPTS_PER_ROUND == 0 and meter.seconds < latency_seconds:
            meter.round()

    found = dict(zip(every, results(measured), strict=True))
    if not meter.timers:
        meter.begin(max(map(most_tokens, found.values())))
    latency, kinds = meter.finish(latency_seconds), [prompt.kind for prompt in prompts]
    assert meter.decoder.drafter is not None
    drafting = meter.decoder.drafter.drafting

    def judged(sampling: Sampling) -> Judged:
        each = found[sampling]
        levels = each.levels()
        return Judged(pooled(levels), each.effective_trials(), levels, each.by_kind(kinds), meter.verification(sampling))

    def profile(sampling: Sampling, further: Sequence[Sampling]) -> Profile:
        own = judged(sampling)
        both = {each.verifier: found[each] for each in (sampling, *further)}
        return Profile(
            acceptance=own.vector,
            trials=own.trials,
            latency=structs.replace(latency, verification=own.verification),
            settings=sampling.settings(),
            models=pair.facts,
            hardware=fingerprint(pair.target.device),
            levels=own.levels,
            kinds=own.kinds,
            lift=both["traversal"].lift() if {"sequoia", "traversal"} <= both.keys() else None,
            verifiers={each.verifier: judged(each) for each in further},
            drafting=drafting,
        )

    return [profile(sampling, others) for sampling, others in zip(samplings, further, strict=True)]


def most_tokens(found: Acceptance) -> float:
    """No tree of any size that is timed has more expected tokens: the values of as many of the endless tree's best nodes, by
    level, by level and class, or by one vector for all levels."""
    levels = found.levels()
    by_level, by_class = (rates(*tally(levels, classes))[0] for classes in (1, 2))
    return max(most_expected_tokens(rows, SIZES[-1]) for rows in (by_level, by_class, pooled(levels)))
