"""The drawings of trees by match: every class's tree side by side, and the speed-up by kind."""

from __future__ import annotations

from typing import Any

from sequoia_plan.artifacts import Acceptance, Plan, TokenTree
from sequoia_plan.artifacts.plan import MatchPlan
from sequoia_plan.planner.report.panels import EDGE_COLOUR, GREEN, tree_panel

MAX_LEVELS_DRAWN = 10
"""The end of a deeper tree, which is a looked-up chain, is not drawn."""


def trees_by_match_panel(tree: TokenTree, axes: Any) -> None:
    """Draw the tree of each class of match, with its share of steps above it.

    Trees that are equal are drawn once, with the shortest matches of all their classes.
    """
    axes.set_axis_off()
    parts_of_tree: dict[TokenTree, list[MatchPlan]] = {}  # classes may share a tree
    for part in tree.plan.by_match:
        parts_of_tree.setdefault(tree.for_match(part.match_length), []).append(part)
    width = 1 / len(parts_of_tree)
    for number, (class_tree, parts) in enumerate(parts_of_tree.items()):
        inset = axes.inset_axes((number * width, 0, 0.85 * width, 0.76))
        tree_panel(_without_end_of_chain(class_tree, parts[0].acceptance), inset)
        inset.set(ylim=(0.6 - MAX_LEVELS_DRAWN, 0.4), ylabel="", yticks=[])
        inset.margins(x=0.4)
        lengths = [f"{part.match_length}+" if part.match_length else "none" for part in parts]
        lines = [
            f"match: {' or '.join(lengths)}",
            f"{sum(part.share for part in parts):.0%} of steps",
            f"{class_tree.size} nodes",
            "looked up" if class_tree.looks_up else "drafted",
        ]
        inset.set_title("\n".join(lines), fontsize=10)


def _without_end_of_chain(tree: TokenTree, acceptance: Acceptance) -> TokenTree:
    """The first `MAX_LEVELS_DRAWN` levels of a tree, with the acceptance that its nodes have."""
    size = int(tree.level_offsets[min(tree.depth, MAX_LEVELS_DRAWN)])
    return TokenTree(tree.parents[:size], Plan(acceptance=acceptance), tree.looks_up)


def speedups_by_kind_panel(tree: TokenTree, axes: Any) -> None:
    """Draw the predicted speed-up of each kind of prompts, the highest at the top."""
    ratios = sorted(tree.plan.speedup_by_kind.items(), key=lambda item: item[1])
    kinds, speedups = zip(*ratios, strict=True)
    bars = axes.barh(kinds, speedups, color=GREEN)
    axes.bar_label(bars, fmt="%.2fx", padding=3)
    axes.axvline(1, linewidth=1.2, color=EDGE_COLOUR)
    axes.set(xlabel="times plain decoding, predicted", xlim=(0, 1.15 * max(speedups)))
    axes.tick_params(axis="y", length=0)
