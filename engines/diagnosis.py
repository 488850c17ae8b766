"""What measurements say beyond the best setting: where time goes, bounds, and what would help."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from sequoia_plan.engines.chain_replay import ReplayModel
from sequoia_plan.engines.plan import EnginePlan
from sequoia_plan.engines.planning import FREE
from sequoia_plan.engines.prediction import StepTimes

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
    tree: Callable[[ReplayModel, StepTimes], dict[str, float]],
) -> EnginePlan:
    """The plan with `bounds`, `step`, `changes` and `tree` of each context, which `tree` plans."""
    contexts = []
    for context_plan, (model, times) in zip(plan.contexts, measurements, strict=True):
        passes = times.target_seconds.items()
        bounds = {"no draft passes, always right and free": max(size / t for size, t in passes)}
        details: dict[str, Any] = {"bounds": bounds, "tree": tree(model, times)}
        chains = [cell for cell in context_plan.cells if cell.drafting.is_chain]
        if chains:
            best = max(chains, key=lambda cell: cell.throughput)
            details["step"] = {}
            for name, only_this in zip(PARTS, np.eye(4), strict=True):
                times_without = dataclasses.replace(times, weights=1 - only_this)
                without = model.expect(best.drafting, 1, times_without)
                details["step"][name] = best.seconds - without.seconds
            bounds[FREE] = best_speed(model, times, width=0, draft=0)
            changes = {
                "a draft of half the cost": best_speed(model, times, draft=0.5),
                "half the rise of the target's pass with its tokens": best_speed(
                    model, times, width=0.5
                ),
                "acceptance +0.1": best_speed(model.improved(0.1), times),
            }
            details["changes"] = {
                f"the best chain, with {name}": changes[name]
                for name in sorted(changes, key=changes.__getitem__, reverse=True)
            }
        contexts.append(structs.replace(context_plan, **details))
    return structs.replace(plan, contexts=tuple(contexts))


def best_speed(
    model: ReplayModel, times: StepTimes, width: float = 1.0, draft: float = 1.0
) -> float:
    """Tokens/s of the best chain; `width`, `draft`: factors on further tokens' and draft's time."""
    changed = dataclasses.replace(times, weights=(1, width, draft, draft))
    chains = (drafting for drafting in model.draftings if drafting.is_chain)
    return max(model.expect(chain, 1, changed).speed for chain in chains)
