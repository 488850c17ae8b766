"""What engines decode to be measured, and those that run, as many at a time as fit in memory."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from typing import Any, ClassVar, NamedTuple

from sequoia_plan.artifacts import prompts as prompt_files
from sequoia_plan.artifacts.prompts import PromptText
from sequoia_plan.engines.plan import ContextPlan, Drafting, MeasuredCell

MAX_CPU_ENGINES = 4


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

    @classmethod
    def load(cls, path: str | None, limit: int, tokens: int) -> Workload:
        """Loads the built-in prompts or a file's, at most `limit` to measure on and to verify."""
        prompts = prompt_files.load(path or prompt_files.BUILT_IN)
        measuring = prompt_files.measuring_half(prompts)[:limit]
        held_out = prompt_files.held_out_half(prompts)[:limit]
        return cls([prompt.text for prompt in (*measuring, *held_out)], len(measuring), tokens)

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


def measured_cell(runs: Sequence[EngineRun], batch: int) -> MeasuredCell:
    """What runs of one kind, with `batch` requests at a time, achieved together."""
    seconds, num_steps, tokens = map(sum, zip(*runs, strict=True))
    return MeasuredCell(tokens / seconds, tokens / (num_steps * batch), seconds / num_steps)


def text_before(prompts: Sequence[Sequence[int]], first: int, size: int) -> list[int]:
    """The first `size` tokens of the prompts from `first` on, repeated if they are not enough."""
    following = islice(cycle(prompts), first, None)
    return [*islice(chain.from_iterable(following), size)]


@dataclass(kw_only=True)
class EnginePool(ExitStack, ABC):
    """Engines of one target and draft, all of which end with this context."""

    name: ClassVar[str]
    version: str = ""
    """The engine's version, once one runs."""
    target: str
    draft: str | None
    workload: Workload
    max_length: int
    """Most tokens to draft."""
    batches: Sequence[int] = (1,)
    """Numbers of requests decoded together to plan for."""
    contexts: Sequence[int] = (0,)
    """Tokens of every prompt to plan for; 0 decodes prompts as they are."""
    report_status: Callable[[str], None] = lambda text: None
    prompts: list[list[int]] = field(default_factory=list)
    """Token ids of the workload's prompts, once an engine runs."""
    start_time: float = field(default_factory=time.perf_counter)
    running: dict[Any, Any] = field(default_factory=dict)
    """The engines that run, by their way of drafting."""

    def __post_init__(self) -> None:
        """Begins the context."""
        super().__init__()

    @abstractmethod
    def most_running(self) -> int:
        """Engines that fit in memory together: on a GPU one, else MAX_CPU_ENGINES."""

    @abstractmethod
    def start(self, key: Any) -> Any:
        """Starts an engine that the context will close, and waits until it is ready."""

    @abstractmethod
    def encode(self, engine: Any) -> list[list[int]]:
        """Token ids of the workload's prompts in the chat template."""

    @abstractmethod
    def measure(self) -> Sequence[Any]:
        """Measures what a plan needs: for each context a `planning.Measurement`."""

    @abstractmethod
    def run(self, kind: RunKind, prompts: Sequence[int]) -> EngineRun:
        """Decodes prompts."""

    @abstractmethod
    def launch_options(self, plan: ContextPlan) -> tuple[str, ...]:
        """The options to start the engine with."""

    def source(self, context: int) -> str:
        """Says in words what acceptance is counted on, such as "8 prompts of 512 tokens"."""
        return f"{self.workload.num_measuring} prompts" + f" of {context} tokens" * bool(context)

    def ensure_running(self, keys: Sequence[Any]) -> None:
        """Starts the engines that do not run, and ends others if memory does not hold all.

        They start one after the other, since engines that compile together may disturb each other.
        """
        if len({*self.running, *keys}) > self.most_running():
            for key in {*self.running} - {*keys}:
                self.running.pop(key).close()
        for key in keys:
            if key not in self.running:
                self.running[key] = self.start(key)
                self.prompts = self.prompts or self.encode(self.running[key])

    def run_in_rounds(
        self, kinds: Sequence[RunKind], run: Callable[[RunKind, int], Any], rounds: int
    ) -> dict[RunKind, list[Any]]:
        """Runs every kind once a round, so that a drift of the machine's speed affects all.

        Engines that do not fit in memory together run one group after the other. Every second round
        goes through them in the opposite order.
        """
        runs: dict[RunKind, list[Any]] = {kind: [] for kind in kinds}
        keys = [*dict.fromkeys(kind.drafting for kind in kinds)]
        keys.sort(key=lambda key: key not in self.running)  # those that run come first
        while keys:
            group = keys[: self.most_running()]
            keys = keys[len(group) :]
            portion = [kind for kind in kinds if kind.drafting in group]
            for round_index in range(rounds):
                self.ensure_running(group)
                for kind in portion[:: -1 if round_index % 2 else 1]:
                    runs[kind].append(run(kind, round_index))
        return runs
