"""Measured acceptance and latency of a target, draft and machine: a YAML file to edit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from sequoia_plan.artifacts.acceptance import Acceptance
from sequoia_plan.artifacts.counts import ClassCounts, PromptKind
from sequoia_plan.artifacts.drafting import LANGUAGE_MODEL, Drafting
from sequoia_plan.artifacts.errors import ArgumentError, SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.latency import Latency
from sequoia_plan.artifacts.lookup import LookupCounts
from sequoia_plan.artifacts.schema import Artifact, Count, Metadata, check_format

FORMAT, VERSION, MADE_BY = "sequoia-plan-profile", 1, "sequoia-plan profile"
EXPECTED = f"a file written by {MADE_BY}"
MAX_BYTES = 1 << 20
"""A profile with counts by match class has about 40 thousand bytes."""


def takes_chains_only(models: Mapping[str, Any]) -> bool:
    """Has the target layers with a recurrent state? A tree would need a state for each node."""
    return bool(models.get("target", {}).get("recurrent_layers"))


class Profile(Artifact, frozen=True):
    """Acceptance and, where measured, latency of a pair of models with one verifier."""

    acceptance: Annotated[
        Acceptance,
        "counts by level, the first for the root's children, the last with all levels below; "
        "or rates as `plan.acceptance` has them",
    ]
    latency: Annotated[Latency | None, "without it, trees are solved for tokens, not for speed"] = (
        None
    )
    longer: Annotated[
        tuple[Latency, ...],
        "latencies at longer contexts, in ascending order (`profile --context 256,4096`); `solve` "
        "makes a tree for each",
    ] = ()
    settings: Annotated[
        Metadata,
        "what acceptance was measured under: `temperature`, `top_p`, `verifier` and others",
    ] = {}
    models: Annotated[
        dict[str, Metadata],
        "`target` and `draft`, each with `name`, `digest`, `content`, `dtype`, `parameters`, "
        "`placement`, `weights`, `fused_layers`; a draft's `vocabulary` if it is cut; a target "
        "with `recurrent_layers` takes chains",
    ] = {}
    hardware: Annotated[
        Metadata, "the machine: device, processor, its kind of products, threads, library versions"
    ] = {}
    tree_size: Annotated[
        Count | None,
        "nodes of the tree that wrote the text, where one was given (`profile --tree`)",
    ] = None
    drafting: Annotated[Drafting, "which passes the draft makes; missing for a language model"] = (
        LANGUAGE_MODEL
    )
    prompts: Annotated[
        dict[PromptKind, Annotated[tuple[ClassCounts, ...], Meta(min_length=1)]],
        "the counts of `acceptance` prompt by prompt, all levels together, by kind (`all` where "
        "prompts name none): the differences between prompts and kinds set the intervals",
    ] = {}
    lookup: Annotated[
        LookupCounts | None,
        "counts by how much of the text before a step occurs earlier in it (prompt lookup)",
    ] = None

    def __post_init__(self) -> None:
        """Refuse prompts that are not parts of the counts, and contexts that do not ascend."""
        contexts = [latency.context for latency in (self.latency, *self.longer) if latency]
        if self.longer and (not self.latency or [*sorted({0, *contexts})] != [0, *contexts]):
            raise SequoiaPlanError(
                f"longer: found the contexts {contexts}, expected each longer than the one before, "
                "the first that of `latency`"
            )
        counts, prompts = self.acceptance.counts, list(chain.from_iterable(self.prompts.values()))
        if prompts and counts:
            has_one_length = {len(prompt.counts) for prompt in prompts} == {
                counts.accepted.shape[2]
            }
            if (
                not has_one_length
                or sum(prompt.trials for prompt in prompts) != counts.trials.sum()
            ):
                raise SequoiaPlanError(
                    "prompts: found trials that do not add up to those of `acceptance`, expected "
                    "the same ranks for each prompt; leave `prompts` out, or profile again"
                )

    def save(self, path: str | Path) -> None:
        """Write as YAML, atomically; equal profiles give equal bytes."""
        write_atomically(path, self.to_yaml().encode())

    def to_yaml(self) -> str:
        """The file's text."""
        from sequoia_plan.artifacts import yaml_text  # here, because the runtime never needs it

        return yaml_text.dump({"format": FORMAT, "version": VERSION, **self.to_dict()})

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read and check a file.

        Raises:
            SequoiaPlanError: if the file is missing, not of this format and version, or holds
                impossible values.
        """
        return cls.from_bytes(read_bytes(path, EXPECTED, MAX_BYTES), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Profile:
        """Read and check a file's content; errors begin with `name`, and are as of `load`."""
        from sequoia_plan.artifacts import yaml_text

        document = yaml_text.load(data, name, EXPECTED)
        check_format(document, FORMAT, VERSION, name, MADE_BY)
        return cls.from_dict(document, name)

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
            tree_size=None,
            prompts={},
            models={role: model for role, model in self.models.items() if role != "draft"},
            drafting=LANGUAGE_MODEL,
            lookup=self.lookup.without_draft(),
        )

    @property
    def sha256(self) -> str:
        """Hash of the profile as `save` writes it: comments and layout do not count."""
        return hashlib.sha256(self.to_yaml().encode()).hexdigest()
