"""How many tokens another engine should draft a step, by batch size: what was measured, what is promised, and what was then measured, as YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta

from sequoia_plan.artifacts import yaml_text
from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.schema import Artifact, Count, Facts, Number, Seconds, Size, field

FORMAT = yaml_text.Format("sequoia-plan-engine", 1, "a plan for an engine", "engine plan", "measure again")
LARGEST_FILE = 1 << 20


class ChainAcceptance(Artifact, frozen=True):
    """How often the first, the first two, ... tokens of a drafted chain were accepted."""

    PREFIX: ClassVar[str] = "acceptance"

    drafts: Annotated[Size, field("chains that were verified")]
    accepted: Annotated[
        Annotated[tuple[Count, ...], Meta(min_length=1, title="a non-empty list of counts")],
        field("of these, how many had their first token accepted, their first two, and so on"),
    ]
    trials: Annotated[
        Number,
        field(
            "the effective sample size: how many independent chains would leave the same uncertainty; fewer than `drafts` where those of one text "
            "resemble each other. 0 if only counts are known, which are then taken as independent",
            always=True,
        ),
    ] = 0.0
    share: Annotated[
        Annotated[float, Meta(gt=0, le=1, title="a number > 0 and <= 1")],
        field("of a request's steps in which anything was drafted; below 1 where drafts are looked up in the text", always=True),
    ] = 1.0
    source: Annotated[str, field("where the counts are from", always=True)] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for before, after in zip((self.drafts, *self.accepted), self.accepted, strict=False):
            if after > before:
                raise SequoiaPlanError(f"{self.PREFIX}.accepted: found {after} after {before}, expected no more at a later position than at the one before")

    @property
    def survival(self) -> tuple[float, ...]:
        """The probability that the first 1, 2, ... tokens are accepted."""
        return tuple(count / self.drafts for count in self.accepted)


class StepSeconds(Artifact, frozen=True):
    """The time of a decoding step, measured."""

    batch: Annotated[Size, field("requests decoded together")]
    speculative_tokens: Annotated[Count, field("tokens drafted a step and request; 0 without speculation")]
    seconds: Annotated[Seconds, field("a step; the median over rounds")]
    error: Annotated[Number, field("its relative standard error, from how rounds differ", always=True)] = 0.0
    steps: Annotated[Count, field("steps that were timed, in all rounds", always=True)] = 0


class MeasuredCell(Artifact, frozen=True):
    """What an engine with that many speculative tokens then did, on prompts that nothing was measured on before."""

    throughput: Annotated[Number, field("generated tokens a second while `batch` requests are decoded; the median over runs")]
    low: Annotated[Number, field("the slowest run")]
    high: Annotated[Number, field("the fastest run")]
    tokens_per_step: Annotated[Number, field("generated tokens a step and request")]
    seconds: Annotated[Seconds, field("a step")]
    runs: Annotated[Size, field("how many runs")]


class Cell(Artifact, frozen=True):
    """What is promised for one batch size and number of speculative tokens."""

    batch: Annotated[Size, field("requests decoded together")]
    speculative_tokens: Annotated[Count, field("tokens drafted a step and request; 0 without speculation")]
    tokens_per_step: Annotated[Annotated[float, Meta(ge=1, title="a number >= 1")], field("expected tokens a step and request")]
    seconds: Annotated[Seconds, field("a step")]
    throughput: Annotated[Number, field("generated tokens a second, of all requests together")]
    low: Annotated[Number, field("of its 95 % interval")]
    high: Annotated[Number, field("of its 95 % interval")]
    speedup: Annotated[Number, field("over no speculation at this batch size")]
    timed: Annotated[bool, field("was the step's time measured at this number of tokens, or is it from a line between two that were?")]
    measured: Annotated[MeasuredCell | None, field("what `--verify` measured")] = None


class Range(Artifact, frozen=True):
    """An entry of the schedule."""

    first: Annotated[Size, field("the smallest batch size it holds for")]
    last: Annotated[Size, field("the largest; the last entry holds for all larger ones, too")]
    speculative_tokens: Annotated[Count, field("the best number; 0 is no speculation")]


class EnginePlan(Artifact, frozen=True):
    """A plan for an engine whose drafts are chains."""

    ORDER: ClassVar[tuple[str, ...]] = (
        *("engine", "version", "method", "target", "draft", "settings"),
        *("acceptance", "steps", "cells", "schedule", "lines", "seconds", "tool"),
    )

    engine: Annotated[str, field("vllm or sglang", key="engine.name")]
    acceptance: Annotated[ChainAcceptance, field("how far drafted chains are accepted")]
    version: Annotated[str, field("of the engine; empty if it is not known", key="engine.version", always=True)] = ""
    method: Annotated[str, field("what the engine calls the kind of draft")] = ""
    target: Annotated[str, field("the target, as the engine was given it", key="models.target")] = ""
    draft: Annotated[str, field("the draft, as the engine was given it", key="models.draft")] = ""
    settings: Annotated[Facts, field("how it was measured: temperature, prompts, tokens, the engine's options")] = {}
    steps: Annotated[Annotated[tuple[StepSeconds, ...], Meta(title="a list of mappings")], field("measured times of a step")] = ()
    cells: Annotated[Annotated[tuple[Cell, ...], Meta(title="a list of mappings")], field("what is promised, by batch size and number of tokens")] = ()
    schedule: Annotated[Annotated[tuple[Range, ...], Meta(title="a list of mappings")], field("the best number by batch size")] = ()
    lines: Annotated[tuple[str, ...], field("what to start the engine with")] = ()
    seconds: Annotated[Number, field("what measuring took")] = 0.0
    tool: Annotated[str, field("what made the plan")] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, rows in (("steps", self.steps), ("cells", self.cells)):
            places = [(row.batch, row.speculative_tokens) for row in rows]
            if twice := [place for number, place in enumerate(places) if place in places[:number]]:
                raise SequoiaPlanError(f"{name}: found batch {twice[0][0]} with {twice[0][1]} speculative tokens twice, expected it once")

    @property
    def batches(self) -> list[int]:
        """The batch sizes there are promises for."""
        return sorted({cell.batch for cell in self.cells})

    def at(self, batch: int) -> list[Cell]:
        """The cells of one batch size, by number of speculative tokens."""
        return sorted((cell for cell in self.cells if cell.batch == batch), key=lambda cell: cell.speculative_tokens)

    def best(self, batch: int) -> Cell:
        """The cell with the highest promised throughput; of equals the one with fewest tokens."""
        return max(self.at(batch), key=lambda cell: (cell.throughput, -cell.speculative_tokens))

    def save(self, path: str | Path) -> None:
        """Write as YAML, atomically."""
        write_atomically(path, self.to_yaml().encode())

    def to_yaml(self) -> str:
        """The file's text."""
        return yaml_text.dump({"format": FORMAT.name, "version": FORMAT.version, **self.facts()}, width=160)

    @classmethod
    def load(cls, path: str | Path) -> EnginePlan:
        """Read and validate.

        Raises:
            SequoiaPlanError: if the file is missing, not a plan for an engine, of another version, or holds impossible numbers.
        """
        return yaml_text.read(cls, read_bytes(path, "a plan written by sequoia-plan engine", LARGEST_FILE), str(path), FORMAT.what, FORMAT)
