"""Measured acceptance and latency of a target, draft and machine: a YAML file to edit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray

from sequoia_plan.artifacts import yaml_text
from sequoia_plan.artifacts.drafting import LANGUAGE_MODEL, Drafting
from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.latency import Latency, VerificationCost
from sequoia_plan.artifacts.metadata import is_number
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.schema import Artifact, Count, Metadata, Number, field

FORMAT = yaml_text.Format("sequoia-plan-profile", 1, "a profile", "profile", "profile again")
EXPECTED = "a profile written by sequoia-plan profile"
MAX_FILE_BYTES = 1 << 18
"""A measured profile has two or three thousand bytes."""
SUM_TOLERANCE = 1e-6
"""Relative; how far a sum of probabilities may exceed 1."""
COUNT_TOLERANCE = 0.01
"""Absolute; counts are written to four digits, and a sum may have many of them."""
MAX_KIND_LENGTH = 60
"""Characters in the name of a kind of prompts."""
MAX_KINDS = 64
"""A file with more kinds than this names its prompts, not their kinds."""


def check_acceptance(vector: Any, name: str) -> None:
    """Refuse what cannot be an acceptance vector.

    Args:
        vector: the value to check, p[1], p[2], ...
        name: what errors call it.

    Raises:
        SequoiaPlanError: if `vector` is empty, holds anything but numbers in [0, 1], or sums to
            more than 1 + 1e-6.
    """
    if not isinstance(vector, (list, tuple)) or not vector:
        raise SequoiaPlanError(
            f"{name}: found {vector!r:.60}, expected a non-empty list of probabilities p[1], "
            "p[2], ..."
        )
    for rank, p in enumerate(vector, 1):
        if not is_number(p) or not 0 <= p <= 1:
            raise SequoiaPlanError(
                f"{name}: p[{rank}] is {p!r:.60}, expected a probability from 0 to 1"
            )
    if sum(vector) > 1 + SUM_TOLERANCE:
        raise SequoiaPlanError(
            f"{name}: sums to {sum(vector):.6g}, expected at most 1 (at most one child is accepted)"
        )


Vector = Annotated[tuple[float, ...], Meta(title="a list of numbers, not empty")]
TopP = Annotated[float, Meta(gt=0, le=1, title="a number > 0 and <= 1")]
Trials = Annotated[int, Meta(ge=0, lt=2**53, title="a whole number >= 0, < 2^53")]
RankCount = Annotated[float, Meta(ge=0, lt=2**53, title="a number >= 0")]
RankCounts = Annotated[tuple[RankCount, ...], Meta(min_length=1, title="numbers >= 0")]


class Settings(Artifact, frozen=True):
    """The keys of `settings` that have a meaning; others may hold any metadata."""

    temperature: Annotated[Number | None, field("of the target's sampling; 0 is greedy")] = None
    top_p: Annotated[TopP | None, field("the nucleus filter on the target; 1 keeps all")] = None
    verifier: Annotated[str | None, field("the rule that accepted drafted tokens")] = None


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

    Args:
        levels: for each level, the observed nodes (`trials`), how many of their children of each
            rank were accepted (`counts`), and the part of both off the spine.
    """
    if not levels or not levels[0].trials:
        return False
    observed_levels = [level for level in levels[1:] if level.trials]
    is_any_split = any(level.off_spine for level in levels)
    return is_any_split and all(level.off_spine for level in observed_levels)


def counts_by_class(
    levels: Sequence[LevelCounts], num_classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The counts of a profile as arrays, from which `rates` estimates acceptance probabilities.

    Args:
        levels: for each level, its counts and the part of them off the spine.
        num_classes: 2 to separate nodes on the spine (class 0: they and all their ancestors are
            first children) from nodes off it (class 1); 1 for all nodes together.

    Returns:
        Trials, float64 [levels, classes], the number of accepted nodes that were observed; and
        counts, float64 [levels, classes, ranks], how many of their children of each rank were
        accepted.
    """
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
VerifierName = Annotated[str, Meta(pattern="^[a-z0-9-]{1,30}$", title="a verifier's name")]


class VerifierAcceptance(Artifact, frozen=True):
    """Acceptance and cost of a further verifier on the same draws."""

    PREFIX: ClassVar[str] = "verifiers"

    vector: Annotated[tuple[float, ...], field("as `acceptance.vector`", check=check_acceptance)]
    trials: Annotated[Count, field("as `acceptance.trials`", always=True)] = 0
    levels: Annotated[Levels, field("as `acceptance.levels`")] = ()
    kinds: Annotated[dict[PromptKind, tuple[LevelCounts, ...]], field("as `acceptance.kinds`")] = {}
    verification: Annotated[VerificationCost | None, field("as `latency.verification`")] = None


class Profile(Artifact, frozen=True):
    """Acceptance and, where measured, latency of one verifier.

    Further verifiers that were measured along with it are in `verifiers`.
    """

    ORDER: ClassVar[tuple[str, ...]] = (
        "settings", "models", "hardware", "drafting", "trials", "acceptance", "levels", "kinds",
        "latency", "verifiers",
    )  # fmt: skip

    acceptance: Annotated[
        Vector,
        field(
            "p[1], p[2], ...: the probability that, of an accepted node's children, the one of "
            "that rank is accepted. Each from 0 to 1, sum at most 1 + 1e-6",
            key="acceptance.vector",
            check=check_acceptance,
        ),
    ]
    trials: Annotated[
        Count,
        field(
            "the vector's effective sample size: how many independent observations of an accepted "
            "node would leave the same uncertainty; fewer than in `levels`, because positions of "
            "one text resemble each other. 0 if it was not measured",
            key="acceptance.trials",
            always=True,
        ),
    ] = 0
    latency: Annotated[
        Latency | None, field("without it, trees are solved for tokens, not for speed")
    ] = None
    settings: Annotated[
        Metadata,
        field(
            "what acceptance was measured under: `temperature`, `top_p`, `verifier` and others",
            keys=Settings,
            always=True,
        ),
    ] = {}
    models: Annotated[
        dict[str, Any],
        field(
            "`target` and `draft`, each with `name`, `digest`, `content`, `dtype`, `parameters`, "
            "`placement`",
            always=True,
        ),
    ] = {}
    hardware: Annotated[
        Metadata,
        field("the machine: device, processor, threads, library versions", always=True),
    ] = {}
    levels: Annotated[
        Levels,
        field(
            "the counts behind `vector`, one entry a level: the first for the root's children, "
            "the last with all levels below",
            key="acceptance.levels",
        ),
    ] = ()
    drafting: Annotated[
        Drafting, field("which passes the draft makes; missing for a language model")
    ] = LANGUAGE_MODEL
    kinds: Annotated[
        dict[PromptKind, tuple[LevelCounts, ...]],
        field(
            "`levels` by kind of prompts, where every prompt names its kind: the differences "
            "between kinds set the interval for prompts of a new kind",
            key="acceptance.kinds",
        ),
    ] = {}
    verifiers: Annotated[
        dict[VerifierName, VerifierAcceptance],
        field(
            "by name: acceptance and verification of further verifiers, measured along with that "
            "of `settings.verifier`; `solve` chooses"
        ),
    ] = {}

    def __post_init__(self) -> None:
        """Refuse counts that contradict each other, and verifiers that cannot be further ones."""
        super().__post_init__()
        _check_counts("acceptance", self.levels, self.kinds)
        temperature = self.settings.get("temperature")
        for name, acceptance in self.verifiers.items():
            if name == self.verifier or temperature == 0:
                raise SequoiaPlanError(
                    f"verifiers.{name}: found beside the verifier {self.verifier} at temperature "
                    f"{temperature}, expected other verifiers than the one in `settings`, and "
                    "none at temperature 0, where they all decide alike"
                )
            if acceptance.levels and not self.levels:
                raise SequoiaPlanError(
                    f"verifiers.{name}.levels: found counts, expected them for every verifier or "
                    "for none; profile again"
                )
            _check_counts(f"verifiers.{name}", acceptance.levels, acceptance.kinds)

    @property
    def verifier(self) -> str:
        """The verifier that acceptance and latency are of; `sequoia` where none is named."""
        return str(self.settings.get("verifier") or "sequoia")

    @property
    def all_verifiers(self) -> tuple[str, ...]:
        """Every verifier that was measured, that of the settings first."""
        return (self.verifier, *self.verifiers)

    def for_verifier(self, verifier: str) -> Profile:
        """The profile of one verifier alone; at temperature 0 all verifiers decide alike.

        Raises:
            ArgumentError: if it was not measured.
        """
        if verifier == self.verifier:
            return replace(self, verifiers={})
        settings = {**self.settings, "verifier": verifier}
        if self.settings.get("temperature") == 0:
            return replace(self, settings=settings)
        if verifier not in self.verifiers:
            raise ArgumentError(
                f"verifier: found {verifier!r}, expected {' or '.join(self.all_verifiers)}, which "
                "the profile has; profile --verifier measures it"
            )
        acceptance = self.verifiers[verifier]
        return replace(
            self,
            settings=settings,
            latency=self.latency and replace(self.latency, verification=acceptance.verification),
            acceptance=acceptance.vector,
            trials=acceptance.trials,
            levels=acceptance.levels,
            kinds=acceptance.kinds,
            verifiers={},
        )

    @property
    def acceptance_by_level(self) -> tuple[tuple[float, ...], ...]:
        """p[level][rank], the probability that an accepted node's child of a rank is accepted.

        It is the share of counts in trials of the node's level. A level without trials has the
        probabilities of the one above it. Empty if there are no counts.
        """
        rows: list[tuple[float, ...]] = []
        for level in self.levels:
            if level.trials:
                rows.append(tuple(count / level.trials for count in level.counts))
            else:
                rows.append(rows[-1] if rows else self.acceptance)
        return tuple(rows)

    @property
    def acceptance_by_class(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """p[level][class][rank], how probably an accepted node's child of a rank is accepted.

        The node's class is 0 on the spine (it and all its ancestors are first children) and 1 off
        it. `rates` estimates the probabilities from the counts. Empty if the classes were not
        counted separately, or differ by no more than noise.
        """
        if not has_classes(self.levels):
            return ()
        probs = rates(*counts_by_class(self.levels, 2))[0]
        if np.array_equal(probs[:, 0], probs[:, 1]):  # `rates` makes them equal within noise
            return ()
        return tuple(tuple(map(tuple, level)) for level in probs.tolist())

    @property
    def sha256(self) -> str:
        """Hash of the profile as `save` writes it: comments and layout do not count."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write as YAML, atomically; same profile, same bytes."""
        write_atomically(path, self.to_yaml().encode())

    def to_yaml(self) -> str:
        """The file's text."""
        header = {"format": FORMAT.name, "version": FORMAT.version}
        return yaml_text.dump(header | self.to_dict(), width=100)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read and validate.

        Raises:
            SequoiaPlanError: if the file is missing, not a profile, of another version, or holds
                impossible numbers.
        """
        return cls.from_bytes(read_bytes(path, EXPECTED, MAX_FILE_BYTES), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Profile:
        """Read and validate the profile in a file's content.

        Args:
            data: the content.
            name: the file's name in errors.

        Raises:
            SequoiaPlanError: if it is not a profile, is of another version, or holds impossible
                numbers.
        """
        return yaml_text.read(cls, data, name, EXPECTED, FORMAT)


def _check_counts(place: str, levels: Levels, kinds: Mapping[str, Levels]) -> None:
    """Refuse counts that contradict each other.

    A trial is an accepted node, and a count is how many trials accepted their child of one rank.
    Every entry must have as many ranks as the first level, and at most one accepted child a trial.
    Its part for nodes off the spine (nodes that have an ancestor that is no first child, or are
    none themselves) must not exceed it. The counts of all kinds must add up to the levels.

    Args:
        place: the section of the file that holds both, as errors call it.
        levels: trials and counts of each level.
        kinds: trials and counts of each level, by kind of prompts; empty if prompts name no kinds.
    """
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
    """Refuse trials of one level that do not add up over kinds, or kinds that lack a level.

    Args:
        place: the section of the file that holds the counts, as errors call it.
        levels: the counts of each level.
        kinds: the counts of each level, by kind of prompts.
        number: the level to check.
    """
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
    """Refuse counts by rank of a wrong number of ranks, or that sum to more than the trials.

    Args:
        level: the counts.
        num_ranks: expected number of ranks.
        name: what errors call the counts.
    """
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

    Args:
        level: the counts of the whole level.
        off_spine: the part of them that belongs to nodes off the spine.
        num_ranks: expected number of ranks.
        name: what errors call that part.
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
