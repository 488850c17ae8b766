"""What engines decode to be measured, how they may draft, and what a run of one gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from sequoia_plan.artifacts import prompts as prompt_files
from sequoia_plan.artifacts.prompts import PromptText
from sequoia_plan.engines.plan import Drafting, MeasuredCell


class RunKind(NamedTuple):
    """What the time of a step depends on."""

    drafting: Drafting
    batch: int = 1
    context: int = 0
    """Tokens of every prompt; 0 decodes prompts as they are."""


@dataclass(frozen=True)
class Workload:
    """The prompts that are decoded: the first ones to measure on, the others to verify."""

    prompts: Sequence[PromptText]
    num_measuring: int
    tokens: int = 64
    """New tokens of a prompt, at most."""
    temperature: float = 0.0
    kinds: Sequence[str | None] = ()
    """The kind of each prompt to measure on."""

    @classmethod
    def load(
        cls, path: str | None, limit: int | None, tokens: int, temperature: float = 0.0
    ) -> Workload:
        """Loads the built-in prompts or a file's, at most `limit` to measure on and to verify."""
        prompts = prompt_files.load(path or prompt_files.BUILT_IN)
        measuring = prompt_files.measuring_half(prompts)[:limit]
        held_out = prompt_files.held_out_half(prompts)[:limit]
        texts = [prompt.text for prompt in (*measuring, *held_out)]
        kinds = [prompt.kind for prompt in measuring]
        return cls(texts, len(measuring), tokens, temperature, kinds)

    @property
    def measuring(self) -> range:
        """Indices of the prompts to measure on."""
        return range(self.num_measuring)

    @property
    def held_out(self) -> range:
        """Indices of the prompts to verify on."""
        return range(self.num_measuring, len(self.prompts))


class EngineRun(NamedTuple):
    """The full steps of a run: those that yielded tokens for every request."""

    seconds: float
    steps: int
    tokens: int


def measured_cell(runs: Sequence[EngineRun] | None, batch: int) -> MeasuredCell | None:
    """Summarizes runs of one kind, if there are any."""
    if not runs:
        return None
    seconds, num_steps, tokens = map(sum, zip(*runs, strict=True))
    return MeasuredCell(tokens / seconds, tokens / (num_steps * batch), seconds / num_steps)


def text_before(texts: Sequence[Sequence[int]], first: int, size: int) -> list[int]:
    """The first `size` tokens of the texts from `first` on, repeated if they are not enough."""
    following = (texts[index % len(texts)] for index in range(first, first + size))
    return list(islice(chain.from_iterable(following), size))
