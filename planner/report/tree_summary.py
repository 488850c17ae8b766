"""A token tree in the terminal: its shape, its predictions, and its most valuable nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from sequoia_plan.artifacts import Acceptance, TokenTree
from sequoia_plan.artifacts.expected_tokens import node_values
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE, Interval, IntervalEnds, Plan
from sequoia_plan.artifacts.processor import processor_name, usable_cores
from sequoia_plan.artifacts.profile import takes_chains_only
from sequoia_plan.artifacts.promise import MIN_KINDS
from sequoia_plan.artifacts.state import MAX_LOSS, choices_of

if TYPE_CHECKING:
    from rich.tree import Tree

MAX_NODES_DRAWN, MAX_LEVELS_DRAWN = 40, 10
EXTRA_TIMES = [2 ** (eighths / 8) for eighths in range(-24, 25)]
"""Factors of what steps take beyond plain ones, at which trees are compared."""
MORE_BYTES = 1e9
"""So much more memory, or a tenth of what a pass reads if that is less, is said to save time."""


def print_summary(tree: TokenTree) -> None:
    """Print the shape of a tree, its plan, and a small drawing."""
    from rich.console import Console

    console = Console(highlight=False)
    plan = tree.plan
    lines = [f"{tree}, branching {tree.branching}", *describe(tree), *_describe_details(plan)]
    for role, model in plan.models.items():
        weights = model.get("weights") or model.get("dtype")
        lines.append(_line(role, f"{model.get('name')}{f' ({weights})' if weights else ''}"))
    lines += _describe_machine(plan)
    print(*lines, sep="\n")
    acceptances = {0: plan.acceptance} | {p.match_length: p.acceptance for p in plan.by_match}
    for match_length, class_tree in tree.portfolio.items():
        if tree.by_match:
            console.print(f"match of {at_least(match_length)}")
        drawing, num_drawn = _drawing(class_tree, acceptances.get(match_length))
        console.print(drawing)
        if num_drawn < class_tree.size:
            console.print(f"... and {class_tree.size - num_drawn} nodes of less value")


def describe_prediction(plan: Plan) -> Iterator[str]:
    """Yields lines with the predicted figures, how sure they are, and what is proven."""
    interval, new_kind = plan.interval or Interval(), plan.interval_new_kind or Interval()
    if takes_chains_only(plan.models):
        text = "the target has layers with a recurrent state; a tree needs a state for each node"
        yield _line("chains only", text)
    if new_kind.predicted_speedup:
        ends = _low_to_high(new_kind.predicted_speedup, "x")
        yield _line("predicted speed-up", f"{ends} over plain decoding for prompts of a new kind")
    if plan.median_speedup:
        ends = _in_parentheses(interval.predicted_speedup)
        text = f"{plan.median_speedup:.2f}x{ends}, the median over prompts"
        yield _line("for the profiled mix", text)
    for kind, speedup in plan.speedup_by_kind.items():
        ends = _in_parentheses(plan.interval_by_kind.get(kind))
        number = len(plan.text_speedups.get(kind, ()))
        yield _line(f"  {kind}", f"{speedup:.2f}x{ends}, of {number}")
    if plan.expected_tokens is not None:
        ends = _in_parentheses(interval.expected_tokens)
        yield _line("expected tokens a step", f"{plan.expected_tokens:.4f}{ends}")
    if new_kind.expected_tokens:
        yield _line("prompts of a new kind", f"{_low_to_high(new_kind.expected_tokens)} (95 %)")
    if plan.predicted_speedup is not None and plan.step_seconds is not None:
        title = "for all tokens together" if plan.median_speedup else "predicted speed-up"
        text = f"{plan.predicted_speedup:.3f}x over plain decoding"
        yield _line(title, f"{text}, {plan.step_seconds * 1000:.1f} ms a step")
    if plan.tree_speedup is not None:
        text = f"{plan.tree_speedup:.3f}x with the fastest single tree on the same texts"
        yield _line("without prompt lookup", text)
    if plan.gap is not None:
        what = "other trees by match within the limits are"
        if not plan.by_match:
            what = "other tree within the limits is"
        # the gap is relative to the bound, the text to this tree; a smaller gap is rounding
        is_gap = plan.gap >= OPTIMALITY_TOLERANCE
        more = f"more than {plan.gap / max(1 - plan.gap, 1e-12):.2%} " if is_gap else ""
        yield _line("proven", f"by these measurements, no {what} {more}faster")


def _describe_details(plan: Plan) -> Iterator[str]:
    """Yields lines with what a plan holds beside its prediction."""
    if plan.solver:
        bound = plan.upper_bound
        text = "" if bound is None else f"; any tree of this size: at most {bound:.4f} tokens"
        yield _line("solver", plan.solver + text)
    if plan.acceptance and not plan.interval_new_kind:
        reason = f"the profiled prompts name fewer than {MIN_KINDS} kinds"
        yield _line("prompts of a new kind", f"not known: {reason}")
    if stream := plan.latency and plan.latency.stream:
        # weights that stay in memory need not arrive in each pass; less if that waits for others
        more_bytes = min(MORE_BYTES, stream.bytes / 10)
        text = f"{more_bytes / 1e6:.0f} MB more of layers in memory would make a step up "
        milliseconds = 1000 * stream.seconds * more_bytes / stream.bytes
        yield _line("more memory", f"{text}to {milliseconds:.1f} ms shorter")


def _describe_machine(plan: Plan) -> Iterator[str]:
    """Yields a line with the machine that times are of, and what to do on another one."""
    measured, here, cores = plan.hardware, processor_name(), usable_cores()
    if plan.latency and measured.get("processor"):
        parts = measured.get("gpu") or measured["processor"], measured.get("instructions")
        text = ", ".join(filter(None, (*parts, f"{measured['threads']} threads")))
        if measured["processor"] != here or measured["threads"] > cores:
            text += f"; this is {here}, {cores} cores: run profile and solve again for its times"
        yield _line("machine", text)


def describe_states(tree: TokenTree) -> Iterator[str]:
    """Yields a line for each state of a text that has a tree of its own: share, tree and times.

    The match of a text is its longest suffix that occurs earlier in it.
    """
    for match_plan in tree.plan.by_match if tree.by_match else ():
        class_tree = tree.for_match(match_plan.match_length)
        source = "drafted"
        if class_tree.looks_up:
            num_drafted = int((class_tree.classes == 1).sum())
            source = f"looked up, {num_drafted} drafted" if num_drafted else "looked up"
        yield _line(
            f"match of {at_least(match_plan.match_length)}",
            f"{match_plan.share:.1%} of steps: {source}; {class_tree.size} nodes, depth "
            f"{class_tree.depth}, {match_plan.expected_tokens:.3f} tokens a step, "
            f"{match_plan.step_seconds * 1000:.1f} ms",
        )
    if tree.plan.plain_seconds and (tree.size > 1 or tree.by_match):
        text = f"other trees or none, by the clock; a long text loses {MAX_LOSS:.0%} at most"
        yield _line("slower than plain", text)
        choices, kept = choices_of(tree, 0), []
        for factor in EXTRA_TIMES:
            speeds = [c.tokens / (1 + factor * (c.cost - 1)) for c in choices]
            kept += [factor] * (speeds[0] == max(speeds))
        text = f"steps take {_low_to_high((min(kept, default=1), max(kept, default=1)))} times"
        yield _line("the fastest while", f"{text} as much more than plain ones")


def describe(tree: TokenTree) -> Iterator[str]:
    """Yields lines on what a tree promises, its trees by match, and those by context."""
    yield from describe_prediction(tree.plan)
    yield from describe_states(tree)
    for start, other in tree.by_context.items():
        yield _line(f"texts of {start}+ tokens", str(other))
        for line in describe(other):
            yield f"  {line}"


def _line(title: str, text: str) -> str:
    """A title and what is said of it, in two columns."""
    return f"{title:<24}{text}"


def at_least(match_length: int) -> str:
    """The shortest match of a class in words."""
    return f"{match_length}+ tokens" if match_length else "no token"


def _in_parentheses(ends: IntervalEnds | None) -> str:
    """The ends of a 95 % interval in parentheses; empty for None."""
    return f" (95 %: {_low_to_high(ends)})" if ends else ""


def _low_to_high(ends: IntervalEnds, unit: str = "") -> str:
    """The ends of an interval, as "1.20x to 1.40x"."""
    return f"{ends[0]:.2f}{unit} to {ends[1]:.2f}{unit}"


def _drawing(tree: TokenTree, acceptance: Acceptance | None) -> tuple[Tree, int]:
    """A drawing of the nodes that are most probably accepted, and their number.

    A node is drawn as its rank and its value. Without acceptance, the first nodes are drawn.
    """
    from rich.tree import Tree

    values = node_values(tree, acceptance.rates) if acceptance else np.ones(tree.size)
    branches = {0: Tree("[bold]root 1.000[/bold]")}
    for node in sorted(np.argsort(-values, kind="stable")[:MAX_NODES_DRAWN].tolist()):
        parent = int(tree.parents[node])
        if parent in branches and tree.position_ids[node] < MAX_LEVELS_DRAWN:
            source = "  looked up" if tree.looks_up and tree.classes[node] == 0 else ""
            branches[node] = branches[parent].add(f"{tree.ranks[node]}  {values[node]:.3f}{source}")
    return branches[0], len(branches)
