"""Measured acceptance and latency of a target, draft and machine: a YAML file to edit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from sequoia_plan.artifacts import yaml_text
from sequoia_plan.artifacts.counts import (
    SUM_TOLERANCE,
    LevelCounts,
    Levels,
    PromptKind,
    check_counts,
    counts_by_class,
    has_classes,
)
from sequoia_plan.artifacts.drafting import LANGUAGE_MODEL, Drafting
from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.latency import Latency, VerificationCost
from sequoia_plan.artifacts.lookup import LookupCounts
from sequoia_plan.artifacts.metadata import is_number
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.schema import Artifact, Count, Metadata, Number, field

FORMAT = yaml_text.Format("sequoia-plan-profile", 1, "a profile", "profile", "profile again")
EXPECTED = "a profile written by sequoia-plan profile"
MAX_FILE_BYTES = 1 << 20
"""A measured profile has two or three thousand bytes, and with counts by class of match about 40
thousand; of the texts among them it keeps at most `MAX_TEXT_CHARACTERS`."""


def check_acceptance(vector: Any, name: str) -> None:
    """Refuse what cannot be an acceptance vector."""
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


class Settings(Artifact, frozen=True):
    """The keys of `settings` that have a meaning; others may hold any metadata."""

    temperature: Annotated[Number | None, field("of the target's sampling; 0 is greedy")] = None
    top_p: Annotated[TopP | None, field("the nucleus filter on the target; 1 keeps all")] = None
    verifier: Annotated[str | None, field("the rule that accepted drafted tokens")] = None


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
        "settings", "models", "hardware", "drafting", "trials", "tree_size", "acceptance", "levels",
        "kinds", "lookup", "latency", "verifiers",
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
            "`placement`, `fused_layers`",
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
    tree_size: Annotated[
        Count | None,
        field(
            "nodes of the tree that wrote the text, where one was given (`profile --tree`)",
            key="acceptance.tree_size",
        ),
    ] = None
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
    lookup: Annotated[
        LookupCounts | None,
        field("counts by how much of the text before a step occurs earlier in it (prompt lookup)"),
    ] = None
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
        check_counts("acceptance", self.levels, self.kinds)
        for number, match_class in enumerate(self.lookup.classes if self.lookup else ()):
            for name in ("drafted", "looked_up"):
                place = f"lookup.classes[{number}].{name}"
                check_counts(place, getattr(match_class, name), {})
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
            check_counts(f"verifiers.{name}", acceptance.levels, acceptance.kinds)

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

    def without_draft(self) -> Profile:
        """The profile of the target alone: prompt lookup is all that proposes tokens.

        Raises:
            ArgumentError: if prompt lookup was not counted.
        """
        if self.lookup is None:
            raise ArgumentError(
                "draft none: found a profile without lookup counts, expected them, because nothing "
                "else proposes tokens then; profile again"
            )
        return replace(
            self,
            acceptance=(0.0,),
            trials=0,
            levels=(),
            tree_size=None,
            kinds={},
            verifiers={},
            models={role: model for role, model in self.models.items() if role != "draft"},
            drafting=LANGUAGE_MODEL,
            lookup=self.lookup.without_draft(),
        )

    @property
    def acceptance_by_level(self) -> tuple[tuple[float, ...], ...]:
        """p[level][rank], the probability that an accepted node's child of a rank is accepted.

        `rates` estimates it from the counts. Levels before the first one with trials have the
        acceptance vector. Empty if there are no counts.
        """
        probs = rates(*counts_by_class(self.levels, 1))[0][:, 0].tolist() if self.levels else []
        is_observed = np.cumsum([level.trials for level in self.levels]) > 0
        return tuple(
            tuple(row) if observed else self.acceptance
            for row, observed in zip(probs, is_observed, strict=True)
        )

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
