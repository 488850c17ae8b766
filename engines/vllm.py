"""vLLM in the user's environment: how it is started, runs, and is told how to draft.

Acceptance is from vLLM's own counters, and step times are from timed steps of a few engines.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.engines import counters
from sequoia_plan.engines.chain import ChainModel, effective_trials
from sequoia_plan.engines.engine_process import EngineProcess
from sequoia_plan.engines.plan import ContextPlan, Drafting, ScheduleEntry
from sequoia_plan.engines.pool import EnginePool
from sequoia_plan.engines.workload import EngineRun, RunKind, text_before

SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
IDLE_SECONDS = 1.5
"""Pause before another engine runs.

vLLM's processes poll for work for one second after their last (shm_broadcast.py in 0.32.0), which
takes a processor from the engine that decodes in that second.
"""
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
    info: dict[str, Any] = field(default_factory=dict)
    """What the first engine reported about its vLLM; empty before."""
    last_drafting: Drafting | None = None

    @property
    def has_device(self) -> bool:
        """True unless the first engine said that it computes on the CPU."""
        return self.info.get("device") != "cpu"

    def start(self, key: Drafting) -> EngineProcess:
        """Starts an engine; the first one says what vLLM it is."""
        self.report_status(f"starting vLLM with {key.length} speculative tokens")
        engine = EngineProcess(self.python)
        self.exit_stack.callback(engine.close)
        config = {**self.speculative, "num_speculative_tokens": key.length} if key.length else None
        self.info = engine.ask(
            f"starting with {key.length} speculative tokens",
            "start",
            model=self.target,
            speculative=config,
            options=dict(self.options),
        )
        self.version = self.info["version"]
        return engine

    def encode(self, engine: EngineProcess) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts, by vLLM's tokenizer."""
        prompts, texts = engine.ask(
            "reading the prompts", "encode", prompts=list(self.workload.prompts)
        )
        return prompts, texts

    def decode(
        self,
        kind: RunKind,
        prompts: Sequence[int],
        steps: int | None = None,
        drain: bool = False,
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
            texts_before=[text_before(self.texts, slot, context) for slot in range(batch)],
            tokens=self.workload.tokens,
            steps=steps,
            temperature=self.workload.temperature,
            drain=drain,
        )

    def run(self, kind: RunKind, prompts: Sequence[int], steps: int | None = None) -> EngineRun:
        """Decodes prompts until fewer than a batch are left, or for so many full steps.

        At small batch sizes it takes MIN_RUN_PROMPTS of them, so that a run takes about as long at
        each; at large ones twice a batch, for which they repeat if necessary.
        """
        count = max(2 * kind.batch, min(len(prompts), MIN_RUN_PROMPTS))
        result = self.decode(kind, [prompts[i % len(prompts)] for i in range(count)], steps)
        seconds, tokens = result["step_seconds"], result["step_tokens"]
        if not seconds:
            raise SequoiaPlanError(
                f"batch {kind.batch}: no step had {kind.batch} requests in it; "
                "give more prompts, or in --engine-args a larger max_num_seqs or KV cache"
            )
        return EngineRun(typical_seconds(seconds) * len(seconds), len(seconds), sum(tokens))

    def record(self, max_length: int, batch: int, context: int) -> ChainModel:
        """Counts how far chains of the maximum length are accepted."""
        prompts = self.workload.measuring
        batch = min(batch, len(prompts))
        self.report_status(
            f"counting what is accepted of {max_length} speculative tokens, "
            f"{batch} requests at a time"
        )
        run = self.decode(RunKind(Drafting(max_length), batch, context), prompts, drain=True)
        source = f"vLLM {self.info['version']}, {self.source(context)}"
        tokens_by_prompt = run["tokens_by_prompt"]
        counted = run["counters"] | {counters.NUM_STEPS: sum(map(len, tokens_by_prompt))}
        acceptance = counters.chain_acceptance(counted, source)
        trials = round(effective_trials(acceptance, tokens_by_prompt), 1)
        acceptance = replace(acceptance, trials=trials)
        return ChainModel(acceptance, max_length)

    def time_round(self, kind: RunKind, round_index: int) -> EngineRun:
        """Times a few full steps."""
        self.report_status(
            f"timing steps with {kind.drafting.length} speculative tokens, round {round_index + 1}"
        )
        first = round_index * kind.batch
        prompts = [(first + i) % self.workload.num_measuring for i in range(2 * kind.batch)]
        return self.run(kind, prompts, STEPS_PER_ROUND)

    def launch_options(self, plan: ContextPlan) -> tuple[str, ...]:
        """The options that start this vLLM."""
        return launch_options(self.speculative, plan.schedule, self.info["accepts_schedule"])


def typical_seconds(step_seconds: Sequence[float]) -> float:
    """Seconds of a step, from the successive steps of a run: the median over portions of it.

    Another program makes a few steps in a row take several times as long, which a mean would hold.
    A portion holds several steps, since chains may be drafted in some only.
    """
    portions = np.array_split(step_seconds, max(len(step_seconds) // STEPS_PER_PORTION, 1))
    return float(np.median([portion.mean() for portion in portions]))


def launch_options(
    speculative: Mapping[str, Any],
    schedule: Sequence[ScheduleEntry],
    accepts_schedule: bool = True,
) -> tuple[str, ...]:
    """Options to start vLLM with: one for each best number above 0, and one with the schedule.

    The schedule has an option only if it has several entries and vLLM accepts it. It takes effect
    at the batch size of each step. vLLM makes the draft's first pass also where the schedule has 0,
    to keep the draft's cache complete.
    """
    best_lengths = dict.fromkeys(entry.speculative_tokens for entry in schedule)
    lengths = [length for length in best_lengths if length]
    configs: list[dict[str, Any]] = [{"num_speculative_tokens": length} for length in lengths]
    if lengths and len(schedule) > 1 and accepts_schedule:
        rows = [[entry.first, entry.last, entry.speculative_tokens] for entry in schedule]
        configs.append({"num_speculative_tokens": max(lengths), SCHEDULE_KEY: rows})
    return tuple(
        f"--speculative-config {shlex.quote(json.dumps({**speculative, **config}))}"
        for config in configs
    )
