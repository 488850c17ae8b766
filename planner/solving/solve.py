"""The compiler: acceptance and latencies in, the best token tree out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, Profile, TokenTree
from sequoia_plan.artifacts.cost import Floats, StepTime, acceptance_rows, expected_tokens
from sequoia_plan.artifacts.plan import provenance
from sequoia_plan.artifacts.uncertainty import Z95, ends, step_time_error
from sequoia_plan.planner.solving.baselines import baseline as baseline_tree
from sequoia_plan.planner.solving.certificate import check
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.fastest import fastest, fastest_by_the_paper
from sequoia_plan.planner.solving.frontier import LARGEST_BUDGET, SOLVERS, Frontier, best_tree, check_input, pick

OBJECTIVES = ("speed", "tokens", "paper")


@dataclass(frozen=True)
class Solution:
    """The best tree and what it promises.

    Args:
        tree: the token tree, its plan filled in.
        expected_tokens: F(tree), tokens a step.
        upper_bound: the most expected tokens that a tree of this size within depth and branching can have; None for a baseline.
        solver: which exact solver found it, or "baseline ...".
        step_seconds: predicted seconds a step; None without latencies.
        predicted_speedup: over plain decoding by the same engine; None without latencies.
        speedup_bound: no tree of at most `budget` nodes within depth and branching is predicted to be faster, for the same measurements;
            None but for the objective speed.
        interval: what noise in the measurements leaves open; None if it is not known how many trials are behind them. 95 %:
            expected_tokens [2], predicted_speedup [2] or None, lost [2]: the share of speed (or tokens) lost at each end against the
            tree that would be chosen there (None for trees too large to solve again).
        seconds: what solving took.
    """

    tree: TokenTree
    expected_tokens: float
    upper_bound: float | None
    solver: str
    step_seconds: float | None
    predicted_speedup: float | None
    speedup_bound: float | None
    interval: Mapping[str, Any] | None
    seconds: float

    @property
    def gap(self) -> float | None:
        """How much faster than this tree another one could be at most, as a share of the bound; None but for the objective speed."""
        if self.predicted_speedup is None or self.speedup_bound is None:
            return None
        return max(0.0, 1 - self.predicted_speedup / self.speedup_bound)

    @property
    def optimal(self) -> bool | None:
        """Is it proven that no tree within the limits is faster (by more than one part in 10^9)? None but for the objective speed."""
        return None if self.gap is None else self.gap <= 1e-9


def solve(
    profile: Profile | Sequence[float] | Sequence[Sequence[float]],
    budget: int,
    depth: int,
    branching: int | None = None,
    objective: str | None = None,
    solver: str | None = None,
    smooth: bool = False,
    baseline: str | None = None,
    one_vector: bool = False,
) -> Solution:
    """The provably best token tree for what was measured.

    Args:
        profile: a Profile, or an acceptance vector p[1..B], or one such row per level.
        budget: size, the root included: exactly this many nodes for "tokens", at most for "speed" and "paper".
        depth: levels, the root's included, at most.
        branching: children a node may have, at most; the acceptance vector's length if None.
        objective: "tokens" maximises F(T) (Sequoia, arXiv 2402.12374, section 3.1); "speed" maximises F(T) over the predicted step
            time, each draft pass at its own width; "paper" maximises F / (t(n) + d c) (section 3.3). None: "speed" if latencies
            are known, else "tokens".
        solver: "best-first", "hull" or "dp"; None picks best-first where it is exact, else hull.
        smooth: replace the vector by the closest one that never increases with rank. A modelling choice.
        baseline: do not solve; take this tree (see baselines.py) and say what it is worth.
        one_vector: take a profile's one vector for all levels, as the paper does, even if it has counts by level.

    Raises:
        SequoiaPlanError: for impossible input, or if no tree of that size fits the depth and branching.
    """
    started = time.perf_counter()
    measured = profile if isinstance(profile, Profile) else None
    acceptance: Any = profile if measured is None else measured.acceptance if one_vector or not measured.levels else _by_level(measured)
    check_input(acceptance, budget, depth, branching)
    latency = measured.latency if measured else None
    objective = objective or ("speed" if latency else "tokens")
    if objective not in OBJECTIVES:
        raise ArgumentError(f"objective: found {objective!r}, expected {', '.join(OBJECTIVES)}")
    if objective != "tokens" and latency is None and not baseline:
        raise ArgumentError(f"objective {objective} needs latencies: give a profile that has them, or choose the objective tokens")
    if smooth:
        smoothed = isotonic(np.atleast_2d(np.asarray(acceptance, float))).tolist()
        acceptance = smoothed if isinstance(acceptance[0], (list, tuple)) else smoothed[0]

    times = StepTime(latency) if latency else None
    rows = acceptance_rows(acceptance, depth, branching)
    bound: float | None = None
    if baseline:
        name, tree = f"baseline {baseline}", baseline_tree(baseline, budget, depth)
    else:
        name = pick(solver, rows, budget if objective == "tokens" or not times else min(budget, times.largest()))
        tree, bound = _choose(rows, budget, objective, name, times)

    tokens = expected_tokens(tree, acceptance)
    step = times.step(tree) if times else None
    known = times is not None and step is not None and bool(np.isfinite(step))
    upper = None if baseline else check(tree, acceptance, depth, branching, tokens if objective == "tokens" else None).upper_bound
    speedup = tokens * times.plain() / step if known and times and step else None
    interval = None
    if measured and measured.trials and not smooth and not baseline and tree.size > 1:

        def lost(vectors: Floats) -> float:
            there = acceptance_rows(vectors, depth, rows.shape[1])  # may rise where `acceptance` does not: the solver is picked anew
            best = _choose(there, budget, objective, pick(None, there, tree.size), times)[0]
            slower = times.step(tree) / times.step(best) if times and objective != "tokens" else 1.0
            return max(0.0, 1 - expected_tokens(tree, vectors) / expected_tokens(best, vectors) / slower)

        interval = _interval(tree, measured, np.atleast_2d(np.asarray(acceptance, float)), speedup, times, lost)
    plan: dict[str, Any] = {
        "acceptance": [list(row) if isinstance(row, Sequence) else row for row in acceptance],
        "budget": budget,
        "depth": depth,
        "branching": branching,
        "objective": objective,
        "solver": name,
        "expected_tokens": tokens,
        "upper_bound": upper,
        "step_seconds": step if known else None,
        "predicted_speedup": speedup,
        "speedup_bound": bound,
        "interval": interval,
    }
    plan |= provenance(measured)
    tree = TokenTree(tree.parents, plan)
    return Solution(tree, tokens, upper, name, plan["step_seconds"], speedup, bound, interval, time.perf_counter() - started)


def _choose(rows: Floats, budget: int, objective: str, name: str, times: StepTime | None) -> tuple[TokenTree, float | None]:
    """The best tree, and for the objective speed a bound on the speed-up of any."""
    if objective == "tokens" or times is None:
        return best_tree(rows, budget, name), None
    if objective == "paper":
        values = SOLVERS[name].frontier(rows, min(budget, times.largest()))
        return fastest_by_the_paper(Frontier(tuple(values), rows, name), times), None
    found = fastest(rows, budget, times)
    return found.tree, found.bound * times.plain()


def _by_level(profile: Profile) -> list[list[float]]:
    """p[level][k] to six digits; counts may exceed their trials by rounding."""
    rows = np.array(profile.by_level)
    return (rows / np.maximum(1.0, rows.sum(1, keepdims=True))).round(6).tolist()


def _interval(
    tree: TokenTree, profile: Profile, acceptance: Floats, speedup: float | None, times: StepTime | None, lost: Callable[[Floats], float]
) -> dict[str, Any]:
    """What a 95 % interval of the measurements does to this tree's promise, and to the choice itself.

    Args:
        lost: of an acceptance, the share that `tree` falls short of the tree that would be chosen for it.
    """
    seen = np.array([level.trials for level in profile.levels]) if len(acceptance) > 1 else np.ones(1)
    vectors = ends(tree, acceptance, profile.trials * seen / seen.sum())
    tokens = [expected_tokens(tree, vector) for vector in vectors]
    now = expected_tokens(tree, acceptance)
    sped: list[float] | None = None
    if speedup is not None and times is not None:
        clock = Z95 * step_time_error(tree, times.latency)
        sped = [speedup * math.exp(sign * math.hypot(math.log(end / now), clock)) for sign, end in zip((-1, 1), tokens, strict=True)]
    return {
        "level": 0.95,
        "expected_tokens": tokens,
        "predicted_speedup": sped,
        "lost": [lost(vector) for vector in vectors] if tree.size <= LARGEST_BUDGET["hull"] else None,
    }
