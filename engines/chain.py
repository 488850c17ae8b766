"""Expected tokens of chains of every length, from how far chains of one length were accepted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.engines.plan import ChainAcceptance, Drafting
from sequoia_plan.engines.prediction import Expectation, ratio_error
from sequoia_plan.engines.timing import StepTimes

MIN_CHAINS = 20
"""A position that fewer chains reached gets the rate of all positions from the second on."""


def survival_probs(agreement: Floats, length: int) -> Floats:
    """Probabilities that the first 1, 2, ... tokens of a chain of `length` are accepted.

    The age of a position is the number of agreements of draft and target in a row before it. A step
    begins at age 0, or `length` + 1 above the last one if the draft agreed with all of its tokens.
    These are the averages over the long run: `agreement` float64 [ages], the last entry for all
    higher ages; returns float64 [length].
    """
    last = len(agreement) - 1
    ages = np.arange(0, last + length + 1, length + 1)  # from the last one on nothing changes
    reached = agreement[np.minimum(ages[:, None] + np.arange(length + 1), last)].cumprod(axis=1)
    continuing = reached[:, length]
    weights = np.cumprod([1.0, *continuing[:-1]])
    weights[-1] /= max(1 - continuing[-1], 1e-4)  # a text ends, also where all is accepted
    return weights @ reached[:, :length] / weights.sum()


def conditional_probs(survival: Floats) -> Floats:
    """float64 [length]: the probability that a token is accepted if all before it were."""
    previous = np.concatenate([[1.0], survival[:-1]])
    return np.divide(survival, previous, out=np.zeros(len(survival)), where=previous > 0)


def agreement_by_age(acceptance: ChainAcceptance) -> Floats:
    """Finds the probability that draft and target agree at each age from counts by position.

    Returns float64 [positions].
    """
    survival = np.array(acceptance.survival)
    length, rates = len(survival), conditional_probs(survival)
    if length > 1:
        reached = survival[:-1].sum()
        common_rate = survival[1:].sum() / reached if reached > 0 else 0.0
        chains_reaching = np.array((acceptance.drafts, *acceptance.accepted[:-1]))  # by position
        rates[chains_reaching < MIN_CHAINS] = common_rate
    agreement = rates.copy()
    for _ in range(200):
        modelled_rates = conditional_probs(survival_probs(agreement, length))
        factors = np.divide(rates, modelled_rates, out=np.ones(length), where=modelled_rates > 0)
        if np.abs(factors - 1).max() < 1e-10:
            break
        agreement = np.clip(agreement * factors, 0, 1)
    return agreement


@dataclass(frozen=True)
class ChainModel:
    """Predicts chains of up to `max_length` tokens (docs/engines.md, "The model")."""

    acceptance: ChainAcceptance
    max_length: int

    @property
    def draftings(self) -> list[Drafting]:
        """No speculation, and chains of each length."""
        return [Drafting(length) for length in range(self.max_length + 1)]

    @cached_property
    def tokens_and_error(self) -> list[tuple[float, float]]:
        """Expected tokens a step by length, and their relative standard error.

        A step that drafts yields its accepted tokens and one more.
        """
        agreement = agreement_by_age(self.acceptance)
        share = self.acceptance.drafting_share
        # where the effective number of chains is unknown, all of them are taken as independent
        trials = self.acceptance.trials or self.acceptance.drafts
        by_length = [(1.0, 0.0)]
        for length in range(1, self.max_length + 1):
            survival = survival_probs(agreement, length)
            mean = 1 + share * float(survival.sum())
            standard_error = math.sqrt(max(_accepted_variance(survival), 0) / trials)
            by_length.append((mean, share * standard_error / mean))
        return by_length

    def expect(self, drafting: Drafting, batch: int, times: StepTimes) -> Expectation:
        """The errors of tokens a step and of the step's time are taken as independent."""
        seconds, time_error = times.seconds_and_error(batch, drafting.length)
        tokens, tokens_error = self.tokens_and_error[drafting.length]
        return Expectation(tokens, seconds, math.hypot(time_error, tokens_error))


def effective_trials(acceptance: ChainAcceptance, tokens_by_text: Sequence[Sequence[int]]) -> float:
    """Number of independent chains that would leave the same uncertainty as the counted ones.

    The chains of one text resemble each other, so it is the variance of a single chain over that
    of the mean. It is 0 for a single text.
    """
    texts_with_steps = [steps for steps in tokens_by_text if len(steps)]
    if len(texts_with_steps) < 2:
        return 0.0
    mean_error = ratio_error(map(sum, texts_with_steps), map(len, texts_with_steps))
    chain_variance = _accepted_variance(np.array(acceptance.survival))
    if mean_error > 0 and chain_variance > 0:
        return float(min(acceptance.drafts, chain_variance / mean_error**2))
    return float(acceptance.drafts)


def _accepted_variance(survival: Floats) -> float:
    """Variance of the number of accepted tokens of a chain; `survival` float64 [length]."""
    second_moment = ((2 * np.arange(1, len(survival) + 1) - 1) * survival).sum()
    return float(second_moment - survival.sum() ** 2)
