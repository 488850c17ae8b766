"""The CUDA path: the embedded pair end to end, and models of the paper's shapes with random weights.

    python benchmarks/gpu.py -o build/gpu.json                            # one 80 GB card, under 9 minutes, unattended
    python benchmarks/gpu.py --device cpu --quick -o build/gpu-quick.json  # tiny settings on the CPU, to see that it runs

- pair-t0, pair-t06: profile, solve, then decode held-out prompts with our plain decoding, transformers' `generate` and assisted
  generation, and our tree; the parts of a step.
- static: transformers' static cache, whose forward pass it compiles, beside our plain decoding.
- llama-2-7b, llama-2-13b: bfloat16, with a draft of 68M parameters. Step times do not depend on what weights say, so these are
  measured: target and draft passes by size, memory bandwidth, the best tree's step for the paper's acceptance vectors. Tokens a
  second follow from a vector that was measured on other models, so they are called projected.

The JSON is written after every part. A part that would start too late is recorded as skipped.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from random_models import Shape, bytes_read, copy_bandwidth, random_pair, shape
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts import Latency, Profile, TokenTree
from sequoia_plan.artifacts.cost import StepTime, expected_tokens
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.tree_file import CATALOG
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving.baselines import arms
from sequoia_plan.profiler.bench import bench, compare, hugging_face, ours, summary
from sequoia_plan.profiler.breakdown import breakdown
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import measure_latency
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.prompts import built_in, held_out
from sequoia_plan.runtime import Pair, Sampling, load_pair
from sequoia_plan.runtime.models.load import dtype_name

VECTORS = ("sequoia-example", "llama3-70b-8b-cnn")
CONTENDERS = ("plain", "generate", "assisted", "traversal")
BUDGET, DEPTH = 768, 20


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        texts, prompts, tokens: prompts profiled, held-out prompts decoded, new tokens of each.
        precision: of the acceptance, see `finished_prompts`.
        latency_seconds, rounds: for repeating latencies and breakdowns.
        largest: nodes of the largest tree that is timed.
        copied: bytes of the copy that memory bandwidth is measured with.
        targets, draft: shapes.
    """

    texts: int
    prompts: int
    tokens: int
    precision: float
    latency_seconds: float
    rounds: int
    largest: int
    copied: int
    targets: dict[str, Shape]
    draft: Shape


FULL = Scale(
    texts=16,
    prompts=10,
    tokens=128,
    precision=0.05,
    latency_seconds=10.0,
    rounds=20,
    largest=1024,
    copied=1 << 30,
    targets={"llama-2-7b": shape(4096, 11008, 32, 32), "llama-2-13b": shape(5120, 13824, 40, 40)},
    draft=shape(768, 3072, 2, 12),
)
QUICK = Scale(
    texts=2,
    prompts=2,
    tokens=8,
    precision=0.0,
    latency_seconds=0.0,
    rounds=3,
    largest=16,
    copied=1 << 24,
    targets={"llama-2-7b": shape(64, 128, 2, 4, 512), "llama-2-13b": shape(96, 192, 2, 4, 512)},
    draft=shape(32, 64, 1, 2, 512),
)


@dataclass(frozen=True)
class Run:
    """What a part needs to know: the device, how much to measure, and when to come to an end (of `time.perf_counter`)."""

    device: torch.device
    scale: Scale
    deadline: float


@functools.cache
def embedded(device: torch.device, placement: str = "auto") -> Pair:
    """The embedded pair, loaded once."""
    return load_pair(device=str(device), placement=placement)


def real_pair(run: Run, sampling: Sampling) -> dict[str, Any]:
    """The embedded pair end to end: profile, solve, decode side by side, the parts of a step."""
    scale, pair = run.scale, embedded(run.device)
    work = {"largest": scale.largest, "precision": scale.precision, "tokens_per_prompt": min(scale.tokens, 64)}
    profile = measure(pair, built_in()[: scale.texts], [sampling], scale.latency_seconds, **work)[0]
    solution = solve(profile, BUDGET, DEPTH)
    trees = arms(solution.tree, sampling.verifier)
    reference = functools.partial(embedded, run.device, placement="resident")
    result = compare(pair, reference, solution.tree, trees, sampling, longest_first(pair, scale), scale.tokens, CONTENDERS, deadline=run.deadline)
    steps = {"plain": TokenTree.chain(1), "tree": solution.tree}
    return result.facts() | {
        "acceptance": profile.acceptance,
        "trials": profile.trials,
        "latency": curves(profile.latency),
        "tree": {"parents": solution.tree.parents.tolist(), "expected_tokens": solution.plan.expected_tokens, "step_seconds": solution.plan.step_seconds},
        "breakdown": {name: breakdown(pair, tree, sampling, rounds=scale.rounds) for name, tree in steps.items()},
    }


def static_cache(run: Run) -> dict[str, Any]:
    """transformers' static cache: on CUDA it compiles the forward pass itself, when it is first warmed."""
    pair, tokens = embedded(run.device), run.scale.tokens
    found = {}
    for sampling in (Sampling(), Sampling(0.6)):
        decoders = {
            "plain": ours(pair, TokenTree.chain(1), sampling, tokens),
            "static": hugging_face(pair, sampling, tokens, counted=False, cache_implementation="static"),
        }
        figures = summary(bench(decoders, longest_first(pair, run.scale), deadline=run.deadline), ["plain"])
        found[f"T {sampling.temperature}"] = {name: each.facts() for name, each in figures.items()}
    return {"contenders": found}


def random_weights(run: Run, name: str) -> dict[str, Any]:
    """A target of the paper's with its draft: passes by size, bandwidth, and the step of the best tree for each of the paper's vectors."""
    scale, sampling = run.scale, Sampling(0.6)
    pair = random_pair(name, scale.targets[name], scale.draft, run.device)
    latency = measure_latency(pair, sampling, math.inf, scale.latency_seconds, largest=scale.largest)
    times = StepTime(latency)
    plain = breakdown(pair, TokenTree.chain(1), sampling, rounds=scale.rounds)
    read = bytes_read(pair.target)
    copied = copy_bandwidth(run.device, scale.copied)
    trees = {}
    for vector in VECTORS:
        known = Profile.load(CATALOG / "profiles" / f"{vector}.yaml")
        facts = {"latency": latency, "settings": sampling.settings(), "models": pair.facts, "hardware": fingerprint(run.device)}
        tree = solve(Profile(acceptance=known.acceptance, trials=known.trials, **facts), BUDGET, DEPTH).tree
        trees[vector] = judged(pair, tree, known.acceptance, times, sampling, plain["step"], scale.rounds)
    return {
        "settings": sampling.settings() | {"dtype": dtype_name(pair.target.dtype), "context": latency.context},
        "models": pair.facts,
        "latency": curves(latency),
        "bandwidth": {
            "bytes_read_a_pass": read,
            "copy_bytes_per_second": round(copied),
            "target_bytes_per_second": round(read / latency.target[1]),
            "share_of_copy": round(read / latency.target[1] / copied, 4),
        },
        "plain": plain,
        "trees": trees,
    }


def judged(pair: Pair, tree: TokenTree, acceptance: Sequence[float], times: StepTime, sampling: Sampling, plain_step: float, rounds: int) -> dict[str, Any]:
    """A tree's step against the sum of its passes, each timed alone, and what the vector would make of it."""
    parts = breakdown(pair, tree, sampling, rounds=rounds)
    passes = times.step(tree) - times.latency.overhead - times.verification(tree)
    tokens = expected_tokens(tree, acceptance)
    return {
        "parents": tree.parents.tolist(),
        "size": tree.size,
        "depth": tree.depth,
        "step_seconds": {"measured": parts["step"], "planned": times.step(tree), "sum_of_passes": passes},
        "overhead_share": 1 - passes / parts["step"],
        "breakdown": parts,
        "projected": {
            "expected_tokens": tokens,
            "tokens_per_second": tokens / parts["step"],
            "plain_tokens_per_second": 1 / plain_step,
            "speedup": tokens * plain_step / parts["step"],
        },
    }


def longest_first(pair: Pair, scale: Scale) -> list[list[int]]:
    """Held-out prompts: whatever grows with length has grown once all are warm."""
    return sorted(held_out(pair.tokenizer, scale.prompts), key=len, reverse=True)


def curves(latency: Latency | None) -> dict[str, Any]:
    """Seconds by number of tokens."""
    assert latency is not None
    return {
        "target": latency.target,
        "draft": latency.draft,
        "overhead": latency.overhead,
        "verification": latency.verification.facts() if latency.verification else None,
        "context": latency.context,
        "samples": latency.samples,
        "out_of_memory": latency.out_of_memory,
    }


PARTS: dict[str, tuple[float, Callable[[Run], dict[str, Any]]]] = {
    "pair-t0": (110.0, lambda run: real_pair(run, Sampling())),
    "pair-t06": (90.0, lambda run: real_pair(run, Sampling(0.6))),
    "llama-2-7b": (110.0, lambda run: random_weights(run, "llama-2-7b")),
    "static": (90.0, static_cache),
    "llama-2-13b": (110.0, lambda run: random_weights(run, "llama-2-13b")),
}
"""The parts in the order they run, and how many seconds each is meant to take of 8.5 minutes."""


def measured(part: Callable[[Run], dict[str, Any]], run: Run) -> dict[str, Any]:
    """A part's findings with its time and peak memory; an error ends the part, not the run."""
    on_cuda = run.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    started = time.perf_counter()
    try:
        found = part(run)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    found["seconds"] = round(time.perf_counter() - started, 1)
    found["peak_memory_bytes"] = (
        {"allocated": torch.cuda.max_memory_allocated(run.device), "reserved": torch.cuda.max_memory_reserved(run.device)} if on_cuda else None
    )
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything; what would start too late is skipped [default: 8.5]")
    parser.add_argument("--only", action="append", choices=[*PARTS], help="may be repeated [default: all parts]")
    parser.add_argument("--quick", action="store_true", help="tiny settings and shapes, to see that it runs")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    device, scale = torch.device(options.device), QUICK if options.quick else FULL
    report: dict[str, Any] = {"quick": options.quick, "minutes": options.minutes, "hardware": fingerprint(device), "parts": {}}
    options.output.parent.mkdir(parents=True, exist_ok=True)

    chosen = {name: part for name, part in PARTS.items() if not options.only or name in options.only}
    started, planned = time.perf_counter(), sum(seconds for seconds, _ in chosen.values())
    end, due = started + 60 * options.minutes, started
    for name, (seconds, part) in chosen.items():
        share = 60 * options.minutes * seconds / planned
        due += share
        if end - time.perf_counter() < share / 2:
            report["parts"][name] = {"skipped": "out of time"}
        else:
            print(f"{time.perf_counter() - started:6.0f} s  {name}", file=sys.stderr, flush=True)
            report["parts"][name] = measured(part, Run(device, scale, due))
        write_atomically(options.output, (json.dumps(report, indent=1) + "\n").encode())
    show(report)
    return int(any("error" in found for found in report["parts"].values()))


def show(report: dict[str, Any]) -> None:
    """The main figures of each part."""
    table = Table(title="GPU" if report["hardware"]["device"] == "cuda" else "CPU, a trial run", box=None)
    for column in ("part", "what", "tokens/s", "tokens/step", "ms/step", "not model", "note"):
        table.add_column(column, justify="left" if column in ("part", "what", "note") else "right")
    for part, found in report["parts"].items():
        if note := found.get("skipped") or found.get("error"):
            table.add_row(part, "", "", "", "", "", note)
            continue
        groups = found["contenders"] if part == "static" else {"": found.get("contenders", {})}
        for title, figures in groups.items():
            for each in figures.values():
                speed, steps = each["speedup"].get("plain"), each["tokens_per_step"]
                note = f"{title} {speed['median']:.2f} x plain".strip() if speed else title
                table.add_row(part, each["title"], f"{each['tokens_per_second']['median']:.1f}", f"{steps:.2f}" if steps else "", "", "", note)
        for name, parts in found.get("breakdown", {}).items():
            table.add_row(part, f"step: {name}", "", "", f"{1000 * parts['step']:.2f}", f"{parts['share_not_model']:.1%}", "")
        if "bandwidth" in found:
            share = found["bandwidth"]["share_of_copy"]
            table.add_row(
                part,
                "step: plain",
                "",
                "",
                f"{1000 * found['plain']['step']:.2f}",
                f"{found['plain']['share_not_model']:.1%}",
                f"{share:.1%} of copy bandwidth",
            )
        for name, tree in found.get("trees", {}).items():
            promised, parts = tree["projected"], tree["breakdown"]
            what, note = f"{tree['size']} nodes, {name}", f"projected, {promised['speedup']:.2f} x plain; overhead {tree['overhead_share']:.1%}"
            speeds = f"{promised['tokens_per_second']:.1f}", f"{promised['expected_tokens']:.2f}"
            table.add_row(part, what, *speeds, f"{1000 * parts['step']:.2f}", f"{parts['share_not_model']:.1%}", note)
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
