"""The picture of a compiled tree: the tree, F against size beside the baselines, and speed over size and depth."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from sequoia_plan.artifacts import ArgumentError, Latency, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner.baselines import baseline
from sequoia_plan.planner.objective import StepTime, expected_tokens, node_values
from sequoia_plan.planner.solvers import LARGEST_TABLE, frontier

INK, GREEN, MUTED = "#22302a", "#2f7d4f", ["#c0803a", "#5b7fa6", "#9a6fa8"]


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

    plan = tree.plan
    panels: list[Any] = [_tree]
    if plan.get("acceptance"):
        panels.append(_tokens)
        if plan.get("latency") and tree.size > 1:
            panels.append(_speed)
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK, "axes.labelcolor": INK, "svg.hashsalt": "sequoia-plan"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(1 + 5.4 * len(panels), 4.8), layout="constrained")
        for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            panel(tree, axes)
        picture = io.BytesIO()
        figure.savefig(picture, format=suffix[1:], dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    write_atomically(path, picture.getvalue())


def _tree(tree: TokenTree, axes: Any) -> None:
    """Level by level; a node's area is the probability that it is accepted."""
    from matplotlib.collections import LineCollection

    points = np.column_stack([_layout(tree), -tree.position_ids])
    acceptance = tree.plan.get("acceptance")
    values = node_values(tree, acceptance) if acceptance else np.ones(tree.size)
    scale = min(1.0, 30 / tree.level_widths.max())
    segments: Any = np.stack([points[1:], points[tree.parents[1:]]], axis=1) if tree.size > 1 else []
    axes.add_collection(LineCollection(segments, colors="#9db0a5", linewidths=0.3 + 0.6 * scale, zorder=1))
    axes.scatter(
        *points.T,
        s=4 + 14 * scale + 200 * values * scale**0.5,
        c=values,
        cmap="YlGn",
        vmin=-0.15,
        vmax=1,
        edgecolors="#35523f",
        linewidths=0.5 * scale + 0.1,
        zorder=2,
    )
    every = -(-tree.depth // 12)
    axes.set_yticks(range(0, -tree.depth, -every), [f"{level}" for level in range(0, tree.depth, every)])
    axes.set_ylabel("tokens after the root")
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.margins(0.06)
    promised = tree.plan.get("expected_tokens")
    axes.set_title(f"{tree.size} nodes, depth {tree.depth}" + (f": {promised:.2f} tokens a step" if promised else ""))


def _tokens(tree: TokenTree, axes: Any) -> None:
    """Expected tokens against size (the paper's Figure 1, left), each baseline at its best shape for the size."""
    acceptance, depth = tree.plan["acceptance"], max(tree.plan.get("depth") or tree.depth, tree.depth, 2)
    largest = int(min(max(64, 2 * tree.size), 4096))
    values = frontier(acceptance, largest, depth, tree.plan.get("branching")).values[-1]
    sizes = np.unique(np.geomspace(1, largest, 40).astype(int))
    ours = sizes[sizes <= len(values)]
    lines = [("this acceptance's best tree", ours, values[ours - 1], GREEN)]
    chains = [f"chains:{k}" for k in (2, 4, 8, 16)]
    shapes = {"complete k-ary, best k": ["k-ary:2", "k-ary:3", "k-ary:4", "k-ary:8"], "k chains, best k": chains, "one chain": ["chain"]}
    for (label, names), colour in zip(shapes.items(), MUTED, strict=True):
        worth = [max(expected_tokens(baseline(name, int(n), depth), acceptance) for name in names) for n in sizes]
        lines.append((label, sizes, np.maximum.accumulate(worth), colour))
    for label, x, y, colour in lines:
        axes.plot(x, y, color=colour, linewidth=2.6 if colour == GREEN else 1.8, label=label)
    if tree.plan.get("expected_tokens"):
        axes.scatter([tree.size], [tree.plan["expected_tokens"]], s=70, color=GREEN, edgecolors="white", linewidths=1.5, zorder=3, label="this tree")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_xlabel("nodes")
    axes.set_ylabel("expected tokens a step")
    axes.set_ylim(bottom=1)
    axes.grid(axis="y", color="#e4e9e6", linewidth=0.8)
    axes.legend(frameon=False, loc="upper left")
    axes.set_title("Tokens a step against size")


def _speed(tree: TokenTree, axes: Any) -> None:
    """The most a tree of each size and depth can speed up; the choice is marked."""
    plan = tree.plan
    known = plan["latency"]
    curves = {name: {int(n): seconds for n, seconds in known[name]} for name in ("target", "draft")}
    times = StepTime(Latency(**curves, overhead=known["overhead"], context=known["context"]))
    depth = min(max(plan.get("depth") or 0, tree.depth), 2 * tree.depth + 2)
    largest = min(times.largest(), max(16, 4 * tree.size), plan.get("budget") or tree.size, LARGEST_TABLE // depth)
    values = frontier(plan["acceptance"], max(largest, tree.size), depth, plan.get("branching")).values
    speeds = np.full((depth, max(largest, tree.size)), np.nan)
    for d, row in enumerate(values, 1):
        speeds[d - 1, : len(row)] = row * times.plain() / times.steps_at_least(np.arange(1, len(row) + 1), d)
    edges = np.arange(1, speeds.shape[1] + 2) - 0.5
    image = axes.pcolormesh(edges, np.arange(depth + 1) + 0.5, np.ma.masked_invalid(speeds), cmap="YlGn", rasterized=True)
    axes.figure.colorbar(image, ax=axes, label="speed-up over plain decoding, at most")
    axes.scatter([tree.size], [tree.depth], marker="*", s=260, color="#d1495b", edgecolors="white", linewidths=1.2, zorder=3)
    promised = plan.get("predicted_speedup")
    if promised:
        side = -1 if tree.size > speeds.shape[1] ** 0.5 else 1
        bold: Any = {"weight": "bold", "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "boxstyle": "round,pad=0.2"}}
        axes.annotate(f"{promised:.2f}x", (tree.size, tree.depth), (12 * side, 10), textcoords="offset points", ha="left" if side > 0 else "right", **bold)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("nodes")
    axes.set_ylabel("depth (levels)")
    axes.set_title("Predicted speed over size and depth")


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
