"""The profiler: a pair of models in, a profile out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sequoia_plan.artifacts import Profile
from sequoia_plan.profiler.acceptance import AcceptanceCounts, measure_acceptance
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import measure_latency
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling


def measure(
    pair: Pair,
    prompts: Sequence[str],
    sampling: Sampling,
    acceptance_seconds: float = 90.0,
    latency_seconds: float = 30.0,
    seed: int = 0,
    on_prompt: Callable[[AcceptanceCounts], None] = lambda counts: None,
    on_size: Callable[[int, float], None] = lambda size, median: None,
) -> Profile:
    """Measure acceptance on `prompts`, then latency, both through the decoder.

    Raises:
        SequoiaPlanError: if the prompts do not fit the models.
    """
    counts = measure_acceptance(pair, [encode(pair.tokenizer, p) for p in prompts], sampling, acceptance_seconds, seed=seed, on_prompt=on_prompt)
    most_tokens = 1 / max(1 - sum(counts.vector()), 1e-3)
    latency = measure_latency(pair, sampling, most_tokens, latency_seconds, on_size=on_size)
    return Profile(
        acceptance=counts.vector(),
        trials=counts.trials,
        latency=latency,
        settings=sampling.settings(),
        models=pair.facts,
        hardware=fingerprint(pair.target.device),
    )
