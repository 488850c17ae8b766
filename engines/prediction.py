"""What a step of an engine is expected to yield and to take, whatever predicts it."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from sequoia_plan.artifacts.uncertainty import Z95, jackknife_error
from sequoia_plan.engines.plan import NONE, Cell, Drafting
from sequoia_plan.engines.timing import StepTimes


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


StepModel = Any
"""What predicts the steps of every way of drafting from one measurement: `acceptance`, `draftings`
with none first, and `expect`, as of `ChainModel` and `ReplayModel`."""


def ratio_error(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Standard error of sum(numerators) / sum(denominators), from a jackknife over texts."""
    above, below = np.array([*numerators], float), np.array([*denominators], float)
    if len(above) < 2:
        return 0.0
    return jackknife_error((above.sum() - above) / (below.sum() - below))  # of all texts but one


def predict_cells(model: StepModel, times: StepTimes, batch: int) -> list[Cell]:
    """Predicts throughput and its 95 % interval for every way of drafting at a batch size.

    The logarithm of the throughput is taken as normally distributed.
    """
    plain = model.expect(NONE, batch, times)
    cells = []
    for drafting in model.draftings:
        expected = model.expect(drafting, batch, times)
        speed, factor = expected.speed, math.exp(Z95 * expected.error)
        cell = Cell(
            batch=batch,
            drafting=drafting,
            tokens_per_step=expected.tokens,
            seconds=expected.seconds,
            throughput=batch * speed,
            low=batch * speed / factor,
            high=batch * speed * factor,
            speedup=speed / plain.speed,
        )
        cells.append(cell)
    return cells


def best_drafting(model: StepModel, times: StepTimes, batch: int) -> Drafting:
    """The way of drafting with the highest throughput, and of equal ones the first."""
    return max(model.draftings, key=lambda drafting: model.expect(drafting, batch, times).speed)
