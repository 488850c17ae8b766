"""How often the child of each rank is the one accepted, by level: by one of two methods (methods.py), prompt by prompt, until it is known well enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.profiler.methods import BOTH, Counted, Forced
from sequoia_plan.profiler.observed import Acceptance, collect
from sequoia_plan.runtime import Pair, Sampling

RANKS = 16
"""Children drawn at a node."""
METHODS = ("forced", "decoding")


@dataclass(frozen=True)
class Progress:
    """How far a measurement is after a prompt.

    Args:
        done, most: prompts so far, and how many there may be.
        latest: what was found under the setting at hand.
        found: by index, what was found under every setting so far.
    """

    done: int
    most: int
    latest: Acceptance
    found: Mapping[int, Acceptance]


def measure_acceptance(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    on_prompt: Callable[[int, int, Acceptance], None] = lambda done, most, found: None,
    **options: Any,
) -> list[Acceptance]:
    """Measure every setting, in the order given, to the end; see `finished_prompts`.

    Args:
        on_prompt: called after each prompt with how many there were, how many there may be, and what was found so far.

    Raises:
        SequoiaPlanError: if nothing could be measured.
    """
    found: Mapping[int, Acceptance] = {}
    for now in finished_prompts(pair, prompts, samplings, **options):
        on_prompt(now.done, now.most, now.latest)
        found = now.found
    return results(found)


def results(found: Mapping[int, Acceptance]) -> list[Acceptance]:
    """What was found under every setting, in their order.

    Raises:
        SequoiaPlanError: if nothing could be measured.
    """
    if not found or not all(each.trials.sum() for each in found.values()):
        raise SequoiaPlanError("acceptance: no step was decoded; the prompts leave no room in the model's context")
    return [found[i] for i in range(len(found))]


def finished_prompts(
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
    journal: Path | None = None,
) -> Iterator[Progress]:
    """Measure prompt by prompt. The same arguments give the same result, whatever the machine's speed.

    Settings that differ in verifier or draft temperature alone share the target's text and both models' logits; `sequoia` and `traversal` under
    the same setting share the drawn children, too.

    Args:
        prompts: token ids, taken in order; once more with other seeds in each further round (greedy takes one round).
        method: "forced" or "decoding".
        precision: stop once `Acceptance.precision` of each setting is at most this; 0 uses all prompts and rounds.
        journal: a file that keeps finished prompts until all is done, so that an interrupted run goes on where it was.

    Raises:
        ArgumentError: for another method.
    """
    if method not in METHODS:
        raise ArgumentError(f"method: found {method!r}, expected {' or '.join(METHODS)}")
    facts = [pair.facts, [list(map(int, prompt)) for prompt in prompts], [s.settings() for s in samplings], method, tokens_per_prompt, seed, ranks, "classes"]
    groups = _groups(samplings, method)
    most = sum(len(prompts) * (1 if samplings[group[0]].greedy else rounds) for group in groups)
    compared = any(s.verifier == "traversal" and not s.greedy for s in samplings)
    found: dict[int, Acceptance] = {}
    done = 0
    with Journal(journal, facts) as kept:
        measure = Forced(pair, ranks, compared) if method == "forced" else Counted(pair, ranks)
        for number, group in enumerate(groups):
            mine = [samplings[i] for i in group]
            tallies: list[Any] = []
            for used in range(len(prompts) * (1 if mine[0].greedy else rounds)):
                prompt = torch.tensor(prompts[used % len(prompts)])
                tallies.append(kept.get(f"{number}.{used}", lambda p=prompt, m=mine, s=seed + used: measure(p, m, tokens_per_prompt, s)))  # type: ignore[misc]
                done += 1
                found |= {i: collect(tallies, place) for place, i in enumerate(group)}
                yield Progress(done, most, found[group[0]], dict(found))
                if max(found[i].precision() for i in group) <= precision:
                    break


def _groups(samplings: Sequence[Sampling], method: str) -> list[list[int]]:
    """Which settings can share text: those under which the target writes the same."""

    def law(i: int) -> str:
        mine = samplings[i]
        # by what the text's own draws say, or compared with what is
        lifted = mine.verifier in BOTH and not mine.greedy and replace(mine, verifier="traversal") in samplings
        return repr(replace(mine, verifier="sequoia", draft_temperature=mine.draft_temperature if lifted else None) if method == "forced" else mine)

    order = sorted(range(len(samplings)), key=law)
    return [list(group) for _, group in itertools.groupby(order, law)]
