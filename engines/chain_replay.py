"""Steps of llama.cpp under other settings, replayed over recorded texts, and what they predict."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain, count, islice, repeat, takewhile
from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.plan import NONE, ChainAcceptance, Drafting
from sequoia_plan.engines.prediction import Expectation, StepTimes, relative_error

NOTHING_DRAFTED = "nothing was drafted on these texts: give others with --prompts"


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


Texts = Sequence[Sequence[ChainStep]]
"""The steps of each text."""


class Proposal(NamedTuple):
    """The token that a draft proposes at a position of a text, after the text's own tokens."""

    prob: float
    agrees: bool
    candidates: list[int] = []
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

    def proposed(self, position: int) -> Iterator[Proposal]:
        """The proposals of a chain that begins at a position, one after the other without end."""
        for at in count(position):
            if at == position < len(self.first):
                proposal = self.first[at]
            elif at < len(self.proposals):
                proposal = self.proposals[at]
            else:
                proposal = Proposal(self.proposals[-1].prob, True)  # `replay` cuts it off
            yield proposal
            if not proposal.agrees:  # all that follows a wrong token is wrong
                tail = self.tails.get(at) or [self.proposals[at].prob]
                for prob in chain(tail, repeat(tail[-1])):
                    yield Proposal(prob, False)

    @cached_property
    def matches(self) -> Callable[[int], Sequence[int]]:
        """`earlier_matches` in prompt and text, as a function of the number of tokens looked up."""
        return cache(partial(earlier_matches, [*self.prompt, *self.tokens]))

    def replay(self, drafting: Drafting) -> list[ChainStep]:
        """The steps of decoding this text again with another way of drafting."""
        end = len(self.tokens) - 1  # as far as the record has what the drafting needs
        if drafting.length:
            num_proposals = len(self.proposals)
            end = min(num_proposals, end) if drafting.lookup_size else num_proposals
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
        """How many tokens llama.cpp's ngram-simple copies in a step, and how many are accepted."""
        size, length = drafting.lookup_size, drafting.lookup_length
        history = len(self.prompt) + position  # tokens in the cache: all but the last one
        if not size or history <= size + length + 1:
            return 0, 0
        match = self.matches(size)[history]
        if not match:
            return 0, 0
        begin = match + size
        text = [*self.prompt, *self.tokens][begin : min(begin + length, history)]
        if len(text) < size:
            return 0, 0
        copied = text[: max(room, 0)]
        same = [*map(operator.eq, copied, self.tokens[position + 1 :]), False]
        return len(copied), same.index(False)

    def _draft(self, position: int, room: int, drafting: Drafting) -> tuple[int, int, int]:
        """How many tokens a chain of the draft has in a step, how many are accepted; its passes.

        A draft that reads hidden states drafts the whole chain and then cuts it off to the `room`.
        """
        most = drafting.length if self.first else min(drafting.length, room)
        likely = takewhile(
            lambda proposal: proposal.prob >= drafting.min_prob, self.proposed(position)
        )
        agrees = [proposal.agrees for proposal in islice(likely, most)]
        passes = len(agrees) + (len(agrees) < most)
        accepted = [*agrees, False].index(False)
        return min(len(agrees), room), min(accepted, room), passes


def with_proposals(
    text: DraftedText, steps: Sequence[ChainStep], chains: Iterable[Sequence[Proposal]]
) -> DraftedText:
    """Adds what a draft proposed along a text, from recorded steps and their logged chains.

    Some drafts log nothing: no p-min can be planned.

    A chain that was accepted whole says nothing about the next position. The draft is taken to
    agree there as it did just before, with the same probability. Long chains make that rare.
    """
    proposals: list[Proposal] = []
    tails: dict[int, Sequence[float]] = {}
    num_tokens = 0
    unlogged = ([Proposal(1.0, False)] * step.drafted for step in steps if step.drafted)
    chains = iter(chains or unlogged)
    for step in steps:
        if not step.is_single:
            break  # from there on it is not known whose tokens are whose
        logged = next(chains, ()) if step.drafted else ()
        if len(logged) < step.drafted:
            raise SequoiaPlanError(
                "the server's debug log has fewer drafted tokens than its timings; this build "
                "logs otherwise than ggml 0.25"
            )
        num_tokens += step.tokens
        drafted = logged[: step.drafted]  # the server cuts off what a request has no room for
        proposals += [proposal._replace(agrees=True) for proposal in drafted[: step.accepted]]
        if step.accepted < step.drafted:
            tails[len(proposals)] = [proposal.prob for proposal in drafted[step.accepted + 1 :]]
            wrong = drafted[step.accepted]
            unknown = step.tokens - step.accepted - 1  # of a recurrent target
            proposals += [wrong, *[wrong._replace(candidates=[])] * unknown]
        elif drafted:
            proposals.append(proposals[-1]._replace(candidates=[]))
        else:  # the last token of a text is not drafted
            proposals.append(Proposal(0.0, False))
    return replace(text, proposals=proposals[: min(text.limit - 1, num_tokens)], tails=tails)


def earlier_matches(tokens: Sequence[int], size: int) -> list[int]:
    """For each token of a text, where the `size` tokens that end with it began before; 0 for none.

    As `common_ngram_simple_draft` of llama.cpp does: the latest begin >= 1 of the same `size`
    tokens that end two tokens or more before this one.
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
    recorded: Mapping[Drafting, Texts] = field(default_factory=dict)
    """Steps that a server made, with their seconds, in ways that are not replayed."""

    @cached_property
    def replays(self) -> Callable[[Drafting], Texts]:
        """The steps of every text by the way of drafting."""
        return cache(
            lambda drafting: (
                self.recorded.get(drafting) or [text.replay(drafting) for text in self.texts]
            )
        )

    def improved(self, gain: float) -> ReplayModel:
        """The model as if the draft were right more often: by the share `gain` of all proposals."""
        rng = random.Random(0)
        wrong_share = np.mean([not p.agrees for text in self.texts for p in text.proposals])

        def better(proposals: Sequence[Proposal]) -> list[Proposal]:
            """Each wrong proposal becomes a right one with the probability gain / wrong_share."""
            improved = []
            for proposal in proposals:
                is_chosen = rng.random() * wrong_share < gain
                turns = is_chosen and not proposal.agrees
                improved.append(Proposal(1.0, True) if turns else proposal)
            return improved

        texts = [
            replace(text, proposals=better(text.proposals), first=better(text.first))
            for text in self.texts
        ]
        return replace(self, texts=texts)

    def expect(self, drafting: Drafting, batch: int, times: StepTimes) -> Expectation:
        """The mean step of all texts; the seconds are those of one request, at any `batch`.

        The error is from the times and, with drafting, from how texts differ.
        """
        texts = [steps for steps in self.replays(drafting) if steps]
        tokens = [sum(step.tokens for step in steps) for steps in texts]
        price = cache(
            lambda drafted, passes: float(times.parts(drafted, passes, drafting.length > 0).sum())
        )
        seconds = [
            # replayed steps have no seconds of their own
            sum(step.seconds or price(step.drafted, step.passes) for step in steps)
            for steps in texts
        ]
        time_error = times.seconds_and_error(batch, drafting.length)[1]
        text_error = relative_error(tokens, seconds) if drafting != NONE else 0.0
        num_steps = sum(map(len, texts))
        return Expectation(
            sum(tokens) / num_steps, sum(seconds) / num_steps, math.hypot(time_error, text_error)
        )


def acceptance_of(texts: Texts, source: str) -> ChainAcceptance:
    """Counts how far chains were accepted, in those steps that drafted the longest chains."""
    steps = [*chain(*texts)]
    length = max((step.drafted for step in steps), default=0)
    longest = [step for step in steps if step.drafted == length]
    return ChainAcceptance(
        drafts=max(len(longest), 1),
        accepted=tuple(sum(step.accepted > i for step in longest) for i in range(max(length, 1))),
        error=relative_error(
            (sum(step.tokens - 1 for step in text) for text in texts), map(len, texts)
        ),
        drafting_share=sum(step.drafted > 0 for step in steps) / max(len(steps), 1),
        source=source,
    )
