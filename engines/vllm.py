"""vLLM in the user's environment: how it is started, runs, and is told how to draft.

Acceptance is from vLLM's own counters, and step times are from timed steps of a few engines.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines import counters
from sequoia_plan.engines.engine_process import EngineProcess
from sequoia_plan.engines.plan import NONE, ContextPlan, Drafting
from sequoia_plan.engines.pool import MAX_CPU_ENGINES, EnginePool, EngineRun, RunKind, text_before
from sequoia_plan.engines.prediction import (
    ChainModel,
    StepTimes,
    best_drafting,
    relative_error,
    step_times,
)

SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
IDLE_SECONDS = 1.5
"""Pause before another engine runs.

vLLM's processes poll for work for one second after their last (shm_broadcast.py in 0.32.0), which
takes a processor from the engine that decodes in that second.
"""
TIMING_ROUNDS = 6
STEPS_PER_ROUND = 12
STEPS_PER_PORTION = 4
MIN_RUN_PROMPTS = 16
"""Prompts that verify at small batch sizes."""


@dataclass(kw_only=True)
class VllmPool(EnginePool):
    """vLLM with different numbers of speculative tokens."""

    name = "vllm"

    python: str
    speculative: Mapping[str, Any]
    """The speculative config without a number of tokens."""
    options: Mapping[str, Any]
    """Arguments of `vllm.LLM`."""
    temperature: float = 0.0
    device: str = ""
    """What the first engine reported that it computes on."""
    last_drafting: Drafting | None = None

    def most_running(self) -> int:
        """One unless the first engine said that it computes on the CPU."""
        return MAX_CPU_ENGINES if self.device == "cpu" else 1

    def start(self, key: Drafting) -> EngineProcess:
        """Starts an engine that drafts `key.length` tokens, and notes its vLLM's version."""
        activity = f"starting vLLM with {key.length} speculative tokens"
        self.report_status(activity)
        engine = EngineProcess(self.python)
        self.callback(engine.close)
        config = {**self.speculative, "num_speculative_tokens": key.length} if key.length else None
        self.version, self.device = engine.ask(
            activity, "start", model=self.target, speculative=config, options=dict(self.options)
        )
        return engine

    def encode(self, engine: EngineProcess) -> list[list[int]]:
        """Token ids of the prompts, by vLLM's tokenizer."""
        return engine.ask("reading the prompts", "encode", prompts=list(self.workload.prompts))

    def decode(
        self, kind: RunKind, prompts: Sequence[int], steps: int | None = None
    ) -> dict[str, Any]:
        """What `driver.Driver.run` returns for these prompts.

        What comes before a prompt depends on its slot alone. The engine therefore finds it in its
        cache when a slot is used again, and requests that are decoded together share no part of
        the cache, which would make their steps faster.
        """
        drafting, batch, context = kind
        self.ensure_running([drafting])
        if self.last_drafting not in (None, drafting):
            time.sleep(IDLE_SECONDS)  # until the engine that ran before uses no processor
        self.last_drafting = drafting
        return self.running[drafting].ask(
            f"decoding {batch} requests at a time with {drafting.length} speculative tokens",
            "run",
            prompts=[self.prompts[index] for index in prompts],
            texts_before=[text_before(self.prompts, slot, context) for slot in range(batch)],
            tokens=self.workload.tokens,
            steps=steps,
            temperature=self.temperature,
        )

    def run(self, kind: RunKind, prompts: Sequence[int], steps: int | None = None) -> EngineRun:
        """Decodes prompts to the end, or for so many full steps.

        At small batch sizes it takes MIN_RUN_PROMPTS of them, so that a run takes about as long at
        each; at large ones twice a batch, for which they repeat if necessary.
        """
        count = max(2 * kind.batch, min(len(prompts), MIN_RUN_PROMPTS))
        full_steps = self.decode(kind, [prompts[i % len(prompts)] for i in range(count)], steps)
        if not full_steps["steps"]:
            raise SequoiaPlanError(
                f"batch {kind.batch}: no step had {kind.batch} requests in it; "
                "give more prompts, or in --engine-args a larger max_num_seqs or KV cache"
            )
        seconds, tokens = zip(*full_steps["steps"], strict=True)
        return EngineRun(typical_seconds(seconds) * len(seconds), len(seconds), sum(tokens))

    def measure(self) -> list[tuple[ChainModel, StepTimes]]:
        """Measures acceptance, and the times of the steps that choosing the best length needs.

        Steps of a length that turns out to be the best at some batch size and context are timed,
        too, if they were not.
        """
        models = {context: self.record(context) for context in self.contexts}
        rounds: dict[RunKind, list[EngineRun]] = {}
        untimed = {NONE, Drafting(1), Drafting(self.max_length)}
        while untimed:
            kinds = [RunKind(*kind) for kind in product(sorted(untimed), self.batches, models)]
            rounds |= self.run_in_rounds(kinds, self.time_round, TIMING_ROUNDS)
            measurements = [(models[context], step_times(rounds, context)) for context in models]
            untimed = {
                best_drafting(*measurement, batch)
                for measurement in measurements
                for batch in self.batches
            } - {kind.drafting for kind in rounds}
        return measurements

    def record(self, context: int) -> ChainModel:
        """Counts how far chains of the maximum length are accepted."""
        prompts = self.workload.measuring
        kind = RunKind(Drafting(self.max_length), min(max(self.batches), len(prompts)), context)
        self.report_status(f"counting what is accepted of {self.max_length} speculative tokens")
        run = self.decode(kind, prompts)
        steps = run["tokens_by_prompt"]
        num_steps = [*map(len, steps)]
        counted = run["counters"] | {f"vllm:{counters.STEPS[0]}_count": sum(num_steps)}
        source = f"vLLM {self.version}, {self.source(context)}"
        acceptance = counters.chain_acceptance(counted, source)
        accepted = [sum(tokens) - len(tokens) for tokens in steps]
        return ChainModel(
            replace(acceptance, error=relative_error(accepted, num_steps)), self.max_length
        )

    def time_round(self, kind: RunKind, round_index: int) -> EngineRun:
        """Times a few full steps."""
        self.report_status(
            f"timing steps with {kind.drafting.length} speculative tokens, round {round_index + 1}"
        )
        first = round_index * kind.batch
        prompts = [(first + i) % self.workload.num_measuring for i in range(2 * kind.batch)]
        return self.run(kind, prompts, STEPS_PER_ROUND)

    def launch_options(self, plan: ContextPlan) -> tuple[str, ...]:
        """Options to start vLLM with: one for each best number above 0, and one with the schedule.

        The schedule has an option only if it has several entries, and needs a vLLM of 2026. It
        takes effect at the batch size of each step. vLLM makes the draft's first pass also where
        the schedule has 0, to keep the draft's cache complete.
        """
        lengths = [*dict.fromkeys(filter(None, (e.speculative_tokens for e in plan.schedule)))]
        configs: list[dict[str, Any]] = [{"num_speculative_tokens": n} for n in lengths]
        if lengths and len(plan.schedule) > 1:
            rows = [[e.first, e.last, e.speculative_tokens] for e in plan.schedule]
            configs.append({"num_speculative_tokens": max(lengths), SCHEDULE_KEY: rows})
        return tuple(
            f"--speculative-config {shlex.quote(json.dumps({**self.speculative, **config}))}"
            for config in configs
        )


def typical_seconds(step_seconds: Sequence[float]) -> float:
    """Seconds of a step, from the successive steps of a run: the median over portions of it.

    Another program makes a few steps in a row take several times as long, which a mean would hold.
    A portion holds several steps, since chains may be drafted in some only.
    """
    portions = np.array_split(step_seconds, max(len(step_seconds) // STEPS_PER_PORTION, 1))
    return float(np.median([portion.mean() for portion in portions]))
