"""A token tree for human eyes: a summary in the terminal, a picture in a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner.objective import node_values

MOST_NODES_DRAWN = 40


def summarise(tree: TokenTree) -> None:
    """Print size, depth, what was promised, and the tree itself (its most valuable nodes if it is large)."""
    from rich.console import Console
    from rich.tree import Tree

    console = Console(highlight=False)
    plan = tree.plan
    console.print(f"{tree.size} nodes, depth {tree.depth}, branching {tree.branching}, level widths {' '.join(map(str, tree.level_widths))}")
    if plan.get("expected_tokens") is not None:
        console.print(f"expected tokens a step  {plan['expected_tokens']:.4f}  ({plan.get('solver')})", markup=False)
    if plan.get("predicted_speedup") is not None:
        console.print(f"predicted speed-up      {plan['predicted_speedup']:.3f}x, {plan['step_seconds'] * 1000:.1f} ms a step")
    for role, facts in (plan.get("models") or {}).items():
        console.print(f"{role:<23} {facts.get('name')}" + (f" ({facts['dtype']})" if facts.get("dtype") else ""), markup=False)
    values = _values(tree)
    drawn = set(np.argsort(-values, kind="stable")[:MOST_NODES_DRAWN].tolist())
    branches = {0: Tree("[bold]root 1.000[/bold]")}
    for node in range(1, tree.size):
        parent = int(tree.parents[node])
        if node in drawn and parent in branches:
            branches[node] = branches[parent].add(f"{tree.ranks[node]}  {values[node]:.3f}")
    console.print(branches[0])
    if len(branches) < tree.size:
        console.print(f"... and {tree.size - len(branches)} nodes of less value")


def plot(tree: TokenTree, path: str | Path) -> None:
    """Draw the tree, level by level; a node's area is its value.

    Raises:
        ArgumentError: for another format than .png or .svg.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise ArgumentError(f"--plot {path}: found the format {suffix or 'none'}, expected .png or .svg")
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    across = _layout(tree)
    points = np.column_stack([across, -tree.position_ids])
    values = _values(tree)
    figure = Figure(figsize=(min(4 + 0.12 * int(tree.level_widths.max()), 16), 1.2 + 0.7 * tree.depth), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.add_collection(LineCollection([points[[node, tree.parents[node]]] for node in range(1, tree.size)], colors="#9db0a5", linewidths=0.8, zorder=1))
    axes.scatter(*points.T, s=12 + 240 * values, c=values, cmap="YlGn", vmin=-0.15, vmax=1, edgecolors="#35523f", linewidths=0.6, zorder=2)
    axes.set_yticks(range(0, -tree.depth, -1), [f"{level}" for level in range(tree.depth)])
    axes.set_ylabel("tokens after the root")
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.margins(0.06)
    promised = tree.plan.get("expected_tokens")
    axes.set_title(f"{tree.size} nodes, depth {tree.depth}" + (f": {promised:.2f} tokens a step" if promised else ""))
    picture = io.BytesIO()
    figure.savefig(picture, format=suffix[1:], dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    write_atomically(path, picture.getvalue())


def _values(tree: TokenTree) -> Any:
    """Node values under the acceptance the tree was solved for; equal ones if it was not solved."""
    acceptance = tree.plan.get("acceptance")
    return node_values(tree, acceptance) if acceptance else np.full(tree.size, 1.0)


def _layout(tree: TokenTree) -> Any:
    """Horizontal places: leaves side by side in preorder, a parent above the middle of its children."""
    across = np.zeros(tree.size)
    leaves = np.where(tree.child_count == 0, 1, 0)
    for node in range(tree.size - 1, 0, -1):
        leaves[tree.parents[node]] += leaves[node]
    start = np.zeros(tree.size)
    for node in range(1, tree.size):
        elder = node - 1
        siblings = elder > 0 and tree.parents[elder] == tree.parents[node]
        start[node] = start[elder] + leaves[elder] if siblings else start[tree.parents[node]]
    for node in range(tree.size - 1, -1, -1):
        first, count = int(tree.first_child[node]), int(tree.child_count[node])
        across[node] = (across[first] + across[first + count - 1]) / 2 if count else start[node]
    return across
