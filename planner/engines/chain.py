"""The best length of a drafted chain: expected tokens of every length from the counts of one, step times between those measured, the optimum.

**Tokens.** Whether the draft agrees with the target at a position depends on how many positions before it they agreed at, the *age*: a text is
taken as runs of agreements, each ended by a disagreement, with the probability h[a] that a run of a agreements goes on. A step that drafts K
tokens begins at some age, accepts while they agree, and yields one token more: after a disagreement the next step begins at age 0, after K
agreements at age K + 1 or, if the draft would not have said that last token, at 0. So a short chain begins within a run more often than a long
one, and its first token is accepted more often: the counts of one length, read as they are, promise too little for shorter ones and too much
for longer ones. `agreement` finds h from the counts of one length, and `survival` gives every length's from h.

**Time.** t(K, batch) is measured for a few K >= 1 and for K = 0, which needs no draft. Between two it is on the line: a token more is one pass
of the draft and one more token for the target to read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.engine_plan import Cell, ChainAcceptance, Range, StepSeconds
from sequoia_plan.artifacts.uncertainty import Z95, median

Floats = NDArray[np.float64]
OLDEST = 64
"""The chance to agree is the same at all higher ages."""


def survival(h: Floats, length: int) -> Floats:
    """float64 [length]: the probability that the first 1, 2, ... tokens of a chain of `length` are accepted, in the long run.

    Args:
        h: float64 [ages], the probability that the draft agrees after so many agreements; the last holds for all higher ages.
    """
    ages = max(OLDEST, 4 * length)
    at = h[np.minimum(np.arange(ages + length + 1), len(h) - 1)]
    alive = np.array([np.concatenate([[1.0], np.cumprod(at[age : age + length])]) for age in range(ages)])  # [ages, length + 1]
    begins = np.zeros(ages)
    begins[0] = 1.0
    for _ in range(10_000):
        goes_on = begins * alive[:, length] * at[np.arange(ages) + length]  # also the token after the chain is what the draft would have said
        after = np.zeros(ages)
        np.add.at(after, np.minimum(np.arange(ages) + length + 1, ages - 1), goes_on)
        after[0] += 1 - goes_on.sum()
        if np.abs(after - begins).max() < 1e-13:
            break
        begins = after
    return begins @ alive[:, 1:]


def agreement(acceptance: ChainAcceptance) -> Floats:
    """float64 [positions]: the probability to agree by age under which chains of the measured length survive as they did.

    The last holds for all higher ages; where too few chains got that far to tell, it is the rate of all positions from the second on.
    """
    measured = np.array(acceptance.survival)
    length = len(measured)
    before = np.concatenate([[1.0], measured[:-1]])
    rates = np.divide(measured, before, out=np.zeros(length), where=before > 0)
    if length > 1:
        common = measured[1:].sum() / before[1:].sum() if before[1:].sum() > 0 else 0.0
        few = np.array((acceptance.drafts, *acceptance.accepted[:-1])) < FEW
        rates[few] = common
        rates[-1] = rates[-1] if not few[-1] else common
    h = rates.copy()
    for _ in range(200):
        now = survival(h, length)
        model = np.divide(now, np.concatenate([[1.0], now[:-1]]), out=np.zeros(length), where=now > 0)
        step = np.divide(rates, model, out=np.ones(length), where=model > 0)
        if np.abs(step - 1).max() < 1e-10:
            break
        h = np.clip(h * step, 0, 1)
    return h


FEW = 20
"""Chains that got to a position; from fewer the chance to agree there is not told apart from that of other positions."""


@dataclass(frozen=True)
class Tokens:
    """Expected tokens a step and request, by length of the chain.

    Args:
        mean: float64 [lengths + 1], for 0, 1, ... speculative tokens.
        error: the same shape, relative standard errors.
    """

    mean: Floats
    error: Floats


def tokens(acceptance: ChainAcceptance, most: int) -> Tokens:
    """Expected tokens for every length up to `most`."""
    h, trials, share = agreement(acceptance), acceptance.trials or acceptance.drafts, acceptance.share
    mean, error = np.ones(most + 1), np.zeros(most + 1)
    for length in range(1, most + 1):
        alive = survival(h, length)
        mean[length] = 1 + share * alive.sum()
        error[length] = share * math.sqrt(max(_variance(alive), 0) / trials) / mean[length]
    return Tokens(mean, error)


def effective_trials(acceptance: ChainAcceptance, gave: Sequence[Sequence[int]]) -> float:
    """How many independent chains leave as much open as these, whose texts differ: from a jackknife over texts.

    Args:
        gave: for each text, the tokens that each of its steps gave.
    """
    sums = np.array([[sum(text), len(text)] for text in gave if len(text)], float)
    if len(sums) < 2:
        return 0.0
    rest = sums.sum(0) - sums
    means = rest[:, 0] / rest[:, 1]
    variance = (len(sums) - 1) / len(sums) * ((means - means.mean()) ** 2).sum()
    each = _variance(np.array(acceptance.survival))
    return float(min(acceptance.drafts, each / variance)) if variance > 0 and each > 0 else float(acceptance.drafts)


def _variance(alive: Floats) -> float:
    """Of the number of accepted tokens of a chain, from the probabilities that its first 1, 2, ... are accepted."""
    return float(((2 * np.arange(1, len(alive) + 1) - 1) * alive).sum() - alive.sum() ** 2)


@dataclass(frozen=True)
class Times:
    """Seconds of a step by batch size and number of speculative tokens, from those measured.

    Raises:
        SequoiaPlanError: if there are none for a batch size, or for too few numbers of tokens.
    """

    steps: tuple[StepSeconds, ...]

    def __post_init__(self) -> None:
        for batch in self.batches:
            if not any(step.speculative_tokens for step in self._of(batch)):
                raise SequoiaPlanError(f"steps: batch {batch} has no time with speculation; expected one for some number of speculative tokens >= 1")

    @property
    def batches(self) -> list[int]:
        return sorted({step.batch for step in self.steps})

    def _of(self, batch: int) -> list[StepSeconds]:
        return sorted((step for step in self.steps if step.batch == batch), key=lambda step: step.speculative_tokens)

    def timed(self, batch: int, length: int) -> bool:
        """Was it measured?"""
        return any((step.batch, step.speculative_tokens) == (batch, length) for step in self.steps)

    def at(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds and their relative standard error; on the line between the two nearest lengths, and between the two nearest batch sizes."""
        known = self.batches
        if batch in known:
            return self._along(batch, length)
        above = next((number for number, each in enumerate(known) if each > batch), len(known) - 1)
        low, high = known[max(above - 1, 0)], known[above]
        (first, error), (second, other) = self._along(low, length), self._along(high, length)
        share = 0.0 if low == high else (batch - low) / (high - low)
        return max(first + share * (second - first), min(first, second) / 2), max(error, other)

    def _along(self, batch: int, length: int) -> tuple[float, float]:
        steps = self._of(batch)
        if length == 0:
            plain = next((step for step in steps if step.speculative_tokens == 0), None)
            if plain is None:
                raise SequoiaPlanError(f"steps: batch {batch} has no time without speculation; expected one for 0 speculative tokens")
            return plain.seconds, plain.error
        steps = [step for step in steps if step.speculative_tokens]
        lengths = np.array([step.speculative_tokens for step in steps], float)
        seconds, errors = np.array([step.seconds for step in steps]), np.array([step.error for step in steps])
        if length <= lengths[-1] or len(steps) == 1:
            return float(np.interp(length, lengths, seconds)), float(np.interp(length, lengths, errors))
        slope = (seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2])
        return float(seconds[-1] + max(slope, 0) * (length - lengths[-1])), float(errors[-1])


def cells(found: Tokens, times: Times, batches: Sequence[int]) -> tuple[Cell, ...]:
    """What is promised for every batch size and number of tokens; the interval's logarithm is normal, its parts independent."""
    rows = []
    for batch in batches:
        plain = times.at(batch, 0)[0]
        for length in range(len(found.mean)):
            seconds, error = times.at(batch, length)
            mean = float(found.mean[length])
            throughput, reach = batch * mean / seconds, Z95 * math.hypot(error, found.error[length])
            rows.append(
                Cell(
                    batch=batch,
                    speculative_tokens=length,
                    tokens_per_step=_short(mean),
                    seconds=_short(seconds),
                    throughput=_short(throughput),
                    low=_short(throughput * math.exp(-reach)),
                    high=_short(throughput * math.exp(reach)),
                    speedup=_short(mean / seconds * plain),
                    timed=times.timed(batch, length),
                )
            )
    return tuple(rows)


def best_length(found: Tokens, times: Times, batch: int) -> int:
    """The number of tokens with the highest throughput at a batch size; 0 is no speculation, and of equals the smallest wins."""
    return int(np.argmax([mean / times.at(batch, length)[0] for length, mean in enumerate(found.mean)]))


def schedule(found: Tokens, times: Times, largest: int) -> tuple[Range, ...]:
    """The best number of tokens for each batch size from 1 to `largest`, sizes with the same number together."""
    best = [best_length(found, times, batch) for batch in range(1, largest + 1)]
    ranges: list[Range] = []
    for batch, length in enumerate(best, 1):
        if ranges and ranges[-1].speculative_tokens == length:
            ranges[-1] = Range(ranges[-1].first, batch, length)
        else:
            ranges.append(Range(batch, batch, length))
    return tuple(ranges)


def step_seconds(rounds: Mapping[tuple[int, int], Sequence[tuple[float, int]]]) -> tuple[StepSeconds, ...]:
    """The time of a step from rounds of timed steps.

    Args:
        rounds: by (batch, speculative tokens): seconds and number of steps of each round. The first round only warms up if there are more.
    """
    rows = []
    for (batch, length), found in sorted(rounds.items()):
        each = np.array([seconds / steps for seconds, steps in found if steps])
        middle, error = median(each)
        rows.append(StepSeconds(batch=batch, speculative_tokens=length, seconds=_short(middle), error=_short(error), steps=sum(steps for _, steps in found)))
    return tuple(rows)


def _short(value: float) -> float:
    """Six digits, which is more than is measured, for files that people read."""
    return float(f"{value:.6g}")
