"""A replay of recorded chains does what the server would have done with other settings."""

import random

import pytest
from refusals import refusal

from sequoia_plan.engines.chain_replay import (
    ChainStep,
    DraftedText,
    Proposal,
    ReplayModel,
    with_proposals,
)
from sequoia_plan.engines.plan import ChainAcceptance, Drafting

LIMIT = 60


def proposed(*probs):
    return [Proposal(prob, False) for prob in probs]


class Drafted:
    """A draft whose agreement and probabilities depend on the text alone, as a greedy draft's."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.agrees = []
        while len(self.agrees) < LIMIT + 80:  # runs, so that it matters where a chain begins
            self.agrees += [True] * rng.randrange(12) + [False] * rng.randrange(1, 4)
        self.probs = [round(rng.uniform(0.3 if a else 0.05, 1.0), 3) for a in self.agrees]
        self.tails = [[round(rng.random(), 3) for _ in range(40)] for _ in self.agrees]

    def decode(self, max_length, min_prob, limit=LIMIT):
        """The loop of llama.cpp's `draft` and of the server around it."""
        steps, chains, position, length = [], [], 0, limit - 1
        while position < length:
            chain, wrong, is_stopped = [], None, False
            while len(chain) < min(max_length, length - position - 1) and not is_stopped:
                at = position + len(chain)
                prob = self.probs[at] if wrong is None else self.tails[wrong][at - wrong - 1]
                is_stopped = prob < min_prob
                if not is_stopped:
                    wrong = at if wrong is None and not self.agrees[at] else wrong
                    chain.append(prob)
            accepted = len(chain) if wrong is None else wrong - position
            tokens = min(accepted + 1, length - position)
            steps.append(ChainStep(len(chain), accepted, tokens, len(chain) + is_stopped))
            if chain:
                chains.append(proposed(*chain))
            position += accepted + 1
        return steps, chains


@pytest.mark.parametrize("seed", range(30))
def test_a_replay_is_what_the_server_does(seed):
    drafted = Drafted(seed)
    text = with_proposals(DraftedText(LIMIT), *drafted.decode(24, 0.0, LIMIT + 24))
    for max_length in (1, 2, 3, 5, 8):
        for min_prob in (0.0, 0.3, 0.6, 0.9):
            expected, _ = drafted.decode(max_length, min_prob)
            assert text.replay(Drafting(max_length, min_prob)) == expected


@pytest.mark.parametrize(
    ("steps", "chains", "expected", "tails"),
    [
        (  # a chain that was accepted whole is taken to go on
            [ChainStep(2, 2, 3), ChainStep(2, 0, 1)],
            [(0.9, 0.8), (0.7, 0.2)],
            [(0.9, True), (0.8, True), (0.8, True), (0.7, False)],
            {3: [0.2]},
        ),
        (  # a text ends where the server reports two steps as one
            [ChainStep(2, 1, 2), ChainStep(4, 1, 5, is_single=False), ChainStep(2, 2, 3)],
            [(0.9, 0.8), (0.7, 0.2), (0.5, 0.5), (0.4, 0.3)],
            [(0.9, True), (0.8, False)],
            {1: []},
        ),
        # a draft that logs nothing
        ([ChainStep(2, 1, 2)], [], [(1.0, True), (1.0, False)], {1: []}),
    ],
)
def test_what_steps_and_chains_say_of_a_text(steps, chains, expected, tails):
    text = with_proposals(DraftedText(20), steps, [proposed(*chain) for chain in chains])
    assert [p[:2] for p in text.proposals] == expected and text.tails == tails


def test_a_log_that_disagrees_with_the_timings_is_one_line():
    with refusal("log has fewer drafted tokens than its timings"):
        with_proposals(DraftedText(20), [ChainStep(2, 1, 2)], [proposed(0.9)])


def draft_of_llama_cpp(tokens, sampled, size, length):
    """The search of `common_ngram_simple_draft`, word for word."""
    if len(tokens) <= size + length + 1:
        return []
    pattern = [*tokens[len(tokens) - size + 1 :], sampled]
    found = 0
    for j in range(len(tokens) - size - 1, 0, -1):
        if tokens[j : j + size] == pattern:
            found = j
            break
    if not found:
        return []
    copied = min(length, len(tokens) - (found + size))
    return [] if copied < size else tokens[found + size : found + size + copied]


@pytest.mark.parametrize("seed", range(20))
def test_a_lookup_is_what_llama_cpp_does(seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(20)]
    for _ in range(120):  # copies, so that there is something to find
        start = rng.randrange(len(tokens))
        tokens += [*tokens[start : start + rng.randrange(1, 12)], rng.randrange(4)]
    prompt, generated = tokens[:40], tokens[40:100]
    limit = 60 + 9 * (seed % 2)  # a text may end before the limit
    for size, length in ((1, 1), (2, 3), (2, 8), (3, 12), (4, 4), (6, 12)):
        expected, index = [], 41
        while index < 100:
            draft = draft_of_llama_cpp(tokens[: index - 1], tokens[index - 1], size, length)
            draft = draft[: max(limit - (index - 40) - 1, 0)]
            same = [a == b for a, b in zip(draft, tokens[index:100], strict=False)]
            accepted = [*same, False].index(False)
            expected.append(ChainStep(len(draft), accepted, min(accepted + 1, 100 - index)))
            index += accepted + 1
        text = DraftedText(limit, prompt, generated)
        assert text.replay(Drafting(lookup_size=size, lookup_length=length)) == expected
        assert any(step.accepted for step in expected) or length < 2


def test_a_lookup_goes_before_the_draft():
    """A period of five tokens is copied; the draft is right in the two tokens after it."""
    tokens = [*range(5), *range(5), *range(5), 90, 91, 92, 93, 7, 8]
    proposals = [Proposal(0.9, token in (91, 92)) for token in tokens[1:]]
    text = DraftedText(40, (50, 51), tokens, proposals)
    chain, lookup, joined = Drafting(2), Drafting(0, 0.0, 2, 3), Drafting(2, 0.0, 2, 3)
    steps = {each: text.replay(each) for each in (chain, lookup, joined)}
    assert len(steps[joined]) < min(len(steps[chain]), len(steps[lookup]))
    looked_up = [step for step in steps[joined] if step.drafted and not step.passes]
    assert looked_up == [step for step in steps[lookup] if step.drafted]


def test_a_better_draft_is_right_more_often():
    text = DraftedText(500, proposals=[Proposal(0.5, i % 2 == 0) for i in range(400)])
    model = ReplayModel([text], [], ChainAcceptance(1, (0,)))
    for gain in (0.0, 0.1):
        (improved,) = model.improved(gain).texts
        assert sum(p.agrees for p in improved.proposals) == pytest.approx(200 + 400 * gain, abs=16)
