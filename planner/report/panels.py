"""The drawing of trees side by side."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Acceptance, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import node_values
from sequoia_plan.artifacts.tree import children_of

EDGE_COLOUR = "#8fa297"
MAX_LEVEL_TICKS = 12
DPI = 160
Panel = tuple[TokenTree, Acceptance | None, str]
"""A tree, the acceptance that gives the values of its nodes, and a title."""


def picture(
    panels: Sequence[Panel],
    inches: tuple[float, float],
    ink: str,
    suffix: str = "svg",
    *,
    in_page: bool = False,
) -> bytes:
    """The file with these trees, also to be seen through; equal trees give equal bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[str, Any] = dict.fromkeys(("text.color", "axes.labelcolor", "ytick.color"), ink)
    settings |= {"font.size": 10, "svg.hashsalt": "sequoia-plan"}
    settings["svg.fonttype"] = "none" if in_page else "path"
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=inches, layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, axes in zip(panels, all_axes, strict=True):
            tree_panel(*panel, axes)
        file = io.BytesIO()
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(file, format=suffix, dpi=DPI, metadata=metadata, transparent=in_page)
    return file.getvalue()


def tree_panel(tree: TokenTree, acceptance: Acceptance | None, title: str, axes: Any) -> None:
    """Draw a tree level by level.

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
    places, num_leaves, children, waiting = np.zeros(tree.size), 0, children_of(tree), [0]
    while waiting:  # in preorder: a node's children wait before what waited already
        node = waiting.pop()
        waiting += reversed(children[node])
        if not children[node]:
            places[node], num_leaves = num_leaves, num_leaves + 1
    for node in np.flatnonzero(tree.child_count)[::-1]:
        places[node] = (places[children[node][0]] + places[children[node][-1]]) / 2
    return places
