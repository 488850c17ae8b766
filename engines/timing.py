"""Seconds of an engine's steps, from rounds of timed steps."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.uncertainty import median_with_error
from sequoia_plan.engines.plan import StepSeconds
from sequoia_plan.engines.workload import EngineRun, RunKind


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step at one context, by batch size and number of speculative tokens."""

    steps: tuple[StepSeconds, ...]
    context: int = 0
    pass_seconds: float = 0.0
    """Seconds of a pass of the draft; 0 if it was not timed."""
    idle_seconds: float = 0.0
    """Seconds of a step in which a draft reads along and makes no pass that drafts."""
    target_seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds of the target's pass over so many tokens, where they were timed."""

    @cached_property
    def by_batch(self) -> dict[int, list[StepSeconds]]:
        """The steps of each batch size, both in ascending order."""
        steps = sorted(self.steps, key=lambda step: (step.batch, step.speculative_tokens))
        by_batch: defaultdict[int, list[StepSeconds]] = defaultdict(list)
        for step in steps:
            by_batch[step.batch].append(step)
        return by_batch

    def seconds_and_error(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds of a step and their relative standard error, interpolated over the batch size."""
        at_timed = np.array([self._at_timed_batch(timed, length) for timed in self.by_batch])
        seconds, error = (np.interp(batch, [*self.by_batch], column) for column in at_timed.T)
        return float(seconds), float(error)

    def target_pass(self, tokens: int) -> float:
        """Seconds of the target's pass over so many tokens, interpolated over them."""
        sizes, seconds = np.array(sorted(self.target_seconds.items())).T
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        beyond = max(tokens - sizes[-1], 0.0) * max(slope, 0.0)
        return float(np.interp(tokens, sizes, seconds) + beyond)

    def parts(self, drafted: int, passes: int | None) -> tuple[float, ...]:
        """Seconds of the parts of a step of one request, by its drafted tokens.

        They are the target's pass over one token, what further tokens add to it, the passes of the
        draft that draft (None without a draft), and the rest, in which the draft reads along.
        """
        one = self.target_pass(1)
        width = self.target_pass(drafted + 1) - one
        if passes is None:
            return one, width, 0.0, 0.0
        timed = min(drafted, self.steps[-1].speculative_tokens)  # lookups may be longer
        whole = self.seconds_and_error(1, timed)[0] if timed else self.idle_seconds
        rest = whole - timed * self.pass_seconds - self.target_pass(timed + 1)
        return one, width, passes * self.pass_seconds, rest

    def _at_timed_batch(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds and relative error at a timed batch size, interpolated over the length.

        Below the smallest timed length >= 1 the time is that of the smallest, above the largest one
        that of the largest.
        """
        plain, *steps = self.by_batch[batch]
        if length == 0:
            return plain.seconds, plain.error
        rows = [(step.speculative_tokens, step.seconds, step.error) for step in steps]
        lengths, *columns = np.array(rows, float).T
        seconds, error = (float(np.interp(length, lengths, column)) for column in columns)
        return seconds, error


def step_seconds(batch: int, length: int, seconds: Floats) -> StepSeconds:
    """The median of several measurements, float64 [measurements]."""
    return StepSeconds(batch, length, *median_with_error(seconds))


def step_times(rounds: Mapping[RunKind, Sequence[EngineRun]], context: int) -> StepTimes:
    """Seconds of a step at one context: the median over rounds that had such steps."""
    seconds = {
        k: [run.seconds / run.steps for run in runs if run.steps] for k, runs in rounds.items()
    }
    steps = (
        step_seconds(kind.batch, kind.drafting.length, np.array(timed))
        for kind, timed in seconds.items()
        if kind.context == context and timed
    )
    return StepTimes(tuple(steps), context)
