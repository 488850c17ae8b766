"""What a plan predicts for a tree: expected tokens, seconds of a step, speed-up."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sequoia_plan.artifacts.acceptance import Acceptance
from sequoia_plan.artifacts.bench_result import Prediction
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.plan import Plan
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree import TokenTree


class TreePrediction(NamedTuple):
    """Predictions for a tree, named like the fields of its plan. None: the measurements lack it."""

    expected_tokens: float | None = None
    step_seconds: float | None = None
    predicted_speedup: float | None = None


def predict(
    tree: TokenTree, acceptance: Acceptance | None, times: StepTime | None
) -> TreePrediction:
    """Predict expected tokens, step time and speed-up."""
    tokens = expected_tokens(tree, acceptance.rates) if acceptance else None
    step = times.step_seconds(tree) if times else math.inf
    if times is None or not math.isfinite(step):
        return TreePrediction(tokens)
    speedup = tokens * times.plain_seconds() / step if tokens is not None else None
    return TreePrediction(tokens, step, speedup)


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
    times = StepTime.from_measured(plan, looks_up=bool(plan.by_match))
    if not plan.by_match or times is None or (tree.size == 1 and not tree.by_match):
        tokens, _, speedup = predict(tree, plan.acceptance, times)
    elif tree.by_match:
        tokens, speedup = plan.expected_tokens, plan.predicted_speedup
    else:  # its acceptance is known for texts without a match only
        return Prediction()
    return Prediction(tokens, speedup)
