"""The model of chains for other engines: against linear algebra, a walk over a text, and every choice tried."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.engine_plan import ChainAcceptance, StepSeconds
from sequoia_plan.planner.engines.chain import Times, Tokens, agreement, best_length, cells, effective_trials, schedule, step_seconds, survival, tokens

H = np.array([0.45, 0.7, 0.85, 0.6, 0.75])


def walk(text, length):
    """Decode a text of agreements with chains of `length`: for each step, how many tokens were accepted."""
    found, at = [], 0
    while at + length + 1 < len(text):
        accepted = 0
        while accepted < length and text[at + accepted]:
            accepted += 1
        found.append(accepted)
        at += accepted + 1
    return np.array(found)


def a_text(size, seed):
    """Agreements of draft and target, each as probable as H says after so many before it."""
    random, text, age = np.random.default_rng(seed), np.zeros(size, bool), 0
    for place, draw in enumerate(random.random(size)):
        text[place] = draw < H[min(age, len(H) - 1)]
        age = age + 1 if text[place] else 0
    return text


def counted(steps, length):
    return ChainAcceptance(len(steps), tuple(int((steps >= n).sum()) for n in range(1, length + 1)))


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_survival_is_that_of_the_stationary_age(length):
    """The ages at which steps begin, from the transition matrix's eigenvector."""
    most = 200
    at = H[np.minimum(np.arange(most + 2 * length + 2), len(H) - 1)]
    moves = np.zeros((most, most))
    for age in range(most):
        alive = np.prod(at[age : age + length])
        goes_on = alive * at[age + length]
        moves[age, min(age + length + 1, most - 1)] += goes_on
        moves[age, 0] += 1 - goes_on
    system = np.vstack([(moves.T - np.eye(most)), np.ones(most)])
    begins = np.linalg.lstsq(system, np.append(np.zeros(most), 1.0), rcond=None)[0]
    expected = [sum(begins[age] * np.prod(at[age : age + n]) for age in range(most)) for n in range(1, length + 1)]
    np.testing.assert_allclose(survival(H, length), expected, atol=1e-9)


def test_counts_of_one_length_tell_every_shorter_one():
    """One text, decoded with chains of 6 and with shorter ones. Read as they are, the counts of 6 are wrong: the control."""
    text = a_text(400_000, 0)
    counts = counted(walk(text, 6), 6)
    found = tokens(counts, 6)
    for length in (1, 2, 3, 6):
        steps = walk(text, length)
        error = steps.std() / math.sqrt(len(steps))
        assert abs(found.mean[length] - 1 - steps.mean()) < 5 * error, length
    steps = walk(text, 1)
    assert abs(counts.survival[0] - steps.mean()) > 20 * steps.std() / math.sqrt(len(steps))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.05, 0.95), min_size=1, max_size=6))
def test_agreement_is_what_the_counts_were_made_of(h):
    h = np.array(h)
    made = survival(h, len(h))
    found = agreement(ChainAcceptance(10**12, tuple(round(1e12 * each) for each in made)))
    np.testing.assert_allclose(survival(found, len(h)), made, atol=1e-8)
    np.testing.assert_allclose(found, h, atol=1e-4)


def test_extreme_counts():
    for accepted, mean in (((0, 0), [1, 1, 1]), ((50, 50), [1, 2, 3]), ((30,), [1, 1.6])):
        np.testing.assert_allclose(tokens(ChainAcceptance(50, accepted), len(mean) - 1).mean, mean, atol=1e-9)
    with pytest.raises(SequoiaPlanError, match="found 60 after 50, expected no more at a later position"):
        ChainAcceptance(50, (60,))


def table(seconds, batches):
    return Times(tuple(StepSeconds(batch, length, each) for batch, row in zip(batches, seconds, strict=True) for length, each in enumerate(row)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.001, 1.0), min_size=5, max_size=5), min_size=1, max_size=3),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_the_best_length_is_that_of_every_length_tried(seconds, falls):
    mean = np.concatenate([[1.0], 1 + np.cumsum(np.cumprod(falls))])
    found, batches = Tokens(mean, np.zeros(5)), [1, 4, 16][: len(seconds)]
    times = table(seconds, batches)
    for batch, row in zip(batches, seconds, strict=True):
        speeds = [batch * each / second for each, second in zip(mean, row, strict=True)]
        assert speeds[best_length(found, times, batch)] == max(speeds)
    for row in cells(found, times, batches):
        assert row.throughput == pytest.approx(row.batch * mean[row.speculative_tokens] / seconds[batches.index(row.batch)][row.speculative_tokens], rel=1e-5)
    ranges = schedule(found, times, max(batches))
    assert [n for each in ranges for n in range(each.first, each.last + 1)] == list(range(1, max(batches) + 1))
    for each in ranges:
        assert all(best_length(found, times, batch) == each.speculative_tokens for batch in range(each.first, each.last + 1))


def test_do_not_speculate_is_an_answer():
    found = tokens(ChainAcceptance(1000, (400, 100)), 2)
    slow = table([[0.1, 0.12, 0.13], [0.1, 0.2, 0.3]], [1, 8])
    assert (best_length(found, slow, 1), best_length(found, slow, 8)) == (1, 0)
    ranges = schedule(found, slow, 8)
    assert ranges[0].speculative_tokens == 1 and ranges[-1].speculative_tokens == 0 and ranges[-1].last == 8


def test_times_between_those_measured_are_on_the_line():
    times = Times((StepSeconds(1, 0, 0.05), StepSeconds(1, 1, 0.1), StepSeconds(1, 5, 0.18), StepSeconds(4, 0, 0.11), StepSeconds(4, 1, 0.16)))
    assert times.at(1, 3)[0] == pytest.approx(0.14)
    assert times.at(1, 7)[0] == pytest.approx(0.22)
    assert times.at(1, 0)[0] == 0.05  # not on the others' line
    assert times.at(2, 1)[0] == pytest.approx(0.12)
    assert times.at(4, 3)[0] == 0.16
    assert times.timed(1, 5) and not times.timed(1, 3)
    with pytest.raises(SequoiaPlanError, match="batch 1 has no time with speculation"):
        Times((StepSeconds(1, 0, 0.05),))
    with pytest.raises(SequoiaPlanError, match="batch 1 has no time without speculation"):
        Times((StepSeconds(1, 2, 0.05),)).at(1, 0)


def test_the_median_round_is_the_step_time():
    rows = step_seconds({(1, 2): [(1.0, 10), (1.1, 10), (9.0, 10)], (4, 0): [(2.0, 10), (0.0, 0)]})
    assert rows[0].seconds == pytest.approx(0.11) and rows[0].steps == 30 and rows[0].error > 0
    assert (rows[1].seconds, rows[1].error) == (0.2, 0)


def texts_that_differ(seed, texts=40, steps=30):
    """Tokens of each step by text; the chance to accept the one drafted token is each text's own."""
    random = np.random.default_rng(seed)
    return [1 + (random.random(steps) < random.beta(2, 2)).astype(int) for _ in range(texts)]


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Texts that differ: with the effective sample size 95 % of the intervals hold 1.5 tokens, with the number of chains too few: the control."""
    held = {True: 0, False: 0}
    for seed in range(400):
        gave = texts_that_differ(seed)
        counts = counted(np.concatenate(gave) - 1, 1)
        for known in held:
            acceptance = ChainAcceptance(counts.drafts, counts.accepted, effective_trials(counts, gave) if known else 0.0)
            mean, error = (each[1] for each in (tokens(acceptance, 1).mean, tokens(acceptance, 1).error))
            # survival of one drafted token, its own text's rate apart, is what was counted
            held[known] += abs(counts.survival[0] - 0.5) < 1.96 * error * mean
    assert held[True] / 400 > 0.92
    assert held[False] / 400 < 0.6


def test_effective_trials_never_exceed_the_chains():
    gave = [[1, 2, 1, 2]] * 10
    assert effective_trials(counted(np.array([each - 1 for text in gave for each in text]), 1), gave) == 40
    assert effective_trials(ChainAcceptance(4, (2,)), [[1, 2, 1, 2]]) == 0
