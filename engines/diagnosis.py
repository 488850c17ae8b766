"""What measurements say beyond the best setting: where time goes, bounds, and what would help."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from sequoia_plan.artifacts.counts import ALL_KINDS
from sequoia_plan.engines.chain_replay import DraftedText, ReplayModel
from sequoia_plan.engines.plan import NONE, Drafting, EnginePlan
from sequoia_plan.engines.planning import FREE, best_of_each
from sequoia_plan.engines.timing import StepTimes

PARTS = (
    "the target's pass over one token",
    "its further tokens",
    "the draft's passes",
    "the draft's reading, and the rest",
)
"""Names of `StepTimes.parts`."""


def diagnosed(
    plan: EnginePlan,
    measurements: Sequence[tuple[ReplayModel, StepTimes]],
    kinds: Sequence[str | None],
    tree: Callable[[ReplayModel, StepTimes], dict[str, float]],
) -> EnginePlan:
    """Adds to each context what its recorded texts and times say, and the planned tree."""
    parts = []
    for part, (model, times) in zip(plan.contexts, measurements, strict=True):
        best = [cell for cell in best_of_each(part.cells) if cell.drafting != NONE]
        by_name = {str(c.drafting): tokens_by_kind(model, c.drafting, kinds) for c in best}
        passes = times.target_seconds.items()
        bounds = {"no draft passes, always right and free": max(size / t for size, t in passes)}
        found: dict[str, Any] = {"tokens_by_kind": by_name, "tree": tree(model, times)}
        for cell in filter(lambda cell: cell.drafting.is_chain, best):
            parts_of_step = model.parts_per_token(cell.drafting, times) * cell.tokens_per_step
            found["step"] = dict(zip(PARTS, parts_of_step.tolist(), strict=True))
            free = best_speed(model, times, draft=0, width=0)
            bounds[FREE] = free
            changes = {
                "a draft of half the cost": best_speed(model, times, draft=0.5),
                "half the rise of the target's pass with its tokens": best_speed(
                    model, times, width=0.5
                ),
                "acceptance +0.1": best_speed(model.improved(0.1), times),
            }
            ordered = sorted(changes.items(), key=lambda change: -change[1])  # most helpful first
            found["changes"] = {f"the best chain, with {name}": speed for name, speed in ordered}
        parts.append(replace(part, bounds=bounds, **found))
    return replace(plan, contexts=tuple(parts))


def tokens_by_kind(
    model: ReplayModel, drafting: Drafting, kinds: Sequence[str | None]
) -> dict[str, float]:
    """Mean tokens of the steps of each kind of prompt."""
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    for kind, steps in zip(kinds, model.replays[drafting], strict=True):
        tokens[kind or ALL_KINDS] += [step.tokens for step in steps]
    return {kind: sum(each) / len(each) for kind, each in tokens.items() if each}


def best_speed(
    model: ReplayModel, times: StepTimes, draft: float = 1.0, width: float = 1.0
) -> float:
    """Tokens a second of the best chain if parts of a step took a multiple of their time."""
    weights = np.array([1, width, draft, draft])
    chains = filter(lambda drafting: drafting.is_chain, model.draftings)
    return max(1 / float(model.parts_per_token(each, times) @ weights) for each in chains)


def rank_rates(texts: Sequence[DraftedText]) -> list[float]:
    """How often the text's token was the draft's first, second, ... candidate."""
    ranks: Counter[int] = Counter()
    for text in texts:
        for proposal, token in zip(text.proposals, text.tokens[1:], strict=False):
            if proposal.candidates:
                ranks[[*proposal.candidates, token].index(token)] += 1
    return [ranks[rank] / ranks.total() for rank in range(max(ranks, default=0))]
