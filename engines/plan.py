"""How many tokens another engine should draft in a step, by batch size, as YAML.

Such a plan holds what was measured, what is predicted from it, and what was measured afterwards.
"""

from typing import Annotated

from msgspec import Meta

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.schema import (
    Artifact,
    Count,
    Metadata,
    Number,
    Seconds,
    Size,
    YamlArtifact,
)

SOME = Meta(min_length=1)
CountsByPosition = Annotated[tuple[Count, ...], SOME]
Share = Annotated[float, Meta(gt=0, le=1)]
AtLeastOne = Annotated[float, Meta(ge=1)]


class ChainAcceptance(Artifact, frozen=True):
    """How often the first, the first two, ... tokens of a drafted chain were accepted."""

    drafts: Annotated[Size, "number of chains that were verified"]
    accepted: Annotated[
        CountsByPosition,
        "number of these whose first token was accepted, whose first two were, and so on",
    ]
    trials: Annotated[
        Number,
        "effective sample size: how many independent chains would leave the same uncertainty. "
        "It is below `drafts` where chains of one text resemble each other, and 0 if only the "
        "counts are known; chains are then taken as independent",
    ] = 0.0
    drafting_share: Annotated[
        Share,
        "share of a request's steps in which any token was drafted; below 1 where drafts are "
        "looked up in the text",
    ] = 1.0
    source: Annotated[str, "source of the counts"] = ""

    def __post_init__(self) -> None:
        """Refuse counts that rise: the first n + 1 tokens cannot be accepted more often than n."""
        counts = [self.drafts, *self.accepted]
        if not self.accepted or counts != sorted(counts, reverse=True):
            raise SequoiaPlanError(
                f"accepted: found {self.accepted!s:.60} of {self.drafts} drafts, expected one or "
                "more counts, none larger than the one before"
            )

    @property
    def survival(self) -> tuple[float, ...]:
        """The probabilities that the first token, the first two, ... are accepted."""
        return tuple(count / self.drafts for count in self.accepted)


class StepSeconds(Artifact, frozen=True):
    """The measured time of a decoding step."""

    batch: Annotated[Size, "requests that are decoded together"]
    speculative_tokens: Annotated[Count, "tokens drafted a step and request; 0 without speculation"]
    seconds: Annotated[Seconds, "seconds of a step; the median over rounds"]
    error: Annotated[Number, "relative standard error of that, from the spread of rounds"] = 0.0
    steps: Annotated[Count, "steps that were timed in all rounds"] = 0


class MeasuredCell(Artifact, frozen=True):
    """What an engine with that many speculative tokens achieved, on prompts not used before."""

    throughput: Annotated[
        Number,
        "generated tokens a second while `batch` requests are decoded; the median over runs",
    ]
    low: Annotated[Number, "throughput of the slowest run"]
    high: Annotated[Number, "throughput of the fastest run"]
    tokens_per_step: Annotated[Number, "generated tokens a step and request"]
    seconds: Annotated[Seconds, "seconds of a step"]
    runs: Annotated[Size, "number of runs"]


class Cell(Artifact, frozen=True):
    """The prediction for one batch size and one number of speculative tokens."""

    batch: Annotated[Size, "requests that are decoded together"]
    speculative_tokens: Annotated[Count, "tokens drafted a step and request; 0 without speculation"]
    tokens_per_step: Annotated[AtLeastOne, "expected tokens a step and request"]
    seconds: Annotated[Seconds, "seconds of a step"]
    throughput: Annotated[Number, "generated tokens a second of all requests together"]
    low: Annotated[Number, "lower end of the throughput's 95 % interval"]
    high: Annotated[Number, "upper end of the throughput's 95 % interval"]
    speedup: Annotated[Number, "speed-up over no speculation at this batch size"]
    is_timed: Annotated[
        bool,
        "true if the step was timed at this number of tokens; false if its time is "
        "interpolated between two numbers that were",
    ]
    variant: Annotated[
        str,
        "a setting besides the number of tokens, as the engine's option and value, such as "
        "`p-min 0.6`; empty if there is none",
    ] = ""
    measured: Annotated[MeasuredCell | None, "what `--verify` measured"] = None


class ScheduleEntry(Artifact, frozen=True):
    """The best number of speculative tokens for a range of batch sizes."""

    first: Annotated[Size, "smallest batch size of the range"]
    last: Annotated[Size, "largest batch size of the range; the last entry holds beyond it, too"]
    speculative_tokens: Annotated[Count, "the best number; 0 is no speculation"]


class ContextPlan(Artifact, frozen=True):
    """What was measured, predicted and chosen at one length of the context."""

    context: Annotated[
        Count, "tokens of every prompt that is decoded; 0 if prompts are decoded as they are"
    ]
    acceptance: Annotated[ChainAcceptance, "how far drafted chains are accepted"]
    steps: Annotated[tuple[StepSeconds, ...], SOME, "measured times of a step"]
    cells: Annotated[tuple[Cell, ...], SOME, "predictions by batch size and number of tokens"]
    schedule: Annotated[tuple[ScheduleEntry, ...], SOME, "the best number of tokens by batch size"]
    lines: Annotated[tuple[str, ...], "options to start the engine with"] = ()
    draft_pass_seconds: Annotated[
        Number, "seconds of a pass of llama.cpp's draft; 0 if it was not timed"
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


class EnginePlan(YamlArtifact, frozen=True, kw_only=True):
    """A plan for an engine that drafts chains."""

    FORMAT = "sequoia-plan-engine"
    MADE_BY = "sequoia-plan engine"

    engine: Annotated[str, "`vllm`, `sglang` or `llamacpp`"]
    engine_version: Annotated[str, "the engine's version; empty if it is unknown"] = ""
    method: Annotated[str, "the engine's name for the type of draft"] = ""
    target: Annotated[str, "the target, as it was named to the engine"] = ""
    draft: Annotated[str, "the draft, as it was named to the engine"] = ""
    settings: Annotated[
        Metadata,
        "how it was measured: temperature, prompts, tokens, the engine's options",
    ] = {}
    contexts: Annotated[
        tuple[ContextPlan, ...],
        SOME,
        "the plan at each context, shortest first",
    ]
    seconds: Annotated[Number, "seconds that measuring took"] = 0.0
    tool: Annotated[str, "name and version of the program that made the plan"] = ""
