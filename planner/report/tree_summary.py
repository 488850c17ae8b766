"""A token tree in the terminal: its shape, its predictions, and its most valuable nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from sequoia_plan.artifacts import Acceptance, TokenTree
from sequoia_plan.artifacts.expected_tokens import node_values
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE, Interval, Plan
from sequoia_plan.artifacts.step_time import memory_gain
from sequoia_plan.artifacts.uncertainty import MIN_KINDS

if TYPE_CHECKING:
    from rich.tree import Tree

MAX_NODES_DRAWN = 40


def print_summary(tree: TokenTree) -> None:
    """Print the shape of a tree, its plan, the best node to add, and a small drawing."""
    from rich.console import Console

    console = Console(highlight=False)
    plan = tree.plan
    console.print(f"{tree}, branching {tree.branching}", soft_wrap=True, markup=False)
    for line in (*describe_plan(plan), *describe_by_match(tree)):
        console.print(line, soft_wrap=True, markup=False)
    if best_addition_line := _describe_best_addition(tree):
        console.print(best_addition_line)
    for role, model in plan.models.items():
        dtype = f" ({model['dtype']})" if model.get("dtype") else ""
        console.print(f"{role:<23} {model.get('name')}{dtype}", markup=False)
    acceptance_by_length = {part.match_length: part.acceptance for part in plan.by_match}
    for match_length, class_tree in tree.portfolio.items():
        if tree.by_match:
            console.print(f"match of {_at_least(match_length)}")
        acceptance = acceptance_by_length.get(match_length)
        if acceptance is None and match_length == 0:
            acceptance = plan.acceptance
        drawing, num_drawn = _drawing(class_tree, acceptance)
        console.print(drawing)
        if num_drawn < class_tree.size:
            console.print(f"... and {class_tree.size - num_drawn} nodes of less value")


def describe_by_match(tree: TokenTree) -> Iterator[str]:
    """Yields a line for each class of match: its share of steps and its tree.

    The match of a text is its longest suffix that occurs earlier in it. It yields nothing for a
    single tree without prompt lookup.
    """
    for part in tree.plan.by_match:
        class_tree = tree.for_match(part.match_length)
        source = "drafted"
        if class_tree.looks_up:
            num_drafted = int((class_tree.classes == 1).sum())
            source = f"looked up, {num_drafted} drafted" if num_drafted else "looked up"
        yield (
            f"match of {_at_least(part.match_length):<15}{part.share:.1%} of steps: {source}; "
            f"{class_tree.size} nodes, depth {class_tree.depth}, {part.expected_tokens:.3f} tokens "
            f"a step, {part.step_seconds * 1000:.1f} ms"
        )


def _at_least(match_length: int) -> str:
    """The shortest match of a class in words."""
    if match_length == 0:
        return "no token"
    return f"{match_length}+ tokens"


def describe_plan(plan: Plan) -> Iterator[str]:
    """Yields lines with what a plan holds: expected tokens, speed, intervals and bounds."""
    interval = plan.interval or Interval()
    if plan.expected_tokens is not None:
        tokens = f"{plan.expected_tokens:.4f}{_in_parentheses(interval.expected_tokens)}"
        bound = ""
        if plan.upper_bound is not None:
            bound = f", at most {plan.upper_bound:.4f} for any tree of this size"
        yield f"expected tokens a step  {tokens}{bound}  ({plan.solver})"
    if plan.predicted_speedup is not None and plan.step_seconds is not None:
        speedup = f"{plan.predicted_speedup:.3f}x over plain decoding"
        ends = _in_parentheses(interval.predicted_speedup)
        yield f"predicted speed-up      {speedup}{ends}, {plan.step_seconds * 1000:.1f} ms a step"
    if plan.interval and plan.interval_new_kind:
        yield f"prompts of a new kind   {_describe_interval(plan.interval_new_kind)} (95 %)"
    elif plan.interval:
        yield (
            "prompts of a new kind   not known: the profiled prompts name fewer than "
            f"{MIN_KINDS} kinds"
        )
    if plan.tree_speedup is not None:
        yield (
            f"without prompt lookup   {plan.tree_speedup:.3f}x with the fastest single tree on the "
            "same texts"
        )
    if plan.speedup_by_kind:
        kinds = plan.speedup_by_kind.items()
        yield "by kind of prompts      " + ", ".join(
            f"{name} {ratio:.2f}x" for name, ratio in kinds
        )
    if memory := memory_gain(plan):
        yield (
            f"more memory             {memory.bytes / 1e6:.0f} MB more of layers in memory would "
            f"make a step up to {memory.seconds * 1000:.1f} ms shorter"
        )
    if plan.gap is not None:
        basis, trees, faster = "measurements", "tree", "is "
        if plan.by_match:
            basis, trees, faster = "measurements and shares of steps", "trees by match", "are "
        if plan.gap >= OPTIMALITY_TOLERANCE:  # a smaller gap is rounding
            # the gap is relative to the bound, and the text is relative to this tree
            faster += f"more than {plan.gap / (1 - plan.gap):.2%} "
        faster += "faster"
        yield (f"proven                  by these {basis}, no {trees} within the limits {faster}")


def _describe_interval(interval: Interval) -> str:
    """The intervals of expected tokens and of speed-up, as "3.1 to 3.4 tokens a step, ..."."""
    parts = []
    if interval.expected_tokens:
        parts.append(f"{_low_to_high(interval.expected_tokens)} tokens a step")
    if interval.predicted_speedup:
        parts.append(f"{_low_to_high(interval.predicted_speedup)}x")
    return ", ".join(parts)


def _in_parentheses(ends: tuple[float, float] | None) -> str:
    """The ends of a 95 % interval in parentheses; empty for None."""
    return f" (95 %: {_low_to_high(ends)})" if ends else ""


def _low_to_high(ends: tuple[float, float]) -> str:
    """The ends of an interval, as "1.200 to 1.400"."""
    return f"{ends[0]:.3f} to {ends[1]:.3f}"


def _describe_best_addition(tree: TokenTree) -> str:
    """A line about the further node that would add the most expected tokens to the tree.

    The node must be within the plan's limits on depth and children of a node. The line is empty if
    the plan has no acceptance, if it has trees by match, or if the limits leave no room.
    """
    from sequoia_plan.planner.solving.certificate import best_addition

    plan = tree.plan
    if not plan.acceptance or tree.by_match:
        return ""
    rows = plan.acceptance.at_depth(max(plan.depth or 0, tree.depth), plan.branching)
    addition = best_addition(tree, rows) if rows.shape[2] >= tree.branching else None
    if not addition:
        return ""
    parent, rank, value = addition  # the value is the probability that the node is accepted
    level = tree.position_ids[parent] + 1
    return f"the next node           child {rank} of node {parent}, on level {level}: +{value:.4f}"


def _drawing(tree: TokenTree, acceptance: Acceptance | None) -> tuple[Tree, int]:
    """A drawing of the nodes that are most probably accepted, and their number.

    A node is drawn as its rank and its value, the probability that it is accepted. Nodes of a
    looked-up spine say so. Without acceptance, the first nodes are drawn.
    """
    from rich.tree import Tree

    values = node_values(tree, acceptance.rates) if acceptance else np.ones(tree.size)
    drawn_nodes = np.argsort(-values, kind="stable")[:MAX_NODES_DRAWN].tolist()
    branches = {0: Tree("[bold]root 1.000[/bold]")}
    # the end of a spine without other nodes on its levels takes one line
    num_drawn_levels = tree.num_drafted_levels + 2 if tree.looks_up else tree.depth
    for node in sorted(drawn_nodes):
        parent, level = int(tree.parents[node]), int(tree.position_ids[node])
        if node and parent in branches and level < num_drawn_levels:
            is_looked_up = tree.looks_up and tree.classes[node] == 0
            label = f"{tree.ranks[node]}  {values[node]:.3f}"
            branches[node] = branches[parent].add(label + ("  looked up" if is_looked_up else ""))
    num_drawn, num_left = len(branches), max(0, tree.depth - num_drawn_levels)
    end_of_spine = int(tree.level_offsets[num_drawn_levels - 1]) if num_left else 0
    if num_left and end_of_spine in branches:
        text = f"... {num_left} more, one after the other, the last {values[-1]:.3f}  looked up"
        branches[end_of_spine].add(text)
        num_drawn += num_left
    return branches[0], num_drawn
