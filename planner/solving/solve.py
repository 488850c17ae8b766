"""The compiler: acceptance and latencies in, the best token tree out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts import ArgumentError, Profile, TokenTree
from sequoia_plan.artifacts.cost import Acceptance, Floats, StepTime, acceptance_rows, expected_tokens, promise
from sequoia_plan.artifacts.merge import rounded
from sequoia_plan.artifacts.plan import Plan, provenance
from sequoia_plan.planner.solving.baselines import baseline as baseline_tree
from sequoia_plan.planner.solving.certificate import check
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.fastest import MOST_WORK, fastest, fastest_by_the_paper
from sequoia_plan.planner.solving.frontier import SOLVERS, Frontier, best_tree, check_input, pick
from sequoia_plan.planner.solving.noise import Candidate, alternative, intervals

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
    verifier: str | None = None,
    classes: bool = True,
) -> Solution:
    """The best token tree for what was measured, with a proof in its plan: `upper_bound`, and for the objective speed `speedup_bound`.

    Where a profile has several verifiers, a tree is solved for each of them. The best of these trees is taken, and its verifier is in the
    plan's `settings`; the plan's `alternatives` say by how much it is better than the others.

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
        verifier: solve for this one alone, of those that the profile has.
        classes: take a profile's counts by class of the parent (on the spine or off it) where the classes differ by more than noise.

    Raises:
        SequoiaPlanError: for impossible input, or if no tree of that size fits the depth and branching.
    """
    started = time.perf_counter()
    if isinstance(profile, Profile):
        each = [profile.under(name) for name in ([verifier] if verifier else profile.measured)]
        classes &= all(one.by_class for one in each)
        vectors: list[Any] = [one.acceptance if one_vector or not one.levels else _rows(one, classes) for one in each]
    elif verifier:
        raise ArgumentError(f"verifier: found {verifier!r} with an acceptance vector, which holds for one verifier; give a profile to choose by")
    else:
        each, vectors = [], [profile]
    latency = each[0].latency if each else None
    objective = objective or ("speed" if latency else "tokens")
    if objective not in OBJECTIVES:
        raise ArgumentError(f"objective: found {objective!r}, expected {', '.join(OBJECTIVES)}")
    if objective != "tokens" and latency is None and not baseline:
        raise ArgumentError(f"objective {objective} needs latencies: give a profile that has them, or choose the objective tokens")
    depth = min(depth, (each[0].drafting.deepest if each else None) or depth)
    found = []
    for measured, acceptance in itertools.zip_longest(each, vectors):
        check_input(acceptance, budget, depth, branching)
        if smooth:
            acceptance = isotonic(np.asarray(acceptance, float)).tolist()
        rows, times = acceptance_rows(acceptance, depth, branching), StepTime.of(measured) if measured else None
        bound: float | None = None
        if baseline:
            name, tree = f"baseline {baseline}", baseline_tree(baseline, budget, depth)
        else:
            name = pick(solver, rows, budget if objective == "tokens" or not times else min(budget, times.largest()))
            tree, bound = _choose(rows, budget, objective, name, times)
            name = "branch and bound" if bound is not None else name
        found.append(Candidate(tree, acceptance, rows, measured, times, promise(tree, acceptance, times), bound, name))
    by_tokens = objective == "tokens" or any(one.given.step_seconds is None for one in found)
    best = max(found, key=lambda one: one.worth(by_tokens))
    tree, given, times, measured = best.tree, best.given, best.times, best.measured

    upper = None if baseline else check(tree, best.acceptance, depth, branching, given.expected_tokens if objective == "tokens" else None).upper_bound
    interval = elsewhere = None
    if measured and measured.trials and not smooth and not baseline and tree.size > 1:

        def lost(vectors: Floats) -> float:
            there = acceptance_rows(vectors, depth, best.rows.shape[2])  # may rise where the acceptance does not: the solver is picked anew
            other = _choose(there, budget, objective, pick(None, there, tree.size), times, MOST_WORK // 10)[0]
            then = replace_fields(times, acceptance=vectors) if times and objective != "tokens" else None
            slower = then.step(tree) / then.step(other) if then else 1.0
            return max(0.0, 1 - expected_tokens(tree, vectors) / expected_tokens(other, vectors) / slower)

        interval, elsewhere = intervals(best, lost)
    plan = replace(
        provenance(measured),
        acceptance=_tuples(best.acceptance),
        budget=budget,
        depth=depth,
        branching=branching,
        objective=objective,
        solver=best.solver,
        upper_bound=upper,
        speedup_bound=best.bound,
        alternatives={one.verifier: alternative(best, one, profile, by_tokens, smooth) for one in found if one is not best},
        interval=interval,
        interval_new_kind=elsewhere,
        **given._asdict(),
    )
    if isinstance(profile, Profile):
        plan = replace(plan, profile_sha256=profile.sha256)
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


def _rows(profile: Profile, classes: bool) -> Any:
    """p[level][k] or p[level][class][k] to six digits; counts may exceed their trials by rounding."""
    rows = np.array(profile.by_class if classes else profile.by_level)
    shares = (rows / np.maximum(1.0, rows.sum(-1, keepdims=True))).tolist()
    return [[list(rounded(row)) for row in level] for level in shares] if classes else [list(rounded(row)) for row in shares]


def _tuples(acceptance: Any) -> Any:
    return tuple(map(_tuples, acceptance)) if isinstance(acceptance, Sequence) else acceptance
