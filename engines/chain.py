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


@dataclass(frozen=True)
class ChainModel:
    """Predicts chains of up to `max_length` tokens as the first tokens of the counted ones.

    A shorter chain begins more often where the draft was just right; its first tokens are accepted
    a little more often than is predicted (docs/engines.md, "The model").
    """

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
        share = self.acceptance.drafting_share
        # where the effective number of chains is unknown, all of them are taken as independent
        trials = self.acceptance.trials or self.acceptance.drafts
        by_length = [(1.0, 0.0)]
        for length in range(1, self.max_length + 1):
            survival = np.array(self.acceptance.survival[:length])
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
