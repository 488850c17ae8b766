"""The picture of a compiled tree, or of its trees by match side by side."""

import io
from pathlib import Path

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner.report import panels
from sequoia_plan.planner.report.tree_summary import at_least

PNG_DPI = 160


def draw(tree: TokenTree, path: str | Path) -> None:
    """Draw the tree of each class of match into a .png or .svg file."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ArgumentError(
            f"--plot {path}: found the format {suffix or 'none'}, expected .png or .svg"
        )
    import matplotlib
    from matplotlib.figure import Figure

    plan, portfolio = tree.plan, tree.portfolio
    acceptances = {0: plan.acceptance} | {p.match_length: p.acceptance for p in plan.by_match}
    style_settings = panels.style("#22302a", "#e4e9e6", "sequoia-plan") | {"font.size": 11}
    with matplotlib.rc_context(style_settings):
        figure = Figure(figsize=(1 + 4 * len(portfolio), 4.8), layout="constrained")
        all_axes = figure.subplots(1, len(portfolio), squeeze=False)[0]
        for axes, (length, class_tree) in zip(all_axes, portfolio.items(), strict=True):
            panels.tree_panel(class_tree, acceptances.get(length), axes)
            match = f"match of {at_least(length)}\n" if tree.by_match else ""
            source = "looked up" if class_tree.looks_up else "drafted"
            axes.set_title(f"{match}{class_tree.size} nodes, depth {class_tree.depth}, {source}")
        picture = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else None  # the same tree, the same bytes
        figure.savefig(picture, format=suffix[1:], dpi=PNG_DPI, metadata=metadata)
    write_atomically(path, picture.getvalue())
