"""The picture of a compiled tree: the tree, F against size beside the baselines, and speed over size and depth."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner.report.panels import speed_panel, style, tokens_panel, tree_panel


def draw(tree: TokenTree, path: str | Path) -> None:
    """Draw what the tree's plan allows: its acceptance vector gives the second panel, its latencies the third.

    Raises:
        ArgumentError: for another format than .png or .svg.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ArgumentError(f"--plot {path}: found the format {suffix or 'none'}, expected .png or .svg")
    import matplotlib
    from matplotlib.figure import Figure

    promised = tree.plan.expected_tokens
    panels: list[Any] = [(tree_panel, f"{tree.size} nodes, depth {tree.depth}" + (f": {promised:.2f} tokens a step" if promised else ""))]
    if tree.plan.acceptance:
        panels.append((tokens_panel, "Tokens a step against size"))
        if tree.plan.latency and tree.size > 1:
            panels.append((speed_panel, "Predicted speed over size and depth"))
    with matplotlib.rc_context(style("#22302a", "#e4e9e6", "sequoia-plan") | {"font.size": 11}):
        figure = Figure(figsize=(1 + 5.4 * len(panels), 4.8), layout="constrained")
        for axes, (panel, title) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            panel(tree, axes)
            axes.set_title(title)
        picture = io.BytesIO()
        figure.savefig(picture, format=suffix[1:], dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    write_atomically(path, picture.getvalue())
