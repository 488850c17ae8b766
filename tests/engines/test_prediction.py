"""The model of chains, held to exhaustive search, and its intervals to the truth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from sequoia_plan.engines.plan import ChainAcceptance, Drafting, StepSeconds
from sequoia_plan.engines.planning import make_plan
from sequoia_plan.engines.prediction import ChainModel, StepTimes, relative_error


def model_of(rates):
    """A model of chains whose tokens are accepted with these rates."""
    counts = tuple(round(10**6 * probability) for probability in np.cumprod(rates))
    return ChainModel(ChainAcceptance(10**6, counts), len(rates))


def times_of(seconds, batches):
    """StepTimes of a table of seconds, [batches][lengths]."""
    steps = [
        StepSeconds(batch, length, value)
        for batch, row in zip(batches, seconds, strict=True)
        for length, value in enumerate(row)
    ]
    return StepTimes(tuple(steps))


def test_counts_that_rise_are_refused():
    with refusal(r"found .60,. of 50 drafts"):
        ChainAcceptance(50, (60,))


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(0.001, 1.0), min_size=5, max_size=5), min_size=1, max_size=3),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_the_best_length_is_that_of_every_length_tried(seconds, rates):
    mean = np.concatenate([[1.0], 1 + np.cumsum(np.cumprod(rates))])
    batches = [1, 4, 16][: len(seconds)]
    times = times_of(seconds, batches)
    (part,) = make_plan([(model_of(rates), times)], batches, lambda _: (), engine="x").contexts
    for cell in part.cells:
        cell_seconds = seconds[batches.index(cell.batch)][cell.speculative_tokens]
        throughput = cell.batch * mean[cell.speculative_tokens] / cell_seconds
        assert cell.throughput == pytest.approx(throughput, rel=1e-5)
    ends = [0, *(entry.last for entry in part.schedule)]
    assert [entry.first - 1 for entry in part.schedule] == ends[:-1] and ends[-1] == max(batches)
    for entry in part.schedule:
        for batch in range(entry.first, entry.last + 1):
            speeds = [m / times.seconds_and_error(batch, n)[0] for n, m in enumerate(mean)]
            assert speeds[entry.speculative_tokens] == pytest.approx(max(speeds), rel=1e-5)


def test_times_between_those_measured_are_on_the_line():
    rows = [(1, 0, 0.05), (1, 1, 0.1), (1, 5, 0.18), (4, 0, 0.11), (4, 1, 0.16)]
    times = StepTimes(tuple(StepSeconds(*row) for row in rows))
    for (batch, length), seconds in {
        (1, 3): 0.14,
        (1, 0): 0.05,  # not on the line of the other lengths
        (2, 1): 0.12,
        (4, 3): 0.16,
    }.items():
        assert times.seconds_and_error(batch, length)[0] == pytest.approx(seconds)


def test_a_text_without_steps_says_nothing_of_the_error():
    assert relative_error([3, 0, 5], [4, 0, 9]) == relative_error([3, 5], [4, 9]) > 0
    assert relative_error([3, 0], [4, 0]) == relative_error([0, 0], [4, 9]) == 0


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Of the 95 % intervals of texts that differ, 95 % contain the truth, 1.5 tokens.

    The control: with steps in place of texts too few do.
    """
    hits = {True: 0, False: 0}
    for seed in range(400):
        random = np.random.default_rng(seed)
        # accepted tokens of each step by text, with chains of 1; each text has its own acceptance
        texts = [random.random(30) < random.beta(2, 2) for _ in range(40)]
        steps = np.concatenate(texts)
        for by_text in hits:
            groups = texts if by_text else steps[:, None]
            error = relative_error([sum(group) for group in groups], map(len, groups))
            counted = ChainAcceptance(len(steps), (int(steps.sum()),), error)
            expected = ChainModel(counted, 1).expect(Drafting(1), 1, times_of([[1.0, 1.0]], [1]))
            hits[by_text] += abs(expected.tokens - 1.5) < 1.96 * expected.error * expected.tokens
    assert hits[True] / 400 > 0.92
    assert hits[False] / 400 < 0.6
