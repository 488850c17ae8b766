"""The drawing of a tree onto axes, and the style that all drawings share."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Acceptance, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import node_values

GREEN, AMBER, BLUE = "#2f9d5f", "#c0803a", "#5b8fc6"
"""Colours that are readable on white and on black."""
EDGE_COLOUR = "#8fa297"
MAX_LEVEL_TICKS = 12
DPI = 160


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


def picture(
    panels: Sequence[Callable[[Any], None]],
    inches: tuple[float, float],
    settings: dict[str, Any],
    suffix: str = "svg",
) -> bytes:
    """The file with these drawings side by side; equal drawings give equal bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(settings | {"font.size": 10}):
        figure = Figure(figsize=inches, layout="constrained")
        for draw, axes in zip(
            panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True
        ):
            draw(axes)
        file = io.BytesIO()
        metadata = {"Date": None} if suffix == "svg" else None
        transparent = settings.get("axes.facecolor") == "none"
        figure.savefig(file, format=suffix, dpi=DPI, metadata=metadata, transparent=transparent)
    return file.getvalue()


def tree_panel(tree: TokenTree, acceptance: Acceptance | None, title: str, axes: Any) -> None:
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
    axes.set(ylabel="tokens after the root", xticks=[], title=title)
    axes.spines[:].set_visible(False)
    axes.margins(0.1)


def _horizontal_places(tree: TokenTree) -> Floats:
    """x of every node: leaves are side by side in preorder, and a parent is above the middle of its
    children.

    Returns float64 [size].
    """
    places, num_leaves = np.zeros(tree.size), 0
    first_child, child_count = tree.first_child.tolist(), tree.child_count.tolist()
    waiting = [0]
    while waiting:  # in preorder: a node's children wait before what waited already
        node = waiting.pop()
        waiting += range(first_child[node] + child_count[node] - 1, first_child[node] - 1, -1)
        if not child_count[node]:
            places[node], num_leaves = num_leaves, num_leaves + 1
    for node in np.flatnonzero(child_count)[::-1]:
        last_child = first_child[node] + child_count[node] - 1
        places[node] = (places[first_child[node]] + places[last_child]) / 2
    return places
