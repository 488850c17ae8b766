"""The profiler: a pair of models in, a profile out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from sequoia_plan.artifacts import Acceptance, Latency, Profile, TokenTree
from sequoia_plan.artifacts.expected_tokens import max_expected_tokens
from sequoia_plan.artifacts.prompts import Prompt
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
    tree: TokenTree | None = None,
    **acceptance_options: Any,
) -> list[Profile]:
    """Measure a profile for each context and sampling: acceptance on `prompts`, and latency.

    The forward passes of target and draft are timed with the first sampling, verification with
    each. Rounds of latency samples are spread over the prompts: the speed of a shared machine
    changes, and one minute of samples at the end would show the speed of that minute only.

    Args:
        samplings: temperature and verifier, one entry for each profile of a context.
        latency_seconds: about how long latency is sampled at each context, once it is known which
            sizes to time.
        context: number of tokens in the KV cache while passes are timed; with several numbers,
            passes are timed at each of them. Acceptance is counted on the prompts as they are.
        on_size: called with each tree size (number of nodes) when it is first timed, and the median
            seconds of the target's pass over so many tokens.
        on_prompt: called after each prompt with the number of prompts so far, the most there may
            be, and what was observed so far with the sampling that is being measured.
        max_size: the most nodes for which passes are timed.
        tree: writes the text that acceptance is counted on; None for a small tree of ten nodes.
        acceptance_options: keyword arguments of `measure_by_prompt`, such as its method.

    Returns:
        The profiles of the first context in the order of `samplings`, then those of the next.

    Raises:
        SequoiaPlanError: if the prompts do not fit the models.
    """
    all_samplings = list(dict.fromkeys(samplings))
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

    def profile(sampling: Sampling, meter: LatencyMeter, latency: Latency) -> Profile:
        """The profile of `sampling` at the context of `meter`."""
        observed = acceptance_of_sampling[sampling]
        return Profile(
            acceptance=Acceptance.counted(observed.totals()),
            effective_trials=observed.effective_trials(),
            latency=structs.replace(latency, verification=meter.verification_cost(sampling)),
            settings=sampling.settings(),
            models=pair.metadata,
            hardware=fingerprint(pair.target.device),
            tree_size=tree.size if tree else None,
            kinds=observed.by_kind(kind_of_prompt),
            lookup=lookup_counts(observed.lookup, kind_of_prompt),
            drafting=drafting,
        )

    return [
        profile(sampling, meter, latency)
        for meter, latency in zip(meters, latencies, strict=True)
        for sampling in samplings
    ]


def max_tokens_of_any_tree(observed: ObservedAcceptance) -> float:
    """A bound on the expected tokens a step of any tree of at most `SIZES[-1]` nodes."""
    acceptance = Acceptance.counted(observed.totals())
    pooled = acceptance.pooled()[None, None]
    estimates = (acceptance.rates, acceptance.with_one_class().rates, pooled)
    return max(max_expected_tokens(rates, SIZES[-1]) for rates in estimates)
