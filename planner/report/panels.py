"""The drawings of a tree and its plan; each draws onto given axes in matplotlib's current style."""

from __future__ import annotations

from typing import Any

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens, node_values
from sequoia_plan.planner.solving.baselines import baseline
from sequoia_plan.planner.solving.tokens.frontier import max_budget, most_tokens

GREEN, AMBER, BLUE, PURPLE, RED = "#2f9d5f", "#c0803a", "#5b8fc6", "#a86fb8", "#d1495b"
"""Colours that are readable on white and on black."""
EDGE_COLOUR = "#8fa297"

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
    segments: Any = np.stack([points[1:], points[tree.parents[1:]]], axis=1)
    edges = LineCollection(segments, colors=EDGE_COLOUR, linewidths=0.3 + 0.6 * scale, zorder=1)
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
        tokens = [
            max(
                expected_tokens(baseline(name, int(size), depth), acceptance.rates)
                for name in names
            )
            for size in sizes
        ]
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
    _set_log2_scale(axes.yaxis)
    _set_log2_scale(axes.xaxis)
    axes.set(xlabel="tokens in the pass", ylabel="milliseconds")
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _set_log2_scale(axis: Any) -> None:
    """Make an axis logarithmic with ticks at 1, 2, 4, ..., written as plain numbers."""
    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log", base=2)
    axis.set_major_formatter(lambda number, _: f"{number:g}")


def _horizontal_places(tree: TokenTree) -> Floats:
    """x of every node: leaves are side by side in preorder, and a parent is above the middle of its
    children.

    Returns float64 [size].
    """
    places = np.zeros(tree.size)
    num_leaves = 0
    waiting = [0]
    while waiting:  # in preorder: a node's children wait before what waited already
        node = waiting.pop()
        first, count = int(tree.first_child[node]), int(tree.child_count[node])
        waiting.extend(range(first + count - 1, first - 1, -1))
        if not count:
            places[node], num_leaves = num_leaves, num_leaves + 1
    for node in np.flatnonzero(tree.child_count)[::-1]:
        first = tree.first_child[node]
        places[node] = (places[first] + places[first + tree.child_count[node] - 1]) / 2
    return places
