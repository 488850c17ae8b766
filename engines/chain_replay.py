"""Steps of llama.cpp under other settings, replayed over recorded texts, and what they predict."""

from __future__ import annotations

import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import structs

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.engines.chain import effective_trials
from sequoia_plan.engines.plan import NONE, ChainAcceptance, Drafting
from sequoia_plan.engines.prediction import Expectation, ratio_error
from sequoia_plan.engines.timing import StepTimes

NOTHING_DRAFTED = "nothing was drafted on these texts: give more --tokens or other prompts"


class ChainStep(NamedTuple):
    """One step of decoding, as a server did it or as a replay predicts it."""

    drafted: int
    accepted: int
    tokens: int
    passes: int = 0
    """Passes of the draft that drafted, one more than tokens where the threshold ended a chain."""
    seconds: float = 0.0
    is_single: bool = True
    """Whether the server reported the step alone."""


class Proposal(NamedTuple):
    """The token that a draft proposes at a position of a text, after the text's own tokens."""

    prob: float
    agrees: bool
    candidates: Sequence[int] = ()
    """The likeliest tokens, first the one that is drafted."""


@dataclass(frozen=True)
class DraftedText:
    """What a draft proposed along a text, and the text's tokens, in which others are looked up.

    The positions are those of the generated tokens from the second on: the first one comes with the
    prompt's pass.
    """

    limit: int
    """Tokens that a request may take."""
    prompt: Sequence[int] = ()
    tokens: Sequence[int] = ()
    proposals: Sequence[Proposal] = ()
    tails: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Probabilities of the tokens that were drafted after a wrong one, by its position."""
    bonus: int = 1
    """Tokens that a step of a rejected draft yields besides accepted ones (`Server.bonus`)."""
    first: Sequence[Proposal] = ()
    """Proposals where a chain begins, if they are others: of a draft that reads hidden states."""

    def proposal(self, position: int, wrong: int | None) -> Proposal:
        """What is proposed at a position of a chain whose first wrong token is at `wrong`."""
        if wrong is not None:
            tail = self.tails.get(wrong) or [self.proposals[wrong].prob]
            return Proposal(tail[min(position - wrong, len(tail)) - 1], False)
        if position < len(self.proposals):
            return self.proposals[position]
        return Proposal(self.proposals[-1].prob, True)  # beyond the end all accepted is lost

    @cached_property
    def matches(self) -> Callable[[int], Sequence[int]]:
        """`earlier_matches` by the number of tokens that are looked up."""
        return cache(partial(earlier_matches, [*self.prompt, *self.tokens]))

    def replay(self, drafting: Drafting) -> list[ChainStep]:
        """Decodes the text again in another way."""
        end = len(self.proposals) if drafting.length else len(self.tokens) - 1
        if drafting.lookup_size:
            end = min(end, len(self.tokens) - 1)
        steps = []
        position = 0
        while position < end:
            # the server leaves room for the token that every step yields; the first token is the
            # prompt's
            room = self.limit - position - 2
            drafted, accepted = self._look_up(position, room, drafting)
            passes = 0
            if not drafted and room > 0 and drafting.length:
                drafted, accepted, passes = self._draft(position, room, drafting)
            tokens = accepted + (self.bonus if accepted < drafted else 1)
            steps.append(ChainStep(drafted, accepted, min(tokens, end - position), passes))
            position += tokens
        return steps

    def _look_up(self, position: int, room: int, drafting: Drafting) -> tuple[int, int]:
        """Tokens drafted and accepted by llama.cpp's ngram-simple."""
        size, length = drafting.lookup_size, drafting.lookup_length
        history = len(self.prompt) + position  # tokens in the cache: all but the last one
        if not size or history <= size + length + 1 or not (match := self.matches(size)[history]):
            return 0, 0
        begin = match + size
        text = [*self.prompt, *self.tokens][begin : min(begin + length, history)]
        if len(text) < size:
            return 0, 0
        copied = text[: max(room, 0)]
        same = [*map(operator.eq, copied, self.tokens[position + 1 :]), False]
        return len(copied), same.index(False)

    def _draft(self, position: int, room: int, drafting: Drafting) -> tuple[int, int, int]:
        """Tokens drafted and accepted by a chain of the draft, and its passes.

        A draft that reads hidden states drafts the whole chain and then cuts it off.
        """
        most = drafting.length if self.first else min(drafting.length, room)
        drafted = accepted = 0
        wrong = None  # position of the chain's first wrong token
        while drafted < most:
            proposal = self.proposal(position + drafted, wrong)
            if not drafted and position < len(self.first):
                proposal = self.first[position]
            if proposal.prob < drafting.min_prob:
                break
            if wrong is None and not proposal.agrees:
                wrong = position + drafted
            drafted += 1
            accepted += wrong is None
        passes = drafted + (drafted < most)
        return min(drafted, room), min(accepted, room), passes


def drafted_text(
    steps: Sequence[ChainStep], chains: Iterator[Sequence[Proposal]], limit: int
) -> DraftedText:
    """Puts the next recorded chains together, those of one text.

    A chain that was accepted whole says nothing about the next position. The draft is taken to
    agree there as it did just before, with the same probability. Long chains make that rare.
    """
    proposals: list[Proposal] = []
    tails: dict[int, Sequence[float]] = {}
    num_tokens = 0
    is_known = True  # whose tokens are whose, before steps that are reported together
    for step in steps:
        logged: list[Proposal] = []
        while len(logged) < step.drafted:
            proposed = next(chains, None)
            if not proposed:
                raise SequoiaPlanError(
                    "the server's debug log has fewer drafted tokens than its timings; this build "
                    "logs otherwise than ggml 0.25"
                )
            logged += proposed
        is_known = is_known and step.is_single
        if not is_known:
            continue
        num_tokens += step.tokens
        drafted = logged[: step.drafted]  # the server cuts off what a request has no room for
        proposals += [proposal._replace(agrees=True) for proposal in drafted[: step.accepted]]
        if step.accepted < step.drafted:
            tails[len(proposals)] = [proposal.prob for proposal in drafted[step.accepted + 1 :]]
            proposals.append(drafted[step.accepted])
            unknown = step.tokens - step.accepted - 1  # of a recurrent target
            proposals += [drafted[step.accepted]._replace(candidates=())] * unknown
        elif drafted:
            proposals.append(proposals[-1]._replace(candidates=()))
        else:  # the last token of a text is not drafted
            proposals.append(Proposal(0.0, False))
    return DraftedText(limit, proposals=proposals[: min(limit - 1, num_tokens)], tails=tails)


def earlier_matches(tokens: Sequence[int], size: int) -> list[int]:
    """Finds where the last tokens before each position occurred before.

    As `common_ngram_simple_draft` of llama.cpp does: the latest begin >= 1 of the same `size`
    tokens that end before the last token.
    """
    begins: dict[tuple[int, ...], int] = {}
    matches = [0] * len(tokens)
    for last in range(len(tokens)):
        newest = last - size - 1  # the latest begin that llama.cpp looks at
        if newest >= 1:
            begins[tuple(tokens[newest : newest + size])] = newest
        if last - size + 1 >= 0:
            matches[last] = begins.get(tuple(tokens[last - size + 1 : last + 1]), 0)
    return matches


@dataclass(frozen=True)
class ReplayModel:
    """Predicts the ways of drafting of llama.cpp from the steps of recorded texts."""

    texts: Sequence[DraftedText]
    draftings: Sequence[Drafting]
    """The ways to choose from, none first."""
    acceptance: ChainAcceptance
    recorded: Mapping[Drafting, Sequence[Sequence[ChainStep]]] = field(default_factory=dict)
    """Steps that a server made, with their seconds, in ways that are not replayed."""

    @cached_property
    def replays(self) -> dict[Drafting, Sequence[Sequence[ChainStep]]]:
        """Of each way of drafting the steps of every text that has any."""
        replayed = {each: [text.replay(each) for text in self.texts] for each in self.draftings}
        return {**replayed, **self.recorded}

    def improved(self, gain: float) -> ReplayModel:
        """The model with a draft that is right more often: some wrong proposals become so."""
        rng = random.Random(0)
        wrong = [p for text in self.texts for p in text.proposals if not p.agrees]
        share = gain * sum(len(text.proposals) for text in self.texts) / max(len(wrong), 1)

        def better(proposals: Sequence[Proposal]) -> list[Proposal]:
            certain = Proposal(1.0, True)
            return [p if p.agrees or rng.random() > share else certain for p in proposals]

        texts = [
            replace(text, proposals=better(text.proposals), first=better(text.first))
            for text in self.texts
        ]
        return replace(self, texts=texts)

    def expect(self, drafting: Drafting, batch: int, times: StepTimes) -> Expectation:
        """The mean step of all texts. The error is from how texts differ and from the times."""
        replays = [steps for steps in self.replays[drafting] if steps]
        tokens = [sum(step.tokens for step in steps) for steps in replays]
        price = cache(lambda *kind: float(parts_of(drafting, times, *kind).sum()))
        seconds = [
            sum(step.seconds or price(step.drafted, step.passes) for step in steps)
            for steps in replays
        ]
        time_error = times.seconds_and_error(batch, drafting.length)[1]
        speed = sum(tokens) / sum(seconds)
        text_error = ratio_error(tokens, seconds) / speed if drafting != NONE else 0.0
        num_steps = sum(map(len, replays))
        return Expectation(
            sum(tokens) / num_steps, sum(seconds) / num_steps, math.hypot(time_error, text_error)
        )

    def parts_per_token(self, drafting: Drafting, times: StepTimes) -> Floats:
        """Seconds of the parts of all steps over their tokens, of a chain (`StepTimes.parts`)."""
        steps = [*chain.from_iterable(self.replays[drafting])]
        counts = Counter((step.drafted, step.passes) for step in steps)
        parts = [count * parts_of(drafting, times, *kind) for kind, count in counts.items()]
        return np.sum(parts, axis=0) / sum(step.tokens for step in steps)


def parts_of(drafting: Drafting, times: StepTimes, drafted: int, passes: int) -> Floats:
    """Seconds of the parts of a step, float64 [4]."""
    return np.array(times.parts(drafted, passes if drafting.length else None))


def acceptance_of(texts: Sequence[Sequence[ChainStep]], source: str) -> ChainAcceptance:
    """Counts how far chains were accepted, in those steps that drafted the longest chains."""
    steps = [*chain.from_iterable(texts)]
    length = max((step.drafted for step in steps), default=0)
    if not length:
        return ChainAcceptance(max(len(steps), 1), (0,), source=source)
    full = [step for step in steps if step.drafted == length]
    counts = ChainAcceptance(
        drafts=len(full),
        accepted=tuple(sum(step.accepted > i for step in full) for i in range(length)),
        drafting_share=round(sum(step.drafted > 0 for step in steps) / len(steps), 4),
        source=source,
    )
    tokens_by_text = [[step.tokens for step in steps] for steps in texts]
    return structs.replace(counts, trials=round(effective_trials(counts, tokens_by_text), 1))
