"""Acceptance from a profile's counts: for all steps, and for steps of one class of match.

The match of a text is its longest suffix that occurs earlier in it, and the lookup chain is what
followed there (artifacts/lookup.py). Steps are put into classes by the length of the match.

The class of a node is something else: 0 on the spine (the root, its first child, that node's first
child, ...) and 1 off it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts import LevelCounts, Profile
from sequoia_plan.artifacts.cost import Floats, acceptance_table
from sequoia_plan.artifacts.counts import counts_by_class
from sequoia_plan.artifacts.lookup import MatchClass
from sequoia_plan.artifacts.merge import round_probs

MIN_TRIALS = 50
"""Levels with fewer observed nodes have one vector, from all their counts together."""


def level_probs(profile: Profile, by_class: bool) -> Any:
    """A profile's p[level][rank] or p[level][class][rank], to six digits.

    p is the probability that an accepted node's child of a rank is accepted, by the node's level
    and class (0 on the spine, 1 off it).
    """
    rows = profile.acceptance_by_class if by_class else profile.acceptance_by_level
    return rounded_rows(np.array(rows))


def rounded_rows(rows: Floats) -> Any:
    """Nested lists of the probabilities, to six digits.

    Counts may exceed their trials by rounding; a vector of a larger sum is scaled down to the sum
    1. `rows` float64 [levels, ranks].
    """
    levels = (rows / np.maximum(1.0, rows.sum(-1, keepdims=True))).tolist()
    if rows.ndim == 3:
        return [[list(round_probs(vector)) for vector in level] for level in levels]
    return [list(round_probs(vector)) for vector in levels]


def drafted_probs(profile: Profile, match_class: MatchClass) -> Any:
    """p[level][rank] or p[level][class][rank] of steps of one class of match, all nodes drafted.

    A class of match with too few counts has the profile's own acceptance.
    """
    levels = match_class.drafted
    if not levels or levels[0].trials < MIN_TRIALS:
        levels = profile.levels
    if not levels:
        return list(profile.acceptance)
    view = replace(profile, levels=_levels_with_trials(levels), kinds={}, lookup=None)
    return level_probs(view, by_class=bool(view.acceptance_by_class))


def looked_up_probs(match_class: MatchClass, drafted: Any) -> Any:
    """p[level][class][rank] of steps of one class of match whose tree has a looked-up spine.

    Rank 1 of a node on the spine is the looked-up token, and its other children are drafted; so are
    all children of nodes off the spine. The two classes of nodes have counts of their own, which
    are not moved towards each other: their ranks mean different things.
    """
    levels = match_class.looked_up
    if not levels or levels[0].trials < MIN_TRIALS:
        return None
    trials, counts = counts_by_class(levels, 2)
    on_spine = pooled_rows(trials[:, 0], counts[:, 0])
    if trials[1:, 1].sum():
        # no node is off the spine on the root's level
        below_root = pooled_rows(trials[1:, 1], counts[1:, 1])
        off_spine = np.concatenate([below_root[:1], below_root])
    else:
        off_spine = _with_shape(acceptance_table(drafted)[:, -1], on_spine.shape)
    return rounded_rows(np.stack([on_spine, off_spine], 1))


def looked_up_as_visited(probs: Any, visits_by_run: Floats) -> Any:
    """The same as `looked_up_probs`, with looked-up tokens as steps come upon them.

    A long run of right tokens has many positions and takes few steps. So a looked-up token is right
    less often for the average step than for the average position, which is what was counted. The
    drafted children keep their probabilities given that the looked-up token is wrong. `probs`
    [level]; `visits_by_run` float64 [runs].
    """
    if visits_by_run.sum() < MIN_TRIALS:
        return probs
    reached = visits_by_run[::-1].cumsum()[::-1]  # the run has so many tokens or more
    is_right = pooled_rows(reached[:-1], reached[1:, None])[:, 0]
    table = acceptance_table(probs)
    rows = table[np.minimum(np.arange(len(is_right)), len(table) - 1)].copy()
    wrong_before = 1 - rows[:, 0, 0]
    share_left = np.where(wrong_before > 0, (1 - is_right) / np.maximum(wrong_before, 1e-300), 0.0)
    rows[:, 0, 1:] *= share_left[:, None]
    rows[:, 0, 0] = is_right
    last = int(np.flatnonzero(np.diff(is_right, prepend=-1.0))[-1])  # the levels after it repeat it
    return rounded_rows(rows[: max(last, len(table) - 1) + 1])


def pooled_rows(trials: Floats, counts: Floats) -> Floats:
    """The share of counts in trials, float64 [levels, ranks], with the sparse levels as one.

    The first level with fewer than `MIN_TRIALS` trials and all deeper ones have one vector, from
    their counts together, and from those of the level above if they are still too few. `trials`
    float64 [levels]; `counts` float64 [levels, ranks].
    """
    first = _first_pooled_level(trials)
    trials, counts = trials.copy(), counts.copy()
    trials[first:], counts[first:] = trials[first:].sum(), counts[first:].sum(0)
    rows: Floats = counts / trials[:, None]
    return rows


def _first_pooled_level(trials: Floats) -> int:
    """The first of the levels that have one vector together; their number if none have."""
    is_sparse = trials < MIN_TRIALS
    if not is_sparse.any():
        return len(trials)
    first = int(np.argmax(is_sparse))
    while first > 0 and trials[first:].sum() < MIN_TRIALS:
        first -= 1
    return first


def _levels_with_trials(levels: Sequence[LevelCounts]) -> tuple[LevelCounts, ...]:
    """The counts by level, with sparse levels added up into one, which holds for all deeper ones.

    Counts of nodes off the spine are added up where every level that is added up has them.
    """
    first = _first_pooled_level(np.array([level.trials for level in levels], float))
    pooled = levels[first:]
    if len(pooled) < 2:
        return tuple(levels)
    off_spine = [level.off_spine for level in pooled]
    parts = [part for part in off_spine if part is not None]
    total = LevelCounts(*_sum_of_counts(pooled))
    # The root's level has no nodes off the spine, and names none.
    if parts and (len(parts) == len(pooled) or (first == 0 and off_spine[0] is None)):
        trials, counts = _sum_of_counts(parts)
        total = replace(total, off_spine=replace(parts[0], trials=trials, counts=counts))
    return (*levels[:first], total)


def _sum_of_counts(parts: Sequence[Any]) -> tuple[int, tuple[float, ...]]:
    """The sum of trials, and of counts by rank."""
    counts = np.sum([part.counts for part in parts], axis=0)
    return sum(part.trials for part in parts), tuple(counts.tolist())


def _with_shape(rows: Floats, shape: tuple[int, int]) -> Floats:
    """Rows [levels, ranks] cut or continued to a shape: the last level goes on, further ranks 0."""
    levels = np.minimum(np.arange(shape[0]), len(rows) - 1)
    result = np.zeros(shape)
    num_ranks = min(shape[1], rows.shape[1])
    result[:, :num_ranks] = rows[levels, :num_ranks]
    return result
