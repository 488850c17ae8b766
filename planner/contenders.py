"""What bench compares: the trees, and what the plan promises of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Latency, TokenTree
from sequoia_plan.planner.baselines import baseline
from sequoia_plan.planner.objective import StepTime, expected_tokens

Arm = tuple[TokenTree, str]
"""A tree and the verifier that judges it."""


def arms(tree: TokenTree, verifier: str) -> dict[str, Arm]:
    """Our tree, and those of others with no more nodes and levels, by name; `verifier` judges those that come without their own."""
    found: dict[str, Arm] = {"plain": (TokenTree.chain(1), verifier)}
    if tree.size > 1:
        lanes = max(1, (tree.size - 1) // (tree.depth - 1))
        found |= {
            "chain": (baseline("chain", tree.size, tree.depth), verifier),
            "chains": (baseline(f"chains:{lanes}", tree.size, tree.depth), "specinfer"),
            "k-ary": (baseline("k-ary:2", tree.size, tree.depth), verifier),
            "top-k": (tree, "topk"),
            "sequoia": (tree, "sequoia"),
            "traversal": (tree, "traversal"),
        }
    return found


def predicted(arm: Arm, plan: Mapping[str, Any], sampling: Mapping[str, Any] | None = None) -> dict[str, float | None]:
    """tokens_per_step and speedup (over plain decoding by the same engine) that the measurements in a tree's plan promise.

    None where they do not apply: they were taken with one temperature and filters (`sampling` is what the arm decodes with, None for
    the same) and with one verifier. What `sequoia` yields, `traversal` yields at least; greedy decoding knows one rule only.
    """
    tree, verifier = arm
    settings = dict(plan.get("settings") or {})
    measured = settings.pop("verifier", "sequoia")
    alike = settings.get("temperature") == 0 or verifier == measured or (verifier, measured) == ("traversal", "sequoia")
    alike &= sampling is None or all(sampling.get(name, value) == value for name, value in settings.items())
    alike |= tree.size == 1
    if not plan.get("acceptance") or not alike:
        return {"tokens_per_step": None, "speedup": None}
    tokens = expected_tokens(tree, plan["acceptance"])
    times = step_time(plan)
    step = times.step(tree) if times else float("inf")
    return {"tokens_per_step": tokens, "speedup": tokens * times.plain() / step if times and np.isfinite(step) else None}


def add_predictions(figures: Mapping[str, dict[str, Any]], arms: Mapping[str, Arm], plan: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Put what `predicted` says beside every contender's figures; None beside those that have no tree."""
    for name, found in figures.items():
        found["predicted"] = predicted(arms[name], plan, sampling) if name in arms else None


def step_time(plan: Mapping[str, Any]) -> StepTime | None:
    """The latencies a tree's plan records; None if it was solved without."""
    latency = plan.get("latency") or {}
    if not latency.get("target") or not latency.get("draft"):
        return None
    return StepTime(Latency(dict(latency["target"]), dict(latency["draft"]), latency.get("overhead") or 0.0, latency.get("context") or 0))
