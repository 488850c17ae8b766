"""What the noise of the measurements leaves open: of a tree's promise, and of its advantage over the best tree with another verifier."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.cost import Floats, Promise, StepTime, expected_tokens
from sequoia_plan.artifacts.plan import Alternative, Interval
from sequoia_plan.artifacts.profile import tally
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.uncertainty import Z95, ends, lift_error, step_ratio_error, step_time_error, token_ratio_error, trials_of_a_new_kind
from sequoia_plan.planner.solving.frontier import LARGEST_BUDGET


@dataclass(frozen=True)
class Candidate:
    """The best tree for one verifier.

    Args:
        tree: the token tree.
        acceptance, rows: what it was solved for, and float64 [levels, classes, ranks] within the limits.
        measured, times: the profile of that verifier alone, and its latencies; None where there is none.
        given: what is promised.
        bound: on the speed-up of any tree; None if there is none.
        solver: its name.
    """

    tree: TokenTree
    acceptance: Any
    rows: Floats
    measured: Profile | None
    times: StepTime | None
    given: Promise
    bound: float | None
    solver: str

    @property
    def verifier(self) -> str:
        """The verifier's name."""
        return self.measured.verifier if self.measured else ""

    @property
    def table(self) -> Floats:
        """float64 [levels, ranks] or [levels, classes, ranks]: the acceptance as measured; the last level holds for all deeper ones."""
        return np.atleast_2d(np.asarray(self.acceptance, float))

    def worth(self, by_tokens: bool) -> float:
        """Expected tokens, of a step or of a second."""
        assert self.given.expected_tokens is not None
        return self.given.expected_tokens / (1.0 if by_tokens or self.given.step_seconds is None else self.given.step_seconds)


def alternative(best: Candidate, other: Candidate, profile: Any, by_tokens: bool, smooth: bool) -> Alternative:
    """What is said of the best tree for another verifier.

    Its interval is that of the measurements' noise: of what both verifiers accept, judged on the same draws; of passes, where the two trees
    differ; and of verification.

    Args:
        profile: of both verifiers.
        by_tokens: compared by the tokens of a step.
        smooth: the acceptance is not as measured.
    """
    advantage = best.worth(by_tokens) / other.worth(by_tokens)
    error = math.inf if smooth else _advantage_error(best, other, profile, by_tokens)
    interval = (advantage * math.exp(-Z95 * error), advantage * math.exp(Z95 * error)) if math.isfinite(error) else None
    tokens, step = other.given.expected_tokens, other.given.step_seconds
    assert tokens is not None
    return Alternative(other.tree.size, other.tree.depth, tokens, advantage, step, interval)


def _advantage_error(best: Candidate, other: Candidate, profile: Profile, by_tokens: bool) -> float:
    """Standard error of the logarithm of the advantage; inf if it is not known."""
    by_name = {best.verifier: best, other.verifier: other}
    if profile.lift is None or by_name.keys() != {"sequoia", "traversal"}:
        return math.inf
    plain, lifted = by_name["sequoia"], by_name["traversal"]
    assert plain.measured is not None and lifted.measured is not None
    seen = np.array([level.trials for level in lifted.measured.levels], float)
    counts = np.array([level.counts for level in lifted.measured.levels])
    trials = _observations(plain.tree, plain.measured, plain.table)[0]
    errors = [
        lift_error(lifted.tree, lifted.table, counts, seen, profile.lift),
        token_ratio_error((lifted.tree, lifted.table), (plain.tree, plain.table), trials),
    ]
    if not by_tokens and best.times and other.times:
        at = [(one.tree, replace(one.times, acceptance=one.acceptance)) for one in (best, other) if one.times]
        errors.append(step_ratio_error(at[0], at[1]))
    return math.hypot(*errors)


def intervals(one: Candidate, lost: Callable[[Floats], float]) -> tuple[Interval, Interval | None]:
    """Of a tree's promise: for prompts like the profiled ones, and for prompts of a new kind (None if the profile does not tell).

    Args:
        lost: of an acceptance, the share that the tree falls short of the tree that would be chosen for it.
    """
    assert one.measured is not None
    alike, new = _observations(one.tree, one.measured, one.table)
    return _interval(one, alike, lost), None if new is None else _interval(one, new, lost)


def _observations(tree: TokenTree, profile: Profile, acceptance: Floats) -> tuple[Floats, Floats | None]:
    """How many independent observations each vector of the acceptance is worth, [levels] or [levels, classes]: for prompts like the profiled
    ones, and for prompts of a new kind (None if the profile does not tell)."""
    shape, classes = acceptance.shape[:-1], acceptance.shape[1] if acceptance.ndim > 2 else 1
    seen = rates(*tally(profile.levels, classes))[1] if len(acceptance) > 1 else np.ones((1, 1))
    alike = (profile.trials * seen / seen.sum()).reshape(shape)
    if not profile.kinds:
        return alike, None
    trials, counts = (np.stack(each) for each in zip(*(tally(levels, classes) for levels in profile.kinds.values()), strict=True))
    if len(acceptance) == 1:
        trials, counts = trials.sum(1, keepdims=True), counts.sum(1, keepdims=True)
    new = trials_of_a_new_kind(tree, acceptance.reshape(*seen.shape, -1), trials, counts)
    return alike, None if new is None else np.minimum(new.reshape(shape), alike)


def _interval(one: Candidate, trials: Floats, lost: Callable[[Floats], float]) -> Interval:
    """What a 95 % interval does to this tree's promise, and to the choice itself.

    Args:
        trials: independent observations behind each vector of the acceptance, [levels] or [levels, classes].
        lost: as for `intervals`.
    """
    tree, acceptance, times, speedup = one.tree, one.table, one.times, one.given.predicted_speedup
    low, high = ends(tree, acceptance, trials)
    tokens = expected_tokens(tree, low), expected_tokens(tree, high)
    sped: tuple[float, float] | None = None
    if speedup is not None and times is not None:
        now, clock = expected_tokens(tree, acceptance), Z95 * step_time_error(tree, times)
        slower, faster = (speedup * math.exp(sign * math.hypot(math.log(end / now), clock)) for sign, end in zip((-1, 1), tokens, strict=True))
        sped = slower, faster
    return Interval(0.95, tokens, sped, (lost(low), lost(high)) if tree.size <= LARGEST_BUDGET["hull"] else None)
