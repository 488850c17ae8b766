"""Profiles of the same pair under the same settings, added up."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.profile import Counts, LevelCounts, Profile


def merge(profiles: Sequence[Profile], names: Sequence[str] = ()) -> Profile:
    """Their counts together; latency and hardware of the first that has latencies.

    Args:
        names: what to call each in errors; numbers if there are none.

    Raises:
        SequoiaPlanError: if there is nothing to merge, or two profiles differ in settings, models or ranks, or lack counts.
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
        if len(other.levels[0].counts) != len(first.levels[0].counts):
            raise SequoiaPlanError(f"{name}: {len(other.levels[0].counts)} ranks, {names[0]} has {len(first.levels[0].counts)}")
        for earlier in range(number):
            if profiles[earlier].levels == other.levels:
                raise SequoiaPlanError(f"{name}: holds the counts of {names[earlier]} again, which would count twice; leave one of them out")
    depth = max(len(profile.levels) for profile in profiles)
    levels = added([profile.levels for profile in profiles], depth)
    kinds = {}
    if all(profile.kinds for profile in profiles):
        names_of_kinds = dict.fromkeys(kind for profile in profiles for kind in profile.kinds)
        kinds = {kind: added([profile.kinds[kind] for profile in profiles if kind in profile.kinds], depth) for kind in names_of_kinds}
    timed = next((profile for profile in profiles if profile.latency), first)
    acceptance = {"acceptance": pooled(levels), "trials": sum(profile.trials for profile in profiles), "levels": levels, "kinds": kinds}
    return replace(first, latency=timed.latency, hardware=timed.hardware, **acceptance)


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
    return tuple(round(sum(counts) / trials, 6) for counts in zip(*(level.counts for level in levels), strict=True))
