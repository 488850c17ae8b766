"""A token tree in the terminal: what it is, what it promises, and its most valuable nodes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import node_values, worth_of_memory
from sequoia_plan.artifacts.plan import OPTIMAL, Interval, Plan
from sequoia_plan.artifacts.uncertainty import LEAST_KINDS

MOST_NODES_DRAWN = 40


def summarise(tree: TokenTree) -> None:
    """Print size, depth, level widths, the promise with its bounds, where the next node would go, and a small drawing."""
    from rich.console import Console
    from rich.tree import Tree

    console = Console(highlight=False)
    plan = tree.plan
    for line in (f"{tree}, branching {tree.branching}", *promises(plan)):
        console.print(line, soft_wrap=True, markup=False)
    acceptance = plan.acceptance
    if acceptance:
        _next_node(tree, console)
    for role, facts in plan.models.items():
        console.print(f"{role:<23} {facts.get('name')}" + (f" ({facts['dtype']})" if facts.get("dtype") else ""), markup=False)
    values = node_values(tree, acceptance) if acceptance else np.ones(tree.size)
    branches = {0: Tree("[bold]root 1.000[/bold]")}
    for node in sorted(np.argsort(-values, kind="stable")[:MOST_NODES_DRAWN].tolist()):
        parent = int(tree.parents[node])
        if node and parent in branches:
            branches[node] = branches[parent].add(f"{tree.ranks[node]}  {values[node]:.3f}")
    console.print(branches[0])
    if len(branches) < tree.size:
        console.print(f"... and {tree.size - len(branches)} nodes of less value")


def promises(plan: Plan) -> Iterator[str]:
    """What a plan says of expected tokens and speed, a line each, with intervals and bounds where it has them."""
    interval = plan.interval or Interval()
    for name, other in plan.alternatives.items():
        ends = f" (95 %: {other.interval[0]:.3f} to {other.interval[1]:.3f})" if other.interval else ""
        open_ = ", within the noise of the measurements" if other.interval and other.interval[0] <= 1 else "" if other.interval else ", noise not known"
        what = f"the best tree for {name} ({other.size} nodes, depth {other.depth})"
        better = "the tokens" if plan.objective == "tokens" or other.step_seconds is None else "the speed"
        yield f"verifier                {plan.settings.get('verifier')}: {other.advantage:.3f} times {better} of {what}{ends}{open_}"
    if plan.expected_tokens is not None:
        limit = f", at most {plan.upper_bound:.4f} for any tree of this size" if plan.upper_bound is not None else ""
        yield f"expected tokens a step  {plan.expected_tokens:.4f}{_ends(interval.expected_tokens)}{limit}  ({plan.solver})"
    if plan.predicted_speedup is not None and plan.step_seconds is not None:
        speed = f"{plan.predicted_speedup:.3f}x over plain decoding{_ends(interval.predicted_speedup)}"
        yield f"predicted speed-up      {speed}, {plan.step_seconds * 1000:.1f} ms a step"
    if plan.interval and plan.interval_new_kind:
        tokens, speed_there = plan.interval_new_kind.expected_tokens, plan.interval_new_kind.predicted_speedup
        told = ", ".join(filter(None, (_range(tokens, " tokens a step"), _range(speed_there, "x"))))
        yield f"prompts of a new kind   {told} (95 %)"
    elif plan.interval:
        yield f"prompts of a new kind   not known: the profiled prompts name fewer than {LEAST_KINDS} kinds"
    if more := worth_of_memory(plan):
        yield f"more memory             {more.bytes / 1e6:.0f} MB more of layers in memory would make a step up to {more.seconds * 1000:.1f} ms shorter"
    if plan.gap is not None:
        faster = "faster" if plan.gap < OPTIMAL else f"more than {plan.gap / (1 - plan.gap):.2%} faster"
        yield f"proven                  by these measurements, no tree within the limits is {faster}"


def _next_node(tree: TokenTree, console: object) -> None:
    """Which further node would add the most expected tokens, within the limits the tree was solved for."""
    from sequoia_plan.artifacts.cost import acceptance_rows
    from sequoia_plan.planner.solving.certificate import best_addition

    rows = acceptance_rows(tree.plan.acceptance or (), max(tree.plan.depth or 0, tree.depth), tree.plan.branching)
    following = best_addition(tree, rows) if rows.shape[2] >= tree.branching else None
    if following:
        parent, rank, value = following
        console.print(f"the next node           child {rank} of node {parent}, on level {tree.position_ids[parent] + 1}: +{value:.4f}")  # type: ignore[attr-defined]


def _range(ends: tuple[float, float] | None, unit: str) -> str:
    return f"{ends[0]:.3f} to {ends[1]:.3f}{unit}" if ends else ""


def _ends(ends: tuple[float, float] | None) -> str:
    return f" (95 %: {ends[0]:.3f} to {ends[1]:.3f})" if ends else ""
