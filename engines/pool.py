"""The engines that run: one for each way of drafting, as many at a time as fit in memory."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sequoia_plan.engines.plan import ContextPlan
from sequoia_plan.engines.workload import EngineRun, RunKind, Workload

MAX_CPU_ENGINES = 4


@dataclass(kw_only=True)
class EnginePool(ABC):
    """Engines of one target and draft, all of which end with this context."""

    version: str = ""
    """The engine's version, once one runs."""
    target: str
    draft: str | None
    workload: Workload
    max_context: int = 0
    """The most tokens of a prompt that are asked for."""
    report_status: Callable[[str], None] = lambda text: None
    prompts: list[list[int]] = field(default_factory=list)
    """Token ids of the workload's prompts, once an engine runs."""
    texts: list[list[int]] = field(default_factory=list)
    """The same without the chat template."""
    start_time: float = field(default_factory=time.perf_counter)
    exit_stack: ExitStack = field(default_factory=ExitStack)
    running: dict[Any, Any] = field(default_factory=dict)
    """The engines that run, by their way of drafting and whatever else differs."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.exit_stack.close()

    name: ClassVar[str]

    @property
    @abstractmethod
    def has_device(self) -> bool:
        """Whether engines compute on a GPU, whose memory is taken to hold one of them."""

    @abstractmethod
    def start(self, key: Any) -> Any:
        """Starts an engine that `exit_stack` will close, and waits until it is ready."""

    @abstractmethod
    def encode(self, engine: Any) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the workload's prompts in the chat template, and without it."""

    @abstractmethod
    def run(self, kind: RunKind, prompts: Sequence[int]) -> EngineRun:
        """Decodes prompts."""

    @abstractmethod
    def launch_options(self, plan: ContextPlan) -> tuple[str, ...]:
        """The options to start the engine with."""

    def source(self, context: int) -> str:
        """What acceptance is counted on."""
        of_context = f" of {context} tokens" if context else ""
        return f"{self.workload.num_measuring} prompts{of_context}"

    def groups(self, keys: Iterable[Any]) -> list[list[Any]]:
        """Splits engines into groups that fit in memory together. Those that run come first."""
        size = 1 if self.has_device else MAX_CPU_ENGINES
        ordered = sorted(dict.fromkeys(keys), key=lambda key: key not in self.running)
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]

    def ensure_running(self, keys: Sequence[Any]) -> None:
        """Starts the engines that do not run, and ends others if memory does not hold all.

        They start one after the other, since engines that compile together may disturb each other.
        """
        missing = [key for key in keys if key not in self.running]
        if missing and len(self.groups([*self.running, *missing])) > 1:
            for key in [key for key in self.running if key not in keys]:
                self.running.pop(key).close()
        for key in missing:
            self.running[key] = self.start(key)
            if not self.prompts:
                self.prompts, self.texts = self.encode(self.running[key])

    def run_in_rounds(
        self,
        kinds: Sequence[RunKind],
        run: Callable[[RunKind, int], EngineRun],
        rounds: int,
    ) -> dict[RunKind, list[EngineRun]]:
        """Runs every kind once a round, so that a drift of the machine's speed affects all.

        Engines that do not fit in memory together run one group after the other. Every second round
        goes through them in the opposite order.
        """
        runs: dict[RunKind, list[EngineRun]] = {kind: [] for kind in kinds}
        for group in self.groups(kind.drafting for kind in kinds):
            portion = [kind for kind in kinds if kind.drafting in group]
            for round_index in range(rounds):
                self.ensure_running(group)
                for kind in portion[:: -1 if round_index % 2 else 1]:
                    runs[kind].append(run(kind, round_index))
        return runs
