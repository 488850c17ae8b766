"""Compares diagnoses of engines with measurements of cells that were fixed beforehand, as JSON.

    python benchmarks/diagnose.py vllm --python .venv-engines/bin/python --target target \\
        --draft draft -o benchmarks/results/engine-vllm.json
    python benchmarks/diagnose.py llamacpp --server llama-server --target T.gguf --draft D.gguf \\
        --name "q4_1, draft q8_0" -o benchmarks/results/diagnose.json

A real engine runs the embedded models (docs/engines.md says how to write them). The plan is made of
every second built-in prompt, and the cells are measured on the others, in rounds in which the ways
of drafting alternate. `vllm` measures the whole grid of lengths, batch sizes and, with `--context
256,2048`, contexts, in each round. `llamacpp` measures one pair of models, a part of the prompts in
each round, and adds it to the output; with `--grid` it searches every n-max and p-min that the plan
chooses from by brute force, on the plan's own prompts, measures the best three and the plan's
choice once more, and compares what both found and how long they took.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

from reports import new_parser, write_report

from sequoia_plan.engines import planning
from sequoia_plan.engines.llama_server import find_build
from sequoia_plan.engines.llamacpp import LlamaCppPool
from sequoia_plan.engines.plan import NONE, Cell, Drafting, MeasuredCell
from sequoia_plan.engines.pool import EnginePool, EngineRun, RunKind, Workload, measured_cell
from sequoia_plan.engines.prediction import predict_cells
from sequoia_plan.engines.spec_types import MIN_PROBS, split_types
from sequoia_plan.engines.vllm import VllmPool
from sequoia_plan.profiler.hardware import fingerprint

VLLM_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
}
MOST = 8
CHAINS = [Drafting(3), Drafting(1), Drafting(2, 0.6), Drafting(8, 0.8)]
LOOKUPS = [Drafting(0, 0.0, *sizes) for sizes in ((2, 8), (3, 8), (12, 48))]
JOINED = [Drafting(2, 0.6, 3, 8)]
"""Ways of drafting of llama.cpp that are measured besides none and the best."""
GRID = [Drafting(*each) for each in product(range(1, MOST + 1), MIN_PROBS)]


def measure_kinds(
    pool: EnginePool, kinds: Sequence[RunKind], repeats: int, prompts: Sequence[int], parts: int = 1
) -> dict[RunKind, MeasuredCell]:
    """Measures cells on some prompts, on one of so many parts of them in each round."""

    def run(kind: RunKind, round_index: int) -> EngineRun:
        run = pool.run(kind, prompts[round_index % parts :: parts])
        print(f"{kind} round {round_index}: {run.tokens / run.seconds:.1f} tokens/s", flush=True)
        return run

    runs = pool.run_in_rounds(kinds, run, repeats)
    return {kind: measured_cell(runs[kind], kind.batch) for kind in kinds}


def comparison(kind: RunKind, cell: Cell, measured: MeasuredCell) -> dict[str, Any]:
    """A predicted and a measured cell."""
    return {
        "context": kind.context,
        "batch": kind.batch,
        "drafting": str(kind.drafting),
        "predicted": cell.throughput,
        "low": cell.low,
        "high": cell.high,
        "measured": measured.throughput,
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
    contexts = [int(text) for text in arguments.context.split(",")]
    batches, max_length = [1, 4, 16], 6
    options = dict(VLLM_OPTIONS)
    if any(contexts):
        batches, max_length = [1, 4], 1
        options["max_model_len"] = max(contexts) + 2 * arguments.tokens

    with VllmPool(
        target=arguments.target,
        draft=arguments.draft,
        workload=Workload.load(None, arguments.prompts, arguments.tokens),
        max_length=max_length,
        batches=batches,
        contexts=contexts,
        report_status=lambda text: print(text, flush=True),
        python=arguments.python,
        speculative={"method": arguments.method, "model": arguments.draft},
        options=options,
    ) as pool:
        plan = planning.plan_of(pool, pool.measure())
        grid = product(map(Drafting, range(max_length + 1)), batches, contexts)
        measured = measure_kinds(
            pool, [RunKind(*kind) for kind in grid], arguments.repeats, pool.workload.held_out
        )
    rows = [
        comparison(kind, cell, measured[kind])
        for part in plan.contexts
        for cell in part.cells
        for kind in [RunKind(cell.drafting, cell.batch, part.context)]
    ]
    return {**summary(rows), "plan": plan.to_dict()}


def measure_llamacpp(arguments: argparse.Namespace) -> dict[str, Any]:
    """Diagnoses a pair in llama.cpp, measures the cells, and adds the result to the file."""
    draft_type, _ = split_types(None, arguments.target, arguments.draft)
    names = ("name", "threads", "prompts", "tokens")
    result = {name: getattr(arguments, name) for name in names}
    result["type"] = draft_type
    with LlamaCppPool(
        target=arguments.target,
        draft=arguments.draft,
        workload=Workload.load(None, arguments.prompts, arguments.tokens),
        max_length=MOST,
        report_status=lambda text: print(text, flush=True),
        build=find_build(arguments.server, draft_type or "none"),
        draft_type=draft_type,
        arguments=["-t", str(arguments.threads)],
    ) as pool:
        start_time = time.perf_counter()
        ((model, times),) = pool.measure()
        result["version"] = pool.version
        model = replace(model, draftings=[*model.draftings, *JOINED * bool(draft_type)])
        cells = {cell.drafting: cell for cell in predict_cells(model, times, 1)}
        result["planning_seconds"] = time.perf_counter() - start_time
        draftings = [NONE, *(CHAINS + JOINED) * bool(draft_type), *LOOKUPS]
        if arguments.grid:
            result["grid"] = searched(pool, cells)
        else:
            draftings.append(max(cells, key=lambda each: speed(cells[each])))
            kinds = [*map(RunKind, dict.fromkeys(draftings))]
            parts = arguments.repeats
            measured = measure_kinds(pool, kinds, parts, pool.workload.held_out, parts)
            rows = [comparison(kind, cells[kind.drafting], measured[kind]) for kind in kinds]
            result |= summary(rows)
        result["target_seconds"] = dict(times.target_seconds)
    pairs = []
    if arguments.output.exists():
        pairs = json.loads(arguments.output.read_text())["pairs"]
    pairs = [*(pair for pair in pairs if pair["name"] != result["name"]), result]
    return {"pairs": pairs}


speed = attrgetter("throughput")


def searched(pool: LlamaCppPool, cells: Mapping[Drafting, Cell]) -> dict[str, Any]:
    """Every setting of the grid, measured on the prompts of the plan, and the plan's choice."""
    chosen = max(GRID, key=lambda each: speed(cells[each]))
    start_time, prompts = time.perf_counter(), pool.workload.measuring
    measured = measure_kinds(pool, [*map(RunKind, GRID)], 1, prompts)
    seconds = time.perf_counter() - start_time
    best = sorted(measured, key=lambda kind: -speed(measured[kind]))[:3]
    # the best of many noisy values is too high, so it is measured again
    finalists = [*dict.fromkeys([RunKind(chosen), *best])]
    again = [*map(speed, measure_kinds(pool, finalists, 3, prompts).values())]
    return {
        "seconds": seconds,
        "chosen": str(chosen),
        "chosen_over_best": again[0] / max(again),
        "predicted_and_measured": {
            str(kind.drafting): [speed(cells[kind.drafting]), speed(cell)]
            for kind, cell in measured.items()
        },
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("engine", choices=["vllm", "llamacpp"])
    parser.add_argument("--python", help="the Python that has vLLM")
    parser.add_argument("--server", help="llama-server")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--name", help="what a pair of llama.cpp is called in the output")
    parser.add_argument("--threads", type=int, default=1, help="of llama.cpp")
    parser.add_argument("--method", default="draft_model", help="vLLM's name of how it drafts")
    parser.add_argument("--context", default="0", help="of vLLM, with commas, as 256,2048")
    parser.add_argument("--prompts", type=int, default=24, help="of each half, at most")
    parser.add_argument("--tokens", type=int, default=32, help="of each prompt, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--grid", action="store_true", help="search by brute force")
    arguments = parser.parse_args()
    measure = measure_vllm if arguments.engine == "vllm" else measure_llamacpp
    write_report(arguments.output, {"hardware": fingerprint("cpu"), **measure(arguments)})


if __name__ == "__main__":
    main()
