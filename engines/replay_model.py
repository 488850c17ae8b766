"""Predicts how llama.cpp decodes in every way of drafting, from replayed texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.chain import effective_trials
from sequoia_plan.engines.chain_replay import ChainStep, DraftedText, LookupText, replay
from sequoia_plan.engines.plan import ChainAcceptance
from sequoia_plan.engines.prediction import Expectation, ratio_error
from sequoia_plan.engines.timing import StepTimes
from sequoia_plan.engines.workload import Drafting


@dataclass(frozen=True)
class ReplayModel:
    """Predicts the ways of drafting of one type from recorded texts."""

    texts: Sequence[DraftedText | LookupText]
    acceptance: ChainAcceptance
    draftings: Sequence[Drafting]
    _replays: dict[Drafting, list[list[ChainStep]]] = field(default_factory=dict)

    def replayed(self, drafting: Drafting) -> list[list[ChainStep]]:
        """The steps of each text that has any."""
        if drafting not in self._replays:
            replays = [replay(drafting, text) for text in self.texts]
            self._replays[drafting] = [steps for steps in replays if steps]
        return self._replays[drafting]

    def expect(self, drafting: Drafting, batch: int, times: StepTimes) -> Expectation:
        """The mean step of all texts. The error is from how texts differ and from the times."""
        replays = self.replayed(drafting)
        has_draft = drafting.length > 0 and not drafting.lookup_size
        tokens = [sum(step.tokens for step in steps) for steps in replays]
        seconds = [seconds_of(steps, has_draft, batch, times) for steps in replays]
        time_error = times.seconds_and_error(batch, drafting.length)[1]
        speed = sum(tokens) / sum(seconds)
        text_error = ratio_error(tokens, seconds) / speed if drafting.length else 0.0
        num_steps = sum(map(len, replays))
        return Expectation(
            sum(tokens) / num_steps, sum(seconds) / num_steps, math.hypot(time_error, text_error)
        )


def seconds_of(steps: Iterable[ChainStep], has_draft: bool, batch: int, times: StepTimes) -> float:
    """Seconds of several steps.

    A server with a draft has the draft read the verified tokens, too, which takes about a pass if
    nothing was drafted. A chain that the threshold ends has a pass more than tokens.
    """
    num_passes = sum(step.passes - step.drafted + (not step.drafted) for step in steps)
    counts = Counter(step.drafted for step in steps)
    seconds = sum(n * times.seconds_and_error(batch, length)[0] for length, n in counts.items())
    return seconds + (num_passes * times.pass_seconds if has_draft else 0.0)


def acceptance_of(texts: Sequence[Sequence[ChainStep]], source: str) -> ChainAcceptance:
    """Counts how far chains were accepted, in those steps that drafted the longest chains."""
    steps = [*chain.from_iterable(texts)]
    length = max((step.drafted for step in steps), default=0)
    if not length:
        raise SequoiaPlanError(
            "nothing was drafted on these texts; give more --tokens or other prompts"
        )
    full = [step for step in steps if step.drafted == length]
    counts = ChainAcceptance(
        drafts=len(full),
        accepted=tuple(sum(step.accepted > i for step in full) for i in range(length)),
        drafting_share=round(sum(step.drafted > 0 for step in steps) / len(steps), 4),
        source=source,
    )
    tokens_by_text = [[step.tokens for step in steps] for steps in texts]
    return replace(counts, trials=round(effective_trials(counts, tokens_by_text), 1))
