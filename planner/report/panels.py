"""The drawings of a tree and its plan; each draws onto given axes in matplotlib's current style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Acceptance, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens, node_values
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.planner.solving.baselines import baseline
from sequoia_plan.planner.solving.tokens.frontier import frontier, max_budget, most_tokens

GREEN, AMBER, BLUE, PURPLE, RED = "#2f9d5f", "#c0803a", "#5b8fc6", "#a86fb8", "#d1495b"
"""Colours that are readable on white and on black."""
EDGE_COLOUR, LABEL_COLOUR = "#8fa297", "#22302a"

MAX_LEVEL_TICKS = 12
BASELINES = {
    "complete k-ary, best k": ["k-ary:2", "k-ary:3", "k-ary:4", "k-ary:8"],
    "k chains, best k": ["chains:2", "chains:4", "chains:8", "chains:16"],
    "one chain": ["chain"],
}
"""Label of a line in `tokens_panel` -> the baselines of which the best one counts."""


def style(ink: str, line: str, seed: str) -> dict[str, Any]:
    """The rcParams that all drawings share."""
    ink_parameters = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
        "legend.labelcolor",
    )
    return dict.fromkeys(ink_parameters, ink) | {
        "grid.color": line,
        "svg.hashsalt": seed,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "axes.axisbelow": True,
        "font.family": "sans-serif",
    }


def tree_panel(tree: TokenTree, axes: Any) -> None:
    """Draw the tree level by level.

    A node's area grows with its value, the probability that it is accepted. Without acceptance in
    the tree's plan, all nodes look alike.
    """
    from matplotlib import rcParams
    from matplotlib.collections import LineCollection

    points = np.column_stack([_horizontal_places(tree), -tree.position_ids])
    acceptance = tree.plan.acceptance
    values = node_values(tree, acceptance.rates) if acceptance else np.ones(tree.size)
    scale = min(1.0, 30 / tree.level_widths.max())  # smaller nodes where the levels are wide
    segments: Any = []
    if tree.size > 1:
        parent_points = points[tree.parents[1:]]
        segments = np.stack([points[1:], parent_points], axis=1)
    edge_width = 0.3 + 0.6 * scale
    edges = LineCollection(segments, colors=EDGE_COLOUR, linewidths=edge_width, zorder=1)
    axes.add_collection(edges)
    axes.scatter(
        *points.T,
        s=4 + 14 * scale + 200 * values * scale**0.5,
        c=values,
        cmap="YlGn",
        vmin=-0.15,
        vmax=1,
        zorder=2,
        edgecolors=rcParams["text.color"],
        linewidths=0.5 * scale + 0.1,
    )
    levels_per_tick = -(-tree.depth // MAX_LEVEL_TICKS)  # rounded up
    tick_labels = [f"{level}" for level in range(0, tree.depth, levels_per_tick)]
    axes.set_yticks(range(0, -tree.depth, -levels_per_tick), tick_labels)
    axes.set_ylabel("tokens after the root")
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.margins(0.06)


def tokens_panel(tree: TokenTree, axes: Any) -> None:
    """Draw expected tokens a step against size, for the best trees and for baselines.

    It is the left plot of Figure 1 in Sequoia (arXiv 2402.12374). A baseline is a family of trees,
    such as k chains, and for each size the best of its shapes is drawn.
    """
    acceptance = tree.plan.acceptance
    depth = max(tree.plan.depth or tree.depth, tree.depth, 2)
    assert acceptance is not None
    rows = acceptance.at_depth(depth, tree.plan.branching)
    max_size = min(max(64, 2 * tree.size), 4096, max_budget(rows))
    # expected tokens of the best tree of 1, 2, ... nodes and at most `depth` levels
    best_values = most_tokens(rows, max_size)
    sizes = np.unique(np.geomspace(1, max_size, 40).astype(int))
    possible_sizes = sizes[sizes <= len(best_values)]
    axes.plot(
        possible_sizes,
        best_values[possible_sizes - 1],
        color=GREEN,
        linewidth=2.6,
        label="this acceptance's best tree",
    )
    for (label, names), colour in zip(BASELINES.items(), (AMBER, BLUE, PURPLE), strict=True):
        tokens = [_best_baseline_tokens(names, int(size), depth, acceptance) for size in sizes]
        never_falling = np.maximum.accumulate(tokens)  # nodes that do not help can be left out
        axes.plot(sizes, never_falling, color=colour, linewidth=1.8, label=label)
    axes.scatter(
        [tree.size],
        [expected_tokens(tree, acceptance.rates)],
        s=70,
        color=GREEN,
        edgecolors="white",
        linewidths=1.5,
        zorder=3,
        label="this tree",
    )
    _set_log2_scale(axes.xaxis)
    axes.set(xlabel="nodes", ylabel="expected tokens a step")
    axes.set_ylim(bottom=1)
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="upper left")


def _best_baseline_tokens(
    names: Sequence[str], size: int, depth: int, acceptance: Acceptance
) -> float:
    """Expected tokens a step of the best of the named baselines within a size and a depth."""
    trees = [baseline(name, size, depth) for name in names]
    return max(expected_tokens(tree, acceptance.rates) for tree in trees)


def latency_panel(tree: TokenTree, axes: Any) -> None:
    """Draw milliseconds of the target's and the draft's pass against the tokens in it, log-log."""
    latency = tree.plan.latency
    assert latency is not None
    curves = (("target", latency.target, GREEN), ("draft", latency.draft, BLUE))
    for role, seconds_by_size, colour in curves:
        points = np.array(sorted(seconds_by_size.items()), float)
        sizes, milliseconds = points[:, 0], 1000 * points[:, 1]
        axes.plot(sizes, milliseconds, "o-", markersize=4, color=colour, label=role)
    axes.axvline(tree.size, color=RED, linewidth=1.5, linestyle=":", label="this tree's size")
    axes.set_yscale("log")
    _set_log_ticks(axes.yaxis)
    _set_log2_scale(axes.xaxis)
    axes.set(xlabel="tokens in the pass", ylabel="milliseconds")
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def speed_panel(tree: TokenTree, axes: Any) -> None:
    """Draw the highest speed-up that a tree of each size and depth can have, and mark this tree."""
    plan, step_time = tree.plan, StepTime.from_measured(tree.plan)
    assert step_time is not None and plan.acceptance is not None
    max_depth = min(max(plan.depth or 0, tree.depth, 2), 2 * tree.depth + 2)
    max_size = max(
        tree.size,
        min(
            step_time.largest_size(),
            max(16, 4 * tree.size),
            plan.budget or 64,
        ),
    )
    max_size = min(max_size, max_budget(plan.acceptance.at_depth(max_depth)))
    # for 1, 2, ... levels: expected tokens of the best tree of 1, 2, ... nodes
    tokens_by_depth = frontier(plan.acceptance, max_size, max_depth, plan.branching).values
    speedups = np.full((max_depth, max_size), np.nan)
    for depth, tokens in enumerate(tokens_by_depth, 1):
        sizes = np.arange(depth, len(tokens) + 1)  # `depth` levels have at least as many nodes
        plain_seconds = tokens[depth - 1 :] * step_time.plain_seconds()  # for as many tokens
        step_seconds = step_time.min_step_seconds(sizes, depth)
        speedups[depth - 1, depth - 1 : len(tokens)] = plain_seconds / step_seconds
    # 0.71 is as far below 1 as 1.5 (about 1 / 0.71) is above it on the logarithmic axis.
    size_edges = np.append(0.71, np.arange(1, max_size + 1) + 0.5)
    depth_edges = np.arange(max_depth + 1) + 0.5
    image = axes.pcolormesh(
        size_edges, depth_edges, np.ma.masked_invalid(speedups), cmap="YlGn", rasterized=True
    )
    colour_bar = axes.figure.colorbar(image, ax=axes, label="speed-up over plain decoding, at most")
    colour_bar.outline.set_visible(False)
    axes.scatter(
        [tree.size],
        [tree.depth],
        marker="*",
        s=260,
        color=RED,
        edgecolors="white",
        linewidths=1.2,
        zorder=3,
        clip_on=False,
    )
    if plan.predicted_speedup:
        _label_speedup(tree, plan.predicted_speedup, max_size, max_depth, axes)
    _set_log2_scale(axes.xaxis)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="nodes", ylabel="depth (levels)")


def _label_speedup(
    tree: TokenTree, speedup: float, max_size: int, max_depth: int, axes: Any
) -> None:
    """Write the predicted speed-up beside the tree's mark, on the side that has room."""
    is_on_the_right = tree.size > max_size**0.5  # the middle of the logarithmic axis
    is_at_the_top = tree.depth > 0.8 * max_depth
    axes.annotate(
        f"{speedup:.2f}x",
        (tree.size, tree.depth),
        (-12 if is_on_the_right else 12, -8 if is_at_the_top else 8),
        textcoords="offset points",
        ha="right" if is_on_the_right else "left",
        va="top" if is_at_the_top else "bottom",
        color=LABEL_COLOUR,
        weight="bold",
        bbox={
            "facecolor": "white",
            "edgecolor": "none",
            "alpha": 0.85,
            "boxstyle": "round,pad=0.2",
        },
    )


def _set_log2_scale(axis: Any) -> None:
    """Make the x axis logarithmic with ticks at 1, 2, 4, ..., written as plain numbers."""
    axis.axes.set_xscale("log", base=2)
    axis.set_major_formatter(lambda x, _: f"{x:g}")


def _set_log_ticks(axis: Any) -> None:
    """Give a logarithmic axis ticks at 1, 2, 5, 10, ..., written as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.set_minor_formatter(NullFormatter())


def _horizontal_places(tree: TokenTree) -> Floats:
    """x of every node: leaves are side by side in preorder, and a parent is above the middle of its
    children.

    Returns float64 [size].
    """
    num_leaves = np.where(tree.child_count == 0, 1, 0)  # of each node's subtree
    for node in range(tree.size - 1, 0, -1):
        num_leaves[tree.parents[node]] += num_leaves[node]

    leftmost = np.zeros(tree.size)  # x of the first leaf of each node's subtree
    for node in range(1, tree.size):
        before = node - 1
        is_sibling = before > 0 and tree.parents[before] == tree.parents[node]
        if is_sibling:
            leftmost[node] = leftmost[before] + num_leaves[before]
        else:
            leftmost[node] = leftmost[tree.parents[node]]

    places = np.zeros(tree.size)
    for node in range(tree.size - 1, -1, -1):
        first_child, num_children = int(tree.first_child[node]), int(tree.child_count[node])
        if num_children:
            last_child = first_child + num_children - 1
            places[node] = (places[first_child] + places[last_child]) / 2
        else:
            places[node] = leftmost[node]
    return places
