"""How often the child of each rank is accepted, by level: measured prompt by prompt.

methods.py has the two methods. A measurement ends once the acceptance is known precisely enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.profiler.methods import COMPARED, DecodingMethod, ForcedMethod
from sequoia_plan.profiler.observed import TREE, ObservedAcceptance, collect
from sequoia_plan.runtime import Pair, Sampling

RANKS = 16
"""Number of children drawn at a node."""
METHODS = ("forced", "decoding")


@dataclass(frozen=True)
class Progress:
    """How far a measurement is after a prompt."""

    num_prompts: int
    max_prompts: int
    latest: ObservedAcceptance
    acceptances: Mapping[int, ObservedAcceptance]


def measure_acceptance(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    on_prompt: Callable[[int, int, ObservedAcceptance], None] = lambda done, total, latest: None,
    **options: Any,
) -> list[ObservedAcceptance]:
    """Measure every sampling to the end, and return the acceptances in the order of `samplings`."""
    acceptances: Mapping[int, ObservedAcceptance] = {}
    for progress in measure_by_prompt(pair, prompts, samplings, **options):
        on_prompt(progress.num_prompts, progress.max_prompts, progress.latest)
        acceptances = progress.acceptances
    return in_order(acceptances)


def in_order(acceptances: Mapping[int, ObservedAcceptance]) -> list[ObservedAcceptance]:
    """The acceptances in the order of their samplings."""
    has_trials = [acceptance.trials.sum() > 0 for acceptance in acceptances.values()]
    if not has_trials or not all(has_trials):
        raise SequoiaPlanError(
            "acceptance: no step was decoded; the prompts leave no room in the model's context"
        )
    return [acceptances[index] for index in range(len(acceptances))]


def measure_by_prompt(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    method: str = METHODS[0],
    precision: float = 0.07,
    tokens_per_prompt: int = 32,
    rounds: int = 1,
    seed: int = 0,
    ranks: int = RANKS,
    tree: TokenTree | None = None,
    journal: Path | None = None,
) -> Iterator[Progress]:
    """Measure acceptance prompt by prompt, and yield the progress after each."""
    if method not in METHODS:
        raise ArgumentError(f"method: found {method!r}, expected {' or '.join(METHODS)}")
    if tree is not None and method != "forced":
        raise ArgumentError(f"tree: found with the method {method}, expected the method forced")
    work = [  # a journal of other work is ignored
        pair.metadata,
        [list(map(int, prompt)) for prompt in prompts],
        [sampling.settings() for sampling in samplings],
        method,
        tokens_per_prompt,
        seed,
        ranks,
        "classes of match",  # journals of versions that did not count lookup are other work
        *([] if tree is None else [tree.parents.tolist()]),
    ]
    groups = _groups_sharing_text(samplings, method)

    def max_prompts_of(group: list[int]) -> int:
        """The most prompts that a group may use, all rounds together."""
        return len(prompts) * (1 if samplings[group[0]].greedy else rounds)

    max_prompts = sum(map(max_prompts_of, groups))
    # `traversal` is measured by comparing it with `sequoia` while the text is written
    compares = any(s.verifier == "traversal" and not s.greedy for s in samplings)
    acceptances: dict[int, ObservedAcceptance] = {}
    num_prompts = 0
    results = Journal(journal, work)
    measuring_method: ForcedMethod | DecodingMethod
    if method == "forced":
        measuring_method = ForcedMethod(pair, ranks, compares, tree)
    else:
        measuring_method = DecodingMethod(pair, ranks)
    for group_number, group in enumerate(groups):
        group_samplings = [samplings[index] for index in group]
        tallies: list[Any] = []  # for each prompt, what each sampling of the group counted
        for use in range(max_prompts_of(group)):
            name, prompt = f"{group_number}.{use}", torch.tensor(prompts[use % len(prompts)])
            if (tally := results.get(name)) is None:
                tally = measuring_method(prompt, group_samplings, tokens_per_prompt, seed + use)
                results.add(name, tally)
            tallies.append(tally)
            num_prompts += 1
            for index_in_group, index in enumerate(group):
                acceptances[index] = collect(tallies, index_in_group, tree or TREE)
            latest = acceptances[group[0]]
            yield Progress(num_prompts, max_prompts, latest, dict(acceptances))
            if max(acceptances[index].precision() for index in group) <= precision:
                break


def _groups_sharing_text(samplings: Sequence[Sampling], method: str) -> list[list[int]]:
    """Indices of `samplings`, in groups for which the target writes the same text."""

    def text_key(index: int) -> str:
        """Equal for two samplings if one text serves both."""
        sampling = samplings[index]
        if method != "forced":
            return repr(sampling)
        # `sequoia` and `traversal` are compared while the text is written, so the children drawn
        # there matter, and with them the draft's temperature; otherwise only what the target's
        # probabilities depend on
        is_compared = (
            sampling.verifier in COMPARED
            and not sampling.greedy
            and replace(sampling, verifier="traversal") in samplings
        )
        draft_temperature = sampling.draft_temperature if is_compared else None
        any_verifier = "sequoia"
        return repr(replace(sampling, verifier=any_verifier, draft_temperature=draft_temperature))

    indices = sorted(range(len(samplings)), key=text_key)
    return [list(group) for _, group in itertools.groupby(indices, text_key)]
