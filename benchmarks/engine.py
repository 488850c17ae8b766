"""Compares plans for engines with measurements of cells that were fixed beforehand, as JSON.

    python benchmarks/engine.py vllm --python .venv-engines/bin/python --target target \\
        --draft draft -o benchmarks/results/engine-vllm.json
    python benchmarks/engine.py llamacpp --server llama-server --target T.gguf --draft D.gguf \\
        --name "q4_1, draft q8_0" -o benchmarks/results/engine-llamacpp.json

A real engine runs the embedded models (docs/engines.md says how to write them). The plan is made of
every second built-in prompt, and the cells are measured on the others, in rounds in which the ways
of drafting alternate. `vllm` measures the whole grid of lengths, batch sizes and, with `--context
256,2048`, contexts, and then vLLM with the plan's schedule. `llamacpp` measures one pair of a
target and a type, and adds it to the output; `--tokens-only` compares tokens a step alone, which a
busy machine does not change. vLLM's environment variables are taken as they are set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.engines import planning
from sequoia_plan.engines.chain_replay import replay
from sequoia_plan.engines.llama_server import find_build
from sequoia_plan.engines.llamacpp import LlamaCppPool
from sequoia_plan.engines.plan import Cell, EnginePlan, MeasuredCell
from sequoia_plan.engines.pool import EnginePool
from sequoia_plan.engines.prediction import best_drafting, predict_cells
from sequoia_plan.engines.spec_types import LOOKUP
from sequoia_plan.engines.vllm import SCHEDULE_KEY, VllmPool, speculative_config
from sequoia_plan.engines.workload import (
    NONE,
    Drafting,
    EngineRun,
    RunKind,
    Workload,
    measured_cell,
)

VLLM_BATCHES, VLLM_MAX_LENGTH = [1, 4, 16], 6
CONTEXT_BATCHES, CONTEXT_MAX_LENGTH = [1, 4], 1
"""The grid with contexts."""
VLLM_OPTIONS = {
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
LOOKUP_SIZES_AND_LENGTHS = ((2, 2), (2, 8), (3, 8), (4, 16))
LOOKUP_GRID = [Drafting(length, lookup_size=size) for size, length in LOOKUP_SIZES_AND_LENGTHS]
DRAFT_GRID = [Drafting(1), Drafting(2, 0.6), Drafting(3, 0.6), Drafting(8), Drafting(8, 0.8)]
"""Ways of drafting of llama.cpp that are measured besides none, the default and the best."""


def measure_kinds(
    pool: EnginePool, kinds: Sequence[RunKind], repeats: int
) -> dict[RunKind, MeasuredCell]:
    """Measures cells on the prompts that verify."""

    def run(kind: RunKind, round_index: int) -> EngineRun:
        run = pool.run(kind, pool.workload.held_out)
        print(f"{kind} round {round_index}: {run.tokens / run.seconds:.1f} tokens/s", flush=True)
        return run

    runs = pool.run_in_rounds(kinds, run, lambda runs: min(map(len, runs.values())) >= repeats)
    return {kind: measured_cell(runs[kind], kind.batch) for kind in kinds}


def comparison(kind: RunKind, cell: Cell, measured: MeasuredCell) -> dict[str, Any]:
    """A predicted and a measured cell."""
    return {
        "context": kind.context,
        "batch": kind.batch,
        "drafting": f"{kind.drafting.length} {kind.drafting.variant}".strip(),
        "predicted": cell.throughput,
        "low": cell.low,
        "high": cell.high,
        "measured": measured.throughput,
        "slowest": measured.low,
        "fastest": measured.high,
        "error": round(cell.throughput / measured.throughput - 1, 4),
        "tokens_error": round(cell.tokens_per_step / measured.tokens_per_step - 1, 4),
        "seconds_error": round(cell.seconds / measured.seconds - 1, 4),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows, and how many of their predictions are within 10 %."""
    within = sum(abs(row["error"]) <= 0.1 for row in rows)
    return {"within_10_percent": within, "cells": len(rows), "rows": rows}


def measure_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plans for vLLM, and measures the whole grid."""
    contexts = [int(text) for text in arguments.context.split(",")] if arguments.context else [0]
    batches, max_length = VLLM_BATCHES, VLLM_MAX_LENGTH
    options = dict(VLLM_OPTIONS)
    if arguments.context:
        batches, max_length = CONTEXT_BATCHES, CONTEXT_MAX_LENGTH
        options["max_model_len"] = max(contexts) + 2 * arguments.tokens
    config = speculative_config("draft_model", arguments.draft, {})

    def new_pool(extra: Mapping[str, Any]) -> VllmPool:
        return VllmPool(
            target=arguments.target,
            draft=arguments.draft,
            workload=Workload.load(None, arguments.prompts, arguments.tokens, 0.0),
            max_context=max(contexts),
            report_status=lambda text: print(text, flush=True),
            python=arguments.python,
            speculative={**config, **extra},
            options=options,
        )

    with new_pool({}) as pool:
        measurements, planning_seconds = planning.measure(pool, batches, max_length, contexts)
        plan = planning.plan_of(pool, measurements, batches, planning_seconds)
        start_time = time.perf_counter()
        grid = product(map(Drafting, range(max_length + 1)), batches, contexts)
        measured = measure_kinds(pool, [RunKind(*kind) for kind in grid], arguments.repeats)
        grid_seconds = time.perf_counter() - start_time
    scheduled: dict[RunKind, MeasuredCell] = {}
    schedule = plan.contexts[0].schedule
    if len(schedule) > 1 and not arguments.context:
        longest = Drafting(max(entry.speculative_tokens for entry in schedule))
        entries = [[entry.first, entry.last, entry.speculative_tokens] for entry in schedule]
        with new_pool({SCHEDULE_KEY: entries}) as pool:
            kinds = [RunKind(longest, batch) for batch in batches]
            scheduled = measure_kinds(pool, kinds, arguments.repeats)
    rows = [
        comparison(kind, cell, measured[kind])
        for part in plan.contexts
        for cell in part.cells
        for kind in [RunKind(Drafting.of(cell), cell.batch, part.context)]
    ]
    return {
        "engine": {"version": plan.engine_version, **options},
        "seconds": {"planning": planning_seconds, "grid": grid_seconds},
        "chosen": chosen(plan, measured),
        "schedule": {kind.batch: cell.throughput for kind, cell in scheduled.items()},
        **summary(rows),
        "plan": plan.to_dict(),
    }


def chosen(plan: EnginePlan, measured: Mapping[RunKind, MeasuredCell]) -> list[dict[str, Any]]:
    """Compares the plan's choice with the best measured one, for each kind of request."""
    rows = []
    for part in plan.contexts:
        for batch in part.batches:
            throughput = {
                kind.drafting.length: cell.throughput
                for kind, cell in measured.items()
                if (kind.batch, kind.context) == (batch, part.context)
            }
            choice = part.best_cell(batch).speculative_tokens
            row = {
                "context": part.context,
                "batch": batch,
                "chosen": choice,
                "best": max(throughput, key=lambda length: throughput[length]),
                "chosen_over_best": throughput[choice] / max(throughput.values()),
                "chosen_over_none": throughput[choice] / throughput[0],
            }
            rows.append(row)
    return rows


def measure_llamacpp(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plans for a pair in llama.cpp, and measures the grid; adds the result to the file."""
    build = find_build(arguments.server, arguments.spec_type)
    is_lookup = build.spec_type == LOOKUP
    max_length = 16 if is_lookup else 8
    pool = LlamaCppPool(
        target=arguments.target,
        draft=arguments.draft,
        workload=Workload.load(None, arguments.prompts, arguments.tokens, 0.0),
        report_status=lambda text: print(text, flush=True),
        build=build,
        arguments=["-t", str(arguments.threads)],
    )
    draftings = [NONE, pool.default_drafting, *(LOOKUP_GRID if is_lookup else DRAFT_GRID)]
    result: dict[str, Any] = {
        "name": arguments.name,
        "version": build.version,
        "spec_type": build.spec_type,
        "threads": arguments.threads,
        "prompts": arguments.prompts,
        "tokens": arguments.tokens,
    }
    with pool:
        if arguments.tokens_only:
            texts = pool.record(max_length, 1, 0).texts
            rows = []
            for drafting in draftings[1:]:
                predicted = tokens_per_step([replay(drafting, text) for text in texts])
                measured_tokens = tokens_per_step(pool.decode(drafting, pool.workload.held_out))
                own = tokens_per_step(pool.decode(drafting, pool.workload.measuring))
                row = {
                    "drafting": f"{drafting.length} {drafting.variant}".strip(),
                    "predicted": round(predicted, 4),
                    "measured": round(measured_tokens, 4),
                    "error": round(predicted / measured_tokens - 1, 4),
                    "error_on_the_same_prompts": round(predicted / own - 1, 4),
                }
                rows.append(row)
            result["name"] += ": tokens a step"
        else:
            ((model, times),), seconds = planning.measure(pool, [1], max_length)
            best = best_drafting(model, times, 1)
            cells = {Drafting.of(cell): cell for cell in predict_cells(model, times, 1)}
            kinds = [RunKind(drafting) for drafting in dict.fromkeys([*draftings, best])]
            measured = measure_kinds(pool, kinds, arguments.repeats)
            rows = [
                {**comparison(kind, cells[kind.drafting], measured[kind]),
                 "is_best": kind.drafting == best}
                for kind in kinds
            ]  # fmt: skip
            result |= {
                "planning_seconds": seconds,
                "steps": [step.to_dict() for step in times.steps],
                "draft_pass_seconds": times.pass_seconds,
                "acceptance": model.acceptance.to_dict(),
            }
    result |= summary(rows)
    document: dict[str, Any] = {"pairs": []}
    if arguments.output.exists():
        document = json.loads(arguments.output.read_text())
    pairs = [pair for pair in document["pairs"] if pair["name"] != result["name"]]
    document["pairs"] = [*pairs, result]
    for key in ("within_10_percent", "cells"):
        document[key] = sum(pair[key] for pair in document["pairs"])
    return document


def tokens_per_step(texts: Sequence[Sequence[Any]]) -> float:
    """Mean number of tokens of the steps of several texts."""
    steps = [step for text in texts for step in text]
    return sum(step.tokens for step in steps) / len(steps)


def machine() -> dict[str, str]:
    """The processor, its instructions that matter for small integers, and the environment."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    entries = {key.strip(): value.strip() for key, value in values.items()}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    flags = entries.get("flags", "").split()
    return {
        "processor": entries.get("model name", platform.machine()),
        "instructions": " ".join(flag for flag in wanted if flag in flags),
        **{name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=["vllm", "llamacpp"])
    parser.add_argument("--python", help="the Python that has vLLM")
    parser.add_argument("--server", help="llama-server")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--spec-type", default="draft-simple")
    parser.add_argument("--name", help="what a pair of llama.cpp is called in the output")
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp")
    parser.add_argument("--context", help="of vLLM, with commas between, as 256,2048")
    parser.add_argument("--prompts", type=int, default=24, help="of each half, at most")
    parser.add_argument("--tokens", type=int, default=32, help="of each prompt, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens-only", action="store_true", help="of llama.cpp: no times")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    measure = measure_vllm if arguments.engine == "vllm" else measure_llamacpp
    document = {"machine": machine(), **measure(arguments)}
    write_atomically(arguments.output, (json.dumps(document, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
