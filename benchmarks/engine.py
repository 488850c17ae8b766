"""Compares plans for engines with measurements of cells that were fixed beforehand, as JSON.

    python benchmarks/engine.py vllm --python .venv-engines/bin/python --target target \\
        --draft draft -o benchmarks/results/engine-vllm.json
    python benchmarks/engine.py llamacpp --server llama-server --target T.gguf --draft D.gguf \\
        --name "q4_1, draft q8_0" -o benchmarks/results/engine-llamacpp.json

A real engine runs the embedded models (docs/engines.md says how to write them). The plan is made of
every second built-in prompt, and the cells are measured on the others, in rounds in which the ways
of drafting alternate. `vllm` measures the whole grid of lengths, batch sizes and, with `--context
256,2048`, contexts, and then vLLM with the plan's schedule. `llamacpp` measures one pair of a
target and a type, and adds it to the output. vLLM's environment variables are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from reports import new_parser, write_report

from sequoia_plan.engines import planning
from sequoia_plan.engines.llama_server import find_build
from sequoia_plan.engines.llamacpp import LlamaCppPool
from sequoia_plan.engines.plan import Cell, MeasuredCell
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
from sequoia_plan.profiler.hardware import fingerprint

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

    runs = pool.run_in_rounds(kinds, run, repeats)
    return {kind: measured_cell(runs[kind], kind.batch) for kind in kinds}


def comparison(kind: RunKind, cell: Cell, measured: MeasuredCell) -> dict[str, Any]:
    """A predicted and a measured cell."""
    return {
        "context": kind.context,
        "batch": kind.batch,
        "drafting": named(kind.drafting),
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


def named(drafting: Drafting) -> str:
    """A way of drafting as "3 p-min 0.6"."""
    return f"{drafting.length} {drafting.variant}".strip()


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows, and how many of their predictions are within 10 %."""
    within = sum(abs(row["error"]) <= 0.1 for row in rows)
    return {"within_10_percent": within, "cells": len(rows), "rows": rows}


def measure_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plans for vLLM, and measures the whole grid."""
    contexts = [int(text) for text in arguments.context.split(",")]
    batches, max_length = VLLM_BATCHES, VLLM_MAX_LENGTH
    options = dict(VLLM_OPTIONS)
    if any(contexts):
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
        measurements, seconds = planning.measure(pool, batches, max_length, contexts)
        plan = planning.plan_of(pool, measurements, batches, seconds)
        grid = product(map(Drafting, range(max_length + 1)), batches, contexts)
        measured = measure_kinds(pool, [RunKind(*kind) for kind in grid], arguments.repeats)
    scheduled: dict[RunKind, MeasuredCell] = {}
    schedule = plan.contexts[0].schedule
    if len(schedule) > 1 and not any(contexts):
        longest = Drafting(max(entry.speculative_tokens for entry in schedule))
        entries = [[entry.first, entry.last, entry.speculative_tokens] for entry in schedule]
        with new_pool({SCHEDULE_KEY: entries}) as pool:
            kinds = [RunKind(longest, batch) for batch in batches]
            scheduled = measure_kinds(pool, kinds, arguments.repeats)
    rows = [
        comparison(kind, cell, measured[kind])
        for part in plan.contexts
        for cell in part.cells
        for kind in [RunKind.of(cell, part.context)]
    ]
    return {
        "schedule": {kind.batch: cell.throughput for kind, cell in scheduled.items()},
        **summary(rows),
        "plan": plan.to_dict(),
    }


def measure_llamacpp(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plans for a pair in llama.cpp, and measures the grid; adds the result to the file."""
    is_lookup = arguments.spec_type == LOOKUP
    max_length = 16 if is_lookup else 8
    pool = LlamaCppPool(
        target=arguments.target,
        draft=arguments.draft,
        workload=Workload.load(None, arguments.prompts, arguments.tokens, 0.0),
        report_status=lambda text: print(text, flush=True),
        build=find_build(arguments.server),
        spec_type=arguments.spec_type,
        arguments=["-t", str(arguments.threads)],
    )
    draftings = [NONE, pool.default_drafting, *(LOOKUP_GRID if is_lookup else DRAFT_GRID)]
    names = ("name", "spec_type", "threads", "prompts", "tokens")
    result = {name: getattr(arguments, name) for name in names} | {"version": pool.build.version}
    with pool:
        ((model, times),), seconds = planning.measure(pool, [1], max_length)
        best = best_drafting(model, times, 1)
        cells = {Drafting.of(cell): cell for cell in predict_cells(model, times, 1)}
        kinds = [RunKind(drafting) for drafting in dict.fromkeys([*draftings, best])]
        measured = measure_kinds(pool, kinds, arguments.repeats)
        rows = [
            comparison(kind, cells[kind.drafting], measured[kind])
            | {"is_best": kind.drafting == best}
            for kind in kinds
        ]
        result |= {
            "planning_seconds": seconds,
            "steps": [step.to_dict() for step in times.steps],
            "draft_pass_seconds": times.pass_seconds,
            "acceptance": model.acceptance.to_dict(),
        }
    result |= summary(rows)
    pairs = []
    if arguments.output.exists():
        pairs = json.loads(arguments.output.read_text())["pairs"]
    pairs = [*(pair for pair in pairs if pair["name"] != result["name"]), result]
    totals = {key: sum(pair[key] for pair in pairs) for key in ("within_10_percent", "cells")}
    return {"pairs": pairs, **totals}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("engine", choices=["vllm", "llamacpp"])
    parser.add_argument("--python", help="the Python that has vLLM")
    parser.add_argument("--server", help="llama-server")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--spec-type", default="draft-simple")
    parser.add_argument("--name", help="what a pair of llama.cpp is called in the output")
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp")
    parser.add_argument("--context", default="0", help="of vLLM, with commas, as 256,2048")
    parser.add_argument("--prompts", type=int, default=24, help="of each half, at most")
    parser.add_argument("--tokens", type=int, default=32, help="of each prompt, at most")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    measure = measure_vllm if arguments.engine == "vllm" else measure_llamacpp
    environment = {name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ}
    hardware = fingerprint("cpu") | {"environment": environment}
    write_report(arguments.output, {"hardware": hardware, **measure(arguments)})


if __name__ == "__main__":
    main()
