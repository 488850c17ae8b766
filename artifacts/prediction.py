"""What a plan predicts for a tree: expected tokens, seconds of a step, speed-up."""

import math
from collections.abc import Mapping
from typing import Any

from sequoia_plan.artifacts.acceptance import Acceptance
from sequoia_plan.artifacts.bench_result import Prediction
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import Plan
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree import TokenTree


def predict(tree: TokenTree, acceptance: Acceptance, times: StepTime | None) -> dict[str, float]:
    """Expected tokens and, where times are known, step time and speed-up, as a plan names them."""
    tokens = expected_tokens(tree, acceptance.rates)
    step = times.step_seconds(tree) if times else math.inf
    if times is None or not math.isfinite(step):
        return {"expected_tokens": tokens}
    speedup = tokens * times.plain_seconds() / step
    return {"expected_tokens": tokens, "step_seconds": step, "predicted_speedup": speedup}


def prediction_for(
    tree: TokenTree, verifier: str, plan: Plan, sampling: Mapping[str, Any] | None = None
) -> Prediction:
    """Predict a tree's figures in bench from the measurements in a plan."""
    settings = dict(plan.settings)
    measured_verifier = settings.pop("verifier", "sequoia")
    is_same_acceptance = (
        settings.get("temperature") == 0
        or verifier == measured_verifier
        or (verifier, measured_verifier) == ("traversal", "sequoia")
    )
    is_same_sampling = sampling is None or all(
        sampling.get(name, value) == value for name, value in settings.items()
    )
    applies = (is_same_acceptance and is_same_sampling) or tree.size == 1
    if not plan.acceptance or not applies:
        return Prediction()
    times = StepTime.from_measured(plan, looks_up=bool(tree.by_match))
    if not plan.by_match or times is None or (tree.size == 1 and not tree.by_match):
        figures = predict(tree, plan.acceptance, times)
        return Prediction(figures["expected_tokens"], figures.get("predicted_speedup"))
    if tree.by_match:
        return Prediction(plan.expected_tokens, plan.predicted_speedup)
    return Prediction()  # its acceptance is known for texts without a match only
