"""The compiler: acceptance and latencies in, the best token tree out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, Profile, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.plan import provenance
from sequoia_plan.artifacts.profile import check_acceptance
from sequoia_plan.planner import best_first, dynamic_programming
from sequoia_plan.planner.objective import Floats, StepTime, acceptance_rows, expected_tokens

SOLVERS = {"best-first": best_first, "dp": dynamic_programming}
LARGEST_BUDGET = {"best-first": 1_000_000, "dp": 4_096}
LARGEST_DEPTH = 1_000


@dataclass(frozen=True)
class Solution:
    """The best tree and what it promises.

    Args:
        tree: the token tree, its plan filled in.
        expected_tokens: F(tree), tokens a step.
        solver: which exact solver found it.
        step_seconds: predicted seconds a step; None without latencies.
        predicted_speedup: over plain decoding by the same engine; None without latencies.
        seconds: what solving took.
    """

    tree: TokenTree
    expected_tokens: float
    solver: str
    step_seconds: float | None
    predicted_speedup: float | None
    seconds: float


def solve(
    profile: Profile | Sequence[float] | Sequence[Sequence[float]],
    budget: int,
    depth: int,
    branching: int | None = None,
    objective: str | None = None,
    solver: str | None = None,
) -> Solution:
    """The provably best token tree for what was measured.

    Args:
        profile: a Profile, or an acceptance vector p[1..B], or one such row per level.
        budget: size, the root included: exactly this many nodes for "tokens", at most for "speed".
        depth: levels, the root's included, at most.
        branching: children a node may have, at most; the acceptance vector's length if None.
        objective: "tokens" maximises F(T) (Sequoia, arXiv 2402.12374, section 3.1); "speed" maximises F(T) over the
            predicted step time (section 3.3, with each draft pass at its own width). None: "speed" if latencies are known.
        solver: "best-first" or "dp"; None picks best-first where it is exact, else dp.

    Raises:
        SequoiaPlanError: for impossible input, or if no tree of that size fits the depth and branching.
    """
    started = time.perf_counter()
    measured = profile if isinstance(profile, Profile) else None
    acceptance = measured.acceptance if measured else profile
    _check(acceptance, budget, depth, branching)
    latency = measured.latency if measured else None
    objective = objective or ("speed" if latency else "tokens")
    if objective not in ("speed", "tokens"):
        raise ArgumentError(f"objective: found {objective!r}, expected speed or tokens")
    if objective == "speed" and latency is None:
        raise ArgumentError("objective speed needs latencies: give a profile that has them, or choose the objective tokens")

    rows = acceptance_rows(acceptance, depth, branching)  # type: ignore[arg-type]
    name = _pick(solver, rows, budget if objective == "tokens" else min(budget, StepTime(latency).largest()))  # type: ignore[arg-type]
    times = StepTime(latency) if latency else None
    if objective == "tokens" or times is None:
        tree = _largest_value_tree(name, rows, budget)
    else:
        tree = _fastest_tree(name, rows, budget, times)

    tokens = expected_tokens(tree, acceptance)  # type: ignore[arg-type]
    step = times.step(tree) if times else None
    known = times is not None and step is not None and np.isfinite(step)
    speedup = tokens * times.plain() / step if known else None  # type: ignore[union-attr, operator]
    plan: dict[str, Any] = {
        "acceptance": [list(row) if isinstance(row, Sequence) else row for row in acceptance],  # type: ignore[union-attr]
        "budget": budget,
        "depth": depth,
        "branching": branching,
        "objective": objective,
        "solver": name,
        "expected_tokens": tokens,
        "step_seconds": step if known else None,
        "predicted_speedup": speedup,
    }
    plan |= provenance(measured)
    tree = TokenTree(tree.parents, plan)
    return Solution(tree, tokens, name, plan["step_seconds"], speedup, time.perf_counter() - started)


def _largest_value_tree(name: str, rows: Floats, size: int) -> TokenTree:
    reachable = _largest_reachable(rows, size)
    if reachable < size:
        raise ArgumentError(
            f"no tree of {size} nodes has depth {len(rows) + 1} and branching {rows.shape[1]}: the largest has {reachable}; "
            "lower the budget, or allow more depth or branching"
        )
    return TokenTree.from_parents(SOLVERS[name].parents(rows, size))


def _fastest_tree(name: str, rows: Floats, budget: int, times: StepTime) -> TokenTree:
    """The fastest of the optimal trees of every size <= budget and depth <= len(rows) + 1, by branch and bound.

    F over the least time a tree of that size and depth can take bounds its speed from above; trees are rebuilt and
    timed exactly in the order of that bound, until it can no longer beat the best.
    """
    size = min(budget, times.largest())
    candidates = [
        (float(tokens) / times.step_at_least(n, d), n, d)
        for d in range(1, len(rows) + 2)
        for n, tokens in enumerate(SOLVERS[name].values(rows[: d - 1], size if d > 1 else 1), 1)
        if np.isfinite(tokens)
    ]
    best, fastest = TokenTree.chain(1), 1 / times.plain()
    for bound, n, d in sorted(candidates, key=lambda c: (-c[0], c[1], c[2])):
        if bound <= fastest:
            break
        tree = TokenTree.from_parents(SOLVERS[name].parents(rows[: d - 1], n))
        speed = expected_tokens(tree, rows.tolist() or [0.0]) / times.step(tree)
        if speed > fastest:
            best, fastest = tree, speed
    return best


def _largest_reachable(rows: Floats, cap: int) -> int:
    """Nodes of the complete tree, counted up to `cap`."""
    nodes = level = 1
    for _ in range(len(rows)):
        level *= rows.shape[1]
        nodes += level
        if nodes >= cap:
            return cap
    return nodes


def _pick(solver: str | None, rows: Floats, size: int) -> str:
    exact = best_first.is_non_increasing(rows)
    name = solver or ("best-first" if exact else "dp")
    if name not in SOLVERS:
        raise ArgumentError(f"solver: found {name!r}, expected {' or '.join(SOLVERS)}")
    if name == "best-first" and not exact:
        raise ArgumentError("solver best-first is exact only where acceptance never grows with rank; use dp")
    if size > LARGEST_BUDGET[name]:
        raise ArgumentError(f"budget: found {size}, expected at most {LARGEST_BUDGET[name]} for the solver {name}")
    return name


def _check(acceptance: Any, budget: int, depth: int, branching: int | None) -> None:
    for name, value in (("budget", budget), ("depth", depth), ("branching", branching)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
            raise ArgumentError(f"{name}: found {value!r}, expected a whole number >= 1")
    if depth > LARGEST_DEPTH:
        raise ArgumentError(f"depth: found {depth}, expected at most {LARGEST_DEPTH}")
    if depth == 1 and budget > 1:
        raise ArgumentError(f"depth 1 is the root alone and cannot hold a budget of {budget}: allow a depth of 2 or more, or set the budget to 1")
    if isinstance(acceptance, (list, tuple)) and acceptance and isinstance(acceptance[0], (list, tuple)):
        for level, row in enumerate(acceptance):
            check_acceptance(row, f"acceptance, level {level}")
        if len({len(row) for row in acceptance}) > 1:
            raise SequoiaPlanError(f"acceptance: rows of lengths {[len(r) for r in acceptance]}, expected equal lengths (pad with zeros)")
    else:
        check_acceptance(acceptance, "acceptance")
