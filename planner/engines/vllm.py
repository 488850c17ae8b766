"""A plan for vLLM, measured in the vLLM of the user's environment: acceptance by its own counters, step times by a few engines' timed steps."""

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

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.artifacts.engine_plan import ChainAcceptance, MeasuredCell, Range
from sequoia_plan.planner.engines import counters
from sequoia_plan.planner.engines.process import Engine

SCHEDULE = "num_speculative_tokens_per_batch_size"
WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix", "mtp")
"""Methods that need no model of their own."""
REST = 1.5
"""Seconds before another engine's turn: vLLM's processes look for work in a loop for one second after their last (shm_broadcast.py in 0.32.0),
which takes a processor from whoever decodes in that second."""
Rounds = dict[tuple[int, int], list[tuple[float, int]]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """What is decoded to measure.

    Args:
        prompts: texts or conversations.
        tokens: new tokens a prompt, at most.
        temperature: of sampling; 0 is greedy.
    """

    prompts: Sequence[Any]
    tokens: int = 64
    temperature: float = 0.0


@dataclass(frozen=True)
class Run:
    """What a run gave: seconds, steps and tokens of the steps that count, tokens of each step by prompt, and vLLM's counters around it."""

    seconds: float
    steps: int
    tokens: int
    gave: list[list[int]]
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return self.tokens / self.seconds


@dataclass
class Engines:
    """Engines of one target and draft with different numbers of speculative tokens; a context that ends them all.

    So many are kept `together` that can be: they are then timed in turn. None is for 4 on a CPU, and else 1, since each takes the device's memory.
    """

    python: str
    target: str
    work: Work
    speculative: Mapping[str, Any]
    options: Mapping[str, Any]
    together: int | None = None
    say: Say = lambda text: None
    facts: dict[str, Any] = field(default_factory=dict)
    running: dict[int, Engine] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)
    last: int | None = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """The lengths in groups of engines that are kept together; those that run come first."""
        size = self.together or (4 if self.facts.get("device") == "cpu" else 1)
        ordered = sorted(lengths, key=lambda length: length not in self.running)
        return [sorted(ordered[start : start + size]) for start in range(0, len(ordered), size)]

    def use(self, lengths: Sequence[int]) -> None:
        """See to it that there are engines with these numbers of speculative tokens, a group at most."""
        missing = [length for length in lengths if length not in self.running]
        if missing and not self.facts:  # the first tells what device it is on
            self._start(missing[:1])
            missing = missing[1:]
        if missing and len(self.groups([*self.running, *missing])) > 1:
            for length in [each for each in self.running if each not in lengths]:
                self.running.pop(length).close()
        if missing:
            self._start(missing)

    def _start(self, lengths: Sequence[int]) -> None:
        self.say(f"starting vLLM with {_listed(lengths)} speculative tokens")
        started: dict[int, Engine] = {length: self.stack.enter_context(Engine(self.python)) for length in lengths}
        for length, engine in started.items():
            speculative = {**self.speculative, "num_speculative_tokens": length} if length else None
            engine.send("start", model=self.target, speculative=speculative, options=dict(self.options))
        for length, engine in started.items():
            self.facts |= engine.receive(f"starting with {length} speculative tokens")
            lengths_of_prompts = engine.ask("reading the prompts", "encode", prompts=list(self.work.prompts))["lengths"]
            self.facts["prompt_tokens"] = sum(lengths_of_prompts)
        self.running |= started

    def run(self, length: int, batch: int, prompts: Sequence[int], steps: int | None = None, drain: bool = False) -> Run:
        """Decode `prompts`, `batch` at a time; see `driver.Driver.run`."""
        self.use([length])
        if self.last not in (None, length):
            time.sleep(REST)
        self.last = length
        given = {"batch": batch, "prompts": list(prompts), "tokens": self.work.tokens, "steps": steps, "temperature": self.work.temperature, "drain": drain}
        found = self.running[length].ask(f"decoding {batch} requests at a time with {length} speculative tokens", "run", **given)
        if not found["seconds"]:
            raise SequoiaPlanError(f"batch {batch}: no step had {batch} requests in it; give more prompts, or a larger max_num_seqs in --engine-args")
        return Run(sum(found["seconds"]), len(found["seconds"]), sum(found["tokens"]), found["gave"], found["before"], found["after"])

    def acceptance(self, length: int, batch: int, prompts: Sequence[int]) -> tuple[ChainAcceptance, list[list[int]]]:
        """vLLM's counters of a run at one length, and the tokens of each step by prompt."""
        self.say(f"counting what is accepted of {length} speculative tokens, {batch} requests at a time")
        run = self.run(length, batch, prompts, drain=True)
        return counters.acceptance(run.after, run.before, f"vLLM {self.facts['version']}, {len(prompts)} prompts"), run.gave

    def time(self, lengths: Sequence[int], batches: Sequence[int], steps: int, enough: Callable[[Rounds], bool]) -> Rounds:
        """Timed steps of every length and batch size, in rounds until they are `enough`. Engines that are kept together take turns in a round."""
        found: Rounds = {}
        for group in self.groups(lengths):
            self.use(group)
            cells = [(batch, length) for batch in batches for length in group]
            for batch, length in cells:  # the first passes of every batch size take longer
                self.run(length, batch, self._prompts(batch, 0), 2)
            timed: Rounds = {cell: [] for cell in cells}
            for number in itertools.count():
                self.say(f"timing steps with {_listed(group)} speculative tokens, round {number + 1}")
                for batch, length in cells if number % 2 else reversed(cells):
                    run = self.run(length, batch, self._prompts(batch, number), steps)
                    timed[batch, length].append((run.seconds, run.steps))
                if enough(timed):
                    break
            found |= timed
        return found

    def _prompts(self, batch: int, number: int) -> list[int]:
        """Twice as many prompts as requests, others in every round."""
        return [(number * batch + each) % len(self.work.prompts) for each in range(2 * batch)]


def measured_cell(runs: Sequence[Run], batch: int) -> MeasuredCell:
    """Several runs of one batch size and length, together."""
    speeds = [run.throughput for run in runs]
    steps = sum(run.steps for run in runs)
    each = sum(run.tokens for run in runs) / (steps * batch)
    seconds = float(np.median([run.seconds / run.steps for run in runs]))
    return MeasuredCell(float(np.median(speeds)), min(speeds), max(speeds), each, seconds, len(runs))


def config(method: str, draft: str | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's speculative config, without a number of tokens."""
    return {"method": method, **({"model": draft} if draft else {}), **more}


def lines(speculative: Mapping[str, Any], ranges: Sequence[Range], takes_schedule: bool) -> tuple[str, ...]:
    """What to start vLLM with: a line for each number that is best at some batch size, and one with the schedule if there are several.

    A schedule takes effect at the batch size of each step. vLLM makes the draft's first pass also where it says 0, to keep the draft's cache
    complete.
    """
    lengths = [length for length in dict.fromkeys(each.speculative_tokens for each in ranges) if length]
    found = [option({**speculative, "num_speculative_tokens": length}) for length in lengths]
    if lengths and len(ranges) > 1 and takes_schedule:
        table = [[each.first, each.last, each.speculative_tokens] for each in ranges]
        found.append(option({**speculative, "num_speculative_tokens": max(lengths), SCHEDULE: table}))
    return tuple(found)


def option(speculative: Mapping[str, Any]) -> str:
    """As it is pasted into a shell."""
    return f"--speculative-config {shlex.quote(json.dumps(speculative))}"


def find_python(given: str | None) -> str:
    """The Python that imports vLLM: the one that is given, else this one or the one on the PATH.

    Raises:
        SequoiaPlanError: if none does.
    """
    tried = [given] if given else list(dict.fromkeys(filter(None, (sys.executable, shutil.which("python3"), shutil.which("python")))))
    for python in tried:
        try:
            looked = subprocess.run(
                [python, "-c", "import importlib.util as u; print(bool(u.find_spec('vllm')))"], capture_output=True, timeout=60, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SequoiaPlanError(f"--python {python}: cannot be run ({getattr(error, 'strerror', None) or error}); give the Python that has vLLM") from error
        if looked.stdout.strip() == b"True":
            return python
    raise SequoiaPlanError(f"vLLM is not installed for {' or '.join(tried)}; give the Python of its environment with --python PATH")


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))
