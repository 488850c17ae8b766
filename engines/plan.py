"""How many tokens another engine should draft in a step, by batch size, as YAML.

Such a plan holds what was measured, what is predicted from it, and what was measured afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta

from sequoia_plan.artifacts import yaml_text
from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.files import read_bytes, write_atomically
from sequoia_plan.artifacts.schema import Artifact, Count, Metadata, Number, Seconds, Size, field

FORMAT = yaml_text.Format(
    "sequoia-plan-engine", 1, "a plan for an engine", "engine plan", "measure again"
)
MAX_FILE_BYTES = 1 << 20

CountsByPosition = Annotated[
    tuple[Count, ...], Meta(min_length=1, title="a non-empty list of counts")
]
Share = Annotated[float, Meta(gt=0, le=1, title="a number > 0 and <= 1")]
AtLeastOne = Annotated[float, Meta(ge=1, title="a number >= 1")]


class ChainAcceptance(Artifact, frozen=True):
    """How often the first, the first two, ... tokens of a drafted chain were accepted."""

    PREFIX: ClassVar[str] = "acceptance"

    drafts: Annotated[Size, field("number of chains that were verified")]
    accepted: Annotated[
        CountsByPosition,
        field("number of these whose first token was accepted, whose first two were, and so on"),
    ]
    trials: Annotated[
        Number,
        field(
            "effective sample size: how many independent chains would leave the same uncertainty. "
            "It is below `drafts` where chains of one text resemble each other, and 0 if only the "
            "counts are known; chains are then taken as independent",
        ),
    ] = 0.0
    drafting_share: Annotated[
        Share,
        field(
            "share of a request's steps in which any token was drafted; below 1 where drafts are "
            "looked up in the text",
        ),
    ] = 1.0
    source: Annotated[str, field("source of the counts")] = ""

    def __post_init__(self) -> None:
        """Refuse counts that rise: the first n + 1 tokens cannot be accepted more often than n."""
        super().__post_init__()
        counts = (self.drafts, *self.accepted)
        for before, after in zip(counts, self.accepted, strict=False):
            if after > before:
                raise SequoiaPlanError(
                    f"{self.PREFIX}.accepted: found {after} after {before}, expected no more at a "
                    "later position than at the one before"
                )

    @property
    def survival(self) -> tuple[float, ...]:
        """The probabilities that the first token, the first two, ... are accepted."""
        return tuple(count / self.drafts for count in self.accepted)


class StepSeconds(Artifact, frozen=True):
    """The measured time of a decoding step."""

    batch: Annotated[Size, field("requests that are decoded together")]
    speculative_tokens: Annotated[
        Count, field("tokens drafted a step and request; 0 without speculation")
    ]
    seconds: Annotated[Seconds, field("seconds of a step; the median over rounds")]
    error: Annotated[
        Number, field("relative standard error of that, from the spread of rounds")
    ] = 0.0
    steps: Annotated[Count, field("steps that were timed in all rounds")] = 0


class MeasuredCell(Artifact, frozen=True):
    """What an engine with that many speculative tokens achieved, on prompts not used before."""

    throughput: Annotated[
        Number,
        field("generated tokens a second while `batch` requests are decoded; the median over runs"),
    ]
    low: Annotated[Number, field("throughput of the slowest run")]
    high: Annotated[Number, field("throughput of the fastest run")]
    tokens_per_step: Annotated[Number, field("generated tokens a step and request")]
    seconds: Annotated[Seconds, field("seconds of a step")]
    runs: Annotated[Size, field("number of runs")]


class Cell(Artifact, frozen=True):
    """The prediction for one batch size and one number of speculative tokens."""

    batch: Annotated[Size, field("requests that are decoded together")]
    speculative_tokens: Annotated[
        Count, field("tokens drafted a step and request; 0 without speculation")
    ]
    tokens_per_step: Annotated[AtLeastOne, field("expected tokens a step and request")]
    seconds: Annotated[Seconds, field("seconds of a step")]
    throughput: Annotated[Number, field("generated tokens a second of all requests together")]
    low: Annotated[Number, field("lower end of the throughput's 95 % interval")]
    high: Annotated[Number, field("upper end of the throughput's 95 % interval")]
    speedup: Annotated[Number, field("speed-up over no speculation at this batch size")]
    is_timed: Annotated[
        bool,
        field(
            "true if the step was timed at this number of tokens; false if its time is "
            "interpolated between two numbers that were"
        ),
    ]
    variant: Annotated[
        str,
        field(
            "a setting besides the number of tokens, as the engine's option and value, such as "
            "`p-min 0.6`; empty if there is none"
        ),
    ] = ""
    measured: Annotated[MeasuredCell | None, field("what `--verify` measured")] = None


class ScheduleEntry(Artifact, frozen=True):
    """The best number of speculative tokens for a range of batch sizes."""

    first: Annotated[Size, field("smallest batch size of the range")]
    last: Annotated[
        Size, field("largest batch size of the range; the last entry holds beyond it, too")
    ]
    speculative_tokens: Annotated[Count, field("the best number; 0 is no speculation")]


StepList = Annotated[tuple[StepSeconds, ...], Meta(title="a list of mappings")]
CellList = Annotated[tuple[Cell, ...], Meta(title="a list of mappings")]
Schedule = Annotated[tuple[ScheduleEntry, ...], Meta(title="a list of mappings")]


class ContextPlan(Artifact, frozen=True):
    """What was measured, predicted and chosen at one length of the context."""

    context: Annotated[
        Count, field("tokens of every prompt that is decoded; 0 if prompts are decoded as they are")
    ]
    acceptance: Annotated[ChainAcceptance, field("how far drafted chains are accepted")]
    steps: Annotated[StepList, field("measured times of a step")]
    cells: Annotated[CellList, field("predictions by batch size and number of tokens")]
    schedule: Annotated[Schedule, field("the best number of tokens by batch size")]
    lines: Annotated[tuple[str, ...], field("options to start the engine with")] = ()
    draft_pass_seconds: Annotated[
        Number, field("seconds of a pass of llama.cpp's draft; 0 if it was not timed")
    ] = 0.0

    @property
    def batches(self) -> list[int]:
        """The batch sizes with predictions, in increasing order."""
        return sorted({cell.batch for cell in self.cells})

    def cells_at(self, batch: int) -> list[Cell]:
        """The predictions for one batch size, by increasing number of speculative tokens."""
        cells = [cell for cell in self.cells if cell.batch == batch]
        return sorted(cells, key=lambda cell: (cell.speculative_tokens, cell.variant))

    def best_cell(self, batch: int) -> Cell:
        """The cell of a batch size with the highest predicted throughput.

        Of cells with equal throughput, it is the one with the fewest speculative tokens.
        """
        return max(
            self.cells_at(batch), key=lambda cell: (cell.throughput, -cell.speculative_tokens)
        )


ContextPlans = Annotated[
    tuple[ContextPlan, ...], Meta(min_length=1, title="a non-empty list of mappings")
]


class EnginePlan(Artifact, frozen=True, kw_only=True):
    """A plan for an engine that drafts chains."""

    engine: Annotated[str, field("`vllm`, `sglang` or `llamacpp`")]
    engine_version: Annotated[str, field("the engine's version; empty if it is unknown")] = ""
    method: Annotated[str, field("the engine's name for the type of draft")] = ""
    target: Annotated[str, field("the target, as it was named to the engine")] = ""
    draft: Annotated[str, field("the draft, as it was named to the engine")] = ""
    settings: Annotated[
        Metadata,
        field("how it was measured: temperature, prompts, tokens, the engine's options"),
    ] = {}
    contexts: Annotated[ContextPlans, field("the plan at each context, shortest first")]
    seconds: Annotated[Number, field("seconds that measuring took")] = 0.0
    tool: Annotated[str, field("name and version of the program that made the plan")] = ""

    def save(self, path: str | Path) -> None:
        """Write as YAML, atomically."""
        write_atomically(path, self.to_yaml().encode())

    def to_yaml(self) -> str:
        """The file's text."""
        document = {"format": FORMAT.name, "version": FORMAT.version, **self.to_dict()}
        return yaml_text.dump(document, width=160)

    @classmethod
    def load(cls, path: str | Path) -> EnginePlan:
        """Read and check a file."""
        data = read_bytes(path, "a plan written by sequoia-plan engine", MAX_FILE_BYTES)
        return yaml_text.read(cls, data, str(path), FORMAT.with_article, FORMAT)
