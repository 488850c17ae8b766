"""Steps of llama.cpp under other settings, replayed over recorded texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sequoia_plan.artifacts import SequoiaPlanError
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
