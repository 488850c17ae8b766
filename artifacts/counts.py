"""Acceptance as counts: how often the child of each rank was accepted, by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.schema import Artifact, field

SUM_TOLERANCE = 1e-6
"""Relative; how far a sum of probabilities may exceed 1."""
COUNT_TOLERANCE = 0.01
"""Absolute; counts are written to four digits, and a sum may have many of them."""
MAX_KIND_LENGTH = 60
"""Characters in the name of a kind of prompts."""
MAX_KINDS = 64
"""A file with more kinds than this names its prompts, not their kinds."""


Trials = Annotated[int, Meta(ge=0, lt=2**53, title="a whole number >= 0, < 2^53")]
RankCount = Annotated[float, Meta(ge=0, lt=2**53, title="a number >= 0")]
RankCounts = Annotated[tuple[RankCount, ...], Meta(min_length=1, title="numbers >= 0")]


class Counts(Artifact, frozen=True):
    """Acceptance as counts: they add up over runs, and say how sure a probability is."""

    PREFIX: ClassVar[str] = "acceptance.levels"

    trials: Annotated[Trials, field("accepted nodes of the level that were observed")]
    counts: Annotated[
        RankCounts,
        field(
            "of rank 1, 2, ...: how often that child was accepted, or was expected to be (sums of "
            "probabilities, so not whole). Their sum is at most `trials` (1e-6 relative and 0.01 "
            "absolute tolerance); every level has the same number of ranks"
        ),
    ]


class LevelCounts(Counts, frozen=True):
    """The counts of one level."""

    off_spine: Annotated[
        Counts | None,
        field(
            "the part of `trials` and `counts` that belongs to accepted nodes off the spine (a "
            "rank on their path from the root is above 1). Missing for the root's level, and "
            "where the two classes were not counted separately",
        ),
    ] = None


def has_classes(levels: Sequence[LevelCounts]) -> bool:
    """True if the counts of every level below the root's say which part of them is off the spine.

    A node is on the spine if it and all its ancestors are first children. Levels without trials
    need not say which part is off it.
    """
    if not levels or not levels[0].trials:
        return False
    observed_levels = [level for level in levels[1:] if level.trials]
    is_any_split = any(level.off_spine for level in levels)
    return is_any_split and all(level.off_spine for level in observed_levels)


def counts_by_class(
    levels: Sequence[LevelCounts], num_classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The counts of a profile as arrays, from which `rates` estimates acceptance probabilities."""
    trials = np.array([level.trials for level in levels], float)
    counts = np.array([level.counts for level in levels], float)
    if num_classes == 1:
        return trials[:, None], counts[:, None]
    zeros = Counts(0, (0.0,) * counts.shape[1])
    off_spine = [level.off_spine or zeros for level in levels]
    off_trials = np.array([part.trials for part in off_spine], float)
    off_counts = np.array([part.counts for part in off_spine], float)
    on_counts = np.maximum(counts - off_counts, 0)  # rounding may leave less than 0
    return np.stack([trials - off_trials, off_trials], 1), np.stack([on_counts, off_counts], 1)


Levels = Annotated[tuple[LevelCounts, ...], Meta(title="a list of mappings")]
PromptKind = Annotated[
    str,
    Meta(
        pattern=f"^.{{1,{MAX_KIND_LENGTH}}}$",
        title=f"printable text of 1 to {MAX_KIND_LENGTH} characters",
    ),
]


def check_counts(place: str, levels: Levels, kinds: Mapping[str, Levels]) -> None:
    """Refuse counts that contradict each other."""
    num_ranks = len(levels[0].counts) if levels else 0
    tables = {"levels": levels} | {f"kinds.{kind}": rows for kind, rows in kinds.items()}
    for table, rows in tables.items():
        for number, level in enumerate(rows):
            name = f"{place}.{table}[{number}]"
            _check_vector(level, num_ranks, name)
            if level.off_spine is not None:
                _check_off_spine(level, level.off_spine, num_ranks, f"{name}.off_spine")
    if kinds:
        for number in range(len(levels)):
            _check_sum_of_kinds(place, levels, kinds, number)


def _check_sum_of_kinds(
    place: str, levels: Levels, kinds: Mapping[str, Levels], number: int
) -> None:
    """Refuse trials of one level that do not add up over kinds, or kinds that lack a level."""
    level = levels[number]
    num_trials = sum(rows[number].trials for rows in kinds.values() if number < len(rows))
    if num_trials != level.trials or {len(rows) for rows in kinds.values()} != {len(levels)}:
        raise SequoiaPlanError(
            f"{place}.kinds: found {num_trials} trials on level {number}, expected every level "
            f"in each kind, and {level.trials} trials as in `levels`; leave `kinds` out, or "
            "profile again"
        )
    if level.off_spine is None:
        return
    off_spine = [rows[number].off_spine for rows in kinds.values()]
    off_trials = [part.trials if part else None for part in off_spine]
    if None in off_trials or sum(filter(None, off_trials)) != level.off_spine.trials:
        raise SequoiaPlanError(
            f"{place}.kinds: found {off_trials} trials off the spine on level {number}, expected "
            f"{level.off_spine.trials} together, as in `levels`; leave `kinds` out, or profile "
            "again"
        )


def _check_vector(level: Counts, num_ranks: int, name: str) -> None:
    """Refuse counts by rank of a wrong number of ranks, or that sum to more than the trials."""
    if len(level.counts) != num_ranks:
        raise SequoiaPlanError(
            f"{name}.counts: found {len(level.counts)} ranks, expected {num_ranks} as on the "
            "first level"
        )
    if _exceeds(sum(level.counts), level.trials):
        raise SequoiaPlanError(
            f"{name}.counts: sum to {sum(level.counts):.6g}, expected at most {level.trials} "
            "trials (at most one child is accepted)"
        )


def _check_off_spine(level: LevelCounts, off_spine: Counts, num_ranks: int, name: str) -> None:
    """Refuse counts off the spine that cannot be a part of their level's counts.

    What remains is the counts on the spine. They must not be negative, nor sum to more than their
    trials.
    """
    _check_vector(off_spine, num_ranks, name)
    num_on_spine = level.trials - off_spine.trials
    counts_on_spine = [
        total - part for total, part in zip(level.counts, off_spine.counts, strict=True)
    ]
    is_negative = num_on_spine < 0 or min(counts_on_spine) < -COUNT_TOLERANCE
    if is_negative or _exceeds(sum(counts_on_spine), num_on_spine):
        raise SequoiaPlanError(
            f"{name}: found {off_spine.trials} of {level.trials} trials, with counts that sum to "
            f"{sum(off_spine.counts):.6g} of {sum(level.counts):.6g}; expected a part of the "
            "level's, whose rest holds at most one accepted child a trial"
        )


def _exceeds(count: float, trials: int) -> bool:
    """True if more children were accepted than there were trials, by more than rounding gives."""
    return count > trials * (1 + SUM_TOLERANCE) + COUNT_TOLERANCE
