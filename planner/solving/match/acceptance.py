"""Acceptance of steps of one match class, from a profile's counts.

The match of a text is its longest suffix that occurs earlier in it, and the lookup chain is what
followed there (artifacts/lookup.py). Steps are put into match classes by the length of the match.
"""

import numpy as np

from sequoia_plan.artifacts import Acceptance, Counts, Profile
from sequoia_plan.artifacts.acceptance import rounded
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.lookup import MatchClass

MIN_TRIALS = 50
"""Levels with fewer observed nodes have one vector, from all their counts together."""


def drafted_acceptance(profile: Profile, match_class: MatchClass) -> Acceptance:
    """The rates of one match class with all nodes drafted; the profile's own for too few counts."""
    counts = match_class.drafted
    if counts is None or counts.trials[0].sum() < MIN_TRIALS:
        counts = profile.acceptance.counts
    if counts is None:
        return profile.acceptance
    first = min(_first_pooled_level(counts.trials.sum(1)), counts.num_levels - 1)
    starts = np.arange(first + 1)  # the levels from `first` on become one
    trials, accepted = (np.add.reduceat(n, starts) for n in (counts.trials, counts.accepted))
    return Acceptance.counted(Counts(trials, accepted)).without_counts()


def looked_up_acceptance(match_class: MatchClass, drafted: Acceptance) -> Acceptance | None:
    """The rates of steps of one match class whose tree has a looked-up spine.

    Rank 1 of a node on the spine is the looked-up token, and its other children are drafted; so are
    all children of nodes off the spine, which have the rates of `drafted` where too few of them
    were counted. None for too few counts. Counts are [levels, node classes, ranks].
    """
    counts = match_class.looked_up
    if counts is None or counts.trials[0].sum() < MIN_TRIALS:
        return None
    on_spine = pooled_rates(counts.trials[:, 0], counts.accepted[:, 0])
    if counts.num_classes == 2 and counts.trials[1:, 1].sum():
        # no node is off the spine on the root's level
        below_root = pooled_rates(counts.trials[1:, 1], counts.accepted[1:, 1])
        off_spine = np.concatenate([below_root[:1], below_root])
    else:
        off_spine = np.zeros(on_spine.shape)
        drafted_rates = drafted.at_depth(len(on_spine) + 1, on_spine.shape[1])[:, -1]
        off_spine[:, : drafted_rates.shape[1]] = drafted_rates
    return Acceptance(rounded(np.stack([on_spine, off_spine], 1)))


def looked_up_as_visited(rates: Floats, visits_by_run: Floats) -> Floats:
    """Rates of `looked_up_acceptance`, with looked-up tokens as steps come upon them.

    A long run of right tokens has many positions and takes few steps. So a looked-up token is right
    less often for the average step than for the average position, which is what was counted. The
    drafted children keep their probabilities given that the looked-up token is wrong. `rates`
    float64 [levels, node classes, ranks], as is the result; `visits_by_run` float64 [runs], how
    many steps met 0, 1, 2, ... right tokens in a row.
    """
    if visits_by_run.sum() < MIN_TRIALS:
        return rates
    visits_of_at_least = visits_by_run[::-1].cumsum()[::-1]
    is_right = pooled_rates(visits_of_at_least[:-1], visits_of_at_least[1:, None])[: len(rates), 0]
    rates = rates.copy()
    wrong_before = 1 - rates[:, 0, 0]
    share_left = np.where(wrong_before > 0, (1 - is_right) / np.maximum(wrong_before, 1e-300), 0.0)
    rates[:, 0, 1:] *= share_left[:, None]
    rates[:, 0, 0] = is_right
    return rounded(rates)


def without_repeats(rates: Floats) -> Acceptance:
    """The acceptance without last levels that repeat the one above, which holds for them, too."""
    differs = np.flatnonzero((np.diff(rates, axis=0) != 0).any((1, 2)))
    return Acceptance(rates[: differs[-1] + 2 if differs.size else 1])


def pooled_rates(trials: Floats, accepted: Floats) -> Floats:
    """The share of accepted children in trials, with the sparse levels as one.

    The first level with fewer than `MIN_TRIALS` trials and all deeper ones have one vector, from
    their counts together, and from those of the level above if they are still too few. `trials`
    float64 [levels]; `accepted` float64 [levels, ranks], as is the result.
    """
    first = _first_pooled_level(trials)
    trials, accepted = trials.copy(), accepted.copy()
    trials[first:], accepted[first:] = trials[first:].sum(), accepted[first:].sum(0)
    return accepted / trials[:, None]


def _first_pooled_level(trials: Floats) -> int:
    """The first of the levels that `pooled_rates` takes together; `len(trials)` if none are.

    It is the first sparse level, or one above it where all from there on have too few trials.
    """
    is_sparse = trials < MIN_TRIALS
    if not is_sparse.any():
        return len(trials)
    first = int(np.argmax(is_sparse))
    while first > 0 and trials[first:].sum() < MIN_TRIALS:
        first -= 1
    return first
