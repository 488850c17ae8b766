"""What engines decode to be measured, how they may draft, and what a run of one gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts import prompts as prompt_files
from sequoia_plan.artifacts.prompts import PromptText
from sequoia_plan.engines.plan import Cell, MeasuredCell


class Drafting(NamedTuple):
    """How an engine drafts chains; length 0 is no speculation. Only llama.cpp has the last two."""

    length: int = 0
    """Most tokens drafted a step and request."""
    min_prob: float = 0.0
    """The draft stops before a token that it finds less probable (p-min)."""
    lookup_size: int = 0
    """Tokens that are looked up in the text (size-n); 0 if a model drafts."""

    @property
    def variant(self) -> str:
        """What it sets besides the length, as `Cell.variant`."""
        if self.lookup_size:
            return f"size-n {self.lookup_size}"
        return f"p-min {self.min_prob:g}" if self.min_prob else ""

    @classmethod
    def of(cls, cell: Cell) -> Drafting:
        """The way of drafting that a cell predicts."""
        setting, _, value = cell.variant.partition(" ")
        if setting == "size-n":
            return cls(cell.speculative_tokens, lookup_size=int(value))
        return cls(cell.speculative_tokens, float(value or 0))


NONE = Drafting()


class RunKind(NamedTuple):
    """What the time of a step depends on."""

    drafting: Drafting
    batch: int = 1
    context: int = 0
    """Tokens of every prompt; 0 decodes prompts as they are."""

    @classmethod
    def of(cls, cell: Cell, context: int) -> RunKind:
        """The runs that a cell predicts."""
        return cls(Drafting.of(cell), cell.batch, context)


@dataclass(frozen=True)
class Workload:
    """The prompts that are decoded: the first ones to measure on, the others to verify."""

    prompts: Sequence[PromptText]
    num_measuring: int
    tokens: int = 64
    """New tokens of a prompt, at most."""
    temperature: float = 0.0

    @classmethod
    def load(cls, path: str | None, limit: int | None, tokens: int, temperature: float) -> Workload:
        """Loads the built-in prompts or a file's, at most `limit` to measure on and to verify."""
        prompts = prompt_files.load(path or prompt_files.BUILT_IN)
        measuring = prompt_files.measuring_half(prompts)[:limit]
        held_out = prompt_files.held_out_half(prompts)[:limit]
        texts = [prompt.text for prompt in (*measuring, *held_out)]
        return cls(texts, len(measuring), tokens, temperature)

    @property
    def measuring(self) -> range:
        """Indices of the prompts to measure on."""
        return range(self.num_measuring)

    @property
    def held_out(self) -> range:
        """Indices of the prompts to verify on."""
        return range(self.num_measuring, len(self.prompts))


@dataclass(frozen=True)
class EngineRun:
    """The full steps of a run: those that yielded tokens for every request."""

    seconds: float
    steps: int
    tokens: int


def round_digits(value: float | np.floating) -> float:
    """Rounds to six digits for files that people read. No measurement is that precise."""
    return float(f"{value:.6g}")


def measured_cell(runs: Sequence[EngineRun], batch: int) -> MeasuredCell:
    """Summarizes runs of one kind."""
    throughputs = [run.tokens / run.seconds for run in runs]
    num_steps = sum(run.steps for run in runs)
    return MeasuredCell(
        throughput=round_digits(np.median(throughputs)),
        low=round_digits(min(throughputs)),
        high=round_digits(max(throughputs)),
        tokens_per_step=round_digits(sum(run.tokens for run in runs) / (num_steps * batch)),
        seconds=round_digits(np.median([run.seconds / run.steps for run in runs])),
        runs=len(runs),
    )


def text_before(texts: Sequence[Sequence[int]], first: int, size: int) -> list[int]:
    """The first `size` tokens of the texts from `first` on, repeated if they are not enough."""
    following = (texts[index % len(texts)] for index in range(first, first + size))
    return list(islice(chain.from_iterable(following), size))
