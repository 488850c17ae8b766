"""The profiler: a pair of models in, a profile out."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from sequoia_plan.artifacts import Acceptance, Profile, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.expected_tokens import max_expected_tokens
from sequoia_plan.artifacts.promise import MIN_PROMPTS
from sequoia_plan.artifacts.prompts import Prompt
from sequoia_plan.profiler.forced import ForcedAcceptance, uses_traversal
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.profiler.latency import SIZES, LatencyMeter
from sequoia_plan.profiler.lookup_counts import lookup_counts
from sequoia_plan.profiler.observed import ObservedAcceptance, collect, named_kinds
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.profiler.timing import CONTEXT
from sequoia_plan.runtime import Pair, Sampling

PROMPTS_PER_ROUND = 2
"""After so many prompts, `measure` times one round of latency samples."""
TOKENS_MARGIN = 1.25
"""Factor on the bound that decides which sizes are timed: the bound follows from the acceptance on
the first prompts, and the final acceptance may be higher."""
RANKS = 16
"""Number of children drawn at a node."""
OnPrompt = Callable[[int, int, ObservedAcceptance], None]
"""Called after each prompt with the number of prompts so far, the most there may be, and what was
observed so far."""
LONG_PROMPT = 3.0
"""A longer prompt counts as so many times the median one: passes are compiled at first."""


def measure_acceptance(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    precision: float = 0.07,
    tokens_per_prompt: int = 32,
    tree: TokenTree | None = None,
    journal: Path | None = None,
    on_prompt: OnPrompt = lambda num_prompts, max_prompts, observed: None,
    min_prompts: int = 0,
    seconds: float = math.inf,
) -> ObservedAcceptance:
    """Measure on one prompt after the other, until acceptance is known to within `precision`.

    After about so many `seconds`, `MIN_PROMPTS` are enough.
    """
    work = [
        pair.metadata,
        list(map(list, prompts)),
        sampling.settings(),
        tokens_per_prompt,
        RANKS,
        None if tree is None else tree.parents.tolist(),
    ]
    results = Journal(journal, work)
    measure_prompt = ForcedAcceptance(pair, RANKS, uses_traversal(sampling), tree)
    tallies, durations = [], list[float]()
    for number, prompt in enumerate(prompts):
        started = time.perf_counter()
        measure = partial(measure_prompt, torch.tensor(prompt), sampling, tokens_per_prompt, number)
        tallies.append(results.result(str(number), measure))
        observed = collect(tallies, measure_prompt.tree)
        on_prompt(len(tallies), len(prompts), observed)
        durations.append(time.perf_counter() - started)
        longest = LONG_PROMPT * median(durations)
        passed = sum(min(duration, longest) for duration in durations)
        is_late = passed > seconds and len(tallies) >= MIN_PROMPTS
        if is_late or (observed.precision() <= precision and len(tallies) >= min_prompts):
            break
    if not observed.trials.any():
        raise SequoiaPlanError(
            "acceptance: no step was decoded; the prompts leave no room in the model's context"
        )
    return observed


def measure(
    pair: Pair,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    latency_seconds: float = 45.0,
    contexts: Sequence[int] = (CONTEXT,),
    *,
    precision: float = 0.07,
    acceptance_seconds: float = math.inf,
    tokens_per_prompt: int = 32,
    max_size: int = SIZES[-1],
    tree: TokenTree | None = None,
    journal: Path | None = None,
    on_size: Callable[[int, float], None] = lambda size, median: None,
    on_prompt: OnPrompt = lambda num_prompts, max_prompts, observed: None,
) -> Profile:
    """Measure a profile: acceptance on `prompts`, and latency at each context.

    Rounds of latency samples are spread over the prompts: the speed of a shared machine
    changes, and one minute of samples at the end would show the speed of that minute only.

    Args:
        sampling: temperature, filters and verifier.
        latency_seconds: about how long latency is sampled at each context, once it is known which
            sizes to time.
        contexts: numbers of tokens in the KV cache while passes are timed. Acceptance is counted
            on the prompts as they are.
        precision: acceptance is measured until half of the 95 % interval of the expected tokens a
            step is at most this share of them, and on `MIN_PROMPTS` of each kind, if there are.
        acceptance_seconds: about how long acceptance is measured, latency's rounds between prompts
            included.
        tokens_per_prompt: new tokens that the target writes after each prompt, at most.
        max_size: the most nodes for which passes are timed.
        tree: writes the text that acceptance is counted on; None for one of ten nodes, or
            of 65 if the target is streamed.
        journal: a file from which an interrupted measurement of acceptance goes on.
        on_size: called with each tree size (number of nodes) when it is first timed, and the median
            seconds of the target's pass over so many tokens.
        on_prompt: called after each prompt with the number of prompts so far, the most there may
            be, and what was observed so far.

    Raises:
        SequoiaPlanError: if the prompts do not fit the models.
    """
    kinds = named_kinds([prompt.kind for prompt in prompts])
    prompt_ids = [encode(pair.tokenizer, prompt.text) for prompt in prompts]
    meters = [
        LatencyMeter(pair, sampling, context, on_size, max_size, prompt_ids)
        for context in sorted(contexts)
    ]
    num_prompts_before_latency = min(MIN_PROMPTS, len(prompts))

    def time_between_prompts(
        num_prompts: int, max_prompts: int, observed: ObservedAcceptance
    ) -> None:
        """Time latency in turn with acceptance, once it says which sizes can pay."""
        on_prompt(num_prompts, max_prompts, observed)
        has_begun = bool(meters[0].timers)
        if has_begun and num_prompts % PROMPTS_PER_ROUND == 0:
            for meter in meters:
                if meter.seconds < latency_seconds:
                    meter.round()
        elif not has_begun and num_prompts >= num_prompts_before_latency and observed.trials.any():
            for meter in meters:
                meter.begin(TOKENS_MARGIN * max_tokens_of_any_tree(observed))

    observed = measure_acceptance(
        pair,
        prompt_ids,
        sampling,
        precision=precision,
        tokens_per_prompt=tokens_per_prompt,
        tree=tree,
        journal=journal,
        on_prompt=time_between_prompts,
        seconds=acceptance_seconds,
        min_prompts=1 + max(i for i, k in enumerate(kinds) if kinds[:i].count(k) < MIN_PROMPTS),
    )
    latency, *longer = (meter.finish(latency_seconds) for meter in meters)
    return Profile(
        acceptance=Acceptance.counted(observed.totals()),
        latency=latency,
        longer=tuple(longer),
        settings=sampling.settings(),
        models=pair.metadata,
        hardware=fingerprint(pair.target.device),
        tree_size=tree.size if tree else None,
        prompts=observed.by_prompt(kinds),
        lookup=lookup_counts(observed.lookup, kinds),
        drafting=meters[0].drafter.drafting,
    )


def max_tokens_of_any_tree(observed: ObservedAcceptance) -> float:
    """A bound on the expected tokens a step of trees of up to `SIZES[-1]` nodes, by 3 estimates."""
    acceptance = Acceptance.counted(observed.totals())
    estimates = (  # few prompts are counted so far: each may be too low
        acceptance.rates,  # by level and node class
        acceptance.with_one_class().rates,  # by level
        acceptance.pooled()[None, None],  # the same at all levels
    )
    return max(max_expected_tokens(rates, SIZES[-1]) for rates in estimates)
