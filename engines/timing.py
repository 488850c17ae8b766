"""Seconds of an engine's steps, from rounds of timed steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
        for batch, steps in self.by_batch.items():
            lengths = [step.speculative_tokens for step in steps]
            if lengths[0] != 0 or len(lengths) < 2 or len(lengths) != len(set(lengths)):
                raise SequoiaPlanError(
                    f"steps: batch {batch} was timed with {lengths} speculative tokens, expected "
                    "0 and others, each once; give more prompts or --tokens, or other logs"
                )

    @cached_property
    def by_batch(self) -> dict[int, list[StepSeconds]]:
        """The steps of each batch size, both in ascending order."""
        by_batch: dict[int, list[StepSeconds]] = {}
        for step in sorted(self.steps, key=lambda step: (step.batch, step.speculative_tokens)):
            by_batch.setdefault(step.batch, []).append(step)
        return by_batch

    def is_timed(self, batch: int, length: int) -> bool:
        """True if a step of this batch size and number of speculative tokens was timed."""
        return any(step.speculative_tokens == length for step in self.by_batch.get(batch, []))

    def seconds_and_error(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds of a step and their relative standard error, interpolated over the batch size."""
        at_timed = np.array([self._at_timed_batch(timed, length) for timed in self.by_batch])
        seconds, error = (np.interp(batch, [*self.by_batch], column) for column in at_timed.T)
        return float(seconds), float(error)

    def _at_timed_batch(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds and relative error at a timed batch size, interpolated over the length.

        Below the smallest timed length >= 1 the time is that of the smallest. Above the largest
        one, the line through the two largest goes on, but never falls.
        """
        plain, *steps = self.by_batch[batch]
        if length == 0:
            return plain.seconds, plain.error
        rows = [(step.speculative_tokens, step.seconds, step.error) for step in steps]
        lengths, seconds, errors = np.array(rows, float).T
        beyond = max(length - lengths[-1], 0.0)
        slope = 0.0
        if beyond and len(steps) > 1:
            slope = max((seconds[-1] - seconds[-2]) / (lengths[-1] - lengths[-2]), 0.0)
        return (
            float(np.interp(length, lengths, seconds) + slope * beyond),
            float(np.interp(length, lengths, errors)),
        )


def step_seconds(batch: int, length: int, seconds: Floats, num_steps: int) -> StepSeconds:
    """The median of several measurements, float64 [measurements], which took so many steps."""
    median_seconds, error = median_with_error(seconds)
    return StepSeconds(batch, length, round_digits(median_seconds), round_digits(error), num_steps)


def step_times(rounds: Mapping[RunKind, Sequence[EngineRun]], context: int) -> StepTimes:
    """Seconds of a step at one context: the median over rounds that had such steps."""
    steps: list[StepSeconds] = []
    pass_seconds = 0.0
    for kind in sorted(rounds, key=lambda kind: (kind.batch, kind.drafting)):
        seconds = seconds_per_step(rounds[kind])
        if kind.context != context or not len(seconds):
            continue
        num_steps = sum(run.steps for run in rounds[kind])
        step = step_seconds(kind.batch, kind.drafting.length, seconds, num_steps)
        if kind.drafting.min_prob == NEVER:
            # the draft proposes nothing: a pass that drafts, and one that reads the new token
            pass_seconds = max((step.seconds - steps[0].seconds) / 2, 0.0)
        else:
            steps.append(step)
    return StepTimes(tuple(steps), context, round(pass_seconds, 9))


def seconds_per_step(runs: Iterable[EngineRun]) -> Floats:
    """float64 [runs with steps]."""
    return np.array([run.seconds / run.steps for run in runs if run.steps])
