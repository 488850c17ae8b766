"""Does the plan for llama.cpp hold? Predicted and measured throughput, as JSON.

One run measures one pair of a target and a way of drafting, plans it on every second built-in
prompt, and measures a grid on the others. The grid is fixed beforehand, so it does not depend on
the plan. Runs add their results to the output file.

    python benchmarks/llamacpp.py --server llama-server --target T.gguf --draft D.gguf \
        --name "q4_1, draft q8_0" -o benchmarks/results/engine-llamacpp.json
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
from sequoia_plan.engines import llamacpp_plan
from sequoia_plan.engines.drafting import LOOKUP, NONE, Drafting, candidates, defaults
from sequoia_plan.engines.llamacpp import Build, ServerPool, find_build
from sequoia_plan.engines.plan import MeasuredCell
from sequoia_plan.engines.replay import ChainStep
from sequoia_plan.engines.vllm import Workload, measured_cell

PARTS = 3
"""The prompts to measure on are split into so many parts. Every way of drafting decodes one part
after the other, so that a drift of the machine's speed affects all of them."""


def grid(spec_type: str) -> list[Drafting]:
    """The ways of drafting that are measured: none, the defaults, and others around them."""
    if spec_type == LOOKUP:
        sizes = ((2, 2), (2, 8), (3, 8), (4, 16))
        others = [Drafting(LOOKUP, length, lookup_size=size) for size, length in sizes]
    else:
        others = [
            Drafting(spec_type, length, min_prob)
            for length, min_prob in ((1, 0.0), (2, 0.6), (3, 0.6), (8, 0.0), (8, 0.8))
        ]
    return [NONE, defaults(spec_type), *others]


def compare_tokens(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a step on the second half of the prompts, predicted by a replay of the first half.

    It needs no times, so a busy machine does not change it. A replay of the second half itself is
    beside it: what is left of the error then is the replay's own, and the rest is that the texts
    are others.
    """
    build, spec_type = find_build(arguments.server, arguments.spec_type)
    rows = []
    with new_pool(arguments, build) as pool:
        measuring, held_out = halves(pool)
        texts, own_texts = (
            llamacpp_plan.record(pool, spec_type, 8, half)[0] for half in (measuring, held_out)
        )
        for drafting in grid(spec_type)[1:]:
            pool.ensure_running([drafting])
            measured = tokens_per_step(pool.run(drafting, held_out))
            predicted, own = (
                tokens_per_step([llamacpp_plan.replay(drafting, text) for text in half])
                for half in (texts, own_texts)
            )
            row = {
                "drafting": f"{drafting.max_length} {drafting.variant}".strip(),
                "predicted": round(predicted, 4),
                "measured": round(measured, 4),
                "error": round(predicted / measured - 1, 4),
                "error_on_the_same_prompts": round(own / measured - 1, 4),
            }
            rows.append(row)
            print(row, flush=True)
    return summary(arguments, f"{arguments.name}: tokens a step", build, spec_type, rows)


def summary(
    arguments: argparse.Namespace,
    name: str,
    build: Build,
    spec_type: str,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """What was compared, the rows of the comparison, and how many predictions are within 10 %."""
    return {
        "name": name,
        "version": build.version,
        "spec_type": spec_type,
        "threads": arguments.threads,
        "prompts": arguments.prompts,
        "tokens": arguments.tokens,
        "within_10_percent": sum(abs(row["error"]) <= 0.1 for row in rows),
        "cells": len(rows),
        "rows": rows,
    }


def tokens_per_step(texts: Sequence[Sequence[ChainStep]]) -> float:
    """Mean number of tokens of the steps of several texts."""
    steps = [step for text in texts for step in text]
    return sum(step.tokens for step in steps) / len(steps)


def new_pool(arguments: argparse.Namespace, build: Build) -> ServerPool:
    """Servers for both halves of the prompts, the first half to plan on."""
    prompts = load(BUILT_IN)
    measuring = measuring_half(prompts)[: arguments.prompts]
    held_out = held_out_half(prompts)[: arguments.prompts]
    workload = Workload([prompt.text for prompt in (*measuring, *held_out)], arguments.tokens)
    return ServerPool(
        build,
        arguments.target,
        arguments.draft,
        workload,
        ["-t", str(arguments.threads)],
        report_status=lambda text: print(text, flush=True),
    )


def halves(pool: ServerPool) -> tuple[range, range]:
    """Indices of the prompts to plan on, and of those to measure on."""
    count = len(pool.workload.prompts)
    return range(count // 2), range(count // 2, count)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plans and measures one pair."""
    build, spec_type = find_build(arguments.server, arguments.spec_type)
    max_length = 16 if spec_type == LOOKUP else 8
    with new_pool(arguments, build) as pool:
        measuring, held_out = halves(pool)
        (measurements,), seconds = llamacpp_plan.measure(pool, spec_type, max_length, measuring)
        plan = llamacpp_plan.make_plan(pool, spec_type, max_length, [measurements], seconds)
        predicted = llamacpp_plan.predict_cells(
            candidates(spec_type, max_length),
            measurements.texts,
            measurements.times,
            spec_type != LOOKUP,
        )
        draftings = grid(spec_type)
        best = llamacpp_plan.best_drafting(predicted)
        if best not in draftings:
            draftings.append(best)
        parts: dict[Drafting, list[list[list[ChainStep]]]] = {key: [] for key in draftings}
        for i in range(PARTS):
            kinds = [(drafting, 0) for drafting in draftings[:: -1 if i % 2 else 1]]
            runs = llamacpp_plan.run_draftings(pool, kinds, held_out[i::PARTS], 1)
            for (drafting, _), repeats in runs.items():
                parts[drafting] += repeats
    rows = []
    for drafting in draftings:
        cell, measured = predicted[drafting], measured_over_parts(parts[drafting])
        row = {
            "drafting": f"{drafting.max_length} {drafting.variant}".strip(),
            "predicted": cell.throughput,
            "low": cell.low,
            "high": cell.high,
            "measured": round(measured.throughput, 3),
            "slowest": round(measured.low, 3),
            "fastest": round(measured.high, 3),
            "error": round(cell.throughput / measured.throughput - 1, 4),
            "tokens_error": round(cell.tokens_per_step / measured.tokens_per_step - 1, 4),
            "seconds_error": round(cell.seconds / measured.seconds - 1, 4),
            "is_default": drafting == defaults(spec_type),
            "is_best": drafting == best,
        }
        rows.append(row)
        print(row, flush=True)
    return {
        **summary(arguments, arguments.name, build, spec_type, rows),
        "planning_seconds": plan.seconds,
        "steps": [step.to_dict() for step in plan.steps],
        "draft_pass_seconds": plan.settings["draft_pass_seconds"],
        "acceptance": plan.acceptance.to_dict(),
    }


def measured_over_parts(parts: Sequence[Sequence[Sequence[ChainStep]]]) -> MeasuredCell:
    """All parts together, with the slowest and the fastest of them."""
    whole = measured_cell([llamacpp_plan.engine_run([*chain.from_iterable(parts)])], 1)
    by_part = [llamacpp_plan.engine_run(part).throughput for part in parts]
    return replace(whole, low=min(by_part), high=max(by_part), runs=len(parts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", required=True, help="llama-server")
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--spec-type", default="draft-simple")
    parser.add_argument("--name", required=True, help="what the pair is called in the output")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=24, help="of each half, at most")
    parser.add_argument("--tokens", type=int, default=32, help="of each prompt, at most")
    parser.add_argument("--tokens-only", action="store_true", help="measure no times")
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    result = compare_tokens(arguments) if arguments.tokens_only else measure(arguments)
    document: dict[str, Any] = {"machine": machine(), "pairs": []}
    if arguments.output.exists():
        document = json.loads(arguments.output.read_text())
    document["pairs"] = [pair for pair in document["pairs"] if pair["name"] != result["name"]]
    document["pairs"].append(result)
    for key in ("within_10_percent", "cells"):
        document[key] = sum(pair[key] for pair in document["pairs"])
    write_atomically(arguments.output, (json.dumps(document, indent=1) + "\n").encode())


def machine() -> dict[str, str]:
    """The processor and its instructions that matter for small integers."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    entries = {key.strip(): value.strip() for key, value in values.items()}
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    flags = entries.get("flags", "").split()
    return {
        "processor": entries.get("model name", platform.machine()),
        "instructions": " ".join(flag for flag in wanted if flag in flags),
    }


if __name__ == "__main__":
    main()
