"""The drawings of a tree and of bench's speed-ups, each onto axes in the current style."""

from typing import Any

import numpy as np

from sequoia_plan.artifacts import Acceptance, BenchResult, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import node_values
from sequoia_plan.planner.report.bench_table import speedups_over_plain

GREEN, AMBER, BLUE = "#2f9d5f", "#c0803a", "#5b8fc6"
"""Colours that are readable on white and on black."""
EDGE_COLOUR = "#8fa297"
MAX_LEVEL_TICKS = 12


def style(ink: str, line: str, seed: str) -> dict[str, Any]:
    """The rcParams that all drawings share."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return dict.fromkeys((*inked, "legend.labelcolor"), ink) | {
        "grid.color": line,
        "svg.hashsalt": seed,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "axes.axisbelow": True,
        "font.family": "sans-serif",
    }


def tree_panel(tree: TokenTree, acceptance: Acceptance | None, axes: Any) -> None:
    """Draw the tree level by level.

    A node's area grows with its value, the probability that it is accepted. Without acceptance,
    all nodes look alike.
    """
    from matplotlib.collections import LineCollection

    points = np.column_stack([_horizontal_places(tree), -tree.position_ids])
    values = node_values(tree, acceptance.rates) if acceptance else np.ones(tree.size)
    scale = min(1.0, 30 / tree.level_widths.max())  # smaller nodes where the levels are wide
    segments: Any = np.stack([points[1:], points[tree.parents[1:]]], axis=1)
    axes.add_collection(LineCollection(segments, colors=EDGE_COLOUR, linewidths=scale, zorder=1))
    sizes = 4 + 14 * scale + 200 * values * scale**0.5
    colours = {"cmap": "YlGn", "vmin": -0.15, "vmax": 1, "edgecolors": EDGE_COLOUR}
    axes.scatter(*points.T, s=sizes, c=values, zorder=2, linewidths=scale, **colours)
    levels = np.arange(0, tree.depth, -(-tree.depth // MAX_LEVEL_TICKS))
    axes.set_yticks(-levels, levels)
    axes.set(ylabel="tokens after the root", xticks=[])
    axes.spines[:].set_visible(False)
    axes.margins(0.1)


def speedups_panel(result: BenchResult, axes: Any) -> None:
    """Draw the speed-up over plain decoding of every method, a row for each.

    A dot with a bar is the measured speed-up and its 95 % interval, a diamond the predicted one.
    """
    for row, (name, ratio) in enumerate(speedups_over_plain(result).items()):
        ends = [ratio.interval_low, ratio.interval_high]
        axes.plot(ends, [row, row], color=BLUE)
        axes.plot(ratio.median, row, "o", color=BLUE)
        prediction = result.methods[name].prediction
        if prediction and prediction.speedup:
            axes.plot(prediction.speedup, row, "D", color=AMBER, markerfacecolor="none")
    titles = [result.methods[name].title for name in speedups_over_plain(result)]
    axes.set_yticks(range(len(titles)), titles)
    axes.axvline(1, color=EDGE_COLOUR)
    axes.set(ylim=(len(titles) - 0.5, -0.5), xlabel="times plain decoding")


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
