"""Profiles of the same pair under the same settings, added up."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from sequoia_plan.artifacts.counts import Counts, LevelCounts
from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.latency import VerificationCost
from sequoia_plan.artifacts.lookup import LookupCounts, MatchClass, limited_texts
from sequoia_plan.artifacts.metadata import is_same_model
from sequoia_plan.artifacts.profile import Profile, VerifierAcceptance


def merge(profiles: Sequence[Profile], names: Sequence[str] = ()) -> Profile:
    """Add up the counts of profiles; latency and hardware are those of the first with latencies."""
    if not profiles:
        raise ArgumentError("merge: found no profile, expected one or more")
    names = names or [f"profile {number}" for number in range(1, len(profiles) + 1)]
    named_profiles = list(zip(names, profiles, strict=True))
    for count in range(1, len(profiles) + 1):
        _check_last_of(named_profiles[:count])
    first = profiles[0]
    timed_profile = next((profile for profile in profiles if profile.latency), first)
    depth = max(len(profile.levels) for profile in profiles)
    acceptances = {}
    for verifier in first.all_verifiers:
        latency = timed_profile.for_verifier(verifier).latency
        acceptances[verifier] = _merged_acceptance(
            [profile.for_verifier(verifier) for profile in profiles],
            depth,
            latency.verification if latency else None,
        )
    own_acceptance = acceptances[first.verifier]
    return replace(
        first,
        latency=timed_profile.latency,
        hardware=timed_profile.hardware,
        acceptance=own_acceptance.vector,
        trials=own_acceptance.trials,
        levels=own_acceptance.levels,
        kinds=own_acceptance.kinds,
        lookup=_merged_lookup(named_profiles),
        verifiers={verifier: acceptances[verifier] for verifier in first.verifiers},
    )


def _check_last_of(named_profiles: Sequence[tuple[str, Profile]]) -> None:
    """Refuse the last profile if it lacks counts, differs from the first, or is a repetition."""
    first_name, first = named_profiles[0]
    name, profile = named_profiles[-1]
    if not profile.levels or not sum(level.trials for level in profile.levels):
        raise SequoiaPlanError(
            f"{name}: has no acceptance.levels with counts; profile again with this sequoia-plan"
        )
    models_differ = profile.models.keys() != first.models.keys() or any(
        not is_same_model(metadata, first.models[role], all_keys=True)
        for role, metadata in profile.models.items()
    )
    settings_differ = profile.settings != first.settings
    if settings_differ or models_differ:
        section = "settings" if settings_differ else "models"
        raise SequoiaPlanError(
            f"{name}: its {section} differ from those of {first_name}; only like can be merged "
            "with like"
        )
    if set(profile.all_verifiers) != set(first.all_verifiers):
        verifiers = " and ".join(sorted(profile.all_verifiers))
        first_verifiers = " and ".join(sorted(first.all_verifiers))
        raise SequoiaPlanError(
            f"{name}: measured with {verifiers}, {first_name} with {first_verifiers}; "
            "profile again, with the same --verifier"
        )
    num_ranks, num_first_ranks = len(profile.levels[0].counts), len(first.levels[0].counts)
    if num_ranks != num_first_ranks:
        raise SequoiaPlanError(f"{name}: {num_ranks} ranks, {first_name} has {num_first_ranks}")
    if profile.tree_size != first.tree_size:
        size, first_size = (size or "10" for size in (profile.tree_size, first.tree_size))
        raise SequoiaPlanError(
            f"{name}: counted with a tree of {size} nodes, {first_name} with one of {first_size}; "
            "profile again, with the same --tree"
        )
    for earlier_name, earlier in named_profiles[:-1]:
        if earlier.levels == profile.levels:
            raise SequoiaPlanError(
                f"{name}: holds the counts of {earlier_name} again, which would count twice; "
                "leave one of them out"
            )


def _merged_acceptance(
    profiles: Sequence[Profile], depth: int, verification: VerificationCost | None
) -> VerifierAcceptance:
    """The acceptance of one verifier over all profiles."""
    levels = add_counts([profile.levels for profile in profiles], depth)
    kinds = {}
    if all(profile.kinds for profile in profiles):
        for kind in dict.fromkeys(kind for profile in profiles for kind in profile.kinds):
            tables = [profile.kinds[kind] for profile in profiles if kind in profile.kinds]
            kinds[kind] = add_counts(tables, depth)
    return VerifierAcceptance(
        vector=pooled(levels),
        trials=sum(profile.trials for profile in profiles),
        levels=levels,
        kinds=kinds,
        verification=verification,
    )


def _merged_lookup(named_profiles: Sequence[tuple[str, Profile]]) -> LookupCounts | None:
    """The counts by class of match of all profiles, and their texts; None if a profile has none."""
    lookups = [profile.lookup for _, profile in named_profiles if profile.lookup]
    if len(lookups) < len(named_profiles):
        return None
    first_lengths, first_name = lookups[0].match_lengths, named_profiles[0][0]
    for (name, _), lookup in zip(named_profiles, lookups, strict=True):
        if lookup.match_lengths != first_lengths:
            raise SequoiaPlanError(
                f"{name}: has classes of matches from {lookup.match_lengths} tokens, {first_name} "
                f"from {first_lengths}; profile again"
            )
    classes = tuple(
        MatchClass(
            match_length,
            _merged_tables([lookup.classes[number].drafted for lookup in lookups]),
            _merged_tables([lookup.classes[number].looked_up for lookup in lookups]),
        )
        for number, match_length in enumerate(first_lengths)
    )
    texts: dict[str, list[str]] = {}
    for lookup in lookups:
        for kind, kind_texts in lookup.texts.items():
            texts.setdefault(kind, []).extend(kind_texts)
    return LookupCounts(classes, limited_texts(texts))


def _merged_tables(tables: Sequence[Sequence[LevelCounts]]) -> tuple[LevelCounts, ...]:
    """`add_counts` down to the deepest level; a table may be empty."""
    nonempty = [table for table in tables if table]
    return add_counts(nonempty, max(map(len, nonempty))) if nonempty else ()


def add_counts(tables: Sequence[Sequence[LevelCounts]], depth: int) -> tuple[LevelCounts, ...]:
    """Add up counts level by level; a table may have fewer levels than `depth`.

    Counts are of all nodes of a level, and of those off the spine (the spine is the root, its first
    child, that node's first child, ...). The result has the latter on a level where every table
    that has trials on that level has them.
    """
    zeros = LevelCounts(0, (0.0,) * len(tables[0][0].counts))
    sums = []
    for level in range(depth):
        counts_of_level = [table[level] if level < len(table) else zeros for table in tables]
        nonzero = [counts for counts in counts_of_level if counts.trials]
        off_spine = [counts.off_spine for counts in nonzero if counts.off_spine]
        is_split = off_spine and len(off_spine) == len(nonzero)
        off_spine_sums = Counts(*_sums(off_spine)) if is_split else None
        sums.append(LevelCounts(*_sums(counts_of_level), off_spine_sums))
    return tuple(sums)


def _sums(counts: Sequence[Counts]) -> tuple[int, tuple[float, ...]]:
    """The sum of the trials, and the sum of the counts of each rank (to four digits)."""
    ranks = zip(*(entry.counts for entry in counts), strict=True)
    return sum(entry.trials for entry in counts), tuple(round(sum(rank), 4) for rank in ranks)


def pooled(levels: Sequence[LevelCounts]) -> tuple[float, ...]:
    """The acceptance vector of all levels together, to six digits.

    It is p[1..B], the share of observed nodes whose child of each rank was accepted.
    """
    trials = sum(level.trials for level in levels)
    ranks = zip(*(level.counts for level in levels), strict=True)
    return round_probs([sum(rank) / trials for rank in ranks])


def round_probs(probs: Sequence[float]) -> tuple[float, ...]:
    """Round probabilities to six digits; if their sum then exceeds 1, the largest is lowered."""
    row = [round(p, 6) for p in probs]
    if (excess := sum(row) - 1) > 0:
        row[row.index(max(row))] = round(max(row) - excess, 6)
    return tuple(row)
