"""Steps of llama.cpp under other settings, replayed over recorded texts, and what they predict."""

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.chain import effective_trials
from sequoia_plan.engines.plan import ChainAcceptance
from sequoia_plan.engines.prediction import Expectation, ratio_error
from sequoia_plan.engines.timing import StepTimes
from sequoia_plan.engines.workload import Drafting


@dataclass(frozen=True)
class ChainStep:
    """One step of decoding, as a server did it or as a replay predicts it."""

    drafted: int
    accepted: int
    tokens: int
    passes: int = 0
    seconds: float = 0.0
    is_single: bool = True


class Proposal(NamedTuple):
    """The token that a draft proposes at a position of a text, after the text's own tokens."""

    prob: float
    agrees: bool


@dataclass(frozen=True)
class DraftedText:
    """What a draft model proposed along a text.

    The positions are those of the generated tokens from the second on: the first one comes with the
    prompt's pass.
    """

    proposals: Sequence[Proposal]
    tails: Mapping[int, Sequence[float]]
    """Probabilities of the tokens that were drafted after a wrong one, by its position."""
    limit: int
    first: Sequence[Proposal] = ()
    """Proposals where a chain begins, if they are others."""

    def proposal(self, position: int, wrong: int | None) -> Proposal:
        """What is proposed at a position of a chain whose first wrong token is at `wrong`."""
        if wrong is not None:
            tail = self.tails.get(wrong) or [self.proposals[wrong].prob]
            return Proposal(tail[min(position - wrong, len(tail)) - 1], False)
        if position < len(self.proposals):
            return self.proposals[position]
        return Proposal(self.proposals[-1].prob, True)  # beyond the end all accepted is lost

    def replay(self, drafting: Drafting) -> list[ChainStep]:
        """Decodes the text again with another maximum length and threshold."""
        steps = []
        position, end = 0, len(self.proposals)
        while position < end:
            # the server leaves room for the token that every step yields; the first token is the
            # prompt's
            room = min(drafting.length, self.limit - position - 2)
            drafted = accepted = 0
            wrong = None  # position of the chain's first wrong token
            is_stopped = False
            while drafted < room:
                proposal = self.proposal(position + drafted, wrong)
                if not drafted and position < len(self.first):
                    proposal = self.first[position]
                if proposal.prob < drafting.min_prob:
                    is_stopped = True
                    break
                if wrong is None and not proposal.agrees:
                    wrong = position + drafted
                drafted += 1
                accepted += wrong is None
            tokens = min(accepted + 1, end - position)
            steps.append(ChainStep(drafted, accepted, tokens, drafted + is_stopped))
            position += accepted + 1
        return steps


def drafted_text(
    steps: Sequence[ChainStep], chains: Iterator[Sequence[float]], limit: int
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
        logged: list[float] = []
        while len(logged) < step.drafted:
            probs = next(chains, None)
            if not probs:
                raise SequoiaPlanError(
                    "the server's debug log has fewer drafted tokens than its timings; this build "
                    "logs otherwise than ggml 0.25"
                )
            logged += probs
        is_known = is_known and step.is_single
        if not is_known:
            continue
        num_tokens += step.tokens
        chain = logged[: step.drafted]  # the server cuts off what a request has no room for
        proposals += [Proposal(prob, True) for prob in chain[: step.accepted]]
        if step.accepted < step.drafted:
            tails[len(proposals)] = chain[step.accepted + 1 :]
            proposals.append(Proposal(chain[step.accepted], False))
        elif chain:
            proposals.append(proposals[-1])
        else:  # the last token of a text is not drafted
            proposals.append(Proposal(0.0, False))
    return DraftedText(proposals[: min(limit - 1, num_tokens)], tails, limit)


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
class LookupText:
    """A text in which tokens are looked up."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    limit: int

    def replay(self, drafting: Drafting) -> list[ChainStep]:
        """Decodes the text again with llama.cpp's ngram-simple, counted on its tokens."""
        size = drafting.lookup_size
        if not size:
            return [ChainStep(0, 0, 1)] * (len(self.tokens) - 1)
        tokens = [*self.prompt, *self.tokens]
        matches = earlier_matches(tokens, size)
        steps = []
        index = len(self.prompt) + 1  # of the next token; the first one is the prompt's
        while index < len(tokens):
            history = index - 1  # the tokens in the cache: all but the last one
            match = matches[index - 1]
            copied = tokens[match + size : history][: drafting.length]
            if not match or len(copied) < size or history <= size + drafting.length + 1:
                copied = []
            room = self.limit - (index - len(self.prompt)) - 1
            drafted = copied[: max(room, 0)]
            own = tokens[index : index + len(drafted)]
            accepted = [*map(operator.eq, drafted, own), False].index(False)
            tokens_of_step = min(accepted + 1, len(tokens) - index)
            steps.append(ChainStep(len(drafted), accepted, tokens_of_step))
            index += accepted + 1
        return steps


@dataclass(frozen=True)
class ReplayModel:
    """Predicts the ways of drafting of one type from the steps of recorded texts."""

    acceptance: ChainAcceptance
    replays: Mapping[Drafting, Sequence[Sequence[ChainStep]]]
    """Of each way of drafting the steps of every text."""

    @property
    def draftings(self) -> list[Drafting]:
        """The ways of drafting to choose from."""
        return list(self.replays)

    def expect(self, drafting: Drafting, batch: int, times: StepTimes) -> Expectation:
        """The mean step of all texts. The error is from how texts differ and from the times."""
        replays = [steps for steps in self.replays[drafting] if steps]
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
