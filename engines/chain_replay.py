"""Steps of llama.cpp under other settings, replayed over recorded texts, and what they predict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

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


@dataclass(frozen=True)
class FirstTokens:
    """What a draft proposes along a text if a chain begins at each position."""

    agrees: tuple[bool, ...] = ()
    probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class DraftedText:
    """What a draft model proposed along a text.

    The positions are those of the generated tokens from the second on: the first one comes with the
    prompt's pass.
    """

    agrees: tuple[bool, ...]
    probs: tuple[float, ...]
    tails: Mapping[int, tuple[float, ...]]
    limit: int
    first: FirstTokens = FirstTokens()


def drafted_text(
    steps: Sequence[ChainStep], chains: Sequence[Sequence[float]], limit: int
) -> DraftedText:
    """Puts the recorded chains of one text together.

    A chain that was accepted whole says nothing about the next position. The draft is taken to
    agree there as it did just before, with the same probability. Long chains make that rare.
    """
    agrees: list[bool] = []
    probs: list[float] = []
    tails: dict[int, tuple[float, ...]] = {}
    remaining = iter(chains)
    for step in steps:
        if not step.is_single:
            break  # which of the reported tokens is whose is not known
        chain = next(remaining, ()) if step.drafted else ()
        num_logged = len(chain)
        chain = chain[: step.drafted]  # the server cuts off what a request has no room for
        if num_logged < step.drafted:
            raise SequoiaPlanError(
                f"the server's log has a chain of {num_logged} tokens where its timings have "
                f"{step.drafted}; another client used the server, or this build logs otherwise"
            )
        agrees += [True] * step.accepted
        probs += chain[: step.accepted]
        if step.accepted < step.drafted:
            tails[len(agrees)] = tuple(chain[step.accepted + 1 :])
            agrees.append(False)
            probs.append(chain[step.accepted])
        elif chain:
            agrees.append(True)
            probs.append(chain[-1])
        else:  # the last token of a text is not drafted
            agrees.append(False)
            probs.append(0.0)
    num_tokens = min(limit - 1, sum(step.tokens for step in steps if step.is_single))
    return DraftedText(tuple(agrees[:num_tokens]), tuple(probs[:num_tokens]), tails, limit)


def replay_draft(text: DraftedText, max_length: int, min_prob: float) -> list[ChainStep]:
    """Decodes a recorded text again with another maximum length and threshold."""
    steps = []
    position, end = 0, len(text.agrees)
    while position < end:
        # the server leaves room for the token that every step yields; the first token is the
        # prompt's
        room = min(max_length, text.limit - position - 2)
        drafted = accepted = 0
        wrong = None  # position of the chain's first wrong token
        is_stopped = False
        while drafted < room:
            prob, agrees = _proposal(text, position + drafted, wrong)
            if not drafted and position < len(text.first.probs):
                prob, agrees = text.first.probs[position], text.first.agrees[position]
            if prob < min_prob:
                is_stopped = True
                break
            if wrong is None and not agrees:
                wrong = position + drafted
            drafted += 1
            accepted += wrong is None
        tokens = min(accepted + 1, end - position)
        steps.append(ChainStep(drafted, accepted, tokens, drafted + is_stopped))
        position += accepted + 1
    return steps


def _proposal(text: DraftedText, position: int, wrong: int | None) -> tuple[float, bool]:
    """The probability of the draft's token at a position, and whether it is the text's."""
    if wrong is None:
        if position < len(text.agrees):
            return text.probs[position], text.agrees[position]
        return text.probs[-1], True  # beyond the text's end, where all that is accepted is lost
    tail = text.tails.get(wrong, ())
    index = position - wrong - 1
    if index < len(tail):
        return tail[index], False
    return (tail[-1] if tail else text.probs[wrong]), False


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

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    limit: int


def replay_lookup(text: LookupText, size: int, max_length: int) -> list[ChainStep]:
    """Decodes a text again with llama.cpp's ngram-simple, counted on its tokens."""
    if not size:
        return [ChainStep(0, 0, 1)] * (len(text.tokens) - 1)
    tokens = [*text.prompt, *text.tokens]
    matches = earlier_matches(tokens, size)
    steps = []
    index = len(text.prompt) + 1  # of the next token; the first one is the prompt's
    while index < len(tokens):
        history = index - 1  # the tokens in the cache: all but the last one
        begin = matches[index - 1] + size
        length = 0
        if matches[index - 1] and history > size + max_length + 1:
            length = min(max_length, history - begin)
            length = 0 if length < size else length
        room = text.limit - (index - len(text.prompt)) - 1
        length = max(min(length, room), 0)
        accepted = 0
        while (
            accepted < length
            and index + accepted < len(tokens)
            and tokens[begin + accepted] == tokens[index + accepted]
        ):
            accepted += 1
        steps.append(ChainStep(length, accepted, min(accepted + 1, len(tokens) - index)))
        index += accepted + 1
    return steps


def replay(drafting: Drafting, text: DraftedText | LookupText) -> list[ChainStep]:
    """Decodes a recorded text again with a way of drafting."""
    if isinstance(text, LookupText):
        return replay_lookup(text, drafting.lookup_size, drafting.length)
    return replay_draft(text, drafting.length, drafting.min_prob)


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
