"""The profiler: a pair of models in, a profile out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from sequoia_plan.artifacts import Latency, Profile, TokenTree, VerifierAcceptance
from sequoia_plan.artifacts.cost import max_expected_tokens
from sequoia_plan.artifacts.counts import counts_by_class
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.artifacts.prompts import Prompt
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.profiler.acceptance import in_order, measure_by_prompt
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, SIZES, LatencyMeter
from sequoia_plan.profiler.lookup_counts import lookup_counts
from sequoia_plan.profiler.observed import MIN_PROMPTS, ObservedAcceptance
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Pair, Sampling

PROMPTS_PER_ROUND = 2
"""After so many prompts, `measure` times one round of latency samples."""
TOKENS_MARGIN = 1.25
"""Factor on the bound that decides which sizes are timed: the bound follows from the acceptance on
the first prompts, and the final acceptance may be higher."""


def measure(
    pair: Pair,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    latency_seconds: float = 45.0,
    context: int | Sequence[int] = CONTEXT,
    on_size: Callable[[int, float], None] = lambda size, median: None,
    on_prompt: Callable[[int, int, ObservedAcceptance], None] = lambda done, total, latest: None,
    max_size: int = SIZES[-1],
    verifiers: Sequence[Sequence[str]] = (),
    tree: TokenTree | None = None,
    **acceptance_options: Any,
) -> list[Profile]:
    """Measure a profile for each context and sampling: acceptance on `prompts`, and latency.

    The forward passes of target and draft are timed with the first sampling, verification with
    each. Rounds of latency samples are spread over the prompts: the speed of a shared machine
    changes, and one minute of samples at the end would show the speed of that minute only.

    Args:
        samplings: temperatures and verifier, one entry for each profile of a context.
        latency_seconds: about how long latency is sampled at each context, once it is known which
            sizes to time.
        context: number of tokens in the KV cache while passes are timed; with several numbers,
            passes are timed at each of them. Acceptance is counted on the prompts as they are.
        on_size: called with each tree size (number of nodes) when it is first timed, and the median
            seconds of the target's pass over so many tokens.
        on_prompt: called after each prompt with the number of prompts so far, the most there may
            be, and what was observed so far with the sampling that is being measured.
        max_size: the most nodes for which passes are timed.
        verifiers: for each sampling, names of further verifiers to measure along with its own; none
            if empty, and none at temperature 0, where all accept alike.
        tree: writes the text that acceptance is counted on; None for a small tree of ten nodes.
        acceptance_options: keyword arguments of `measure_by_prompt`, such as its method.

    Returns:
        The profiles of the first context in the order of `samplings`, then those of the next.

    Raises:
        SequoiaPlanError: if the prompts do not fit the models.
    """
    names_by_setting = verifiers or [()] * len(samplings)
    further_samplings = [
        [replace(sampling, verifier=name) for name in names if not sampling.greedy]
        for sampling, names in zip(samplings, names_by_setting, strict=True)
    ]
    with_repeats = [*samplings, *itertools.chain.from_iterable(further_samplings)]
    all_samplings = list(dict.fromkeys(with_repeats))
    prompt_ids = [encode(pair.tokenizer, prompt.text) for prompt in prompts]
    contexts = [context] if isinstance(context, int) else context
    meters = [
        LatencyMeter(pair, samplings[0], size, on_size, max_size, all_samplings, texts=prompt_ids)
        for size in contexts
    ]
    observed_by_index: Mapping[int, ObservedAcceptance] = {}  # keys: indices of `all_samplings`
    for progress in measure_by_prompt(
        pair, prompt_ids, all_samplings, tree=tree, **acceptance_options
    ):
        on_prompt(progress.num_prompts, progress.max_prompts, progress.latest)
        # `latest` is what was observed so far with the sampling that is being measured
        observed_by_index, latest = progress.acceptances, progress.latest
        # a meter has no timers before `begin`, which times sizes up to the one whose pass costs
        # more than a step of any tree can yield, in tokens
        has_begun = bool(meters[0].timers)
        if not has_begun and progress.num_prompts >= MIN_PROMPTS and latest.trials.any():
            max_tokens = TOKENS_MARGIN * max_tokens_of_any_tree(latest)
            for meter in meters:
                meter.begin(max_tokens)
        elif has_begun and progress.num_prompts % PROMPTS_PER_ROUND == 0:
            for meter in meters:
                if meter.seconds < latency_seconds:
                    meter.round()

    acceptance_of_sampling = dict(zip(all_samplings, in_order(observed_by_index), strict=True))
    if not meters[0].timers:  # there were too few prompts to begin earlier
        max_tokens = max(map(max_tokens_of_any_tree, acceptance_of_sampling.values()))
        for meter in meters:
            meter.begin(max_tokens)
    latencies = [meter.finish(latency_seconds) for meter in meters]
    kind_of_prompt = [prompt.kind for prompt in prompts]
    drafter = meters[0].step.drafter
    assert drafter is not None
    drafting = drafter.drafting  # which passes this type of draft takes in a step

    def verifier_acceptance(sampling: Sampling, meter: LatencyMeter) -> VerifierAcceptance:
        """The measured acceptance and verification cost of one sampling."""
        acceptance = acceptance_of_sampling[sampling]
        counts_by_level = acceptance.levels()
        return VerifierAcceptance(
            vector=pooled(counts_by_level),
            trials=acceptance.effective_trials(),
            levels=counts_by_level,
            kinds=acceptance.by_kind(kind_of_prompt),
            verification=meter.verification_cost(sampling),
        )

    def profile(
        sampling: Sampling, further: Sequence[Sampling], meter: LatencyMeter, latency: Latency
    ) -> Profile:
        """The profile of `sampling`, with the acceptance of its `further` verifiers."""
        own = verifier_acceptance(sampling, meter)
        return Profile(
            acceptance=own.vector,
            trials=own.trials,
            latency=structs.replace(latency, verification=own.verification),
            settings=sampling.settings(),
            models=pair.metadata,
            hardware=fingerprint(pair.target.device),
            levels=own.levels,
            tree_size=tree.size if tree else None,
            kinds=own.kinds,
            lookup=lookup_counts(acceptance_of_sampling[sampling].lookup, kind_of_prompt),
            verifiers={other.verifier: verifier_acceptance(other, meter) for other in further},
            drafting=drafting,
        )

    return [
        profile(sampling, further, meter, latency)
        for meter, latency in zip(meters, latencies, strict=True)
        for sampling, further in zip(samplings, further_samplings, strict=True)
    ]


def max_tokens_of_any_tree(acceptance: ObservedAcceptance) -> float:
    """A bound on the expected tokens a step of any tree of at most `SIZES[-1]` nodes."""
    counts_by_level = acceptance.levels()
    probs_by_level, _ = rates(*counts_by_class(counts_by_level, num_classes=1))
    probs_by_class, _ = rates(*counts_by_class(counts_by_level, num_classes=2))
    estimates = (probs_by_level, probs_by_class, pooled(counts_by_level))
    return max(max_expected_tokens(probs, SIZES[-1]) for probs in estimates)
