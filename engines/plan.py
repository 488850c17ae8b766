"""A diagnosis of speculation in an engine: what was measured, what is predicted, and the plan."""

from collections.abc import Sequence

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.schema import Artifact


class ChainAcceptance(Artifact, frozen=True):
    """How often the first, the first two, ... tokens of a drafted chain were accepted."""

    drafts: int
    """Chains that were verified."""
    accepted: tuple[int, ...]
    """How many of these had their first token accepted, their first two, and so on."""
    error: float = 0.0
    """Relative standard error of the accepted tokens of a step, from how texts differ; 0 if only
    the counts are known."""
    drafting_share: float = 1.0
    """Share of a request's steps in which any token was drafted."""
    source: str = ""

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
    """The measured time of a decoding step: the median."""

    batch: int
    speculative_tokens: int
    """Tokens drafted a step and request."""
    seconds: float
    error: float = 0.0
    """Relative standard error."""


class Drafting(Artifact, frozen=True, order=True):
    """How an engine drafts chains; without any value it does not. vLLM has only the length."""

    length: int = 0
    """Most tokens that the draft drafts in a step."""
    min_prob: float = 0.0
    """The draft stops before a less probable token (p-min)."""
    lookup_size: int = 0
    """Tokens that llama.cpp's ngram-simple looks up in the text (size-n)."""
    lookup_length: int = 0
    """Most tokens that it drafts from there (size-m)."""
    types: str = ""
    """Types of llama.cpp that run as they are by default, before the draft if there is one."""

    @property
    def is_chain(self) -> bool:
        """Whether the draft alone drafts."""
        return self.length > 0 and not self.lookup_size and not self.types

    def __str__(self) -> str:
        chain = f"a chain of {self.length}" + f", p-min {self.min_prob:g}" * (self.min_prob > 0)
        lookup = f"n-gram of {self.lookup_size}, up to {self.lookup_length}"
        parts = (self.types, lookup * (self.lookup_size > 0), chain * (self.length > 0))
        return ", else ".join(filter(None, parts)) or "none"


NONE = Drafting()


class MeasuredCell(Artifact, frozen=True):
    """What an engine achieved on prompts not used before, in all runs."""

    throughput: float
    tokens_per_step: float
    seconds: float


class Cell(Artifact, frozen=True):
    """The prediction for one batch size and one way of drafting."""

    batch: int
    drafting: Drafting
    tokens_per_step: float
    seconds: float
    throughput: float
    """Generated tokens a second of all requests together; `low` to `high` is its 95 % interval."""
    low: float
    high: float
    speedup: float
    """Over no speculation at this batch size."""
    measured: MeasuredCell | None = None

    @property
    def speculative_tokens(self) -> int:
        """Most tokens that the draft drafts; 0 without one."""
        return self.drafting.length


def best_of(cells: Sequence[Cell]) -> Cell:
    """The fastest cell of a batch size if its whole interval is above the first one, none."""
    best = max(cells, key=lambda cell: cell.throughput)
    return best if best.low > cells[0].throughput else cells[0]


class ScheduleEntry(Artifact, frozen=True):
    """The best number of speculative tokens from a batch size to another, or beyond the last."""

    first: int
    last: int
    speculative_tokens: int


class ContextPlan(Artifact, frozen=True):
    """What was measured, predicted and chosen at one length of the context."""

    context: int
    """Tokens of every prompt; 0 if prompts are decoded as they are."""
    acceptance: ChainAcceptance | None
    """None if a server counts only how many tokens a step yields."""
    steps: tuple[StepSeconds, ...]
    cells: tuple[Cell, ...]
    schedule: tuple[ScheduleEntry, ...] = ()
    lines: tuple[str, ...] = ()
    """Options to start the engine with."""
    break_even_seconds: float = 0.0
    """Where no step without speculation was timed: speculation pays if one takes longer."""
    target_seconds: dict[int, float] = {}
    """Seconds of the target's pass over so many tokens."""
    step: dict[str, float] = {}
    """Where the seconds of a step of the best chain go."""
    bounds: dict[str, float] = {}
    """Tokens a second that no setting passes, by what would have to hold."""
    changes: dict[str, float] = {}
    """Tokens a second of the best chain after a single change."""
    tree: dict[str, float] = {}
    """The planned tree in an engine that takes trees: `size`, `depth`, `throughput`, and `bound`,
    tokens a second that no tree passes."""

    @property
    def batches(self) -> list[int]:
        """The batch sizes with predictions, in increasing order."""
        return sorted({cell.batch for cell in self.cells})

    def cells_at(self, batch: int) -> list[Cell]:
        """The predictions for one batch size: none first, and fewer tokens before more."""
        return [cell for cell in self.cells if cell.batch == batch]

    def best_cell(self, batch: int) -> Cell:
        """The cell to take at a batch size."""
        return best_of(self.cells_at(batch))


class EnginePlan(Artifact, frozen=True, kw_only=True):
    """A diagnosis of an engine that drafts chains, and the plan that follows."""

    engine: str
    engine_version: str = ""
    target: str = ""
    draft: str = ""
    contexts: tuple[ContextPlan, ...]
    seconds: float = 0.0
