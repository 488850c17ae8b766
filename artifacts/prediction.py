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
    figures = {"expected_tokens": tokens}
    if times and math.isfinite(step := times.step_seconds(tree)):
        speedup = tokens * times.plain_seconds() / step
        figures |= {"step_seconds": step, "predicted_speedup": speedup}
    return figures


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
    is_same_sampling = not sampling or all(
        sampling.get(name, value) == value for name, value in settings.items()
    )
    applies = (is_same_acceptance and is_same_sampling) or tree.size == 1
    if not plan.acceptance or not applies:
        return Prediction()
    latency = plan.latency
    times = StepTime(latency, plan.drafting, bool(tree.by_match)) if latency else None
    if not plan.by_match or times is None or (tree.size == 1 and not tree.by_match):
        figures = predict(tree, plan.acceptance, times)
        return Prediction(figures["expected_tokens"], figures.get("predicted_speedup"))
    if tree.by_match:
        return Prediction(plan.expected_tokens, plan.predicted_speedup)
    return Prediction()  # its acceptance is known for texts without a match only
