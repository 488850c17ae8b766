"""The intervals of a solved tree: what the noise of the measurements leaves open."""

import math
from collections.abc import Callable

import numpy as np

from sequoia_plan.artifacts import Acceptance, Profile, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import Interval
from sequoia_plan.artifacts.prediction import predict
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.uncertainty import (
    Z95,
    rates_at_interval_ends,
    step_time_error,
    trials_for_new_kind,
)
from sequoia_plan.planner.solving.tokens.frontier import MAX_RISING_BUDGET

BestTree = Callable[[Floats], TokenTree]
"""The tree that would be chosen for other rates."""


def intervals(
    tree: TokenTree, profile: Profile, times: StepTime | None, best_tree: BestTree
) -> tuple[Interval | None, Interval | None]:
    """The 95 % intervals of a tree: for prompts like the profiled ones, and of a new kind.

    Without `times` the share that the tree loses at an interval's ends is of tokens, else of speed.
    """
    if not profile.effective_trials or tree.size == 1:
        return None, None
    acceptance = profile.acceptance
    weights = acceptance.trials
    if weights is None:
        weights = np.ones(acceptance.rates.shape[:2])
    trials = profile.effective_trials * weights / weights.sum()
    new_kind = trials_for_new_kind(tree, acceptance, list(profile.kinds.values()))

    rates = acceptance.rates

    def lost_at(rates: Floats) -> float:
        """The share of speed (or of tokens) that the tree loses against the best one."""
        best = best_tree(rates)
        time_ratio = times.step_seconds(tree) / times.step_seconds(best) if times else 1.0
        tokens_ratio = expected_tokens(tree, rates) / expected_tokens(best, rates)
        return max(0.0, 1 - tokens_ratio / time_ratio)

    def interval(trials: Floats) -> Interval:
        """The interval of so many trials."""
        low, high = rates_at_interval_ends(tree, rates, trials)
        tokens = expected_tokens(tree, low), expected_tokens(tree, high)
        measured_times, lost = StepTime.from_measured(profile), None
        predicted_speedup = _speedup_interval(tree, acceptance, measured_times, tokens)
        if tree.size <= MAX_RISING_BUDGET:  # the rates there may increase
            lost = lost_at(low), lost_at(high)
        return Interval(0.95, tokens, predicted_speedup, lost)

    return interval(trials), None if new_kind is None else interval(np.minimum(new_kind, trials))


def _speedup_interval(
    tree: TokenTree, acceptance: Acceptance, times: StepTime | None, ends: tuple[float, float]
) -> tuple[float, float] | None:
    """The ends of the speed-up's interval; its logarithm adds up independent errors.

    The errors are those of the expected tokens, whose interval has these `ends`, and of the step
    time.
    """
    tokens, _, speedup = predict(tree, acceptance, times)
    if times is None or tokens is None or speedup is None:
        return None
    time_error = Z95 * step_time_error(tree, times)
    low, high = (math.hypot(math.log(end / tokens), time_error) for end in ends)
    return speedup * math.exp(-low), speedup * math.exp(high)
