"""Profiles of the same pair under the same settings, added up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.profile import Counts, Judged, LevelCounts, Lift, Profile


def merge(profiles: Sequence[Profile], names: Sequence[str] = ()) -> Profile:
    """Their counts together; latency and hardware of the first that has latencies.

    Args:
        names: what to call each in errors; numbers if there are none.

    Raises:
        SequoiaPlanError: if there is nothing to merge, or two profiles differ in settings, models, verifiers or ranks, or lack counts.
    """
    if not profiles:
        raise ArgumentError("merge: found no profile, expected one or more")
    names = names or [f"profile {number}" for number in range(1, len(profiles) + 1)]
    first = profiles[0]
    for number, (name, other) in enumerate(zip(names, profiles, strict=True)):
        if not other.levels or not sum(level.trials for level in other.levels):
            raise SequoiaPlanError(f"{name}: has no acceptance.levels with counts; profile again with this sequoia-plan")
        for what in ("settings", "models"):
            if getattr(other, what) != getattr(first, what):
                raise SequoiaPlanError(f"{name}: its {what} differ from those of {names[0]}; only like can be merged with like")
        if set(other.measured) != set(first.measured):
            found, expected = (" and ".join(sorted(each.measured)) for each in (other, first))
            raise SequoiaPlanError(f"{name}: measured with {found}, {names[0]} with {expected}; profile again, with the same --verifier")
        if len(other.levels[0].counts) != len(first.levels[0].counts):
            raise SequoiaPlanError(f"{name}: {len(other.levels[0].counts)} ranks, {names[0]} has {len(first.levels[0].counts)}")
        for earlier in range(number):
            if profiles[earlier].levels == other.levels:
                raise SequoiaPlanError(f"{name}: holds the counts of {names[earlier]} again, which would count twice; leave one of them out")
    depth = max(len(profile.levels) for profile in profiles)
    timed = next((profile for profile in profiles if profile.latency), first)

    def judged(verifier: str) -> Judged:
        each = [profile.under(verifier) for profile in profiles]
        levels = added([profile.levels for profile in each], depth)
        kinds = {}
        if all(profile.kinds for profile in each):
            names_of_kinds = dict.fromkeys(kind for profile in each for kind in profile.kinds)
            kinds = {kind: added([profile.kinds[kind] for profile in each if kind in profile.kinds], depth) for kind in names_of_kinds}
        latency = timed.under(verifier).latency
        return Judged(pooled(levels), sum(profile.trials for profile in each), levels, kinds, latency.verification if latency else None)

    own = judged(first.verifier)
    acceptance = {"acceptance": own.vector, "trials": own.trials, "levels": own.levels, "kinds": own.kinds}
    lift, verifiers = _lift(profiles, depth), {verifier: judged(verifier) for verifier in first.verifiers}
    return replace(first, latency=timed.latency, hardware=timed.hardware, lift=lift, verifiers=verifiers, **acceptance)


def _lift(profiles: Sequence[Profile], depth: int) -> Lift | None:
    """The mean of their lifts, by trials, with the variance that independent measurements leave; None if one has none."""
    lifts = [profile.lift for profile in profiles if profile.lift]
    if len(lifts) < len(profiles) or not lifts:
        return None
    weights, ratio, covariance = np.zeros((len(lifts), depth)), np.ones((len(lifts), depth)), np.zeros((len(lifts), depth, depth))
    for one, profile, lift in zip(range(len(lifts)), profiles, lifts, strict=True):
        known = min(len(lift.ratio), len(profile.levels))
        weights[one, :known] = [level.trials for level in profile.levels[:known]]
        ratio[one, :known] = lift.ratio[:known]
        covariance[one, :known, :known] = np.array(lift.covariance)[:known, :known] if lift.covariance else 0.0
    weights /= np.maximum(weights.sum(0), 1)
    together = (weights[:, :, None] * weights[:, None, :] * covariance).sum(0) if all(lift.covariance for lift in lifts) else np.zeros((0, 0))
    ranks = max((lift.ranks for lift in lifts), key=len)
    return Lift(tuple((1 + (weights * (ratio - 1)).sum(0)).round(6).tolist())[: len(ranks)], ranks, tuple(map(tuple, together.round(9).tolist())))


def added(counts: Sequence[Sequence[LevelCounts]], depth: int) -> tuple[LevelCounts, ...]:
    """Counts of the same ranks level by level, down to `depth`; the deeper ones may lack levels. Classes are told apart where all do so."""
    nothing = LevelCounts(0, (0.0,) * len(counts[0][0].counts))
    rows = [[each[level] if level < len(each) else nothing for each in counts] for level in range(depth)]

    def off(row: Sequence[LevelCounts]) -> Counts | None:
        seen = [each for each in row if each.trials]
        parts = [each.off for each in seen if each.off]
        return Counts(*_sums(parts)) if parts and len(parts) == len(seen) else None

    return tuple(LevelCounts(*_sums(row), off(row)) for row in rows)


def _sums(counts: Sequence[Counts]) -> tuple[int, tuple[float, ...]]:
    return sum(each.trials for each in counts), tuple(round(sum(of_rank), 4) for of_rank in zip(*(each.counts for each in counts), strict=True))


def pooled(levels: Sequence[LevelCounts]) -> tuple[float, ...]:
    """p[1..B] of all levels together, to six digits."""
    trials = sum(level.trials for level in levels)
    return rounded([sum(counts) / trials for counts in zip(*(level.counts for level in levels), strict=True)])


def rounded(shares: Sequence[float]) -> tuple[float, ...]:
    """Probabilities to six digits; where rounding brings their sum above 1, the largest gives way."""
    row = [round(share, 6) for share in shares]
    if (beyond := sum(row) - 1) > 0:
        row[row.index(max(row))] = round(max(row) - beyond, 6)
    return tuple(row)
