"""The picture of a compiled tree: the tree itself, expected tokens against size beside the
baselines, and speed over size and depth; or trees by match, and speed by kind of prompts."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner.report.match_panels import speedups_by_kind_panel, trees_by_match_panel
from sequoia_plan.planner.report.panels import speed_panel, style, tokens_panel, tree_panel

PNG_DPI = 160
Panel = Callable[[TokenTree, Any], None]
"""Draws a tree onto matplotlib axes."""


def draw(tree: TokenTree, path: str | Path) -> None:
    """Draw the tree into a .png or .svg file, in up to three panels side by side."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ArgumentError(
            f"--plot {path}: found the format {suffix or 'none'}, expected .png or .svg"
        )
    import matplotlib
    from matplotlib.figure import Figure

    panels = _panels_by_match(tree) if tree.plan.by_match else _panels(tree)
    style_settings = style("#22302a", "#e4e9e6", "sequoia-plan") | {"font.size": 11}
    with matplotlib.rc_context(style_settings):
        figure = Figure(figsize=(1 + 5.4 * len(panels), 4.8), layout="constrained")
        all_axes = np.atleast_1d(figure.subplots(1, len(panels)))
        for axes, (panel, title) in zip(all_axes, panels, strict=True):
            panel(tree, axes)
            axes.set_title(title)
        picture = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else None  # the same tree, the same bytes
        figure.savefig(picture, format=suffix[1:], dpi=PNG_DPI, metadata=metadata)
    write_atomically(path, picture.getvalue())


def _panels(tree: TokenTree) -> list[tuple[Panel, str]]:
    """The panels of a single tree, each with its title."""
    expected_tokens = tree.plan.expected_tokens
    title = f"{tree.size} nodes, depth {tree.depth}"
    if expected_tokens:
        title += f": {expected_tokens:.2f} tokens a step"
    panels: list[tuple[Panel, str]] = [(tree_panel, title)]
    if tree.plan.acceptance:
        panels.append((tokens_panel, "Tokens a step against size"))
        if tree.plan.latency and tree.size > 1:
            panels.append((speed_panel, "Predicted speed over size and depth"))
    return panels


def _panels_by_match(tree: TokenTree) -> list[tuple[Panel, str]]:
    """The panels of trees by match, each with its title."""
    plan = tree.plan
    title = f"Trees by match: {plan.expected_tokens:.2f} tokens a step"
    panels: list[tuple[Panel, str]] = [(trees_by_match_panel, title)]
    if plan.speedup_by_kind:
        speedup = plan.predicted_speedup
        panels.append((speedups_by_kind_panel, f"Speed by kind of prompts: {speedup:.2f}x in all"))
    return panels
