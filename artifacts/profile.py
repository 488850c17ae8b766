"""What was measured: acceptance and latency of one target, draft and machine, as a YAML file people can read and edit."""

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
from sequoia_plan.artifacts.facts import is_number
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.latency import Latency, Verification
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.schema import Artifact, Count, Facts, Number, Size, field

FORMAT = yaml_text.Format("sequoia-plan-profile", 1, "a profile", "profile", "profile again")
EXPECTED = "a profile written by sequoia-plan profile"
LARGEST_FILE = 1 << 18
"""Bytes; a measured profile has two or three thousand."""
SUM_TOLERANCE = 1e-6
COUNT_TOLERANCE = 0.01
"""Counts are written to four digits; there may be many of them."""


def check_acceptance(vector: Any, name: str) -> None:
    """Refuse what cannot be an acceptance vector.

    Raises:
        SequoiaPlanError: if `vector` is empty, holds anything but numbers in [0, 1], or sums to more than 1 + 1e-6.
    """
    if not isinstance(vector, (list, tuple)) or not vector:
        raise SequoiaPlanError(f"{name}: found {vector!r:.60}, expected a non-empty list of probabilities p[1], p[2], ...")
    for rank, p in enumerate(vector, 1):
        if not is_number(p) or not 0 <= p <= 1:
            raise SequoiaPlanError(f"{name}: p[{rank}] is {p!r:.60}, expected a probability from 0 to 1")
    if sum(vector) > 1 + SUM_TOLERANCE:
        raise SequoiaPlanError(f"{name}: sums to {sum(vector):.6g}, expected at most 1 (at most one child is accepted)")


class Settings(Artifact, frozen=True):
    """The keys of `settings` that have a meaning; others may hold any fact."""

    temperature: Annotated[Number | None, field("of the target's sampling; 0 is greedy")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1, title="a number > 0 and <= 1")] | None, field("the nucleus filter on the target; 1 keeps all")] = None
    verifier: Annotated[str | None, field("which rule accepted drafted tokens")] = None


class Counts(Artifact, frozen=True):
    """Acceptance as counts: they add up over runs, and tell how sure a probability is."""

    PREFIX: ClassVar[str] = "acceptance.levels"

    trials: Annotated[Annotated[int, Meta(ge=0, lt=2**53, title="a whole number >= 0, < 2^53")], field("accepted nodes of the level that were observed")]
    counts: Annotated[
        Annotated[tuple[Annotated[float, Meta(ge=0, lt=2**53, title="a number >= 0")], ...], Meta(min_length=1, title="numbers >= 0")],
        field(
            "of rank 1, 2, ...: how often that child was accepted, or was expected to be (sums of probabilities, so not whole). Their sum is at "
            "most `trials` (1e-6 relative and 0.01 absolute tolerance); as many on each level"
        ),
    ]


class LevelCounts(Counts, frozen=True):
    """Those of one level."""

    off: Annotated[
        Counts | None,
        field(
            "the part of `trials` and `counts` that belongs to accepted nodes off the spine (a rank on their path from the root is above 1). Missing "
            "for the root's level, and where nobody told them apart",
            key="off_spine",
        ),
    ] = None


def told_apart(levels: Sequence[LevelCounts]) -> bool:
    """Whether counts say of every level below the root's which part of them is off the spine."""
    return bool(levels) and levels[0].trials > 0 and any(level.off for level in levels) and all(level.off or not level.trials for level in levels[1:])


def tally(levels: Sequence[LevelCounts], classes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Trials [levels, classes] and counts [levels, classes, ranks], as `rates` takes them; with one class those of all nodes together."""
    trials, counts = np.array([level.trials for level in levels], float), np.array([level.counts for level in levels], float)
    if classes == 1:
        return trials[:, None], counts[:, None]
    off = np.array([level.off.trials if level.off else 0 for level in levels], float)
    off_counts = np.array([level.off.counts if level.off else np.zeros(counts.shape[1]) for level in levels], float)
    return np.stack([trials - off, off], 1), np.stack([np.maximum(counts - off_counts, 0), off_counts], 1)


Levels = Annotated[tuple[LevelCounts, ...], Meta(title="a list of mappings")]
LONGEST_KIND = 60
Kind = Annotated[str, Meta(pattern=f"^.{{1,{LONGEST_KIND}}}$", title=f"printable text of 1 to {LONGEST_KIND} characters")]
MOST_KINDS = 64
"""A file that names more names its prompts."""


Verifier = Annotated[str, Meta(pattern="^[a-z0-9-]{1,30}$", title="a verifier's name")]


class Judged(Artifact, frozen=True):
    """What a further verifier accepts of the same draws, and what it takes."""

    PREFIX: ClassVar[str] = "verifiers"

    vector: Annotated[tuple[float, ...], field("as `acceptance.vector`", check=check_acceptance)]
    trials: Annotated[Count, field("as `acceptance.trials`", always=True)] = 0
    levels: Annotated[Levels, field("as `acceptance.levels`")] = ()
    kinds: Annotated[dict[Kind, tuple[LevelCounts, ...]], field("as `acceptance.kinds`")] = {}
    verification: Annotated[Verification | None, field("as `latency.verification`")] = None


class Lift(Artifact, frozen=True):
    """How much more often `traversal` accepts than `sequoia` of the same draws."""

    PREFIX: ClassVar[str] = "acceptance.lift"

    ratio: Annotated[tuple[Number, ...], field("on each level: how many times as often `traversal` as `sequoia` accepts a node of the next one")]
    ranks: Annotated[tuple[Size, ...], field("the children of a node on each level that `ratio` holds for: those of the tree it was measured with")]
    covariance: Annotated[
        Annotated[tuple[tuple[float, ...], ...], Meta(title="a list of lists of numbers")],
        field("of the logarithms of `ratio`, [level][level], by a jackknife over prompts; missing where there were too few of them"),
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        shapes = {len(self.ratio), len(self.ranks), *({len(self.covariance)} if self.covariance else ()), *map(len, self.covariance)}
        if len(shapes) > 1:
            raise SequoiaPlanError(f"{self.PREFIX}: found lists of {' and '.join(map(str, sorted(shapes)))} entries, expected one a level in each")


class Profile(Artifact, frozen=True):
    """Acceptance and, where measured, latency; of one verifier, and beside it of further ones that were measured along with it."""

    ORDER: ClassVar[tuple[str, ...]] = (
        "settings", "models", "hardware", "drafting", "trials", "acceptance", "levels", "kinds", "lift", "latency", "verifiers",
    )  # fmt: skip

    acceptance: Annotated[
        Annotated[tuple[float, ...], Meta(title="a list of numbers, not empty")],
        field(
            "p[1], p[2], ...: the probability that of an accepted node's children the one of that rank is accepted. Each from 0 to 1, sum at most 1 + 1e-6",
            key="acceptance.vector",
            check=check_acceptance,
        ),
    ]
    trials: Annotated[
        Count,
        field(
            "the vector's effective sample size: how many independent observations of an accepted node would leave the same uncertainty; fewer than "
            "in `levels`, because positions of one text resemble each other. 0 if it was not measured",
            key="acceptance.trials",
            always=True,
        ),
    ] = 0
    latency: Annotated[Latency | None, field("without it, trees are solved for tokens, not for speed")] = None
    settings: Annotated[Facts, field("what acceptance was measured under: `temperature`, `top_p`, `verifier` and others", keys=Settings, always=True)] = {}
    models: Annotated[dict[str, Any], field("`target` and `draft`, each with `name`, `digest`, `dtype`, `parameters`, `placement`", always=True)] = {}
    hardware: Annotated[Facts, field("the machine: device, processor, threads, library versions", always=True)] = {}
    levels: Annotated[
        Levels,
        field(
            "the counts behind `vector`, one entry a level: the first for the root's children, the last with all levels below",
            key="acceptance.levels",
        ),
    ] = ()
    drafting: Annotated[Drafting, field("which passes the draft makes; missing for a language model")] = LANGUAGE_MODEL
    kinds: Annotated[
        dict[Kind, tuple[LevelCounts, ...]],
        field(
            "`levels` by kind of prompts, where every prompt said its kind: what is promised for prompts of a new kind follows from how these differ",
            key="acceptance.kinds",
        ),
    ] = {}
    lift: Annotated[Lift | None, field("how much more often `traversal` accepts than `sequoia`, where both were measured", key="acceptance.lift")] = None
    verifiers: Annotated[
        dict[Verifier, Judged],
        field("by name: acceptance and verification of further verifiers, measured along with that of `settings.verifier`; `solve` chooses"),
    ] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_counts("acceptance", self.levels, self.kinds)
        for name, judged in self.verifiers.items():
            if name == self.verifier or self.settings.get("temperature") == 0:
                raise SequoiaPlanError(
                    f"verifiers.{name}: found beside the verifier {self.verifier} at temperature {self.settings.get('temperature')}, expected other "
                    "verifiers than the one in `settings`, and none at temperature 0, where they all decide alike"
                )
            if judged.levels and not self.levels:
                raise SequoiaPlanError(f"verifiers.{name}.levels: found counts, expected them for every verifier or for none; profile again")
            _check_counts(f"verifiers.{name}", judged.levels, judged.kinds)

    @property
    def verifier(self) -> str:
        """The verifier that acceptance and latency are of; `sequoia` where none is named."""
        return str(self.settings.get("verifier") or "sequoia")

    @property
    def measured(self) -> tuple[str, ...]:
        """Every verifier that was measured, that of the settings first."""
        return (self.verifier, *self.verifiers)

    def under(self, verifier: str) -> Profile:
        """What was measured of one verifier alone; at temperature 0 all verifiers decide alike.

        Raises:
            ArgumentError: if it was not measured.
        """
        if verifier == self.verifier:
            return replace(self, verifiers={}, lift=None)
        settings = {**self.settings, "verifier": verifier}
        if self.settings.get("temperature") == 0:
            return replace(self, settings=settings)
        if verifier not in self.verifiers:
            raise ArgumentError(f"verifier: found {verifier!r}, expected {' or '.join(self.measured)}, which the profile has; profile --verifier measures it")
        judged = self.verifiers[verifier]
        latency = self.latency and replace(self.latency, verification=judged.verification)
        known = {"acceptance": judged.vector, "trials": judged.trials, "levels": judged.levels, "kinds": judged.kinds}
        return replace(self, settings=settings, latency=latency, verifiers={}, lift=None, **known)

    @property
    def by_level(self) -> tuple[tuple[float, ...], ...]:
        """p[level][rank] from the counts; a level without trials is as the one above it. Empty if there are no counts."""
        rows: list[tuple[float, ...]] = []
        for level in self.levels:
            rows.append(tuple(count / level.trials for count in level.counts) if level.trials else rows[-1] if rows else self.acceptance)
        return tuple(rows)

    @property
    def by_class(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """p[level][class][rank] from the counts, for parents on the spine and off it, see `rates`. Empty if they do not tell them apart, or
        differ by no more than noise."""
        if not told_apart(self.levels):
            return ()
        rows = rates(*tally(self.levels, 2))[0]
        return () if np.array_equal(rows[:, 0], rows[:, 1]) else tuple(tuple(map(tuple, level)) for level in rows.tolist())

    @property
    def by_kind(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Trials [kinds, levels] and counts [kinds, levels, ranks]."""
        levels = self.kinds.values()
        return np.array([[level.trials for level in each] for each in levels], np.int64), np.array([[level.counts for level in each] for each in levels], float)

    @property
    def sha256(self) -> str:
        """Of the profile as `save` writes it: comments and layout do not count."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write as YAML, atomically; same profile, same bytes."""
        write_atomically(path, self.to_yaml().encode())

    def to_yaml(self) -> str:
        """The file's text."""
        return yaml_text.dump({"format": FORMAT.name, "version": FORMAT.version, **self.facts()}, width=100)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read and validate.

        Raises:
            SequoiaPlanError: if the file is missing, not a profile, of another version, or holds impossible numbers.
        """
        return cls.from_bytes(read_bytes(path, EXPECTED, LARGEST_FILE), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Profile:
        """The profile in a file's content; `name` says which file in errors. Raises as `load` does."""
        return yaml_text.read(cls, data, name, EXPECTED, FORMAT)


def _check_counts(place: str, levels: Levels, kinds: Mapping[str, Levels]) -> None:
    """Refuse counts of different ranks, above their trials, with a part that is none, or of kinds that do not add up."""
    ranks = len(levels[0].counts) if levels else 0
    for name, rows in {"levels": levels, **{f"kinds.{kind}": rows for kind, rows in kinds.items()}}.items():
        for number, level in enumerate(rows):
            _check_vector(level, ranks, f"{place}.{name}[{number}]")
            if level.off is not None:
                _check_off(level, level.off, ranks, f"{place}.{name}[{number}].off_spine")
    for number, level in enumerate(levels):
        found = sum(rows[number].trials for rows in kinds.values() if number < len(rows))
        if kinds and (found != level.trials or {len(rows) for rows in kinds.values()} != {len(levels)}):
            raise SequoiaPlanError(
                f"{place}.kinds: found {found} trials on level {number}, expected every level in each kind, and {level.trials} trials as in "
                "`levels`; leave `kinds` out, or profile again"
            )
        off = [each.off.trials if (each := rows[number]).off else None for rows in kinds.values()]
        if level.off and kinds and (None in off or sum(filter(None, off)) != level.off.trials):
            raise SequoiaPlanError(
                f"{place}.kinds: found {off} trials off the spine on level {number}, expected {level.off.trials} together, as in `levels`; "
                "leave `kinds` out, or profile again"
            )


def _check_vector(found: Counts, ranks: int, place: str) -> None:
    if len(found.counts) != ranks:
        raise SequoiaPlanError(f"{place}.counts: found {len(found.counts)} ranks, expected {ranks} as on the first level")
    if sum(found.counts) > found.trials * (1 + SUM_TOLERANCE) + COUNT_TOLERANCE:
        raise SequoiaPlanError(f"{place}.counts: sum to {sum(found.counts):.6g}, expected at most {found.trials} trials (at most one child is accepted)")


def _check_off(level: LevelCounts, off: Counts, ranks: int, place: str) -> None:
    _check_vector(off, ranks, place)
    rest = [total - part for total, part in zip(level.counts, off.counts, strict=True)]
    trials = level.trials - off.trials
    if trials < 0 or min(rest) < -COUNT_TOLERANCE or sum(rest) > trials * (1 + SUM_TOLERANCE) + COUNT_TOLERANCE:
        raise SequoiaPlanError(
            f"{place}: found {off.trials} of {level.trials} trials, with counts that sum to {sum(off.counts):.6g} of {sum(level.counts):.6g}; expected a "
            "part of the level's, whose rest holds at most one accepted child a trial"
        )
