"""The intervals of a solved tree: what the noise of the measurements leaves open."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.cost import Floats, StepTime, TreePrediction, expected_tokens
from sequoia_plan.artifacts.counts import counts_by_class
from sequoia_plan.artifacts.plan import Interval
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.uncertainty import (
    Z95,
    acceptance_at_interval_ends,
    step_time_error,
    trials_for_new_kind,
)
from sequoia_plan.planner.solving.tokens.frontier import MAX_RISING_BUDGET

ShareLost = Callable[[Floats], float]
"""The share that a tree loses against the tree that would be chosen for another acceptance."""


@dataclass(frozen=True)
class SolvedTree:
    """The best tree for one verifier.

    `acceptance` [rank].
    """

    tree: TokenTree
    acceptance: Any
    profile: Profile | None
    times: StepTime | None
    prediction: TreePrediction
    speedup_bound: float | None
    solver: str

    @property
    def verifier(self) -> str:
        """The verifier's name; empty without a profile."""
        return self.profile.verifier if self.profile else ""

    @property
    def rows(self) -> Floats:
        """The acceptance as float64 [levels, ranks] or [levels, classes, ranks].

        The last level holds for all deeper ones.
        """
        return np.atleast_2d(np.asarray(self.acceptance, float))

    def score(self, by_tokens: bool) -> float:
        """Expected tokens of a step, or of a second."""
        tokens, step_seconds, _ = self.prediction
        assert tokens is not None
        return tokens / (1.0 if by_tokens or step_seconds is None else step_seconds)


def intervals(solved_tree: SolvedTree, share_lost: ShareLost) -> tuple[Interval, Interval | None]:
    """The 95 % intervals of a tree's prediction."""
    trials, new_kind_trials = _effective_trials(solved_tree)
    interval = _interval(solved_tree, trials, share_lost)
    if new_kind_trials is None:
        return interval, None
    return interval, _interval(solved_tree, new_kind_trials, share_lost)


def _effective_trials(solved_tree: SolvedTree) -> tuple[Floats, Floats | None]:
    """The independent observations that each vector of the acceptance is worth."""
    profile, rows = solved_tree.profile, solved_tree.rows
    assert profile is not None
    shape = rows.shape[:-1]
    num_classes = rows.shape[1] if rows.ndim > 2 else 1
    is_one_vector = len(rows) == 1
    observations = np.ones((1, 1))  # all trials are of the one vector
    if not is_one_vector:
        _, observations = rates(*counts_by_class(profile.levels, num_classes))
    trials = (profile.trials * observations / observations.sum()).reshape(shape)
    if not profile.kinds:
        return trials, None
    kinds = [counts_by_class(levels, num_classes) for levels in profile.kinds.values()]
    kind_trials = np.stack([level_trials for level_trials, _ in kinds])
    kind_counts = np.stack([level_counts for _, level_counts in kinds])
    if is_one_vector:
        kind_trials = kind_trials.sum(1, keepdims=True)
        kind_counts = kind_counts.sum(1, keepdims=True)
    new_kind_trials = trials_for_new_kind(
        solved_tree.tree, rows.reshape(*observations.shape, -1), kind_trials, kind_counts
    )
    if new_kind_trials is None:
        return trials, None
    return trials, np.minimum(new_kind_trials.reshape(shape), trials)


def _interval(solved_tree: SolvedTree, trials: Floats, share_lost: ShareLost) -> Interval:
    """The 95 % interval of a tree's prediction, and what the tree loses at its ends."""
    tree = solved_tree.tree
    low, high = acceptance_at_interval_ends(tree, solved_tree.rows, trials)
    tokens = expected_tokens(tree, low), expected_tokens(tree, high)
    can_solve_again = tree.size <= MAX_RISING_BUDGET
    return Interval(
        level=0.95,
        expected_tokens=tokens,
        predicted_speedup=_speedup_interval(solved_tree, tokens),
        lost=(share_lost(low), share_lost(high)) if can_solve_again else None,
    )


def _speedup_interval(
    solved_tree: SolvedTree, tokens_at_ends: tuple[float, float]
) -> tuple[float, float] | None:
    """The ends of the speed-up's interval; its logarithm adds up independent errors.

    The errors are those of the expected tokens and of the step time. None without latencies.
    """
    speedup = solved_tree.prediction.predicted_speedup
    if speedup is None or solved_tree.times is None:
        return None
    tokens = expected_tokens(solved_tree.tree, solved_tree.rows)
    time_error = Z95 * step_time_error(solved_tree.tree, solved_tree.times)
    token_errors = [math.log(end / tokens) for end in tokens_at_ends]
    low, high = (math.hypot(token_error, time_error) for token_error in token_errors)
    return speedup * math.exp(-low), speedup * math.exp(high)
