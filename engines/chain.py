"""The best length of a drafted chain: expected tokens, step times and the fastest length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.uncertainty import Z95, median_with_error
from sequoia_plan.engines.plan import Cell, ChainAcceptance, ScheduleEntry, StepSeconds

MAX_AGE = 64
"""The probability to agree is the same at all higher ages. Chains longer than 16 raise this."""
MIN_CHAINS = 20
"""A position that fewer chains reached gets the rate of all positions from the second on."""


def survival_probs(agreement: Floats, length: int) -> Floats:
    """Probabilities that the first 1, 2, ... tokens of a chain of `length` are accepted.

    The age of a position is the number of agreements of draft and target in a row before it. The
    age at which a step begins is a Markov chain, and these are its long-run averages, where
    alive[age, n] is the probability that a step that begins at that age accepts n tokens or more:
    `agreement` float64 [ages]; returns float64 [length].
    """
    num_ages = max(MAX_AGE, 4 * length)  # all higher ages count as the last one
    # the agreement at every age that a chain can reach, with the last entry repeated
    padded = agreement[np.minimum(np.arange(num_ages + length + 1), len(agreement) - 1)]
    alive = np.array(
        [np.concatenate([[1.0], np.cumprod(padded[age : age + length])]) for age in range(num_ages)]
    )  # [ages, length + 1]
    ages = np.arange(num_ages)
    next_ages = np.minimum(ages + length + 1, num_ages - 1)
    age_probs = np.zeros(num_ages)
    age_probs[0] = 1.0
    for _ in range(10_000):
        # the draft would also have proposed the token that follows the accepted chain
        continuing = age_probs * alive[:, length] * padded[ages + length]
        next_probs = np.zeros(num_ages)
        np.add.at(next_probs, next_ages, continuing)
        next_probs[0] += 1 - continuing.sum()
        if np.abs(next_probs - age_probs).max() < 1e-13:
            break
        age_probs = next_probs
    return age_probs @ alive[:, 1:]


def agreement_by_age(acceptance: ChainAcceptance) -> Floats:
    """Finds the probability that draft and target agree at each age from counts by position.

    Returns float64 [positions].
    """
    survival = np.array(acceptance.survival)
    length = len(survival)
    previous = np.concatenate([[1.0], survival[:-1]])
    rates = np.divide(survival, previous, out=np.zeros(length), where=previous > 0)
    if length > 1:
        reached = previous[1:].sum()
        common_rate = survival[1:].sum() / reached if reached > 0 else 0.0
        chains_reaching = np.array((acceptance.drafts, *acceptance.accepted[:-1]))  # by position
        rates[chains_reaching < MIN_CHAINS] = common_rate
    agreement = rates.copy()
    for _ in range(200):
        modelled = survival_probs(agreement, length)
        previous = np.concatenate([[1.0], modelled[:-1]])
        modelled_rates = np.divide(modelled, previous, out=np.zeros(length), where=modelled > 0)
        factors = np.divide(rates, modelled_rates, out=np.ones(length), where=modelled_rates > 0)
        if np.abs(factors - 1).max() < 1e-10:
            break
        agreement = np.clip(agreement * factors, 0, 1)
    return agreement


@dataclass(frozen=True)
class TokensByLength:
    """Expected tokens a step and request, by number of speculative tokens.

    `mean` float64 [max_length + 1].
    """

    mean: Floats
    error: Floats


def tokens_by_length(acceptance: ChainAcceptance, max_length: int) -> TokensByLength:
    """Predicts the expected tokens a step for chains of 0 to `max_length` drafted tokens.

    A step that drafts yields its accepted tokens and one more, any other step yields one.
    """
    # by age: the probability that draft and target agree after so many agreements in a row
    agreement = agreement_by_age(acceptance)
    # where the effective number of chains is unknown, all counted chains are taken as independent
    trials = acceptance.trials or acceptance.drafts
    mean, relative_error = np.ones(max_length + 1), np.zeros(max_length + 1)
    for length in range(1, max_length + 1):
        survival = survival_probs(agreement, length)
        mean[length] = 1 + acceptance.drafting_share * survival.sum()
        standard_error = math.sqrt(max(_accepted_variance(survival), 0) / trials)
        relative_error[length] = acceptance.drafting_share * standard_error / mean[length]
    return TokensByLength(mean, relative_error)


def effective_trials(
    acceptance: ChainAcceptance, tokens_by_prompt: Sequence[Sequence[int]]
) -> float:
    """Number of independent chains that would leave the same uncertainty as the counted ones.

    The chains of one text resemble each other. A jackknife over texts gives the variance of the
    mean; the variance of a single chain divided by it is the effective sample size.
    """
    texts_with_steps = [steps for steps in tokens_by_prompt if len(steps)]
    num_texts = len(texts_with_steps)
    if num_texts < 2:
        return 0.0
    num_tokens = np.array([sum(steps) for steps in texts_with_steps], float)
    num_steps = np.array([len(steps) for steps in texts_with_steps], float)
    # tokens a step of all texts but one
    means = (num_tokens.sum() - num_tokens) / (num_steps.sum() - num_steps)
    mean_variance = (num_texts - 1) / num_texts * ((means - means.mean()) ** 2).sum()
    chain_variance = _accepted_variance(np.array(acceptance.survival))
    if mean_variance > 0 and chain_variance > 0:
        return float(min(acceptance.drafts, chain_variance / mean_variance))
    return float(acceptance.drafts)


def _accepted_variance(survival: Floats) -> float:
    """Variance of the number of accepted tokens of a chain.

    `survival` float64 [length].
    """
    second_moment = ((2 * np.arange(1, len(survival) + 1) - 1) * survival).sum()
    return float(second_moment - survival.sum() ** 2)


class StepKind(NamedTuple):
    """What the time of a step depends on."""

    batch: int
    length: int
    context: int = 0


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step by batch size and number of speculative tokens, from measured steps."""

    steps: tuple[StepSeconds, ...]

    def __post_init__(self) -> None:
        for batch in self.batches:
            if not any(step.speculative_tokens for step in self._steps_of_batch(batch)):
                raise SequoiaPlanError(
                    f"steps: batch {batch} has no time with speculation; "
                    "expected one for some number of speculative tokens >= 1"
                )

    @property
    def context(self) -> int:
        """The context of the measured steps, as in `StepKind`."""
        return self.steps[0].context

    @property
    def batches(self) -> list[int]:
        """The measured batch sizes, in ascending order."""
        return sorted({step.batch for step in self.steps})

    def _steps_of_batch(self, batch: int) -> list[StepSeconds]:
        """The measured steps of one batch size, by increasing number of speculative tokens."""
        steps = (step for step in self.steps if step.batch == batch)
        return sorted(steps, key=lambda step: step.speculative_tokens)

    def is_measured(self, batch: int, length: int) -> bool:
        """True if a step of this batch size and number of speculative tokens was timed."""
        return any((step.batch, step.speculative_tokens) == (batch, length) for step in self.steps)

    def seconds_and_error(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds of a step, and their relative standard error."""
        batches = self.batches
        if batch in batches:
            return self._at_measured_batch(batch, length)
        last = len(batches) - 1
        upper = next((i for i, measured in enumerate(batches) if measured > batch), last)
        low, high = batches[max(upper - 1, 0)], batches[upper]
        low_seconds, low_error = self._at_measured_batch(low, length)
        high_seconds, high_error = self._at_measured_batch(high, length)
        fraction = 0.0 if low == high else (batch - low) / (high - low)
        seconds = low_seconds + fraction * (high_seconds - low_seconds)
        seconds = max(seconds, min(low_seconds, high_seconds) / 2)
        error = max(low_error, high_error)
        if not 0 <= fraction <= 1 or low == high:
            nearest = low_seconds if batch < low else high_seconds
            error += abs(seconds - nearest) / seconds / 2
        return seconds, error

    def _at_measured_batch(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds and relative error at a measured batch size, interpolated over the length.

        Below the smallest measured length >= 1 the time is that of the smallest. Above the largest
        one, the line through the two largest goes on, but never falls.
        """
        steps = self._steps_of_batch(batch)
        if length == 0:
            plain = next((step for step in steps if step.speculative_tokens == 0), None)
            if plain is None:
                raise SequoiaPlanError(
                    f"steps: batch {batch} has no time without speculation; "
                    "expected one for 0 speculative tokens"
                )
            return plain.seconds, plain.error
        steps = [step for step in steps if step.speculative_tokens]
        lengths = np.array([step.speculative_tokens for step in steps], float)
        seconds = np.array([step.seconds for step in steps])
        errors = np.array([step.error for step in steps])
        if length <= lengths[-1] or len(steps) == 1:
            return (
                float(np.interp(length, lengths, seconds)),
                float(np.interp(length, lengths, errors)),
            )
        slope = (seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2])
        return float(seconds[-1] + max(slope, 0) * (length - lengths[-1])), float(errors[-1])


def times_by_context(steps: Sequence[StepSeconds]) -> list[StepTimes]:
    """The measured steps of each context, by increasing context."""
    contexts = sorted({step.context for step in steps})
    return [
        StepTimes(tuple(step for step in steps if step.context == context)) for context in contexts
    ]


def predict_cells(
    tokens: TokensByLength, times: StepTimes, batches: Sequence[int]
) -> tuple[Cell, ...]:
    """Predicts throughput and its 95 % interval by batch size and number of speculative tokens.

    The logarithm of the throughput is taken as normally distributed, and the relative errors of
    tokens a step and of the step's time as independent.
    """
    cells = []
    for batch in batches:
        plain_seconds = times.seconds_and_error(batch, 0)[0]
        for length in range(len(tokens.mean)):
            seconds, time_error = times.seconds_and_error(batch, length)
            mean = float(tokens.mean[length])
            throughput = batch * mean / seconds
            half_width = Z95 * math.hypot(time_error, tokens.error[length])  # of the logarithm
            cell = Cell(
                batch=batch,
                speculative_tokens=length,
                tokens_per_step=_round(mean),
                seconds=_round(seconds),
                throughput=_round(throughput),
                low=_round(throughput * math.exp(-half_width)),
                high=_round(throughput * math.exp(half_width)),
                speedup=_round(mean / seconds * plain_seconds),
                is_timed=times.is_measured(batch, length),
                context=times.context,
            )
            cells.append(cell)
    return tuple(cells)


def best_length(tokens: TokensByLength, times: StepTimes, batch: int) -> int:
    """Number of speculative tokens with the highest throughput at a batch size.

    0 is no speculation. Of numbers with equal throughput the smallest wins.
    """
    # throughput of one request; all requests together have `batch` times as much
    speeds = [
        mean / times.seconds_and_error(batch, length)[0] for length, mean in enumerate(tokens.mean)
    ]
    return int(np.argmax(speeds))


def make_schedule(
    tokens: TokensByLength, times: StepTimes, max_batch: int
) -> tuple[ScheduleEntry, ...]:
    """Finds the best number of speculative tokens for each batch size from 1 to `max_batch`."""
    schedule: list[ScheduleEntry] = []
    for batch in range(1, max_batch + 1):
        length = best_length(tokens, times, batch)
        if schedule and schedule[-1].speculative_tokens == length:
            schedule[-1] = ScheduleEntry(schedule[-1].first, batch, length)
        else:
            schedule.append(ScheduleEntry(batch, batch, length))
    return tuple(schedule)


def median_step_seconds(
    rounds: Mapping[StepKind, Sequence[tuple[float, int]]],
) -> tuple[StepSeconds, ...]:
    """Computes the time of a step as the median over rounds of timed steps."""
    rows = []
    for kind in sorted(rounds, key=lambda kind: (kind.context, kind)):
        timed_rounds = rounds[kind]
        seconds_per_step = np.array([seconds / steps for seconds, steps in timed_rounds if steps])
        median_seconds, error = median_with_error(seconds_per_step)
        row = StepSeconds(
            batch=kind.batch,
            speculative_tokens=kind.length,
            seconds=_round(median_seconds),
            error=_round(error),
            steps=sum(steps for _, steps in timed_rounds),
            context=kind.context,
        )
        rows.append(row)
    return tuple(rows)


def _round(value: float) -> float:
    """Rounds to six digits for files that people read. No measurement is that precise."""
    return float(f"{value:.6g}")
