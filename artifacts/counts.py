"""Counts of accepted children, by level and node class, as arrays and as a profile writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.schema import Artifact, Count, Number

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SUM_TOLERANCE = 1e-6
"""Relative; how far a sum of probabilities may exceed 1."""
COUNT_TOLERANCE = 0.01
"""Absolute; counts are written to four digits, and a sum may have many of them."""
MAX_KIND_LENGTH = 60
"""Characters in the name of a kind of prompts."""
MAX_KINDS = 64
"""A file with more kinds than this names its prompts, not their kinds."""
ALL_KINDS = "all"
"""In place of the kind of prompts that name none."""
PromptKind = Annotated[str, Meta(pattern=f"^.{{1,{MAX_KIND_LENGTH}}}$")]


class ClassCounts(Artifact, frozen=True):
    """The counts of one level, or of its nodes off the spine."""

    trials: Annotated[Count, "accepted nodes of the level that were observed"]
    counts: Annotated[
        tuple[Number, ...],
        Meta(min_length=1),
        "of rank 1, 2, ...: how often that child was accepted, or was expected to be (sums of "
        "probabilities, so not whole). Their sum is at most `trials` (1e-6 relative and 0.01 "
        "absolute tolerance); every level has the same number of ranks",
    ]


class LevelCounts(ClassCounts, frozen=True):
    """The counts of one level as a file has them."""

    off_spine: Annotated[
        ClassCounts | None,
        "the part of `trials` and `counts` that belongs to accepted nodes off the spine (a "
        "rank on their path from the root is above 1). Missing for the root's level, and "
        "where the two node classes were not counted separately",
    ] = None


class Counts:
    """How often the children of accepted nodes were accepted.

    Args:
        trials: float64 [levels, node classes], the accepted nodes that were observed. Levels and
            node classes are as in `Acceptance`.
        accepted: float64 [levels, node classes, ranks], how often the child of each rank was
            accepted, or was expected to be: sums of probabilities, so not whole.

    Raises:
        SequoiaPlanError: for a negative number, or more accepted children than trials.
    """

    def __init__(self, trials: Any, accepted: Any) -> None:
        # totals are rounded in a file, so what they leave for a node class may be just below 0
        self.trials, self.accepted = read_only(trials), read_only(np.maximum(accepted, 0.0))
        accepted_of_trials = self.accepted.sum(-1)
        limit = self.trials * (1 + SUM_TOLERANCE) + COUNT_TOLERANCE
        is_possible = (self.trials >= 0) & (accepted_of_trials <= limit)
        is_possible &= np.min(accepted, -1) >= -COUNT_TOLERANCE
        if not is_possible.all():
            level, node_class = np.argwhere(~is_possible)[0]
            raise SequoiaPlanError(
                f"counts[{level}]: found counts that sum to "
                f"{accepted_of_trials[level, node_class]:.6g} of "
                f"{self.trials[level, node_class]:.6g} trials "
                f"{'off' if node_class else 'on'} the spine, expected no negative number and at "
                "most one accepted child a trial"
            )

    @property
    def num_levels(self) -> int:
        """Levels that were counted separately, the last one together with all below it."""
        return len(self.trials)

    @property
    def num_classes(self) -> int:
        """Node classes that were counted separately: 1 or 2."""
        return self.trials.shape[1]

    def with_one_class(self) -> Counts:
        """The same counts, with both node classes added up."""
        return Counts(self.trials.sum(1, keepdims=True), self.accepted.sum(1, keepdims=True))

    @classmethod
    def from_file(cls, document: Any) -> Counts:
        """Read a list of levels; node classes count separately if every level says so."""
        levels = msgspec.convert(document, Annotated[list[LevelCounts], Meta(min_length=1)])
        none = ClassCounts(0, (0.0,) * len(levels[0].counts))
        # [levels, 2]: of both node classes together, and off the spine
        pairs = [(level, level.off_spine or none) for level in levels]
        if len({len(entry.counts) for pair in pairs for entry in pair}) > 1:
            raise SequoiaPlanError("found levels of different lengths, expected equal ones")
        trials = np.array([[entry.trials for entry in pair] for pair in pairs], float)
        accepted = np.array([[_rounded(entry.counts) for entry in pair] for pair in pairs])
        is_split = any(level.off_spine for level in levels) and all(
            level.off_spine for level in levels[1:] if level.trials
        )
        if not is_split:
            return cls(trials[:, :1], accepted[:, :1])
        trials[:, 0] -= trials[:, 1]  # leaves those on the spine
        accepted[:, 0] -= accepted[:, 1]
        return cls(trials, accepted)

    def to_file(self) -> list[dict[str, Any]]:
        """A list of levels, with counts to four digits."""
        totals, document = self.with_one_class(), []
        for level in range(self.num_levels):
            entry = _class_counts(totals.trials[level, 0], totals.accepted[level, 0])
            if self.num_classes == 2 and level:
                entry["off_spine"] = _class_counts(self.trials[level, 1], self.accepted[level, 1])
            document.append(entry)
        return document

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Counts)
            and np.array_equal(self.trials, other.trials)
            and np.array_equal(self.accepted, other.accepted)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Counts({self.to_file()})"


def read_only(values: Any) -> Floats:
    """A C-contiguous float64 copy that cannot be written to."""
    array = np.array(values, np.float64, order="C")
    array.flags.writeable = False
    return array


def _class_counts(trials: float, accepted: Floats) -> dict[str, Any]:
    """The file's mapping of one level and node class."""
    return {"trials": int(trials), "counts": _rounded(accepted.tolist())}


def _rounded(counts: Iterable[float]) -> list[float]:
    """Counts to four digits, as files have them: what is read is what is written again."""
    return [round(count, 4) for count in counts]
