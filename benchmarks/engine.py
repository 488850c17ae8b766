"""Compares plans for vLLM with measurements of the whole grid of lengths and batch sizes.

    python benchmarks/engine.py --python .venv-engines/bin/python --target target --draft draft \\
        -o engine-vllm.json

A real vLLM runs the embedded target and draft; `sequoia-plan export --format hf` writes their
folders. The plan is made of every second built-in prompt, and the grid is measured on the others.
In every repeat the lengths alternate. They are in two groups of engines that both contain plain
decoding, since seven engines do not fit in memory. The engine with the plan's schedule comes last.
Each run is saved beside the output, and a benchmark that was stopped continues from there. vLLM's
environment variables are taken as they are set.

With `--context 256,2048` the grid has the contexts as its third axis, and fewer lengths, batch
sizes and prompts. Of this grid only the plan is saved before its end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
from sequoia_plan.engines import planning, vllm
from sequoia_plan.engines.chain import StepKind
from sequoia_plan.engines.plan import EnginePlan

BATCHES = [1, 4, 16]
MAX_LENGTH = 6
"""Maximum number of speculative tokens."""
REPEATS = 3
GROUPS = [[0, 1, 2, 3], [0, 4, 5, 6]]
"""Lengths whose engines are in memory together."""
NUM_PROMPTS = 48
"""Prompts to measure on, and as many to verify on."""
NUM_TOKENS = 32
"""New tokens of a prompt."""
CONTEXT_BATCHES = [1, 4]
CONTEXT_MAX_LENGTH = 1
CONTEXT_REPEATS = 2
CONTEXT_NUM_PROMPTS = 24, 8
"""The grid with contexts: prompts to measure on, and to verify on."""
ENGINE_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
}
ENVIRONMENT_VARIABLES = (
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "OMP_NUM_THREADS",
)
"""Variables that the output records."""


@dataclass(frozen=True)
class EngineGroup:
    """Engines that are measured together.

    Args:
        name: "grid", or "schedule" for the engine with the plan's schedule.
        lengths: numbers of speculative tokens.
        config: further entries of the speculative config.
    """

    name: str
    lengths: list[int]
    config: dict[str, Any]


def engine_options(context: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for prompts of that many tokens; 0 for the prompts as they are."""
    length = {"max_model_len": context + 2 * NUM_TOKENS} if context else {}
    return {**ENGINE_OPTIONS, **length}


class Benchmark:
    """The benchmark's models and prompts, and the runs so far, which a journal file keeps."""

    def __init__(self, python: str, target: str, draft: str, journal: Path) -> None:
        prompts = load(BUILT_IN)
        measuring = measuring_half(prompts)[:NUM_PROMPTS]
        held_out = held_out_half(prompts)[:NUM_PROMPTS]
        texts = [prompt.text for prompt in (*measuring, *held_out)]
        self.python = python
        self.target = target
        self.workload = vllm.Workload(texts, NUM_TOKENS)
        self.held_out = list(range(len(texts) // 2, len(texts)))
        self.config = vllm.speculative_config("draft_model", draft, {})
        self.journal = journal
        self.state: dict[str, Any] = {"plan": None, "starts": {}, "runs": []}
        if journal.exists():
            self.state = json.loads(journal.read_text())

    def save(self) -> None:
        write_atomically(self.journal, json.dumps(self.state).encode())

    def pool(self, config: dict[str, Any], context: int = 0) -> vllm.EnginePool:
        """An empty pool of engines.

        Args:
            config: further entries of the speculative config.
            context: the largest number of tokens of a prompt; 0 for the prompts as they are.
        """
        return vllm.EnginePool(
            self.python,
            self.target,
            self.workload,
            {**self.config, **config},
            engine_options(context),
            max_engines=4,
            report_status=lambda text: print(text, flush=True),
        )

    def plan(self) -> EnginePlan:
        """Returns the plan in the journal; measures and saves it if there is none."""
        if self.state["plan"] is None:
            with self.pool({}) as pool:
                plan = self.new_plan(pool, BATCHES, MAX_LENGTH, NUM_PROMPTS, [0])
            self.state["plan"] = plan.to_dict()
            self.save()
        return EnginePlan.from_dict(self.state["plan"], "plan")

    def new_plan(
        self,
        pool: vllm.EnginePool,
        batches: list[int],
        max_length: int,
        num_prompts: int,
        contexts: list[int],
    ) -> EnginePlan:
        """Measures a plan."""
        acceptance, steps, seconds = planning.measure(
            pool, batches, max_length, range(num_prompts), contexts=contexts
        )
        return planning.make_plan(
            acceptance,
            steps,
            batches,
            max_length,
            lambda schedule: vllm.launch_options(self.config, schedule, accepts_schedule=True),
            engine="vllm",
            version=pool.info["version"],
            method="draft_model",
            seconds=seconds,
        )

    def contexts(self, contexts: list[int]) -> EnginePlan:
        """Measures a plan by context, and then the whole grid on the other prompts."""
        num_measuring, num_verifying = CONTEXT_NUM_PROMPTS
        with self.pool({}, max(contexts)) as pool:
            if self.state["plan"] is None:
                plan = self.new_plan(
                    pool, CONTEXT_BATCHES, CONTEXT_MAX_LENGTH, num_measuring, contexts
                )
                self.state["plan"] = plan.to_dict()
                self.save()
            plan = EnginePlan.from_dict(self.state["plan"], "plan")
            kinds = [
                StepKind(cell.batch, cell.speculative_tokens, cell.context) for cell in plan.cells
            ]
            runs = planning.run_cells(pool, kinds, self.held_out[:num_verifying], CONTEXT_REPEATS)
        return planning.add_measurements(plan, runs)

    def measure(self, group: EngineGroup, repeat: int) -> None:
        """Runs each batch size and length of a group, unless the journal has the run."""
        lengths = str(group.lengths)
        saved_runs = {
            (run["arm"], run["group"], run["repeat"], run["batch"], run["length"])
            for run in self.state["runs"]
        }
        cells = []
        for batch in BATCHES:
            ordered = group.lengths if (repeat + batch) % 2 else group.lengths[::-1]
            cells += [(batch, length) for length in ordered]
        missing = [cell for cell in cells if (group.name, lengths, repeat, *cell) not in saved_runs]
        if not missing:
            return
        with self.pool(group.config) as pool:
            start_time = time.perf_counter()
            pool.ensure_running(group.lengths)
            start_seconds = time.perf_counter() - start_time
            self.state["starts"][f"{group.name} {lengths} {repeat}"] = start_seconds
            for length in group.lengths:  # the first passes of every batch size take longer
                for batch in BATCHES:
                    prompts = planning.run_prompts(self.held_out, batch)
                    pool.run(length, batch, prompts, steps=2)
            for batch, length in missing:
                start_time = time.perf_counter()
                run = pool.run(length, batch, planning.run_prompts(self.held_out, batch))
                row = {
                    "arm": group.name,
                    "group": lengths,
                    "repeat": repeat,
                    "batch": batch,
                    "length": length,
                    "wall": time.perf_counter() - start_time,
                    "seconds": run.seconds,
                    "steps": run.steps,
                    "tokens": run.tokens,
                }
                self.state["runs"].append(row)
                tokens_per_step = run.tokens / run.steps / batch
                print(
                    f"repeat {repeat} batch {batch} length {length}: "
                    f"{run.throughput:.1f} tokens/s, {tokens_per_step:.3f} a step",
                    flush=True,
                )
                self.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="the Python that has vLLM")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--context", help="contexts with commas between, as 256,2048")
    arguments = parser.parse_args()
    journal = arguments.output.with_suffix(".part.json")
    benchmark = Benchmark(arguments.python, arguments.target, arguments.draft, journal)
    if arguments.context:
        start_time = time.perf_counter()
        plan = benchmark.contexts([int(context) for context in arguments.context.split(",")])
        document = context_report(plan, time.perf_counter() - start_time)
        write_atomically(arguments.output, (json.dumps(document, indent=1) + "\n").encode())
        journal.unlink()
        return
    plan = benchmark.plan()
    groups = [EngineGroup("grid", lengths, {}) for lengths in GROUPS]
    max_length = max(entry.speculative_tokens for entry in plan.schedule)
    if max_length and len(plan.schedule) > 1:
        schedule = [[entry.first, entry.last, entry.speculative_tokens] for entry in plan.schedule]
        groups.append(EngineGroup("schedule", [max_length], {vllm.SCHEDULE_KEY: schedule}))
    for repeat in range(arguments.repeats):
        for group in groups:
            benchmark.measure(group, repeat)
    text = json.dumps(report(plan, benchmark.state), indent=1) + "\n"
    write_atomically(arguments.output, text.encode())
    journal.unlink()


def context_report(plan: EnginePlan, seconds: float) -> dict[str, Any]:
    """The plan with measurements in its cells, and how well its predictions hold.

    Args:
        plan: a plan by context, with all cells measured.
        seconds: what the benchmark took.
    """
    rows = []
    for cell in plan.cells:
        if not cell.measured:
            continue
        row = {
            "context": cell.context,
            "batch": cell.batch,
            "length": cell.speculative_tokens,
            "predicted": cell.throughput,
            "measured": cell.measured.throughput,
            "slowest": cell.measured.low,
            "fastest": cell.measured.high,
            "error": round(cell.throughput / cell.measured.throughput - 1, 4),
            "tokens_error": round(cell.tokens_per_step / cell.measured.tokens_per_step - 1, 4),
            "seconds_error": round(cell.seconds / cell.measured.seconds - 1, 4),
        }
        rows.append(row)
        print(row, flush=True)
    chosen = {
        f"{part.context}x{batch}": part.best_cell(batch).speculative_tokens
        for part in plan.parts()
        for batch in part.batches
    }
    return {
        **_machine(plan, max(cell.context for cell in plan.cells)),
        "seconds": {"planning": plan.seconds, "all": seconds},
        "chosen by context and batch": chosen,
        "within_10_percent": sum(abs(row["error"]) <= 0.1 for row in rows),
        "cells": len(rows),
        "rows": rows,
        "plan": _without_folders(plan).to_dict(),
    }


def _machine(plan: EnginePlan, context: int = 0) -> dict[str, Any]:
    """The machine, vLLM's environment variables, and its version and options for a context."""
    return {
        "machine": {
            "processor": _processor(),
            "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
            "python": platform.python_version(),
        },
        "environment": {
            name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ
        },
        "engine": {"name": "vllm", "version": plan.version, **engine_options(context)},
    }


def _without_folders(plan: EnginePlan) -> EnginePlan:
    """The plan with the models' names in place of their folders."""
    return replace(
        plan,
        target="SmolLM2-135M-Instruct",
        draft="the embedded draft",
        lines=(),
        by_context=tuple(replace(choice, lines=()) for choice in plan.by_context),
    )


def report(plan: EnginePlan, state: dict[str, Any]) -> dict[str, Any]:
    """The plan with measurements in its cells, and how well its predictions hold."""
    grid_runs = _runs_by_cell(state["runs"], "grid")
    scheduled_runs = _runs_by_cell(state["runs"], "schedule")
    plan = planning.add_measurements(_without_folders(plan), grid_runs)
    measured_cells = [cell for cell in plan.cells if cell.measured]
    throughput_errors = {
        _cell_name(cell.batch, cell.speculative_tokens): (
            cell.throughput / cell.measured.throughput - 1
        )
        for cell in measured_cells
        if cell.measured
    }
    measured_speedups = {
        _cell_name(kind.batch, kind.length): _speedups(state["runs"], kind.batch, kind.length)
        for kind in grid_runs
        if kind.length
    }
    predicted_speedups = {
        _cell_name(cell.batch, cell.speculative_tokens): cell.speedup for cell in measured_cells
    }
    speedup_errors = {
        name: predicted_speedups[name] / statistics.median(speedups) - 1
        for name, speedups in measured_speedups.items()
    }
    grid_seconds = _grid_seconds(state)
    return {
        **_machine(plan),
        "seconds": {
            "planning": plan.seconds,
            "grid": grid_seconds,
            "planning_over_grid": plan.seconds / grid_seconds,
        },
        "chosen": {batch: _choice(plan, batch, scheduled_runs) for batch in plan.batches},
        **_error_summary(throughput_errors),
        "speedup": {
            "what": "over no speculation, measured in the same group and repeat, "
            "which a drift of the machine's speed does not reach",
            **_error_summary(speedup_errors),
            "measured": {
                name: [round(speedup, 4) for speedup in speedups]
                for name, speedups in measured_speedups.items()
            },
        },
        "plan": plan.to_dict(),
        "runs": state["runs"],
        "starts": state["starts"],
    }


def _runs_by_cell(rows: list[dict[str, Any]], name: str) -> dict[StepKind, list[vllm.EngineRun]]:
    """Runs of the groups with a name."""
    runs: dict[StepKind, list[vllm.EngineRun]] = {}
    for row in rows:
        if row["arm"] == name:
            run = vllm.EngineRun(row["seconds"], row["steps"], row["tokens"], [], {}, {})
            runs.setdefault(StepKind(row["batch"], row["length"]), []).append(run)
    return runs


def _cell_name(batch: int, length: int) -> str:
    return f"{batch}x{length}"


def _choice(
    plan: EnginePlan,
    batch: int,
    scheduled_runs: dict[StepKind, list[vllm.EngineRun]],
) -> dict[str, Any]:
    """Compares the plan's choice for a batch size with the best measured one."""
    throughput = {
        cell.speculative_tokens: cell.measured.throughput
        for cell in plan.cells_at(batch)
        if cell.measured
    }
    best = max(throughput, key=lambda length: throughput[length])
    chosen = plan.best_cell(batch).speculative_tokens
    max_length = max(entry.speculative_tokens for entry in plan.schedule)
    schedule_ratio = None
    if runs := scheduled_runs.get(StepKind(batch, max_length)):
        schedule_ratio = vllm.measured_cell(runs, batch).throughput / throughput[chosen]
    return {
        "chosen": chosen,
        "best": best,
        "chosen_over_best": throughput[chosen] / throughput[best],
        "chosen_over_none": throughput[chosen] / throughput[0],
        "schedule_over_chosen": schedule_ratio,
    }


def _error_summary(errors: dict[str, float]) -> dict[str, Any]:
    """Predictions over measurements, less 1, by cell, and how many are within 10 %."""
    return {
        "within_10_percent": sum(abs(error) <= 0.1 for error in errors.values()),
        "cells": len(errors),
        "predicted_over_measured_less_1": {name: round(error, 4) for name, error in errors.items()},
    }


def _speedups(rows: Sequence[dict[str, Any]], batch: int, length: int) -> list[float]:
    """Throughput over that without speculation in the same group and repeat."""
    throughput = {
        (row["group"], row["repeat"], row["length"]): row["tokens"] / row["seconds"]
        for row in rows
        if row["arm"] == "grid" and row["batch"] == batch
    }
    return [
        value / throughput[group, repeat, 0]
        for (group, repeat, row_length), value in throughput.items()
        if row_length == length and (group, repeat, 0) in throughput
    ]


def _grid_seconds(state: dict[str, Any]) -> float:
    """Seconds of the grid's runs, and of one start of each of its groups."""
    starts = sum(
        seconds
        for name, seconds in state["starts"].items()
        if name.startswith("grid") and name.endswith(" 0")
    )
    return starts + sum(run["wall"] for run in state["runs"] if run["arm"] == "grid")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
