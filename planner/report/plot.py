"""The picture of a compiled tree, or of its trees by match side by side."""

from pathlib import Path

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner.report import panels
from sequoia_plan.planner.report.tree_summary import at_least


def draw(tree: TokenTree, path: str | Path) -> None:
    """Draw the tree of each match class into a .png or .svg file."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ArgumentError(
            f"--plot {path}: found the format {suffix or 'none'}, expected .png or .svg"
        )
    plan, drawn = tree.plan, list[panels.Panel]()
    acceptances = {0: plan.acceptance} | {p.match_length: p.acceptance for p in plan.by_match}
    for length, class_tree in tree.portfolio.items():
        source = "looked up" if class_tree.looks_up else "drafted"
        title = f"{class_tree.size} nodes, depth {class_tree.depth}, {source}"
        if tree.by_match:
            title = f"match of {at_least(length)}\n{title}"
        drawn.append((class_tree, acceptances.get(length), title))
    inches = (1 + 4.0 * len(drawn), 4.8)
    write_atomically(path, panels.picture(drawn, inches, "#22302a", suffix[1:]))
