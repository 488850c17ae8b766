"""Measured acceptance and latency of a target, draft and machine: a YAML file to edit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from sequoia_plan.artifacts import yaml_text
from sequoia_plan.artifacts.acceptance import Acceptance
from sequoia_plan.artifacts.counts import Counts, PromptKind
from sequoia_plan.artifacts.drafting import LANGUAGE_MODEL, Drafting
from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.latency import Latency
from sequoia_plan.artifacts.lookup import LookupCounts
from sequoia_plan.artifacts.schema import Artifact, Count, Metadata, Number, field

FORMAT = yaml_text.Format("sequoia-plan-profile", 1, "a profile", "profile", "profile again")
EXPECTED = "a profile written by sequoia-plan profile"
MAX_FILE_BYTES = 1 << 20
"""A measured profile has two or three thousand bytes, and with counts by class of match about 40
thousand; of the texts among them it keeps at most `MAX_TEXT_CHARACTERS`."""

TopP = Annotated[float, Meta(gt=0, le=1, title="a number > 0 and <= 1")]


class Settings(Artifact, frozen=True):
    """The keys of `settings` that have a meaning; others may hold any metadata."""

    temperature: Annotated[Number | None, field("of the target's sampling; 0 is greedy")] = None
    top_p: Annotated[TopP | None, field("the nucleus filter on the target; 1 keeps all")] = None
    verifier: Annotated[str | None, field("the rule that accepted drafted tokens")] = None


class Profile(Artifact, frozen=True):
    """Acceptance and, where measured, latency of a pair of models with one verifier."""

    ORDER: ClassVar[tuple[str, ...]] = (
        "settings", "models", "hardware", "drafting", "acceptance", "effective_trials", "tree_size",
        "kinds", "lookup", "latency",
    )  # fmt: skip

    acceptance: Annotated[
        Annotated[
            Acceptance,
            Meta(title="a list of levels with counts, or of numbers, or of lists of numbers"),
        ],
        field(
            "counts by level, the first for the root's children, the last with all levels below; "
            "or rates as `plan.acceptance` has them"
        ),
    ]
    effective_trials: Annotated[
        Count,
        field(
            "effective sample size: how many independent observations of an accepted node would "
            "leave the same uncertainty; fewer than in `acceptance`, because positions of one text "
            "resemble each other. 0 if it was not measured",
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
    tree_size: Annotated[
        Count | None,
        field("nodes of the tree that wrote the text, where one was given (`profile --tree`)"),
    ] = None
    drafting: Annotated[
        Drafting, field("which passes the draft makes; missing for a language model")
    ] = LANGUAGE_MODEL
    kinds: Annotated[
        dict[PromptKind, Counts],
        field(
            "the counts of `acceptance` by kind of prompts, where every prompt names its kind: the "
            "differences between kinds set the interval for prompts of a new kind"
        ),
    ] = {}
    lookup: Annotated[
        LookupCounts | None,
        field("counts by how much of the text before a step occurs earlier in it (prompt lookup)"),
    ] = None

    def __post_init__(self) -> None:
        """Refuse kinds that are not parts of the counts."""
        super().__post_init__()
        counts = self.acceptance.counts
        if self.kinds and counts:
            parts = list(self.kinds.values())
            have_one_shape = {part.accepted.shape for part in parts} == {counts.accepted.shape}
            if not have_one_shape or np.any(sum(part.trials for part in parts) != counts.trials):
                raise SequoiaPlanError(
                    "kinds: found trials that do not add up to those of `acceptance`, expected the "
                    "same levels and ranks in each kind; leave `kinds` out, or profile again"
                )

    @property
    def verifier(self) -> str:
        """The verifier that acceptance and latency are of; `sequoia` where none is named."""
        return str(self.settings.get("verifier") or "sequoia")

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
            acceptance=Acceptance([[[0.0]]]),
            effective_trials=0,
            tree_size=None,
            kinds={},
            models={role: model for role, model in self.models.items() if role != "draft"},
            drafting=LANGUAGE_MODEL,
            lookup=self.lookup.without_draft(),
        )

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
