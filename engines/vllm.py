"""Measures in the vLLM of the user's environment, and writes the options that vLLM starts with.

Acceptance is from vLLM's own counters, and step times are from timed steps of a few engines.
"""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.engines import counters
from sequoia_plan.engines.chain import StepKind
from sequoia_plan.engines.plan import ChainAcceptance, MeasuredCell, ScheduleEntry
from sequoia_plan.engines.process import WRAPPER_TEXTS, EngineProcess

SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
METHODS_WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix", "mtp")
"""Methods that need no draft model."""
IDLE_SECONDS = 1.5
"""Pause before another engine runs.

vLLM's processes poll for work for one second after their last (shm_broadcast.py in 0.32.0), which
takes a processor from the engine that decodes in that second.
"""
TimedRounds = dict[StepKind, list[tuple[float, int]]]
"""Seconds and number of steps of each round."""
ReportStatus = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    """The prompts that are decoded to measure."""

    prompts: Sequence[Any]
    tokens: int = 64
    temperature: float = 0.0


@dataclass(frozen=True)
class EngineRun:
    """The result of `driver.Driver.run`."""

    seconds: float
    steps: int
    tokens: int
    tokens_by_prompt: list[list[int]]
    counters_before: Mapping[str, float]
    counters_after: Mapping[str, float]

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return self.tokens / self.seconds


@dataclass
class EnginePool:
    """Engines of one target and draft with different numbers of speculative tokens.

    A number of speculative tokens is called a length, and 0 is no speculation. The engines end with
    the context.
    """

    python: str
    target: str
    workload: Workload
    speculative: Mapping[str, Any]
    options: Mapping[str, Any]
    max_engines: int | None = None
    report_status: ReportStatus = lambda text: None
    info: dict[str, Any] = field(default_factory=dict)
    """What the first engine reported about its vLLM; empty before."""
    _engines: dict[int, EngineProcess] = field(default_factory=dict)
    _exit_stack: ExitStack = field(default_factory=ExitStack)
    _last_length: int | None = None

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def group_lengths(self, lengths: Sequence[int]) -> list[list[int]]:
        """Splits numbers of speculative tokens into groups whose engines fit in memory together.

        Numbers whose engine already runs come first.
        """
        group_size = self.max_engines or (4 if self.info.get("device") == "cpu" else 1)
        ordered = sorted(lengths, key=lambda length: length not in self._engines)
        starts = range(0, len(ordered), group_size)
        return [sorted(ordered[start : start + group_size]) for start in starts]

    def ensure_running(self, lengths: Sequence[int]) -> None:
        """Starts the engines that do not run yet, and closes others if memory does not hold all."""
        missing = [length for length in lengths if length not in self._engines]
        if missing and not self.info:  # the first engine reports the type of device: CPU or other
            self._start(missing[:1])
            missing = missing[1:]
        all_groups = self.group_lengths([*self._engines, *missing])
        if missing and len(all_groups) > 1:  # memory does not hold running and missing engines
            for length in [length for length in self._engines if length not in lengths]:
                self._engines.pop(length).close()
        if missing:
            self._start(missing)

    def _start(self, lengths: Sequence[int]) -> None:
        """Starts an engine for each number of speculative tokens, and gives it the prompts.

        All of them load their models at the same time. Those that fail are started once more, one
        after the other: engines that compile at the same time may disturb each other. One that
        started alone and failed for a reason that its log names is not.
        """
        self.report_status(f"starting vLLM with {_comma_separated(lengths)} speculative tokens")
        engines = {length: self._launch(length) for length in lengths}
        failed = []
        for length, engine in engines.items():
            try:
                self._await(length, engine)
            except SequoiaPlanError as error:
                is_known = not any(text in str(error) for text in WRAPPER_TEXTS)
                if len(lengths) == 1 and is_known:
                    raise
                engine.close()
                failed.append(length)
        for length in failed:
            self.report_status(f"starting vLLM again with {length} speculative tokens")
            self._await(length, self._launch(length))

    def _launch(self, length: int) -> EngineProcess:
        """Starts the process of an engine, and tells it to load its models."""
        engine: EngineProcess = self._exit_stack.enter_context(EngineProcess(self.python))
        config = {**self.speculative, "num_speculative_tokens": length} if length else None
        engine.send("start", model=self.target, speculative=config, options=dict(self.options))
        return engine

    def _await(self, length: int, engine: EngineProcess) -> None:
        """Waits until an engine has loaded its models, and gives it the prompts."""
        self.info |= engine.receive(f"starting with {length} speculative tokens")
        engine.ask("reading the prompts", "encode", prompts=list(self.workload.prompts))
        self._engines[length] = engine

    def run(
        self,
        length: int,
        batch: int,
        prompts: Sequence[int],
        steps: int | None = None,
        drain: bool = False,
        context: int = 0,
    ) -> EngineRun:
        """Decodes prompts, and times the full steps: those that yield tokens for every request.

        `driver.Driver.run` does this in the engine's process.
        """
        self.ensure_running([length])
        if self._last_length not in (None, length):
            time.sleep(IDLE_SECONDS)  # until the engine that ran before uses no processor
        self._last_length = length
        result = self._engines[length].ask(
            f"decoding {batch} requests at a time with {length} speculative tokens",
            "run",
            batch=batch,
            prompts=list(prompts),
            tokens=self.workload.tokens,
            steps=steps,
            temperature=self.workload.temperature,
            drain=drain,
            context=context,
        )
        if not result["step_seconds"]:
            raise SequoiaPlanError(
                f"batch {batch}: no step had {batch} requests in it; "
                "give more prompts, or in --engine-args a larger max_num_seqs or KV cache"
            )
        return EngineRun(
            seconds=sum(result["step_seconds"]),
            steps=len(result["step_seconds"]),
            tokens=sum(result["step_tokens"]),
            tokens_by_prompt=result["tokens_by_prompt"],
            counters_before=result["counters_before"],
            counters_after=result["counters_after"],
        )

    def check_context(self, context: int) -> None:
        """Refuses a context that the engine has no room for. An engine must run."""
        max_model_len = self.info["max_model_len"]
        if context + self.workload.tokens > max_model_len:
            raise ArgumentError(
                f"--context {context}: with {self.workload.tokens} new tokens it is above "
                f"vLLM's max_model_len of {max_model_len}; give a smaller one, fewer --tokens, or "
                "a larger max_model_len in --engine-args"
            )

    def measure_acceptance(
        self, length: int, batch: int, prompts: Sequence[int], context: int = 0
    ) -> tuple[ChainAcceptance, list[list[int]]]:
        """Counts how far chains of one length are accepted."""
        self.report_status(
            f"counting what is accepted of {length} speculative tokens, {batch} requests at a time"
        )
        run = self.run(length, batch, prompts, drain=True, context=context)
        source = f"vLLM {self.info['version']}, {len(prompts)} prompts"
        source += f" of {context} tokens" if context else ""
        acceptance = counters.chain_acceptance(run.counters_after, run.counters_before, source)
        return acceptance, run.tokens_by_prompt

    def time_steps(
        self,
        lengths: Sequence[int],
        batches: Sequence[int],
        steps: int,
        is_precise: Callable[[TimedRounds], bool],
        contexts: Sequence[int] = (0,),
    ) -> TimedRounds:
        """Times steps with every number of speculative tokens, batch size and context, in rounds.

        A group is as many engines as fit in memory together. They alternate within a round, so that
        a drift of the machine's speed affects all of them.
        """
        rounds: TimedRounds = {}
        for group in self.group_lengths(lengths):
            self.ensure_running(group)
            kinds = [
                StepKind(batch, length, context)
                for context in contexts
                for batch in batches
                for length in group
            ]
            for kind in kinds:  # the first passes of every batch size take longer
                self._run_round(kind, 0, steps=2)
            group_rounds: TimedRounds = {kind: [] for kind in kinds}
            for i in itertools.count():
                self.report_status(
                    f"timing steps with {_comma_separated(group)} speculative tokens, round {i + 1}"
                )
                # every second round goes through them in the opposite order
                for kind in kinds if i % 2 else reversed(kinds):
                    run = self._run_round(kind, i, steps)
                    group_rounds[kind].append((run.seconds, run.steps))
                if is_precise(group_rounds):
                    break
            rounds |= group_rounds
        return rounds

    def _run_round(self, kind: StepKind, round_index: int, steps: int) -> EngineRun:
        """Runs twice as many prompts as are decoded together. Every round begins with others."""
        batch, num_prompts = kind.batch, len(self.workload.prompts)
        prompts = [(round_index * batch + i) % num_prompts for i in range(2 * batch)]
        return self.run(kind.length, batch, prompts, steps, context=kind.context)


def measured_cell(runs: Sequence[EngineRun], batch: int) -> MeasuredCell:
    """Summarizes runs of one batch size and one number of speculative tokens."""
    throughputs = [run.throughput for run in runs]
    total_steps = sum(run.steps for run in runs)
    total_tokens = sum(run.tokens for run in runs)
    return MeasuredCell(
        throughput=float(np.median(throughputs)),
        low=min(throughputs),
        high=max(throughputs),
        tokens_per_step=total_tokens / (total_steps * batch),
        seconds=float(np.median([run.seconds / run.steps for run in runs])),
        runs=len(runs),
    )


def speculative_config(method: str, draft: str | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's speculative config, without a number of speculative tokens."""
    return {"method": method, **({"model": draft} if draft else {}), **extra}


def launch_options(
    speculative: Mapping[str, Any], schedule: Sequence[ScheduleEntry], accepts_schedule: bool
) -> tuple[str, ...]:
    """Options to start vLLM with: one for each best number above 0, and one with the schedule.

    The schedule has an option only if it has several entries and vLLM accepts it. It takes effect
    at the batch size of each step. vLLM makes the draft's first pass also where the schedule has 0,
    to keep the draft's cache complete.
    """
    best_lengths = dict.fromkeys(entry.speculative_tokens for entry in schedule)
    lengths = [length for length in best_lengths if length]
    options = [
        _config_option({**speculative, "num_speculative_tokens": length}) for length in lengths
    ]
    if lengths and len(schedule) > 1 and accepts_schedule:
        entries = {
            "num_speculative_tokens": max(lengths),
            SCHEDULE_KEY: [
                [entry.first, entry.last, entry.speculative_tokens] for entry in schedule
            ],
        }
        options.append(_config_option({**speculative, **entries}))
    return tuple(options)


def _config_option(speculative: Mapping[str, Any]) -> str:
    """The option with a speculative config, quoted for a shell."""
    return f"--speculative-config {shlex.quote(json.dumps(speculative))}"


def find_python(python: str | None) -> str:
    """Finds a Python that can import vLLM."""
    candidates = (sys.executable, shutil.which("python3"), shutil.which("python"))
    paths = [python] if python else list(dict.fromkeys(filter(None, candidates)))
    script = "import importlib.util as u; print(bool(u.find_spec('vllm')))"
    for path in paths:
        try:
            result = subprocess.run(
                [path, "-c", script], capture_output=True, timeout=60, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SequoiaPlanError(
                f"--python {path}: cannot be run ({reason}); give the Python that has vLLM"
            ) from error
        if result.stdout.strip() == b"True":
            return path
    raise SequoiaPlanError(
        f"vLLM is not installed for {' or '.join(paths)}; "
        "give the Python of its environment with --python PATH"
    )


def _comma_separated(lengths: Sequence[int]) -> str:
    """Numbers of speculative tokens as text, as "0, 1, 8"."""
    return ", ".join(map(str, lengths))
