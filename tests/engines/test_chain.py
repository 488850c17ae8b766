"""The model of chains, held to exhaustive search, and its intervals to the truth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines.chain import ChainModel, effective_trials
from sequoia_plan.engines.plan import ChainAcceptance, Drafting, StepSeconds
from sequoia_plan.engines.planning import make_plan
from sequoia_plan.engines.timing import StepTimes, step_times
from sequoia_plan.engines.workload import EngineRun, RunKind


def count_acceptance(steps, length):
    accepted = tuple(int((steps >= n).sum()) for n in range(1, length + 1))
    return ChainAcceptance(len(steps), accepted)


def test_extreme_counts():
    for accepted, mean in (((0, 0), [1, 1, 1]), ((50, 50), [1, 2, 3]), ((30,), [1, 1.6])):
        model = ChainModel(ChainAcceptance(50, accepted), len(mean) - 1)
        means = [tokens for tokens, _ in model.tokens_and_error]
        np.testing.assert_allclose(means, mean, atol=1e-9)
    message = r"found .60,. of 50 drafts"
    with pytest.raises(SequoiaPlanError, match=message):
        ChainAcceptance(50, (60,))


def times_of(seconds, batches):
    """StepTimes of a table of seconds, [batches][lengths]."""
    steps = [
        StepSeconds(batch, length, value)
        for batch, row in zip(batches, seconds, strict=True)
        for length, value in enumerate(row)
    ]
    return StepTimes(tuple(steps))


class ModelOfMeans(ChainModel):
    """A model whose expected tokens are given."""

    def __init__(self, mean):
        super().__init__(ChainAcceptance(10, (5,)), len(mean) - 1)
        self.__dict__["tokens_and_error"] = [(tokens, 0.0) for tokens in mean]


def plan_of(model, times, batches):
    (part,) = make_plan([(model, times)], batches, lambda _: (), engine="x").contexts
    return part


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(0.001, 1.0), min_size=5, max_size=5), min_size=1, max_size=3),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_the_best_length_is_that_of_every_length_tried(seconds, rates):
    mean = np.concatenate([[1.0], 1 + np.cumsum(np.cumprod(rates))])
    batches = [1, 4, 16][: len(seconds)]
    times = times_of(seconds, batches)
    part = plan_of(ModelOfMeans(mean), times, batches)
    for cell in part.cells:
        cell_seconds = seconds[batches.index(cell.batch)][cell.speculative_tokens]
        throughput = cell.batch * mean[cell.speculative_tokens] / cell_seconds
        assert cell.throughput == pytest.approx(throughput, rel=1e-5)
    assert [entry.first for entry in part.schedule] == [
        1,
        *(entry.last + 1 for entry in part.schedule[:-1]),
    ]
    assert part.schedule[-1].last == max(batches)
    for entry in part.schedule:
        for batch in range(entry.first, entry.last + 1):
            speeds = [m / times.seconds_and_error(batch, n)[0] for n, m in enumerate(mean)]
            assert speeds[entry.speculative_tokens] == max(speeds)


def test_do_not_speculate_is_an_answer():
    model = ChainModel(ChainAcceptance(1000, (400, 100)), 2)
    part = plan_of(model, times_of([[0.1, 0.12, 0.13], [0.1, 0.2, 0.3]], [1, 8]), [1, 8])
    assert [part.best_cell(batch).speculative_tokens for batch in (1, 8)] == [1, 0]
    first, *_, last = part.schedule
    assert first.speculative_tokens == 1 and last.speculative_tokens == 0 and last.last == 8


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


def test_the_median_round_is_the_step_time():
    rounds = {
        RunKind(Drafting(2), 1, 512): [EngineRun(2.0, 10, 10), EngineRun(0.0, 0, 0)],
        RunKind(Drafting(0), 1, 512): [EngineRun(seconds, 10, 10) for seconds in (1.0, 1.1, 9.0)],
        RunKind(Drafting(1), 1, 256): [EngineRun(5.0, 10, 10)],
    }
    times = step_times(rounds, 512)
    plain, speculative = times.by_batch[1]
    assert plain.seconds == pytest.approx(0.11) and plain.error > 0
    assert (speculative.seconds, speculative.error, times.context) == (0.2, 0, 512)


def texts_that_differ(seed, texts=40, steps=30):
    """Tokens of each step by text, with chains of 1; each text has an acceptance of its own."""
    random = np.random.default_rng(seed)
    return [1 + (random.random(steps) < random.beta(2, 2)).astype(int) for _ in range(texts)]


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Of the 95 % intervals of texts that differ, 95 % contain the truth, 1.5 tokens.

    The control: with the number of chains in place of the effective sample size too few do.
    """
    hits = {True: 0, False: 0}
    for seed in range(400):
        tokens_by_text = texts_that_differ(seed)
        counts = count_acceptance(np.concatenate(tokens_by_text) - 1, 1)
        for uses_effective_trials in hits:
            trials = effective_trials(counts, tokens_by_text) if uses_effective_trials else 0.0
            acceptance = ChainAcceptance(counts.drafts, counts.accepted, trials)
            tokens, error = ChainModel(acceptance, 1).tokens_and_error[1]
            half_width = 1.96 * error * tokens
            # the survival of the one drafted token is 0.5 on average over texts
            hits[uses_effective_trials] += abs(counts.survival[0] - 0.5) < half_width
    assert hits[True] / 400 > 0.92
    assert hits[False] / 400 < 0.6


def test_effective_trials_never_exceed_the_chains():
    tokens_by_text = [[1, 2, 1, 2]] * 10
    accepted = np.array([tokens - 1 for steps in tokens_by_text for tokens in steps])
    assert effective_trials(count_acceptance(accepted, 1), tokens_by_text) == 40
    assert effective_trials(ChainAcceptance(4, (2,)), [[1, 2, 1, 2]]) == 0
