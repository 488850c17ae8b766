"""Does the plan for vLLM hold? Plans with the embedded pair in a real vLLM, then measures the whole grid of lengths and batch sizes.

    python benchmarks/engine.py --python .venv-engines/bin/python --target target --draft draft -o engine-vllm.json

The folders are what `sequoia-plan export --format hf` writes. The plan is made of every second built-in prompt, the grid of the others. In
every repeat the lengths take turns, in two groups of engines that both hold plain decoding, since seven engines are too many for the memory;
the engine that follows the plan's schedule comes after them. It is measured cell by cell: a run that was stopped goes on where it was, from
the file beside the output. vLLM's environment variables are taken as they are set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sequoia_plan.artifacts.engine_plan import EnginePlan
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
from sequoia_plan.planner.engines import planning, vllm

BATCHES, MOST, REPEATS = [1, 4, 16], 6, 3
GROUPS = [[0, 1, 2, 3], [0, 4, 5, 6]]
PROMPTS, TOKENS = 48, 32
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 1024}
NOTED = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python that has vLLM")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    journal = given.output.with_suffix(".part.json")
    state: dict[str, Any] = json.loads(journal.read_text()) if journal.exists() else {"plan": None, "starts": {}, "runs": []}

    def keep() -> None:
        write_atomically(journal, json.dumps(state).encode())

    every = load(BUILT_IN)
    prompts = [each.text for each in (*measuring_half(every)[:PROMPTS], *held_out_half(every)[:PROMPTS])]
    held_out = list(range(len(prompts) // 2, len(prompts)))
    speculative = vllm.config("draft_model", given.draft, {})

    def engines(more: dict[str, Any]) -> vllm.Engines:
        work = vllm.Work(prompts, TOKENS)
        return vllm.Engines(given.python, given.target, work, {**speculative, **more}, ENGINE, 4, lambda text: print(text, flush=True))

    if state["plan"] is None:
        with engines({}) as running:
            acceptance, steps, seconds = planning.measure(running, BATCHES, MOST, range(PROMPTS))
            known = {"engine": "vllm", "version": running.facts["version"], "method": "draft_model", "seconds": seconds}
            plan = planning.decide(acceptance, steps, BATCHES, MOST, lambda ranges: vllm.lines(speculative, ranges, True), **known)
        state["plan"] = plan.facts()
        keep()
    plan = EnginePlan.read(state["plan"], "plan")
    schedule = {vllm.SCHEDULE: [[each.first, each.last, each.speculative_tokens] for each in plan.schedule]}
    longest = max(each.speculative_tokens for each in plan.schedule)
    arms: list[tuple[str, list[int], dict[str, Any]]] = [("grid", group, {}) for group in GROUPS]
    if longest and len(plan.schedule) > 1:
        arms.append(("schedule", [longest], schedule))
    for repeat in range(given.repeats):
        for name, group, more in arms:
            cells = [(batch, length) for batch in BATCHES for length in (group if (repeat + batch) % 2 else group[::-1])]
            places = {(run["arm"], run["group"], run["repeat"], run["batch"], run["length"]) for run in state["runs"]}
            missing = [cell for cell in cells if (name, str(group), repeat, *cell) not in places]
            if not missing:
                continue
            with engines(more) as running:
                began = time.perf_counter()
                running.use(group)
                state["starts"][f"{name} {group} {repeat}"] = time.perf_counter() - began
                for length in group:  # the first passes of every batch size take longer
                    for batch in BATCHES:
                        running.run(length, batch, planning.share(held_out, batch), steps=2)
                for batch, length in missing:
                    began = time.perf_counter()
                    run = running.run(length, batch, planning.share(held_out, batch))
                    wall = time.perf_counter() - began
                    facts = {"arm": name, "group": str(group), "repeat": repeat, "batch": batch, "length": length, "wall": wall}
                    state["runs"].append({**facts, "seconds": run.seconds, "steps": run.steps, "tokens": run.tokens})
                    print(
                        f"repeat {repeat} batch {batch} length {length}: {run.throughput:.1f} tokens/s, {run.tokens / run.steps / batch:.3f} a step", flush=True
                    )
                    keep()
    write_atomically(given.output, (json.dumps(report(plan, state), indent=1) + "\n").encode())
    journal.unlink()


def report(plan: EnginePlan, state: dict[str, Any]) -> dict[str, Any]:
    """The plan with what was measured in its cells, and what became of the three promises."""
    runs: dict[tuple[int, int], list[vllm.Run]] = {}
    scheduled: dict[tuple[int, int], list[vllm.Run]] = {}
    for each in state["runs"]:
        run = vllm.Run(each["seconds"], each["steps"], each["tokens"], [], {}, {})
        (runs if each["arm"] == "grid" else scheduled).setdefault((each["batch"], each["length"]), []).append(run)
    plan = planning.with_measured(replace(plan, target="SmolLM2-135M-Instruct", draft="the embedded draft", lines=()), runs)
    known = [cell for cell in plan.cells if cell.measured]
    off = {f"{cell.batch}x{cell.speculative_tokens}": cell.throughput / cell.measured.throughput - 1 for cell in known if cell.measured}
    chosen = {}
    for batch in plan.batches:
        seen = {cell.speculative_tokens: cell.measured.throughput for cell in plan.at(batch) if cell.measured}
        best = max(seen, key=lambda length: seen[length])
        length = plan.best(batch).speculative_tokens
        follows = scheduled.get((batch, max(each.speculative_tokens for each in plan.schedule)))
        chosen[batch] = {
            "chosen": length,
            "best": best,
            "chosen_over_best": seen[length] / seen[best],
            "chosen_over_none": seen[length] / seen[0],
            "schedule_over_chosen": vllm.measured_cell(follows, batch).throughput / seen[length] if follows else None,
        }
    ratios = {f"{batch}x{length}": _ratios(state["runs"], batch, length) for batch, length in runs if length}
    promised = {f"{cell.batch}x{cell.speculative_tokens}": cell.speedup for cell in known}
    speedups = {name: promised[name] / statistics.median(found) - 1 for name, found in ratios.items()}
    once = sum(seconds for name, seconds in state["starts"].items() if name.startswith("grid") and name.endswith(" 0"))
    grid = once + sum(run["wall"] for run in state["runs"] if run["arm"] == "grid")
    return {
        "machine": {"processor": _processor(), "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())), "python": platform.python_version()},
        "environment": {name: os.environ[name] for name in NOTED if name in os.environ},
        "engine": {"name": "vllm", "version": plan.version, **ENGINE},
        "seconds": {"planning": plan.seconds, "grid": grid, "planning_over_grid": plan.seconds / grid},
        "chosen": chosen,
        "within_10_percent": sum(abs(each) <= 0.1 for each in off.values()),
        "cells": len(off),
        "predicted_over_measured_less_1": {name: round(each, 4) for name, each in off.items()},
        "speedup": {
            "what": "over no speculation, measured in the same group and repeat, which a drift of the machine's speed does not reach",
            "within_10_percent": sum(abs(each) <= 0.1 for each in speedups.values()),
            "cells": len(speedups),
            "predicted_over_measured_less_1": {name: round(each, 4) for name, each in speedups.items()},
            "measured": {name: [round(each, 4) for each in found] for name, found in ratios.items()},
        },
        "plan": plan.facts(),
        "runs": state["runs"],
        "starts": state["starts"],
    }


def _ratios(runs: list[dict[str, Any]], batch: int, length: int) -> list[float]:
    """Throughput over that without speculation, of each repeat."""
    at = {(run["group"], run["repeat"], run["length"]): run["tokens"] / run["seconds"] for run in runs if run["arm"] == "grid" and run["batch"] == batch}
    return [speed / at[group, repeat, 0] for (group, repeat, each), speed in at.items() if each == length and (group, repeat, 0) in at]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
