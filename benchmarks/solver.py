"""What solving takes: medians for a tree of exactly n nodes and at most d levels, for three kinds of acceptance vectors; and how close the
trees chosen for speed are proven to be to the fastest ones, on random profiles.

    python benchmarks/solver.py -o benchmarks/results/solver.json     (--quick tries it on small settings)

JIT compile time and a warm call are told apart: the first call of each solver runs in a process of its own with an empty cache. Peak memory is
that process's. The yardstick, the dynamic program in plain Python, is timed between the repeats of (128, 10).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

LLAMA3 = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021, 0.0016, 0.0014, 0.001, 0.001, 0.001]
LLAMA3 += [0.0007, 0.0007, 0.0006, 0.0007, 0.0006, 0.0004, 0.0004, 0.0005, 0.0006, 0.0004, 0.0003, 0.0002, 0.0004, 0.0001]
NOISY_COUNTS = [423, 72, 38, 15, 13, 10, 3, 2, 8, 3, 5, 3, 4, 2, 1, 2, 1, 2, 0, 2, 2, 2, 0, 1, 0, 1, 0, 0, 0, 1, 1, 1]
VECTORS = {
    "Llama3-70B/8B (paper)": LLAMA3,
    "the same, sorted": sorted(LLAMA3, reverse=True),
    "noisy example (authors)": [count / 667 for count in NOISY_COUNTS],
    "adversarial: rising": LLAMA3[::-1],
    "adversarial: (.3, .05, .5)": [0.3, 0.05, 0.5],
}
SIZES = [(128, 10), (768, 20), (4096, 32), (1_000_000, 64), (65536, 64)]  # the slowest last


def plain_python(p: list[float], size: int, depth: int) -> float:
    """The exact dynamic program without any library."""
    best = [0.0, 1.0] + [float("-inf")] * (size - 1)
    for _ in range(depth - 1):
        table = [0.0, 1.0] + [float("-inf")] * (size - 1)
        total = table[:]
        for each in p:
            table = [max((table[n - m] + each * best[m] for m in range(1, n - 1 + 1) if best[m] > 0), default=float("-inf")) if n > 1 else float("-inf")
                     for n in range(size + 1)]  # fmt: skip
            total = [max(a, b) for a, b in zip(total, table, strict=True)]
        best = total
    return best[size]


def measure(vector: str, size: int, depth: int, repeats: int) -> dict[str, Any]:
    """In this process: the first call, the median of the next ones, and the most memory ever held."""
    from sequoia_plan.planner import solve

    p = VECTORS[vector]
    started = time.perf_counter()
    solve(p, 8, 4)
    first = time.perf_counter() - started
    warm = []
    for _ in range(repeats):
        started = time.perf_counter()
        solution = solve(p, size, depth)
        warm.append(time.perf_counter() - started)
        if sum(warm) > 20:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "solver": solution.plan.solver,
        "first_call_seconds": first,
        "seconds": statistics.median(warm),
        "repeats": len(warm),
        "peak_mib": round(peak, 1),
        "expected_tokens": solution.plan.expected_tokens,
    }


def fastest_trees(budget: int, profiles: int) -> dict[str, Any]:
    """For random profiles of up to `budget` nodes and 20 levels, half of them with rows that never increase: how many trees are proven
    to be the fastest, how far the others can be from it at most, and what `solve` takes (without intervals).

    Draft passes cost 1 to 10 % of the target's and rise with their width; every pass has 2 % of noise; one profile in three has no
    costs of verification, one has them by level, one for the whole tree.
    """
    from sequoia_plan.artifacts import Latency, Profile, Verification
    from sequoia_plan.planner import solve

    small = Latency({1: 0.03, 8: 0.04}, {1: 0.001, 2: 0.002, 8: 0.004}, 0.001, 0)
    started = time.perf_counter()
    solve(Profile((0.5, 0.2), latency=small), 8, 4)
    first_call = time.perf_counter() - started
    solve(Profile((0.2, 0.05, 0.6), latency=small), 8, 4)  # compiles what only rows that increase need
    rng = np.random.default_rng(budget)
    sizes = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024) if n <= budget]
    gaps, seconds = [], []
    for index in range(profiles):
        first, decay, rise = rng.uniform(0.4, 0.85), rng.uniform(0.3, 0.6), rng.uniform(0.1, 2)
        vector = np.r_[first, (1 - first) * 0.8 * (1 - decay) * decay ** np.arange(15)]
        vector = rng.multinomial(2000, np.r_[vector, 1 - vector.sum()])[:-1] / 2000
        vector = np.sort(vector)[::-1] if index % 2 else vector
        target, draft = ({n: seconds * (1 + rise * n / budget) * rng.uniform(0.98, 1.02) for n in sizes} for seconds in (0.03, 0.03 * rng.uniform(0.01, 0.1)))
        kind = (None, "level", "tree")[index % 3]
        costs = Verification(0.001, 2e-5, 2e-5, 2e-6, kind) if kind else None
        solution = solve(Profile(tuple(vector.tolist()), latency=Latency(target, draft, 0.001, 0, verification=costs)), budget, 20)
        gaps.append(solution.plan.gap or 0.0)
        seconds.append(solution.seconds)
    return {
        "budget": budget,
        "profiles": profiles,
        "first_call_seconds": first_call,
        "proven_fastest": sum(gap < 1e-9 for gap in gaps),
        "largest_gap": max(gaps),
        "median_gap": statistics.median(gaps),
        "median_seconds": statistics.median(seconds),
        "most_seconds": max(seconds),
    }


def apart(cache: str, *arguments: Any) -> dict[str, Any]:
    """`measure` (or `fastest_trees`, which takes two arguments) in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "NUMBA_CACHE_DIR": cache}).stdout)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only (128, 10) and (768, 20), few repeats")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.one:
        arguments = json.loads(options.one)
        print(json.dumps(fastest_trees(*arguments) if len(arguments) == 2 else measure(*arguments)))
        return
    sizes, repeats = (SIZES[:2], 5) if options.quick else (SIZES, 51)
    results, yardstick = [], []
    with tempfile.TemporaryDirectory() as cache:
        compiling, fastest = {}, []
        for vector in ("the same, sorted", "Llama3-70B/8B (paper)"):
            found = apart(cache, vector, 8, 4, 1)
            compiling[found["solver"]] = found["first_call_seconds"]
        for budget in (64, 256, 1024)[: 1 if options.quick else 3]:
            fastest.append(apart(cache, budget, 12 if options.quick else 120))
            first = fastest[-1].pop("first_call_seconds")
            compiling.setdefault("branch and bound", first)
            print(json.dumps(fastest[-1]), flush=True)
        for size, depth in sizes:
            for vector in VECTORS:
                if size > 65536 and vector != "the same, sorted":
                    continue  # beyond what the hull-guided solver takes
                found = apart(cache, vector, size, depth, repeats)
                results.append({"vector": vector, "size": size, "depth": depth, **found})
                print(f"({size}, {depth})  {vector:<28} {found['seconds'] * 1000:12.3f} ms  {found['peak_mib']:8.1f} MiB  {found['solver']}", flush=True)
                if (size, depth) == SIZES[0]:
                    started = time.perf_counter()
                    value = plain_python(VECTORS[vector], size, depth)
                    yardstick.append(time.perf_counter() - started)
                    assert abs(value - found["expected_tokens"]) < 1e-9 * value
                write(options.output, compiling, yardstick, results, fastest)
    print(json.dumps({"compile_and_first_call_seconds": compiling, "plain_python_seconds_at_128_10": yardstick}, indent=1))


def write(output: Path | None, compiling: dict[str, float], yardstick: list[float], results: list[dict[str, Any]], fastest: list[dict[str, Any]]) -> None:
    """What is known so far: the last rows take minutes."""
    report = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "compile_and_first_call_seconds": compiling,
        "plain_python_seconds_at_128_10": {"median": statistics.median(yardstick), "all": yardstick},
        "fastest_trees": fastest,
        "results": results,
    }
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
