"""The picture of a compiled tree: the tree itself, and expected tokens against size beside chains;
or trees by match, and speed by kind of prompts."""

import io
from pathlib import Path

import numpy as np

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner.report import panels

PNG_DPI = 160


def draw(tree: TokenTree, path: str | Path) -> None:
    """Draw the tree into a .png or .svg file, in one or two panels side by side."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ArgumentError(
            f"--plot {path}: found the format {suffix or 'none'}, expected .png or .svg"
        )
    import matplotlib
    from matplotlib.figure import Figure

    plan = tree.plan
    tokens = f": {plan.expected_tokens:.2f} tokens a step" if plan.expected_tokens else ""
    drawn = [(panels.tree_panel, f"{tree.size} nodes, depth {tree.depth}{tokens}")]
    if plan.by_match:
        drawn = [(panels.trees_by_match_panel, f"Trees by match{tokens}")]
        if plan.speedup_by_kind:
            title = f"Speed by kind of prompts: {plan.predicted_speedup:.2f}x in all"
            drawn.append((panels.speedups_by_kind_panel, title))
    elif plan.acceptance:
        drawn.append((panels.tokens_panel, "Tokens a step against size"))
    style_settings = panels.style("#22302a", "#e4e9e6", "sequoia-plan") | {"font.size": 11}
    with matplotlib.rc_context(style_settings):
        figure = Figure(figsize=(1 + 5.4 * len(drawn), 4.8), layout="constrained")
        all_axes = np.atleast_1d(figure.subplots(1, len(drawn)))
        for axes, (panel, title) in zip(all_axes, drawn, strict=True):
            panel(tree, axes)
            axes.set_title(title)
        picture = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else None  # the same tree, the same bytes
        figure.savefig(picture, format=suffix[1:], dpi=PNG_DPI, metadata=metadata)
    write_atomically(path, picture.getvalue())
