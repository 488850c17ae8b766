"""Counts by match class: matching, trials, acceptance after a looked-up token, aggregation."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from enumeration import exact_acceptance, normalised, without_replacement
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import PROMPTS, naive_match, toy_pair

from sequoia_plan.artifacts import lookup as lookup_artifact
from sequoia_plan.artifacts.lookup import (
    MATCH_LENGTHS,
    MAX_MATCH,
    class_of,
    limited_texts,
    read_positions,
)
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
from sequoia_plan.profiler.children import DrawnChildren
from sequoia_plan.profiler.lookup_counts import (
    CHAIN,
    LEVELS_AFTER_CHAIN,
    LOOKUP_LEVELS,
    MAX_RUN,
    LookupTrials,
    look_up,
    lookup_counts,
)
from sequoia_plan.profiler.measure import measure_acceptance
from sequoia_plan.profiler.observed import LEVELS
from sequoia_plan.runtime import Sampling

pytestmark = pytest.mark.slow
texts = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 90)
).map(lambda drawn: (drawn[0] + [drawn[0][0]] * drawn[2], drawn[1]))
"""Tokens of small numbers, some with a long repetition at the end, and a first position."""


def by_definition(text, position):
    """Match length, chain and run at a position."""
    length, chain = naive_match(text[: position + 1], MAX_MATCH, MAX_RUN)
    pairs = zip(chain, text[position + 1 :], strict=False)
    run = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return length, chain[:CHAIN], run


@settings(max_examples=150)
@given(texts)
def test_look_up_follows_the_definition(drawn):
    text, first = drawn
    first = min(first, len(text) - 1)
    match_lengths, chains, runs = look_up(np.array(text), first)
    assert len(runs) == len(text) - first
    for at, position in enumerate(range(first, len(text))):
        length, chain, run = by_definition(text, position)
        assert (match_lengths[at], runs[at]) == (length, run)
        if length:
            assert chains[at].tolist() == chain


@settings(max_examples=60)
@given(texts, st.randoms(use_true_random=False))
def test_trials_follow_the_definition(drawn, random):
    """Each position is a root; tallies are added up position by position."""
    text, first = drawn
    first = min(first, len(text) - 1)
    count, ranks = len(text) - first, 3
    levels = [0]
    while len(levels) < count:
        levels.append(random.choice([0, levels[-1] + 1]))
    node_classes = [level and random.randrange(2) for level in levels]
    rows = [
        2 * min(level, LEVELS - 1) + node_class if level < 6 else -1
        for level, node_class in zip(levels, node_classes, strict=True)
    ]
    trials = LookupTrials(*map(np.array, (text, levels, rows)))
    generator = np.random.default_rng(random.randrange(99))
    drafted_probs = generator.random((count, ranks))
    looked_up_probs = generator.random((len(trials.tokens), ranks))
    tokens = zip(trials.token_positions.tolist(), trials.tokens.tolist(), strict=True)
    probs_of_token = dict(zip(tokens, looked_up_probs, strict=True))
    assert len(probs_of_token) == len(looked_up_probs)

    drafted = np.zeros((len(MATCH_LENGTHS), LEVELS, 2, 1 + ranks))
    looked_up = np.zeros((len(MATCH_LENGTHS), LOOKUP_LEVELS, 2, 1 + ranks))
    for at in range(count):
        if rows[at] >= 0:
            match_class = class_of(by_definition(text, first + at - levels[at])[0], MATCH_LENGTHS)
            row = drafted[match_class].reshape(-1, 1 + ranks)[rows[at]]
            row += [1, *drafted_probs[at]]
        length, chain, run = by_definition(text, first + at)
        if not length:
            continue
        table = looked_up[class_of(length, MATCH_LENGTHS)]
        for level in range(min(run, CHAIN - 1) + 1):
            if rows[at + level] >= 0:
                probs = probs_of_token[at + level, chain[level]]
                table[min(level, LOOKUP_LEVELS - 1), 0] += [1, *probs]
        for after in range(run + 1, run + 1 + LEVELS_AFTER_CHAIN):
            if run < MAX_RUN and at + after < count and rows[at + after] >= 0:
                table[min(after, LOOKUP_LEVELS - 1), 1] += [1, *drafted_probs[at + after]]

    tally = trials.tally(drafted_probs, looked_up_probs)
    for name, expected in (("drafted", drafted), ("looked_up", looked_up)):
        np.testing.assert_allclose(tally[name], expected.reshape(-1, 1 + ranks), atol=1e-5)
    assert [tuple(position) for position in read_positions(tally["text"])] == [
        by_definition(text, position)[::2] for position in range(first, len(text))
    ]


def exact_after_lookup(p, q, token, count):
    """Acceptance of a looked-up token, then of `count` drafted children, by the definition."""
    others = [normalised(np.where(np.arange(len(p)) == token, 0, probs)) for probs in (p, q)]
    return [p[token], *(1 - p[token]) * exact_acceptance(*others, count)]


@pytest.mark.parametrize("d2t", [None, [0, 2, 3, 4]])
@pytest.mark.parametrize("twin", [None, "x left in q", "x left in the draws"])
def test_acceptance_after_a_looked_up_token_is_exact(d2t, twin, monkeypatch):
    """Averaged over every draw, against the definition. Two wrong ways give other figures."""
    generator = np.random.default_rng(4)
    p = generator.dirichlet(np.ones(5))
    q = generator.dirichlet(np.ones(5))
    covered = [0, 1, 2, 3, 4] if d2t is None else d2t
    q = np.where(np.isin(np.arange(5), covered), q, 0)
    q /= q.sum()
    draws = list(without_replacement(q[covered], 3))
    count = len(draws)
    drawn = torch.tensor([order for order, _ in draws])
    target_probs, draft_probs = torch.tensor(p).expand(count, -1), torch.tensor(q[covered])
    children = DrawnChildren(
        target_probs,
        draft_probs.expand(count, -1),
        drawn,
        Sampling(1.0, verifier="traversal"),
        None if d2t is None else torch.tensor(d2t),
    )
    if twin == "x left in q":
        monkeypatch.setattr(torch.Tensor, "scatter", lambda self, *_: self)
        monkeypatch.setattr(torch.Tensor, "masked_fill", lambda self, *_: self)
    if twin == "x left in the draws":
        keep = torch.arange(3).expand(count, -1)
        monkeypatch.setattr(torch.Tensor, "argsort", lambda self, **_: keep)
    weights = np.array([probability for _, probability in draws])
    errors = []
    for token in range(5):
        probs = children.looked_up_acceptance(torch.arange(count), torch.full((count,), token))
        assert probs.shape == (count, 3) and (probs.sum(1) <= 1 + 1e-6).all()
        errors.append(np.abs(weights @ probs.numpy() - exact_after_lookup(p, q, token, 2)).max())
    assert (max(errors) < 1e-6) == (twin is None)


def test_texts_beyond_the_limit_are_left_out(monkeypatch):
    """Kinds take turns, so none is left without texts."""
    monkeypatch.setattr(lookup_artifact, "MAX_TEXT_CHARACTERS", 10)
    texts_of_kinds = {"chat": ["0:0 0:0", "1:1"], "code": ["2:3", "3:0", "4:0"]}
    assert limited_texts(texts_of_kinds) == {"chat": ("0:0 0:0",), "code": ("2:3",)}


def test_built_in_prompts_that_copy_are_in_both_halves():
    """They are spread over the file, because a measurement may end early."""
    prompts = load(BUILT_IN)
    assert {prompt.kind for prompt in prompts} == {prompt.kind for prompt in prompts[:56]}
    for half in (measuring_half(prompts), held_out_half(prompts)):
        kinds = Counter(prompt.kind for prompt in half)
        assert len(half) == 92 and len(kinds) == 12
        assert all(kinds[kind] == 3 for kind in ("proofread", "quote", "edit-code", "shorten"))


def measured(sampling, prompts=PROMPTS[:4]):
    """The acceptance of toy models on a few prompts."""
    return measure_acceptance(toy_pair(), prompts, sampling, precision=0, tokens_per_prompt=24)


def test_verifiers_that_cannot_look_up_are_not_counted():
    assert lookup_counts(measured(Sampling(1.0, verifier="specinfer")).lookup, ["all"] * 4) is None


def test_texts_are_kept_by_kind_of_prompt():
    observed = measured(Sampling(0.8, verifier="sequoia"), PROMPTS[:4] * 2)
    counts = lookup_counts(observed.lookup, ["chat", "code"] * 4)
    texts_of_prompts = [tally["text"] for tally in observed.lookup]
    by_kind = {"chat": tuple(texts_of_prompts[::2]), "code": tuple(texts_of_prompts[1::2])}
    assert counts.texts == by_kind
    # every position counts once as the root of a step
    positions = [position for text in texts_of_prompts for position in read_positions(text)]
    classes = Counter(class_of(position.match_length, MATCH_LENGTHS) for position in positions)
    for number, part in enumerate(counts.classes[1:], 1):
        assert classes[number] == (part.looked_up.trials[0].sum() if part.looked_up else 0)
    # positions by level and class of parent are those of the profile, split by match class
    totals = observed.totals()
    drafted_trials, drafted_accepted = np.zeros_like(totals.trials), np.zeros_like(totals.accepted)
    for part in counts.classes:
        if part.drafted:
            drafted_trials[: part.drafted.num_levels] += part.drafted.trials
            drafted_accepted[: part.drafted.num_levels] += part.drafted.accepted
    np.testing.assert_array_equal(drafted_trials, totals.trials)
    np.testing.assert_allclose(drafted_accepted, totals.accepted, atol=1e-3)
