"""The compiler: acceptance and latencies in, the best token tree out."""

import math
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sequoia_plan.artifacts import Acceptance, ArgumentError, Latency, Plan, Profile, TokenTree
from sequoia_plan.artifacts.plan import provenance, tool_version
from sequoia_plan.artifacts.prediction import predict
from sequoia_plan.artifacts.profile import takes_chains_only
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.match.by_match import trees_by_match
from sequoia_plan.planner.solving.match.recorded import recorded
from sequoia_plan.planner.solving.problem import Problem, SpeedProblem, proven_bound
from sequoia_plan.planner.solving.promised import single_tree_figures
from sequoia_plan.planner.solving.speed.fastest import fastest_tree
from sequoia_plan.planner.solving.tokens.frontier import (
    best_tree,
    check_limits,
    frontier,
    most_tokens,
    pick_solver,
)

__all__ = ["Solution", "frontier", "solve"]
OBJECTIVES = ("speed", "tokens")


@dataclass(frozen=True)
class Solution:
    """The best tree; its plan holds the predictions and the proofs.

    Args:
        tree: the token tree.
        seconds: the time that solving took.
    """

    tree: TokenTree
    seconds: float

    @property
    def plan(self) -> Plan:
        """Expected tokens, predicted speed-up, bounds and intervals."""
        return self.tree.plan


def solve(
    profile: Profile | Acceptance | Any,
    *,
    budget: int,
    depth: int,
    branching: int | None = None,
    objective: str | None = None,
    lookup: bool = True,
    draft: bool = True,
) -> Solution:
    """Find the best token tree for the measurements, with a proof in its plan.

        solve for the tree with the highest objective
        with prompt lookup: solve for one tree for each match class
        record predictions, proofs and intervals in its plan
        with latencies at longer contexts: the same for each, as a tree by context

    The proof is `upper_bound`, and for the objective speed `speedup_bound`.

    Args:
        profile: the measurements; or an acceptance alone, also as `Acceptance.given` takes it.
        budget: size, the root included: exactly this many nodes for "tokens", at most for "speed".
        depth: levels, the root's included, at most.
        branching: children of a node, at most; as many as the acceptance has ranks if None. It is
            1 where the target has layers with a recurrent state.
        objective: "tokens" maximises F(T) (Sequoia, arXiv 2402.12374, section 3.1); "speed"
            maximises F(T) over the predicted step time, each draft pass at its own width. None:
            "speed" if latencies are known, else "tokens".
        lookup: where the profile has texts for it and the objective is speed, solve for one tree
            for each match class, whose spine (the root, its first child, that node's first
            child, ...) may be looked up in the text (see match/portfolio.py).
        draft: False plans prompt lookup alone, for decoding without a draft.

    Returns:
        The tree with its plan, and the time that solving took.

    Raises:
        SequoiaPlanError: for impossible input, or if no tree of that size fits the depth and
            branching.
    """
    started = time.perf_counter()
    if not isinstance(profile, Profile):
        profile = Profile(Acceptance.given(profile))
        origin: dict[str, Any] = {"tool": tool_version()}
    else:
        profile = profile if draft else profile.without_draft()
        origin = provenance(profile)
    objective = _checked_objective(objective, profile)
    drafted_depth = min(depth, profile.drafting.max_depth or depth)  # what the draft can make
    if takes_chains_only(profile.models):
        branching, budget = 1, min(budget, drafted_depth if objective == "tokens" else depth)
    check_limits(budget, depth, branching)
    problem = Problem(profile.acceptance.at_depth(drafted_depth, branching), budget)
    origin |= {"budget": budget, "depth": drafted_depth, "branching": branching}
    measured = profile  # as a name whose type does not change

    def solved_with(latency: Latency | None) -> TokenTree:
        """The best tree, with its plan, for one context's latencies; None solves for tokens."""
        times = StepTime(latency, measured.drafting) if latency else None
        recording = None
        if times and objective == "speed":
            timed = SpeedProblem(problem.rates, budget, times)
            if lookup and len(problem.rates):
                recording = recorded(measured, timed, depth, branching)
        if not draft and not recording:
            raise ArgumentError(
                "draft none: found no lookup, or another objective than speed, expected both: "
                "nothing else proposes tokens then; give latencies, and leave --no-lookup out"
            )
        if not times or objective == "tokens":
            tree = best_tree(problem)
            figures = _tree_figures(tree, measured, times)
            figures["upper_bound"] = figures["expected_tokens"]  # it is the optimum
        elif recording:
            tree, figures = trees_by_match(measured, recording, fastest_tree(timed).tree)
        else:
            tree, figures = _fastest_tree(measured, timed)
        # lookup takes more time than it saves; without a draft, nothing else proposes tokens
        if recording and draft and figures["predicted_speedup"] < max(1, figures["tree_speedup"]):
            tree, figures = _fastest_tree(measured, timed)
        latency = latency and latency.without_spread()
        solver = pick_solver(problem).NAME if objective == "tokens" else "branch and bound"
        plan = Plan(**origin, **figures, latency=latency, objective=objective, solver=solver)
        return replace(tree, plan=plan)

    latencies = [profile.latency, *(profile.longer if objective == "speed" else ())]
    by_context = {
        # each is for the texts that are nearer to its context, in ratio
        round(math.sqrt(shorter.context * longer.context)): solved_with(longer)
        for shorter, longer in pairwise(filter(None, latencies))
    }
    tree = replace(solved_with(profile.latency), by_context=by_context)
    return Solution(tree, time.perf_counter() - started)


def _checked_objective(objective: str | None, profile: Profile) -> str:
    """The objective, "speed" or "tokens" by default; refuse one that lacks its latencies."""
    objective = objective or ("speed" if profile.latency else "tokens")
    if objective not in OBJECTIVES:
        raise ArgumentError(f"objective: found {objective!r}, expected {' or '.join(OBJECTIVES)}")
    if objective == "speed" and not profile.latency:
        raise ArgumentError(
            "objective speed needs latencies: give a profile that has them, or choose the "
            "objective tokens"
        )
    return objective


def _fastest_tree(profile: Profile, problem: SpeedProblem) -> tuple[TokenTree, dict[str, Any]]:
    """The fastest tree, and what its plan says."""
    tree, _, bound = fastest_tree(problem)
    figures = _tree_figures(tree, profile, problem.times)
    bound *= problem.times.plain_seconds()
    return tree, figures | {
        "upper_bound": max(figures["expected_tokens"], most_tokens(problem, tree.size)),
        "speedup_bound": proven_bound(figures["predicted_speedup"], bound),
    }


def _tree_figures(tree: TokenTree, profile: Profile, times: StepTime | None) -> dict[str, Any]:
    """The predictions and intervals of a single tree, as its plan names them."""
    return {
        **predict(tree, profile.acceptance, times),
        "acceptance": profile.acceptance.without_counts(),
        **single_tree_figures(tree, profile, times),
    }
