"""The planned tree for what was measured in an engine that drafts chains."""

from collections import Counter

from sequoia_plan.artifacts import Acceptance, Profile
from sequoia_plan.artifacts.latency import Latency
from sequoia_plan.engines.chain_replay import ReplayModel
from sequoia_plan.engines.prediction import StepTimes
from sequoia_plan.planner.solving.solve import solve


def planned_tree(
    model: ReplayModel, times: StepTimes, branching: int | None = None
) -> dict[str, float]:
    """Tokens a second of the best tree if the engine verified trees; none without candidates.

    A child of rank k is accepted as often as the text's token was the draft's k-th candidate. The
    target takes for n nodes what it takes for a chain of n, and a draft pass over several nodes
    takes as many times longer as one of the target does.
    """
    ranks = Counter(
        [*proposal.candidates, token].index(token)
        for text in model.texts
        for proposal, token in zip(text.proposals, text.tokens[1:], strict=False)
        if proposal.candidates
    )
    rates = [ranks[rank] / ranks.total() for rank in range(max(ranks, default=0))]
    if not rates:
        return {}
    one = times.target_pass(1)
    reading = max(times.rest_seconds.get(0, 0.0), 0.0)
    target = {n: t + reading * (n > 1) for n, t in times.target_seconds.items()}
    draft = {n: times.pass_seconds * t / one for n, t in times.target_seconds.items()}
    profile = Profile(acceptance=Acceptance([[rates]]), latency=Latency(target=target, draft=draft))
    tree = solve(profile, budget=max(target), depth=16, branching=branching).tree
    return {
        f"the planned tree, of {tree.size} nodes": (tree.plan.predicted_speedup or 1) / one,
        "no tree passes": (tree.plan.speedup_bound or 1) / one,
    }
