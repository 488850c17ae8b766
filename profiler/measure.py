"""The profiler: a pair of models in, a profile out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sequoia_plan.artifacts import Profile
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, SIZES, measure_latency
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling


def measure(
    pair: Pair,
    prompts: Sequence[str],
    samplings: Sequence[Sampling],
    latency_seconds: float = 30.0,
    context: int = CONTEXT,
    on_size: Callable[[int, float], None] = lambda size, median: None,
    largest: int = SIZES[-1],
    **acceptance: Any,
) -> list[Profile]:
    """Measure acceptance on `prompts` under every setting, then latency under the first, all through the decoder.

    Args:
        latency_seconds, context, on_size, largest: see `measure_latency`.
        acceptance: options of `measure_acceptance`.

    Raises:
        SequoiaPlanError: if the prompts do not fit the models.
    """
    found = measure_acceptance(pair, [encode(pair.tokenizer, p) for p in prompts], samplings, **acceptance)
    vectors = [pooled(each.levels()) for each in found]
    most_tokens = max(1 / max(1 - sum(vector), 1e-3) for vector in vectors)
    latency = measure_latency(pair, samplings[0], most_tokens, latency_seconds, context, on_size, largest)
    return [
        Profile(
            acceptance=vector,
            trials=each.worth(),
            latency=latency,
            settings=sampling.settings(),
            models=pair.facts,
            hardware=fingerprint(pair.target.device),
            levels=each.levels(),
        )
        for sampling, vector, each in zip(samplings, vectors, found, strict=True)
    ]
