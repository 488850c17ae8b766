"""What a step of an engine takes, and what it is expected to yield, whatever predicts it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.uncertainty import Z95, jackknife_error, median_with_error
from sequoia_plan.engines.plan import NONE, Cell, ChainAcceptance, Drafting, StepSeconds
from sequoia_plan.engines.pool import EngineRun, RunKind


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step at one context, by batch size and number of speculative tokens."""

    steps: tuple[StepSeconds, ...]
    context: int = 0
    pass_seconds: float = 0.0
    """Seconds of a pass of the draft; 0 if it was not timed."""
    rest_seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds of the rest of a step with a draft, in which it reads along, by drafted tokens."""
    target_seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds of the target's pass over so many tokens, where they were timed."""
    weights: Sequence[float] | Floats = (1, 1, 1, 1)
    """Multiples of `parts`: less than 1 where a part is taken to cost less than was timed."""

    def seconds_and_error(self, batch: int, length: int) -> tuple[float, float]:
        """Seconds of a step and their relative standard error, interpolated over both numbers.

        Steps without drafted tokens have no draft and are on the line of no other length. Outside
        what was timed the time is that of the nearest.
        """
        batches = sorted({step.batch for step in self.steps})
        by_batch = []  # seconds and error at `length`
        for timed_batch in batches:
            steps = sorted(
                (step.speculative_tokens, step.seconds, step.error)
                for step in self.steps
                if step.batch == timed_batch and bool(step.speculative_tokens) == bool(length)
            )
            lengths, *timed = np.array(steps).T
            by_batch.append([np.interp(length, lengths, values) for values in timed])
        both = np.array(by_batch).T
        seconds, error = (float(np.interp(batch, batches, values)) for values in both)
        return seconds, error

    def target_pass(self, tokens: int) -> float:
        """Seconds of the target's pass over so many tokens, interpolated over them."""
        return interpolated(self.target_seconds, tokens)

    def parts(self, drafted: int, passes: int, has_draft: bool) -> Floats:
        """Seconds of the parts of a step of one request, float64 [4], by its drafted tokens.

        They are the target's pass over one token, what further tokens add to it, the passes of the
        draft that draft, and the rest, in which the draft reads along.
        """
        one = self.target_pass(1)
        rest = interpolated(self.rest_seconds, drafted) if has_draft else 0.0
        width = self.target_pass(drafted + 1) - one
        return np.array([one, width, passes * self.pass_seconds, rest]) * self.weights


def interpolated(seconds: Mapping[int, float], tokens: int) -> float:
    """Seconds by numbers of tokens, on the line between those timed."""
    sizes = sorted(seconds)
    return float(np.interp(tokens, sizes, [seconds[size] for size in sizes]))


def step_seconds(batch: int, length: int, seconds: Iterable[float]) -> StepSeconds:
    """The median of several measurements of a step with `length` drafted tokens, with its error."""
    return StepSeconds(batch, length, *median_with_error(np.array([*seconds])))


def step_times(rounds: Mapping[RunKind, Sequence[EngineRun]], context: int) -> StepTimes:
    """Seconds of a step at one context: the median over rounds."""
    steps = (
        step_seconds(kind.batch, kind.drafting.length, (run.seconds / run.steps for run in runs))
        for kind, runs in rounds.items()
        if kind.context == context
    )
    return StepTimes(tuple(steps), context)


def relative_error(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Relative standard error of sum(numerators) / sum(denominators), by a jackknife over texts.

    It is 0 for a single text; those with nothing below do not count.
    """
    pairs = [(a, b) for a, b in zip(numerators, denominators, strict=True) if b]
    if len(pairs) < 2 or not any(a for a, _ in pairs):
        return 0.0
    above, below = np.array(pairs, float).T
    without_one = (above.sum() - above) / (below.sum() - below)
    return jackknife_error(without_one) * float(below.sum() / above.sum())


class Expectation(NamedTuple):
    """A step of a way of drafting, on average."""

    tokens: float
    """Tokens a request."""
    seconds: float
    error: float
    """Relative standard error of tokens a second."""

    @property
    def speed(self) -> float:
        """Tokens a second of one request; a batch has as many times more."""
        return self.tokens / self.seconds


class StepModel(Protocol):
    """What predicts the steps of every way of drafting: `ChainModel` or `ReplayModel`."""

    @property
    def acceptance(self) -> ChainAcceptance:
        """How far chains of the draft were accepted."""

    @property
    def draftings(self) -> Sequence[Drafting]:
        """The ways to choose from, none first."""

    def expect(self, drafting: Drafting, batch: int, times: StepTimes) -> Expectation:
        """The mean step of a way of drafting at a batch size."""


@dataclass(frozen=True)
class ChainModel:
    """Predicts chains of up to `max_length` tokens as the first tokens of the counted ones.

    A shorter chain begins more often where the draft was just right; its first tokens are accepted
    a little more often than is predicted (docs/engines.md, "vLLM").
    """

    acceptance: ChainAcceptance
    max_length: int

    @property
    def draftings(self) -> list[Drafting]:
        """No speculation, and chains of each length."""
        return [*map(Drafting, range(self.max_length + 1))]

    def expect(self, drafting: Drafting, batch: int, times: StepTimes) -> Expectation:
        """A step yields one token, and those accepted in the share of steps that draft.

        The relative errors of tokens and time are taken as independent, and that of the accepted
        tokens as the same for every length.
        """
        seconds, time_error = times.seconds_and_error(batch, drafting.length)
        counted = self.acceptance
        accepted = counted.drafting_share * sum(counted.survival[: drafting.length])
        tokens_error = counted.error * accepted / (1 + accepted)
        return Expectation(1 + accepted, seconds, math.hypot(time_error, tokens_error))


def predict_cells(model: StepModel, times: StepTimes, batch: int) -> list[Cell]:
    """Predicts throughput and its 95 % interval for every way of drafting at a batch size.

    The logarithm of the throughput is taken as normally distributed.
    """
    plain = model.expect(NONE, batch, times)
    cells = []
    for drafting in model.draftings:
        expected = model.expect(drafting, batch, times)
        throughput, factor = batch * expected.speed, math.exp(Z95 * expected.error)
        cell = Cell(
            batch=batch,
            drafting=drafting,
            tokens_per_step=expected.tokens,
            seconds=expected.seconds,
            throughput=throughput,
            low=throughput / factor,
            high=throughput * factor,
            speedup=expected.speed / plain.speed,
        )
        cells.append(cell)
    return cells


def best_drafting(model: StepModel, times: StepTimes, batch: int) -> Drafting:
    """The way of drafting with the highest throughput, and of equal ones the first."""
    return max(model.draftings, key=lambda drafting: model.expect(drafting, batch, times).speed)
