"""The compiler: acceptance and latencies in, the best token tree out."""

import math
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from msgspec import structs

from sequoia_plan.artifacts import Acceptance, ArgumentError, Plan, Profile, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.plan import provenance, tool_version
from sequoia_plan.artifacts.prediction import predict
from sequoia_plan.artifacts.profile import takes_chains_only
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.certificate import check
from sequoia_plan.planner.solving.match.by_match import trees_by_match
from sequoia_plan.planner.solving.match.portfolio import Limits
from sequoia_plan.planner.solving.match.replay import MAX_RUN, recorded_texts
from sequoia_plan.planner.solving.promised import single_tree_figures
from sequoia_plan.planner.solving.speed.fastest import fastest_tree
from sequoia_plan.planner.solving.tokens.frontier import best_tree, check_limits, pick_solver

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
        with prompt lookup: solve for one tree for each class of match
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
            for each class of match, whose spine (the root, its first child, that node's first
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
    if takes_chains_only(profile.models):
        branching, budget = 1, min(budget, depth)
    objective = _checked_objective(objective, profile)
    check_limits(budget, depth, branching)
    max_depth = profile.drafting.max_depth or depth  # what the draft can make
    limits = Limits(budget, min(depth, MAX_RUN), min(depth, max_depth), branching)
    times = StepTime.from_measured(profile) if objective == "speed" else None
    texts = recorded_texts(profile.lookup) if lookup and times and profile.lookup else []
    if not draft and not texts:
        raise ArgumentError(
            "draft none: found no lookup, or another objective than speed, expected both: nothing "
            "else proposes tokens then; give latencies, and leave --no-lookup out"
        )
    rows = profile.acceptance.at_depth(limits.drafted_depth, branching)
    solver = "branch and bound" if times else pick_solver(rows, budget).NAME
    tree, speed_bound = _best_tree(rows, budget, times)
    if texts and times:
        times = StepTime(times.latency, times.drafting, looks_up=True)
        tree, figures = trees_by_match(profile, texts, tree, times, limits)
    else:
        figures = _tree_figures(tree, speed_bound, profile, times, limits)
    plan = Plan(
        **origin,
        **figures,
        budget=budget,
        depth=limits.drafted_depth,
        branching=branching,
        objective=objective,
        solver=solver,
    )
    by_context = {}
    latencies = [times.latency, *profile.longer] if times else []
    for shorter, longer in pairwise(latencies):
        part = solve(
            structs.replace(profile, latency=longer, longer=()),
            budget=budget,
            depth=depth,
            branching=branching,
            objective=objective,
            lookup=lookup,
            draft=draft,
        ).tree
        part_plan = structs.replace(part.plan, profile_sha256=plan.profile_sha256)
        # each is for the texts that are nearer to its context, in ratio
        start = round(math.sqrt(shorter.context * longer.context))
        by_context[start] = replace(part, plan=part_plan)
    tree = TokenTree(tree.parents, plan, by_match=tree.by_match, by_context=by_context)
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


def _best_tree(rows: Floats, budget: int, times: StepTime | None) -> tuple[TokenTree, float]:
    """The fastest tree and a bound on tokens a second; without times the tree of most tokens.

    `rows` float64 [depth - 1, node classes, branching].
    """
    if times is None:
        return best_tree(rows, budget), math.inf
    fastest = fastest_tree(rows, budget, times)
    return fastest.tree, fastest.bound


def _tree_figures(
    tree: TokenTree, speed_bound: float, profile: Profile, times: StepTime | None, limits: Limits
) -> dict[str, Any]:
    """The plan's predictions, proofs and intervals of a single tree.

    `times` is None for the objective tokens.
    """
    acceptance, depth, branching = profile.acceptance, limits.drafted_depth, limits.branching
    prediction = predict(tree, acceptance, StepTime.from_measured(profile))
    # For the objective tokens the tree is the optimum of its size, so no solver runs again.
    optimum = None if times else prediction.expected_tokens
    return {
        **prediction._asdict(),
        "acceptance": acceptance.without_counts(),
        "upper_bound": check(tree, acceptance, depth, branching, optimum).upper_bound,
        "speedup_bound": speed_bound * times.plain_seconds() if times else None,
        **single_tree_figures(tree, profile, StepTime.from_measured(profile)),
    }
