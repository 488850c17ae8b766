"""Measure what solving takes, and how close the trees chosen for speed are to the fastest ones.

    python benchmarks/solver.py -o benchmarks/results/solver.json

Each round times every case once, so drift of the machine is common to all. How close a tree is to
the fastest one is proven, on random profiles. Compilation is not timed.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
from reports import new_parser, spread, write_report

from sequoia_plan.artifacts import Acceptance, Latency, VerificationCost
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.problem import Problem, SpeedProblem
from sequoia_plan.planner.solving.speed.fastest import fastest_tree
from sequoia_plan.planner.solving.tokens.frontier import best_tree, pick_solver
from sequoia_plan.profiler.hardware import fingerprint

LLAMA3 = [0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025]
LLAMA3 += [0.0021, 0.0016, 0.0014, 0.001, 0.001, 0.001, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006]
LLAMA3 += [0.0004, 0.0004, 0.0005, 0.0006, 0.0004, 0.0003, 0.0002, 0.0004, 0.0001]
"""Llama3-70B/8B on CNN (Sequoia, arXiv 2402.12374). It increases in the tail."""
VECTORS = {
    "measured, sorted": sorted(LLAMA3, reverse=True),
    "measured": LLAMA3,
    "rising": sorted(LLAMA3),
}
SIZES = [(128, 10), (768, 20)]
"""(size, depth)."""
BUDGETS = [64, 256, 1024]
MEASURED_SIZES = sorted([*(2**i for i in range(11)), *(3 * 2**i for i in range(9))])
"""Sizes of the passes in a random profile."""


def tokens_cases(repeats: int) -> list[dict[str, Any]]:
    """Time the tree of exactly n nodes and at most d levels for each vector, in rounds."""
    cases: list[tuple[dict[str, Any], Problem, list[float]]] = []
    for (size, depth), (name, vector) in product(SIZES, VECTORS.items()):
        problem = Problem(Acceptance.given(vector).at_depth(depth), size)
        best_tree(problem)
        case = {"vector": name, "size": size, "depth": depth}
        cases.append((case | {"solver": pick_solver(problem).NAME}, problem, []))
    for _ in range(repeats):
        for _, problem, seconds in cases:
            started = time.perf_counter()
            best_tree(problem)
            seconds.append(time.perf_counter() - started)
    return [{**case, **figures(seconds)} for case, _, seconds in cases]


def speed_case(budget: int, profiles: int) -> dict[str, Any]:
    """Solve random profiles for speed, and count the trees that are proven to be the fastest."""
    rng = np.random.default_rng(budget)
    gaps, seconds = [], []
    for number in range(-2, profiles):  # the first two compile what is not timed
        rows, times = random_profile(rng, number, budget)
        started = time.perf_counter()
        fastest = fastest_tree(SpeedProblem(rows, budget, times))
        gap = 1 - fastest.speed / fastest.bound
        if number >= 0:
            gaps.append(gap)
            seconds.append(time.perf_counter() - started)
    proven = sum(gap < 1e-9 for gap in gaps)
    return {"budget": budget, "proven": proven, "largest_gap": max(gaps), **figures(seconds)}


def random_profile(rng: np.random.Generator, number: int, budget: int) -> tuple[Any, StepTime]:
    """Draw acceptance for 20 levels and step times.

    Half of the vectors never increase. Draft passes cost 1 to 10 % of the target's and rise with
    their width, and every pass has 2 % of noise.
    """
    first, decay, rise = rng.uniform(0.4, 0.85), rng.uniform(0.3, 0.6), rng.uniform(0.1, 2)
    vector = np.r_[first, (1 - first) * 0.8 * (1 - decay) * decay ** np.arange(15)]
    vector = rng.multinomial(2000, np.r_[vector, 1 - vector.sum()])[:-1] / 2000
    vector = np.sort(vector)[::-1] if number % 2 else vector
    draft_seconds = 0.03 * rng.uniform(0.01, 0.1)
    target, draft = (
        {
            n: seconds * (1 + rise * n / budget) * rng.uniform(0.98, 1.02)
            for n in MEASURED_SIZES
            if n <= budget
        }
        for seconds in (0.03, draft_seconds)
    )
    latency = Latency(target, draft, 0.001, verification=VerificationCost(0.001, 2e-6))
    return Acceptance.given(vector.tolist()).at_depth(20), StepTime(latency)


def figures(seconds: list[float]) -> dict[str, Any]:
    """The number of times, their median, quartiles and maximum."""
    median, *quartiles = spread(seconds, 6)
    figures = {"seconds": median, "quartiles": quartiles, "most_seconds": max(seconds)}
    return {"repeats": len(seconds), **figures}


def main() -> None:
    """Measure and report."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=51, help="rounds, and random profiles")
    options = parser.parse_args()
    report = {
        "hardware": fingerprint("cpu"),
        "tokens": tokens_cases(options.repeats),
        "speed": [speed_case(budget, options.repeats) for budget in BUDGETS],
    }
    write_report(options.output, report)


if __name__ == "__main__":
    main()
