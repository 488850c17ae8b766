"""Measure what solving takes, and how close the trees chosen for speed are to the fastest ones.

Times are medians for a tree of exactly n nodes and at most d levels, for several acceptance
vectors. How close a tree is to the fastest one is proven on random profiles.

    python benchmarks/solver.py -o benchmarks/results/solver.json
    python benchmarks/solver.py --quick                               (on small settings)

The time of JIT compilation and that of a warm call are separate: the first call of each solver runs
in a process of its own with an empty cache. Peak memory is that process's. The yardstick, the
dynamic program in plain Python, is timed between the repeats of (128, 10).
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

LLAMA3 = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025]
LLAMA3 += [0.0021, 0.0016, 0.0014, 0.001, 0.001, 0.001, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006]
LLAMA3 += [0.0004, 0.0004, 0.0005, 0.0006, 0.0004, 0.0003, 0.0002, 0.0004, 0.0001]
NOISY_COUNTS = [423, 72, 38, 15, 13, 10, 3, 2, 8, 3, 5, 3, 4, 2, 1, 2, 1, 2, 0, 2, 2, 2, 0, 1, 0, 1]
NOISY_COUNTS += [0, 0, 0, 1, 1, 1]
VECTORS = {
    "Llama3-70B/8B (paper)": LLAMA3,
    "the same, sorted": sorted(LLAMA3, reverse=True),
    "noisy example (authors)": [count / 667 for count in NOISY_COUNTS],
    "adversarial: rising": LLAMA3[::-1],
    "adversarial: (.3, .05, .5)": [0.3, 0.05, 0.5],
}
SIZES = [(128, 10), (768, 20), (4096, 32), (1_000_000, 64), (65536, 64)]
"""(size, depth); the slowest comes last."""
MAX_HULL_SIZE = 65536
MEASURED_SIZES = sorted([*(2**i for i in range(11)), *(3 * 2**i for i in range(9))])
"""Sizes of the passes in a random profile."""
NO_TREE = float("-inf")


def plain_python(p: list[float], size: int, depth: int) -> float:
    """Compute the optimum by the exact dynamic program without any library."""
    best = [0.0, 1.0] + [NO_TREE] * (size - 1)
    for _ in range(depth - 1):
        table = [0.0, 1.0] + [NO_TREE] * (size - 1)
        best_of_level = table[:]
        for p_of_rank in p:
            table = [_best_split(table, best, p_of_rank, n) for n in range(size + 1)]
            best_of_level = [max(a, b) for a, b in zip(best_of_level, table, strict=True)]
        best = best_of_level
    return best[size]


def _best_split(table: list[float], best: list[float], p: float, n: int) -> float:
    """Return the most tokens of n nodes where the last child gets at least one of them."""
    if n <= 1:
        return NO_TREE
    sums = (table[n - m] + p * best[m] for m in range(1, n) if best[m] > 0)
    return max(sums, default=NO_TREE)


def measure(vector: str, size: int, depth: int, repeats: int) -> dict[str, Any]:
    """Measure in this process: the first call, the median of the next ones, and peak memory."""
    from sequoia_plan.planner import solve

    p = VECTORS[vector]
    started = time.perf_counter()
    solve(p, budget=8, depth=4)
    first_call_seconds = time.perf_counter() - started
    warm_seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        solution = solve(p, budget=size, depth=depth)
        warm_seconds.append(time.perf_counter() - started)
        if sum(warm_seconds) > 20:
            break
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "solver": solution.plan.solver,
        "first_call_seconds": first_call_seconds,
        "seconds": statistics.median(warm_seconds),
        "repeats": len(warm_seconds),
        "peak_mib": round(peak_mib, 1),
        "expected_tokens": solution.plan.expected_tokens,
    }


def fastest_trees(budget: int, profiles: int) -> dict[str, Any]:
    """Count how many trees for random profiles are proven to be the fastest.

    The profiles are for up to `budget` nodes and 20 levels, see `random_profile`. The result also
    has how far the other trees can be from the fastest at most, and what `solve` takes (without
    intervals).
    """
    from sequoia_plan.planner import solve

    first_call_seconds = _compile(solve)
    rng = np.random.default_rng(budget)
    gaps, seconds = [], []
    for index in range(profiles):
        solution = solve(random_profile(rng, index, budget), budget=budget, depth=20)
        gaps.append(solution.plan.gap or 0.0)
        seconds.append(solution.seconds)
    return {
        "budget": budget,
        "profiles": profiles,
        "first_call_seconds": first_call_seconds,
        "proven_fastest": sum(gap < 1e-9 for gap in gaps),
        "largest_gap": max(gaps),
        "median_gap": statistics.median(gaps),
        "median_seconds": statistics.median(seconds),
        "most_seconds": max(seconds),
    }


def _compile(solve: Any) -> float:
    """Compile the search for the fastest tree; return the seconds of the first call."""
    from sequoia_plan.artifacts import Acceptance, Latency, Profile

    latency = Latency({1: 0.03, 8: 0.04}, {1: 0.001, 2: 0.002, 8: 0.004}, 0.001, 0)
    started = time.perf_counter()
    solve(Profile(Acceptance.given((0.5, 0.2)), latency=latency), budget=8, depth=4)
    first_call_seconds = time.perf_counter() - started
    # This call compiles what only rows that increase need.
    solve(Profile(Acceptance.given((0.2, 0.05, 0.6)), latency=latency), budget=8, depth=4)
    return first_call_seconds


def random_profile(rng: np.random.Generator, index: int, budget: int) -> Any:
    """Draw a profile for trees of up to `budget` nodes.

    Half of the profiles have a vector that never increases. Draft passes cost 1 to 10 % of the
    target's and rise with their width, and every pass has 2 % of noise. One profile in three has no
    costs of verification.

    Args:
        index: the number of the profile.
    """
    from sequoia_plan.artifacts import Acceptance, Latency, Profile, VerificationCost

    first, decay, rise = rng.uniform(0.4, 0.85), rng.uniform(0.3, 0.6), rng.uniform(0.1, 2)
    vector = np.r_[first, (1 - first) * 0.8 * (1 - decay) * decay ** np.arange(15)]
    vector = rng.multinomial(2000, np.r_[vector, 1 - vector.sum()])[:-1] / 2000
    vector = np.sort(vector)[::-1] if index % 2 else vector
    draft_seconds = 0.03 * rng.uniform(0.01, 0.1)
    target, draft = (
        {
            n: seconds * (1 + rise * n / budget) * rng.uniform(0.98, 1.02)
            for n in MEASURED_SIZES
            if n <= budget
        }
        for seconds in (0.03, draft_seconds)
    )
    verification = VerificationCost(0.001, 2e-5) if index % 3 else None
    latency = Latency(target, draft, 0.001, 0, verification=verification)
    return Profile(Acceptance.given(vector), latency=latency)


def run_apart(cache: str, *arguments: Any) -> dict[str, Any]:
    """Run `measure`, or `fastest_trees` for two arguments, in a process of its own.

    Args:
        cache: numba's cache folder.
    """
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    finished = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(finished.stdout)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="only (128, 10) and (768, 20), few repeats"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.one:
        arguments = json.loads(options.one)
        run = fastest_trees if len(arguments) == 2 else measure
        print(json.dumps(run(*arguments)))
    else:
        measure_all(options.quick, options.output)


def measure_all(quick: bool, output: Path | None) -> None:
    """Measure everything, each part in a process of its own, and write it after every row."""
    sizes, repeats = (SIZES[:2], 5) if quick else (SIZES, 51)
    compile_seconds: dict[str, float] = {}
    fastest: list[dict[str, Any]] = []
    yardstick_seconds: list[float] = []
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for vector in ("the same, sorted", "Llama3-70B/8B (paper)"):
            figures = run_apart(cache, vector, 8, 4, 1)
            compile_seconds[figures["solver"]] = figures["first_call_seconds"]
        for budget in (64, 256, 1024)[: 1 if quick else 3]:
            fastest.append(run_apart(cache, budget, 12 if quick else 120))
            first_call_seconds = fastest[-1].pop("first_call_seconds")
            compile_seconds.setdefault("branch and bound", first_call_seconds)
            print(json.dumps(fastest[-1]), flush=True)
        for size, depth in sizes:
            for vector in VECTORS:
                if size > MAX_HULL_SIZE and vector != "the same, sorted":
                    continue
                figures = run_apart(cache, vector, size, depth, repeats)
                results.append({"vector": vector, "size": size, "depth": depth, **figures})
                print_row(results[-1])
                if (size, depth) == SIZES[0]:
                    started = time.perf_counter()
                    tokens = plain_python(VECTORS[vector], size, depth)
                    yardstick_seconds.append(time.perf_counter() - started)
                    assert abs(tokens - figures["expected_tokens"]) < 1e-9 * tokens
                if output:
                    write(output, compile_seconds, yardstick_seconds, results, fastest)
    summary = {
        "compile_and_first_call_seconds": compile_seconds,
        "plain_python_seconds_at_128_10": yardstick_seconds,
    }
    print(json.dumps(summary, indent=1))


def print_row(row: dict[str, Any]) -> None:
    """Print the figures of one vector, size and depth."""
    shape = f"({row['size']}, {row['depth']})"
    milliseconds, peak_mib = row["seconds"] * 1000, row["peak_mib"]
    figures = f"{milliseconds:12.3f} ms  {peak_mib:8.1f} MiB  {row['solver']}"
    print(f"{shape}  {row['vector']:<28} {figures}", flush=True)


def write(
    output: Path,
    compile_seconds: dict[str, float],
    yardstick_seconds: list[float],
    results: list[dict[str, Any]],
    fastest: list[dict[str, Any]],
) -> None:
    """Write what has been measured so far: the last rows take minutes."""
    report = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "compile_and_first_call_seconds": compile_seconds,
        "plain_python_seconds_at_128_10": {
            "median": statistics.median(yardstick_seconds),
            "all": yardstick_seconds,
        },
        "fastest_trees": fastest,
        "results": results,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
