"""The drawings of a plan, each onto axes given to it, in the ink and lines of matplotlib's current style."""

from __future__ import annotations

from typing import Any

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import Acceptance, StepTime, by_class, expected_tokens, node_values
from sequoia_plan.artifacts.plan import CLASSES
from sequoia_plan.artifacts.uncertainty import Z95
from sequoia_plan.planner.solving.baselines import baseline
from sequoia_plan.planner.solving.frontier import LARGEST_TABLE, frontier

GREEN, AMBER, BLUE, PURPLE, RED = "#2f9d5f", "#c0803a", "#5b8fc6", "#a86fb8", "#d1495b"
"""Readable on white and on black."""


def style(ink: str, line: str, seed: str) -> dict[str, Any]:
    """rcParams: text and axes in `ink`, grids and a tree's edges in `line`; the same `seed` gives the same SVG, byte by byte."""
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
    plain = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "axes.axisbelow": True,
        "font.family": "sans-serif",
    }
    return dict.fromkeys(inked, ink) | {"grid.color": line, "svg.hashsalt": seed} | plain


def tree_panel(tree: TokenTree, axes: Any) -> None:
    """Level by level; a node's area is the probability that it is accepted."""
    from matplotlib import rcParams
    from matplotlib.collections import LineCollection

    points = np.column_stack([_layout(tree), -tree.position_ids])
    acceptance = tree.plan.acceptance
    values = node_values(tree, acceptance) if acceptance else np.ones(tree.size)
    scale = min(1.0, 30 / tree.level_widths.max())
    segments: Any = np.stack([points[1:], points[tree.parents[1:]]], axis=1) if tree.size > 1 else []
    axes.add_collection(LineCollection(segments, colors="#8fa297", linewidths=0.3 + 0.6 * scale, zorder=1))
    areas = 4 + 14 * scale + 200 * values * scale**0.5
    edges = {"edgecolors": rcParams["text.color"], "linewidths": 0.5 * scale + 0.1}
    axes.scatter(*points.T, s=areas, c=values, cmap="YlGn", vmin=-0.15, vmax=1, zorder=2, **edges)
    every = -(-tree.depth // 12)
    axes.set_yticks(range(0, -tree.depth, -every), [f"{level}" for level in range(0, tree.depth, every)])
    axes.set_ylabel("tokens after the root")
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.margins(0.06)


def acceptance_panel(acceptance: Acceptance, axes: Any, trials: int = 0) -> None:
    """Log-log, and the power law through it; one vector has its 95 % (Wilson) interval if its `trials` are known. Where parents have two
    classes, the children of nodes off the spine are drawn dashed.

    The fit weighs a rank by what is known of it: log p has the variance (1 - p) / (n p).
    """
    from matplotlib import colormaps

    rows = by_class(acceptance)
    levels, classes, _ = rows.shape
    shades = [GREEN] if levels == 1 else [colormaps["viridis"](0.15 + 0.75 * level / (levels - 1)) for level in range(levels)]
    for level, kind in [each for each in np.ndindex(levels, classes) if each[1] == 0 or each[0] > 0 or levels == 1]:  # the root is on the spine
        ranks, shade = np.flatnonzero(rows[level, kind] > 0) + 1, shades[level]
        p = rows[level, kind, ranks - 1]
        label = "measured" if levels == 1 else None if level % -(-levels // 8) else f"children of level {level}"
        if classes > 1 and label and (level or levels == 1):
            label += f", {CLASSES[kind]}"
        axes.plot(ranks, p, "o--" if kind else "o-", markersize=4 if levels == 1 else 2.5, linewidth=1.2, color=shade, label=label)
        if trials and rows.shape[:2] == (1, 1):
            room = Z95**2 / trials
            middle, reach = (p + room / 2) / (1 + room), np.sqrt(room * p * (1 - p) + room**2 / 4) / (1 + room)
            axes.vlines(ranks, middle - reach, middle + reach, color=shade, alpha=0.35, linewidth=3, label="95 % interval")
    ranks = np.flatnonzero(rows[0, 0] > 0) + 1
    if ranks.size > 1:
        p = rows[0, 0, ranks - 1]
        slope, start = np.polyfit(np.log(ranks), np.log(p), 1, w=np.sqrt(p))
        axes.plot(
            ranks,
            np.exp(start) * ranks**slope,
            ":",
            color=AMBER,
            linewidth=1.8,
            label=f"power law: rank^{slope:.2f}" + (" on level 0" if levels > 1 else ""),
        )
    axes.set_yscale("log")
    _log_ticks(axes.yaxis)
    _doubling(axes.xaxis)
    if rows.max() > 0:
        axes.set_ylim(0.6 * rows[rows > 0].min(), min(1.0, 1.6 * rows.max()))
    axes.set(xlabel="rank", ylabel="probability to be the one accepted")
    axes.legend(loc="lower left")


def tokens_panel(tree: TokenTree, axes: Any) -> None:
    """Expected tokens against size (the paper's Figure 1, left), each baseline at its best shape for the size."""
    acceptance, depth = tree.plan.acceptance, max(tree.plan.depth or tree.depth, tree.depth, 2)
    assert acceptance is not None
    largest = int(min(max(64, 2 * tree.size), 4096))
    values = frontier(acceptance, largest, depth, tree.plan.branching).values[-1]
    sizes = np.unique(np.geomspace(1, largest, 40).astype(int))
    ours = sizes[sizes <= len(values)]
    lines = [("this acceptance's best tree", ours, values[ours - 1], GREEN)]
    chains = [f"chains:{k}" for k in (2, 4, 8, 16)]
    shapes = {"complete k-ary, best k": ["k-ary:2", "k-ary:3", "k-ary:4", "k-ary:8"], "k chains, best k": chains, "one chain": ["chain"]}
    for (label, names), colour in zip(shapes.items(), (AMBER, BLUE, PURPLE), strict=True):
        tokens = [max(expected_tokens(baseline(name, int(n), depth), acceptance) for name in names) for n in sizes]
        lines.append((label, sizes, np.maximum.accumulate(tokens), colour))
    for label, x, y, colour in lines:
        axes.plot(x, y, color=colour, linewidth=2.6 if colour == GREEN else 1.8, label=label)
    axes.scatter([tree.size], [expected_tokens(tree, acceptance)], s=70, color=GREEN, edgecolors="white", linewidths=1.5, zorder=3, label="this tree")
    _doubling(axes.xaxis)
    axes.set(xlabel="nodes", ylabel="expected tokens a step")
    axes.set_ylim(bottom=1)
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="upper left")


def latency_panel(tree: TokenTree, axes: Any) -> None:
    """Seconds of the target's and the draft's pass against the tokens in it, log-log."""
    latency = tree.plan.latency
    assert latency is not None
    for name, curve, colour in (("target", latency.target, GREEN), ("draft", latency.draft, BLUE)):
        points = np.array(sorted(curve.items()), float)
        axes.plot(points[:, 0], 1000 * points[:, 1], "o-", markersize=4, color=colour, label=name)
    axes.axvline(tree.size, color=RED, linewidth=1.5, linestyle=":", label="this tree's size")
    axes.set_yscale("log")
    _log_ticks(axes.yaxis)
    _doubling(axes.xaxis)
    axes.set(xlabel="tokens in the pass", ylabel="milliseconds")
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def speed_panel(tree: TokenTree, axes: Any) -> None:
    """The most a tree of each size and depth can speed up; the choice is marked."""
    plan, times = tree.plan, StepTime.of(tree.plan)
    assert times is not None and plan.acceptance is not None
    depth = min(max(plan.depth or 0, tree.depth, 2), 2 * tree.depth + 2)
    largest = max(tree.size, min(times.largest(), max(16, 4 * tree.size), plan.budget or 64, LARGEST_TABLE // depth))
    values = frontier(plan.acceptance, largest, depth, plan.branching).values
    speeds = np.full((depth, largest), np.nan)
    for d, row in enumerate(values, 1):
        sizes = np.arange(d, len(row) + 1)  # d levels have d nodes at least
        speeds[d - 1, d - 1 : len(row)] = row[d - 1 :] * times.plain() / times.steps_at_least(sizes, d)
    edges = np.append(0.71, np.arange(1, largest + 1) + 0.5)  # on a logarithmic axis one node is as far from its left edge as from its right one
    image = axes.pcolormesh(edges, np.arange(depth + 1) + 0.5, np.ma.masked_invalid(speeds), cmap="YlGn", rasterized=True)
    axes.figure.colorbar(image, ax=axes, label="speed-up over plain decoding, at most").outline.set_visible(False)
    axes.scatter([tree.size], [tree.depth], marker="*", s=260, color=RED, edgecolors="white", linewidths=1.2, zorder=3, clip_on=False)
    if plan.predicted_speedup:
        side = -1 if tree.size > largest**0.5 else 1
        below = tree.depth > 0.8 * depth
        box: Any = {"color": "#22302a", "weight": "bold", "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "boxstyle": "round,pad=0.2"}}
        place: Any = {"textcoords": "offset points", "ha": "left" if side > 0 else "right", "va": "top" if below else "bottom"}
        axes.annotate(f"{plan.predicted_speedup:.2f}x", (tree.size, tree.depth), (12 * side, -8 if below else 8), **place, **box)
    _doubling(axes.xaxis)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="nodes", ylabel="depth (levels)")


def _doubling(axis: Any) -> None:
    """A logarithmic axis of counts: 1, 2, 4, ..."""
    axis.axes.set_xscale("log", base=2)
    axis.set_major_formatter(lambda x, _: f"{x:g}")


def _log_ticks(axis: Any) -> None:
    """1, 2, 5, 10, ... in plain figures."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.set_minor_formatter(NullFormatter())


def _layout(tree: TokenTree) -> Any:
    """Horizontal places: leaves side by side in preorder, a parent above the middle of its children."""
    across = np.zeros(tree.size)
    leaves = np.where(tree.child_count == 0, 1, 0)
    for node in range(tree.size - 1, 0, -1):
        leaves[tree.parents[node]] += leaves[node]
    start = np.zeros(tree.size)
    for node in range(1, tree.size):
        before = node - 1
        siblings = before > 0 and tree.parents[before] == tree.parents[node]
        start[node] = start[before] + leaves[before] if siblings else start[tree.parents[node]]
    for node in range(tree.size - 1, -1, -1):
        first, count = int(tree.first_child[node]), int(tree.child_count[node])
        across[node] = (across[first] + across[first + count - 1]) / 2 if count else start[node]
    return across
