"""The compiler: acceptance and latencies in, the best token tree out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts import ArgumentError, Profile, TokenTree
from sequoia_plan.artifacts.cost import (
    AcceptanceProbs,
    Floats,
    StepTime,
    acceptance_rows,
    expected_tokens,
    predict,
)
from sequoia_plan.artifacts.plan import Alternative, Interval, Plan, provenance
from sequoia_plan.planner.solving.acceptance import level_probs
from sequoia_plan.planner.solving.baselines import baseline as baseline_tree
from sequoia_plan.planner.solving.certificate import check
from sequoia_plan.planner.solving.kinds import figures_by_kind
from sequoia_plan.planner.solving.noise import SolvedTree, intervals
from sequoia_plan.planner.solving.portfolio import Limits, solve_portfolio
from sequoia_plan.planner.solving.replay import MAX_RUN
from sequoia_plan.planner.solving.speed.fastest import MAX_WORK, fastest_tree
from sequoia_plan.planner.solving.speed.isotonic import isotonic
from sequoia_plan.planner.solving.tokens.frontier import best_tree, check_input, pick_solver

OBJECTIVES = ("speed", "tokens")


@dataclass(frozen=True)
class Solution:
    """The best tree; its plan holds the predictions and the proofs.

    Args:
        tree: the token tree.
        seconds: the time that solving took.
        replayed_speedup: with prompt lookup, the speed-up when the profile's recorded texts are
            decoded again on paper, to compare with the predicted one; else None.
    """

    tree: TokenTree
    seconds: float
    replayed_speedup: float | None = None

    @property
    def plan(self) -> Plan:
        """Expected tokens, predicted speed-up, bounds and intervals."""
        return self.tree.plan


@dataclass(frozen=True)
class Problem:
    """The arguments of `solve` that hold for every verifier, with defaults filled in."""

    budget: int
    depth: int
    branching: int | None
    objective: str
    smooth: bool
    baseline: str | None


def solve(
    profile: Profile | AcceptanceProbs,
    budget: int,
    depth: int,
    branching: int | None = None,
    objective: str | None = None,
    smooth: bool = False,
    baseline: str | None = None,
    one_vector: bool = False,
    verifier: str | None = None,
    classes: bool = True,
    lookup: bool | None = None,
    draft: bool = True,
) -> Solution:
    """Find the best token tree for the measurements, with a proof in its plan.

    The proof is `upper_bound`, and for the objective speed `speedup_bound`.

        read acceptance and latencies of each verifier in the profile
        for each verifier: solve for the tree with the highest objective
        choose the tree with the most expected tokens a second (or a step)
        with prompt lookup: solve for one tree for each class of match with that verifier
        record its predictions, proofs, intervals and alternatives in its plan

    The verifier that was chosen is in the plan's `settings`; the plan's `alternatives` say by how
    much it is better than the others.

    Args:
        profile: a Profile, or an acceptance vector p[1..B], or one such vector per level, or per
            level one for parents on the spine (every rank on their path from the root is 1) and
            one for all others.
        budget: size, the root included: exactly this many nodes for "tokens", at most for "speed"
            and "paper".
        depth: levels, the root's included, at most.
        branching: children of a node, at most; the acceptance vector's length if None.
        objective: "tokens" maximises F(T) (Sequoia, arXiv 2402.12374, section 3.1); "speed"
            maximises F(T) over the predicted step time, each draft pass at its own width; "paper"
            maximises F / (t(n) + d c) (section 3.3). None: "speed" if latencies are known, else
            "tokens".
        smooth: replace each vector by the closest one that never increases with rank. A modelling
            choice.
        baseline: do not solve; take this tree (see baselines.py) and predict its expected tokens
            and speed.
        one_vector: take a profile's one vector for all levels, as the paper does, even if it has
            counts by level.
        verifier: solve for this verifier alone, one of those that the profile has.
        classes: take a profile's counts by class of the parent (on the spine or off it) where the
            classes differ by more than noise.
        lookup: solve for one tree for each class of match, whose spine (the root, its first child,
            that node's first child, ...) may be looked up in the text (see portfolio.py). None does
            so where the profile has counts for it and the objective is speed; True refuses
            otherwise.
        draft: False plans prompt lookup alone, for decoding without a draft.

    Returns:
        The tree with its plan, and the time that solving took.

    Raises:
        SequoiaPlanError: for impossible input, or if no tree of that size fits the depth and
            branching.
    """
    started = time.perf_counter()
    if not draft:
        if not isinstance(profile, Profile):
            raise ArgumentError("draft none: found an acceptance vector, expected a profile")
        profile, lookup = profile.without_draft(), True
    measurements = _read_measurements(profile, verifier, one_vector, classes)
    first_profile, _ = measurements[0]
    problem = Problem(
        budget=budget,
        depth=_depth_limit(depth, first_profile),
        branching=branching,
        objective=_checked_objective(objective, first_profile, baseline),
        smooth=smooth,
        baseline=baseline,
    )
    with_lookup = _checked_lookup(lookup, first_profile, problem, one_vector)
    solved_trees = [_solve_for_verifier(*measurement, problem) for measurement in measurements]
    best, alternatives = _choose(solved_trees, problem.objective)
    plan = _annotated_plan(best, alternatives, problem, with_lookup)
    if isinstance(profile, Profile):
        plan = replace(plan, profile_sha256=profile.sha256)  # of all verifiers
    if not with_lookup:
        return Solution(TokenTree(best.tree.parents, plan), time.perf_counter() - started)
    assert best.profile is not None and best.times is not None
    limits = Limits(budget, min(depth, MAX_RUN), problem.depth, branching)
    solved = solve_portfolio(best.profile, best.tree, best.times, limits, plan)
    by_kind = figures_by_kind(best.profile, solved.tree, best.times)
    plan = replace(
        solved.tree.plan,
        speedup_by_kind={kind: figures.speedup for kind, figures in by_kind.items()},
        tokens_by_kind={kind: figures.tokens_per_step for kind, figures in by_kind.items()},
        text_speedups={kind: figures.text_speedups for kind, figures in by_kind.items()},
    )
    tree = TokenTree(solved.tree.parents, plan, by_match=solved.tree.by_match)
    return Solution(tree, time.perf_counter() - started, solved.replayed_speedup)


def _read_measurements(
    profile: Profile | AcceptanceProbs, verifier: str | None, one_vector: bool, classes: bool
) -> list[tuple[Profile | None, Any]]:
    """Each verifier's own profile (None for a bare acceptance), and its acceptance.

    The acceptance is p[rank], p[level][rank] or p[level][class][rank], where the class of a node is
    0 on the spine (the root, its first child, that node's first child, ...) and 1 off it.
    `one_vector` [rank].
    """
    if not isinstance(profile, Profile):
        if verifier:
            raise ArgumentError(
                f"verifier: found {verifier!r} with an acceptance vector, which holds for one "
                "verifier; give a profile to choose by"
            )
        return [(None, profile)]
    names = [verifier] if verifier else profile.all_verifiers
    profiles = [profile.for_verifier(name) for name in names]
    by_class = classes and all(view.acceptance_by_class for view in profiles)
    return [
        (view, view.acceptance if one_vector or not view.levels else level_probs(view, by_class))
        for view in profiles
    ]


def _depth_limit(depth: int, profile: Profile | None) -> int:
    """At most `depth` levels, and no more than the draft can make."""
    max_depth = profile.drafting.max_depth if profile else None
    return min(depth, max_depth or depth)


def _checked_objective(objective: str | None, profile: Profile | None, baseline: str | None) -> str:
    """The objective, "speed" or "tokens" by default; refuse one that lacks its latencies."""
    has_latency = profile is not None and profile.latency is not None
    objective = objective or ("speed" if has_latency else "tokens")
    if objective not in OBJECTIVES:
        raise ArgumentError(f"objective: found {objective!r}, expected {', '.join(OBJECTIVES)}")
    if objective != "tokens" and not has_latency and not baseline:
        raise ArgumentError(
            f"objective {objective} needs latencies: give a profile that has them, or choose the "
            "objective tokens"
        )
    return objective


def _checked_lookup(
    lookup: bool | None, profile: Profile | None, problem: Problem, one_vector: bool
) -> bool:
    """Whether to solve for trees by match; refuse if that is asked for and cannot be done."""
    has_counts = profile is not None and profile.lookup is not None
    is_own_tree = problem.baseline or problem.smooth or one_vector
    is_possible = has_counts and problem.objective == "speed" and not is_own_tree
    if lookup and not is_possible:
        obstacle = "a profile without lookup counts (profile again)"
        if has_counts:
            obstacle = "another objective, a baseline or a changed acceptance"
        raise ArgumentError(
            f"lookup: found {obstacle}, expected counts by class of match and the objective speed"
        )
    return is_possible and lookup is not False


def _solve_for_verifier(profile: Profile | None, acceptance: Any, problem: Problem) -> SolvedTree:
    """The best tree for one verifier (or the named baseline tree), with its prediction.

    `acceptance` [rank].
    """
    check_input(acceptance, problem.budget, problem.depth, problem.branching)
    if problem.smooth:
        acceptance = isotonic(np.asarray(acceptance, float)).tolist()
    times = StepTime.from_measured(profile) if profile else None
    speed_bound: float | None = None
    if problem.baseline:
        solver = f"baseline {problem.baseline}"
        tree = baseline_tree(problem.baseline, problem.budget, problem.depth)
    else:
        rows = acceptance_rows(acceptance, problem.depth, problem.branching)
        tree, speed_bound = _solve_rows(rows, problem, times)
        solver = "branch and bound"  # the search for the objective speed has its own solver
        if speed_bound is None:
            solver = pick_solver(rows, problem.budget)
    prediction = predict(tree, acceptance, times)
    return SolvedTree(tree, acceptance, profile, times, prediction, speed_bound, solver)


def _solve_rows(
    rows: Floats, problem: Problem, times: StepTime | None, max_work: int = MAX_WORK
) -> tuple[TokenTree, float | None]:
    """The best tree, and for the objective speed a bound on the speed-up of any tree.

    `rows` float64 [depth - 1, classes, branching].
    """
    if problem.objective == "tokens" or times is None:
        return best_tree(rows, problem.budget), None
    fastest = fastest_tree(rows, problem.budget, times, max_work)
    # The bound is in tokens a second; plain decoding makes one token in plain_seconds.
    return fastest.tree, fastest.bound * times.plain_seconds()


def _choose(
    solved_trees: Sequence[SolvedTree], objective: str
) -> tuple[SolvedTree, dict[str, Alternative]]:
    """The best tree, and how the trees for the other verifiers compare with it, by verifier.

    The best tree has the most expected tokens a second, or a step if the objective is "tokens" or a
    step time is unknown.
    """
    has_times = all(solved_tree.prediction.step_seconds is not None for solved_tree in solved_trees)
    by_tokens = objective == "tokens" or not has_times
    best = max(solved_trees, key=lambda solved_tree: solved_tree.score(by_tokens))
    alternatives = {}
    for solved_tree in solved_trees:
        if solved_tree is best:
            continue
        tokens, step_seconds, _ = solved_tree.prediction
        assert tokens is not None
        alternatives[solved_tree.verifier] = Alternative(
            size=solved_tree.tree.size,
            depth=solved_tree.tree.depth,
            expected_tokens=tokens,
            advantage=best.score(by_tokens) / solved_tree.score(by_tokens),
            step_seconds=step_seconds,
        )
    return best, alternatives


def _annotated_plan(
    best: SolvedTree, alternatives: dict[str, Alternative], problem: Problem, with_lookup: bool
) -> Plan:
    """The plan of the chosen tree: provenance, limits, prediction, proofs and intervals."""
    upper_bound: float | None = None
    if not problem.baseline and not with_lookup:
        tokens = best.prediction.expected_tokens
        # For the objective tokens the tree is the optimum of its size, so no solver runs again.
        optimum = tokens if problem.objective == "tokens" else None
        certificate = check(best.tree, best.acceptance, problem.depth, problem.branching, optimum)
        upper_bound = certificate.upper_bound
    interval = interval_new_kind = None
    if not with_lookup:
        interval, interval_new_kind = _intervals_if_known(best, problem)
    return replace(
        provenance(best.profile),
        acceptance=_tuples(best.acceptance),
        budget=problem.budget,
        depth=problem.depth,
        branching=problem.branching,
        objective=problem.objective,
        solver=best.solver,
        upper_bound=upper_bound,
        speedup_bound=best.speedup_bound,
        alternatives=alternatives,
        interval=interval,
        interval_new_kind=interval_new_kind,
        **best.prediction._asdict(),
    )


def _intervals_if_known(
    best: SolvedTree, problem: Problem
) -> tuple[Interval | None, Interval | None]:
    """The intervals of `noise.intervals`, where the tree was solved for acceptance as measured."""
    is_measured = best.profile is not None and best.profile.trials > 0 and not problem.smooth
    if not is_measured or problem.baseline or best.tree.size == 1:
        return None, None
    return intervals(best, lambda acceptance: _share_lost(best, problem, acceptance))


def _share_lost(solved_tree: SolvedTree, problem: Problem, acceptance: Floats) -> float:
    """The share of speed (or of tokens) that a tree loses against the best for `acceptance`.

    `acceptance` float64 [levels, ranks].
    """
    rows = acceptance_rows(acceptance, problem.depth, problem.branching)
    # A tenth of the usual work is enough: the share is an estimate, not a proof.
    best, _ = _solve_rows(rows, problem, solved_tree.times, MAX_WORK // 10)
    time_ratio = 1.0
    if solved_tree.times and problem.objective != "tokens":
        times = replace_fields(solved_tree.times, acceptance=acceptance)
        time_ratio = times.step_seconds(solved_tree.tree) / times.step_seconds(best)
    tokens_ratio = expected_tokens(solved_tree.tree, acceptance) / expected_tokens(best, acceptance)
    return max(0.0, 1 - tokens_ratio / time_ratio)


def _tuples(acceptance: Any) -> Any:
    """Turn nested sequences of probabilities into nested tuples."""
    return tuple(map(_tuples, acceptance)) if isinstance(acceptance, Sequence) else acceptance
