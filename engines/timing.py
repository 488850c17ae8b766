"""Seconds of an engine's steps, from rounds of timed steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.uncertainty import median_with_error
from sequoia_plan.engines.plan import StepSeconds
from sequoia_plan.engines.workload import EngineRun, RunKind, round_digits

NEVER = 1.01
"""A threshold that no token reaches: the draft makes one pass and proposes nothing."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step at one context, by batch size and number of speculative tokens."""

    steps: tuple[StepSeconds, ...]
    context: int = 0
    pass_seconds: float = 0.0
    """Seconds of a pass of the draft; 0 if it was not timed."""

    def __post_init__(self) -> None:
        for batch in self.batches:
            lengths = [step.speculative_tokens for step in self._steps_of_batch(batch)]
            if lengths[0] != 0 or len(lengths) < 2 or len(lengths) != len(set(lengths)):
                raise SequoiaPlanError(
                    f"steps: batch {batch} was timed with {lengths} speculative tokens, expected "
                    "0 and others, each once; give more prompts or --tokens, or other logs"
                )

    @property
    def batches(self) -> list[int]:
        """The timed batch sizes, in ascending order."""
        return sorted({step.batch for step in self.steps})

    def _steps_of_batch(self, batch: int) -> list[StepSeconds]:
        """The timed steps of one batch size, by increasing number of speculative tokens."""
        steps = (step for step in self.steps if step.batch == batch)
        return sorted(steps, key=lambda step: step.speculative_tokens)

    def is_timed(self, batch: int, length: int) -> bool:
        """True if a step of this batch size and number of speculative tokens was timed."""
        return any((step.batch, step.speculative_tokens) == (batch, length) for step in self.steps)

    def seconds_and_error(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds of a step, and their relative standard error."""
        batches = self.batches
        if batch in batches:
            return self._at_timed_batch(batch, length)
        last = len(batches) - 1
        upper = next((i for i, timed in enumerate(batches) if timed > batch), last)
        low, high = batches[max(upper - 1, 0)], batches[upper]
        low_seconds, low_error = self._at_timed_batch(low, length)
        high_seconds, high_error = self._at_timed_batch(high, length)
        fraction = 0.0 if low == high else (batch - low) / (high - low)
        seconds = low_seconds + fraction * (high_seconds - low_seconds)
        seconds = max(seconds, min(low_seconds, high_seconds) / 2)
        error = max(low_error, high_error)
        if not 0 <= fraction <= 1 or low == high:  # outside of what was timed
            nearest = low_seconds if batch < low else high_seconds
            error += abs(seconds - nearest) / seconds / 2
        return seconds, error

    def _at_timed_batch(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds and relative error at a timed batch size, interpolated over the length.

        Below the smallest timed length >= 1 the time is that of the smallest. Above the largest
        one, the line through the two largest goes on, but never falls.
        """
        plain, *steps = self._steps_of_batch(batch)
        if length == 0:
            return plain.seconds, plain.error
        lengths = np.array([step.speculative_tokens for step in steps], float)
        seconds = np.array([step.seconds for step in steps])
        errors = np.array([step.error for step in steps])
        beyond = max(length - lengths[-1], 0.0)
        slope = 0.0
        if beyond and len(steps) > 1:
            slope = max((seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2]), 0.0)
        return (
            float(np.interp(length, lengths, seconds) + slope * beyond),
            float(np.interp(length, lengths, errors)),
        )


def step_times(rounds: Mapping[RunKind, Sequence[EngineRun]], context: int) -> StepTimes:
    """Seconds of a step at one context: the median over rounds that had such steps."""
    steps = []
    stopped_seconds = None
    for kind in sorted(rounds, key=lambda kind: (kind.batch, kind.drafting)):
        seconds = seconds_per_step(rounds[kind])
        if kind.context != context or not len(seconds):
            continue
        median_seconds, error = median_with_error(seconds)
        if kind.drafting.min_prob == NEVER:
            stopped_seconds = median_seconds
            continue
        row = StepSeconds(
            batch=kind.batch,
            speculative_tokens=kind.drafting.length,
            seconds=round_digits(median_seconds),
            error=round_digits(error),
            steps=sum(run.steps for run in rounds[kind]),
        )
        steps.append(row)
    pass_seconds = 0.0
    if stopped_seconds and steps:
        # a step whose draft proposes nothing: a pass that drafts, and one that reads the new token
        pass_seconds = max((stopped_seconds - steps[0].seconds) / 2, 0.0)
    return StepTimes(tuple(steps), context, round(pass_seconds, 9))


def seconds_per_step(runs: Iterable[EngineRun]) -> Floats:
    """float64 [runs with steps]."""
    return np.array([run.seconds / run.steps for run in runs if run.steps])
