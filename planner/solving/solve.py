"""The compiler: acceptance and latencies in, the best token tree out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts import ArgumentError, Profile, TokenTree
from sequoia_plan.artifacts.cost import Acceptance, Floats, StepTime, acceptance_rows, expected_tokens, promise
from sequoia_plan.artifacts.plan import Interval, Plan, provenance
from sequoia_plan.artifacts.profile import tally
from sequoia_plan.artifacts.rates import rates
from sequoia_plan.artifacts.uncertainty import Z95, ends, step_time_error, trials_of_a_new_kind
from sequoia_plan.planner.solving.baselines import baseline as baseline_tree
from sequoia_plan.planner.solving.certificate import check
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.fastest import MOST_WORK, fastest, fastest_by_the_paper
from sequoia_plan.planner.solving.frontier import LARGEST_BUDGET, SOLVERS, Frontier, best_tree, check_input, pick

OBJECTIVES = ("speed", "tokens", "paper")


@dataclass(frozen=True)
class Solution:
    """The best tree; what is promised and proven of it is in its plan.

    Args:
        tree: the token tree.
        seconds: what solving took.
    """

    tree: TokenTree
    seconds: float

    @property
    def plan(self) -> Plan:
        """Expected tokens, predicted speed-up, bounds and intervals."""
        return self.tree.plan


def solve(
    profile: Profile | Acceptance,
    budget: int,
    depth: int,
    branching: int | None = None,
    objective: str | None = None,
    solver: str | None = None,
    smooth: bool = False,
    baseline: str | None = None,
    one_vector: bool = False,
    classes: bool = True,
) -> Solution:
    """The best token tree for what was measured, with a proof in its plan: `upper_bound`, and for the objective speed `speedup_bound`.

    Args:
        profile: a Profile, or an acceptance vector p[1..B], or one such row per level, or per level one for parents on the spine (every rank
            on their path from the root is 1) and one for all others.
        budget: size, the root included: exactly this many nodes for "tokens", at most for "speed" and "paper".
        depth: levels, the root's included, at most.
        branching: children a node may have, at most; the acceptance vector's length if None.
        objective: "tokens" maximises F(T) (Sequoia, arXiv 2402.12374, section 3.1); "speed" maximises F(T) over the predicted step
            time, each draft pass at its own width; "paper" maximises F / (t(n) + d c) (section 3.3). None: "speed" if latencies
            are known, else "tokens".
        solver: of the objectives tokens and paper: "best-first", "hull" or "dp"; None picks best-first where it is exact, else hull.
            For speed it is always "branch and bound".
        smooth: replace the vector by the closest one that never increases with rank. A modelling choice.
        baseline: do not solve; take this tree (see baselines.py) and predict its expected tokens and speed.
        one_vector: take a profile's one vector for all levels, as the paper does, even if it has counts by level.
        classes: take a profile's counts by class of the parent (on the spine, where every rank on its path is 1, or off it) where it has them.

    Raises:
        SequoiaPlanError: for impossible input, or if no tree of that size fits the depth and branching.
    """
    started = time.perf_counter()
    measured = profile if isinstance(profile, Profile) else None
    acceptance: Any = profile if measured is None else measured.acceptance if one_vector or not measured.levels else _rows(measured, classes)
    check_input(acceptance, budget, depth, branching)
    latency = measured.latency if measured else None
    objective = objective or ("speed" if latency else "tokens")
    if objective not in OBJECTIVES:
        raise ArgumentError(f"objective: found {objective!r}, expected {', '.join(OBJECTIVES)}")
    if objective != "tokens" and latency is None and not baseline:
        raise ArgumentError(f"objective {objective} needs latencies: give a profile that has them, or choose the objective tokens")
    if smooth:
        acceptance = isotonic(np.asarray(acceptance, float)).tolist()

    times = StepTime.of(measured) if measured else None
    rows = acceptance_rows(acceptance, depth, branching)
    bound: float | None = None
    if baseline:
        name, tree = f"baseline {baseline}", baseline_tree(baseline, budget, depth)
    else:
        name = pick(solver, rows, budget if objective == "tokens" or not times else min(budget, times.largest()))
        tree, bound = _choose(rows, budget, objective, name, times)
        name = "branch and bound" if bound is not None else name

    given = promise(tree, acceptance, times)
    upper = None if baseline else check(tree, acceptance, depth, branching, given.expected_tokens if objective == "tokens" else None).upper_bound
    interval = elsewhere = None
    if measured and measured.trials and not smooth and not baseline and tree.size > 1:

        def lost(vectors: Floats) -> float:
            there = acceptance_rows(vectors, depth, rows.shape[2])  # may rise where `acceptance` does not: the solver is picked anew
            best = _choose(there, budget, objective, pick(None, there, tree.size), times, MOST_WORK // 10)[0]
            slower = times.step(tree) / times.step(best) if times and objective != "tokens" else 1.0
            return max(0.0, 1 - expected_tokens(tree, vectors) / expected_tokens(best, vectors) / slower)

        table = np.atleast_2d(np.asarray(acceptance, float))
        alike, new = _observations(tree, measured, table)
        interval = _interval(tree, table, alike, given.predicted_speedup, times, lost)
        elsewhere = None if new is None else _interval(tree, table, new, given.predicted_speedup, times, lost)
    plan = replace(
        provenance(measured),
        acceptance=_tuples(acceptance),
        budget=budget,
        depth=depth,
        branching=branching,
        objective=objective,
        solver=name,
        upper_bound=upper,
        speedup_bound=bound,
        interval=interval,
        interval_new_kind=elsewhere,
        **given._asdict(),
    )
    return Solution(TokenTree(tree.parents, plan), time.perf_counter() - started)


def _choose(rows: Floats, budget: int, objective: str, name: str, times: StepTime | None, most_work: int = MOST_WORK) -> tuple[TokenTree, float | None]:
    """The best tree, and for the objective speed a bound on the speed-up of any."""
    if objective == "tokens" or times is None:
        return best_tree(rows, budget, name), None
    if objective == "paper":
        values = SOLVERS[name].frontier(rows, min(budget, times.largest()))
        return fastest_by_the_paper(Frontier(tuple(values), rows, name), times), None
    found = fastest(rows, budget, times, most_work)
    return found.tree, found.bound * times.plain()


def _tuples(acceptance: Any) -> Any:
    return tuple(map(_tuples, acceptance)) if isinstance(acceptance, Sequence) else acceptance


def _rows(profile: Profile, classes: bool) -> Any:
    """p[level][k] or p[level][class][k] to six digits; counts may exceed their trials by rounding."""
    rows = np.array((classes and profile.by_class) or profile.by_level)
    return (rows / np.maximum(1.0, rows.sum(-1, keepdims=True))).round(6).tolist()


def _observations(tree: TokenTree, profile: Profile, acceptance: Floats) -> tuple[Floats, Floats | None]:
    """How many independent observations each vector of the acceptance is worth, [levels] or [levels, classes]: for prompts like the profiled
    ones, and for prompts of a new kind (None if the profile does not tell)."""
    classes = acceptance.shape[1] if acceptance.ndim > 2 else 1
    seen = rates(*tally(profile.levels, classes))[1] if len(acceptance) > 1 else np.ones((1, 1))
    alike = profile.trials * seen / seen.sum()
    new = None
    if profile.kinds:
        trials, counts = (np.stack(each) for each in zip(*(tally(levels, classes) for levels in profile.kinds.values()), strict=True))
        pooled = (trials, counts) if len(acceptance) > 1 else (trials.sum(1, keepdims=True), counts.sum(1, keepdims=True))
        new = trials_of_a_new_kind(tree, acceptance.reshape(*seen.shape, -1), *pooled)
    shape = acceptance.shape[:-1]
    return alike.reshape(shape), None if new is None else np.minimum(new, alike).reshape(shape)


def _interval(tree: TokenTree, acceptance: Floats, trials: Floats, speedup: float | None, times: StepTime | None, lost: Callable[[Floats], float]) -> Interval:
    """What a 95 % interval does to this tree's promise, and to the choice itself.

    Args:
        trials: float64 [levels], independent observations behind each level of `acceptance`.
        lost: of an acceptance, the share that `tree` falls short of the tree that would be chosen for it.
    """
    vectors = ends(tree, acceptance, trials)
    tokens = (expected_tokens(tree, vectors[0]), expected_tokens(tree, vectors[1]))
    now = expected_tokens(tree, acceptance)
    sped: tuple[float, float] | None = None
    if speedup is not None and times is not None:
        clock = Z95 * step_time_error(tree, times)
        low_end, high_end = (speedup * math.exp(sign * math.hypot(math.log(end / now), clock)) for sign, end in zip((-1, 1), tokens, strict=True))
        sped = low_end, high_end
    low, high = vectors
    return Interval(0.95, tokens, sped, (lost(low), lost(high)) if tree.size <= LARGEST_BUDGET["hull"] else None)
