"""The drawings of a tree, its plan and bench's results, each onto axes in the current style."""

import textwrap
from typing import Any

import numpy as np

from sequoia_plan.artifacts import Acceptance, BenchResult, Plan, TokenTree
from sequoia_plan.artifacts.counts import Floats
from sequoia_plan.artifacts.expected_tokens import expected_tokens, node_values
from sequoia_plan.artifacts.plan import MatchPlan
from sequoia_plan.planner.report.bench_table import TREE_METHODS, speedups_over_plain
from sequoia_plan.planner.solving.tokens.frontier import max_budget, pick_solver

GREEN, AMBER, BLUE, PURPLE, RED = "#2f9d5f", "#c0803a", "#5b8fc6", "#a86fb8", "#d1495b"
"""Colours that are readable on white and on black."""
EDGE_COLOUR = "#8fa297"

MAX_LEVEL_TICKS = 12
MAX_LEVELS_DRAWN = 10
"""The end of a deeper tree by match, which is a looked-up chain, is not drawn."""
MAX_TITLE_COLUMNS = 20
"""Characters in a line of a method's title."""


def style(ink: str, line: str, seed: str) -> dict[str, Any]:
    """The rcParams that all drawings share."""
    ink_parameters = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
        "legend.labelcolor",
    )
    return dict.fromkeys(ink_parameters, ink) | {
        "grid.color": line,
        "svg.hashsalt": seed,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "axes.axisbelow": True,
        "font.family": "sans-serif",
    }


def tree_panel(tree: TokenTree, axes: Any) -> None:
    """Draw the tree level by level.

    A node's area grows with its value, the probability that it is accepted. Without acceptance in
    the tree's plan, all nodes look alike.
    """
    from matplotlib import rcParams
    from matplotlib.collections import LineCollection

    points = np.column_stack([_horizontal_places(tree), -tree.position_ids])
    acceptance = tree.plan.acceptance
    values = node_values(tree, acceptance.rates) if acceptance else np.ones(tree.size)
    scale = min(1.0, 30 / tree.level_widths.max())  # smaller nodes where the levels are wide
    segments: Any = np.stack([points[1:], points[tree.parents[1:]]], axis=1)
    edges = LineCollection(segments, colors=EDGE_COLOUR, linewidths=0.3 + 0.6 * scale, zorder=1)
    axes.add_collection(edges)
    axes.scatter(
        *points.T,
        s=4 + 14 * scale + 200 * values * scale**0.5,
        c=values,
        cmap="YlGn",
        vmin=-0.15,
        vmax=1,
        zorder=2,
        edgecolors=rcParams["text.color"],
        linewidths=0.5 * scale + 0.1,
    )
    levels_per_tick = -(-tree.depth // MAX_LEVEL_TICKS)  # rounded up
    levels = np.arange(0, tree.depth, levels_per_tick)
    axes.set_yticks(-levels, levels)
    axes.set(ylabel="tokens after the root", xticks=[])
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.margins(0.06)


def tokens_panel(tree: TokenTree, axes: Any) -> None:
    """Draw expected tokens a step against size, for the best trees and for chains.

    As the left plot of Figure 1 in Sequoia (arXiv 2402.12374).
    """
    acceptance = tree.plan.acceptance
    depth = max(tree.plan.depth or tree.depth, tree.depth, 2)
    assert acceptance is not None
    rows = acceptance.at_depth(depth, tree.plan.branching)
    max_size = min(max(64, 2 * tree.size), 4096, max_budget(rows))
    # expected tokens of the best tree of 1, 2, ... nodes and at most `depth` levels
    best_values = pick_solver(rows, max_size).most_tokens(rows, max_size)
    sizes = np.unique(np.geomspace(1, max_size, 40).astype(int))
    possible_sizes = sizes[sizes <= len(best_values)]
    tokens = best_values[possible_sizes - 1]
    axes.plot(possible_sizes, tokens, color=GREEN, lw=2.6, label="this acceptance's best tree")
    chains = (TokenTree.chain(min(int(size), depth)) for size in sizes)
    tokens = [expected_tokens(chain, acceptance.rates) for chain in chains]
    axes.plot(sizes, tokens, color=PURPLE, linewidth=1.8, label="one chain")
    own_tokens = expected_tokens(tree, acceptance.rates)
    axes.plot(
        tree.size, own_tokens, "o", color=GREEN, ms=9, markeredgecolor="white", label="this tree"
    )
    _set_log2_scale(axes.xaxis)
    axes.set(xlabel="nodes", ylabel="expected tokens a step", ylim=(1, None))
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="upper left")


def latency_panel(tree: TokenTree, axes: Any) -> None:
    """Draw milliseconds of the target's and the draft's pass against the tokens in it, log-log."""
    latency = tree.plan.latency
    assert latency is not None
    curves = (("target", latency.target, GREEN), ("draft", latency.draft, BLUE))
    for role, seconds_by_size, colour in curves:
        points = np.array(sorted(seconds_by_size.items()), float)
        sizes, milliseconds = points[:, 0], 1000 * points[:, 1]
        axes.plot(sizes, milliseconds, "o-", markersize=4, color=colour, label=role)
    axes.axvline(tree.size, color=RED, linewidth=1.5, linestyle=":", label="this tree's size")
    _set_log2_scale(axes.yaxis)
    _set_log2_scale(axes.xaxis)
    axes.set(xlabel="tokens in the pass", ylabel="milliseconds")
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def trees_by_match_panel(tree: TokenTree, axes: Any) -> None:
    """Draw the tree of each class of match, with its share of steps above it.

    Trees that are equal are drawn once, with the shortest matches of all their classes.
    """
    axes.set_axis_off()
    parts_of_tree: dict[TokenTree, list[MatchPlan]] = {}  # classes may share a tree
    for part in tree.plan.by_match:
        parts_of_tree.setdefault(tree.for_match(part.match_length), []).append(part)
    width = 1 / len(parts_of_tree)
    for number, (class_tree, parts) in enumerate(parts_of_tree.items()):
        inset = axes.inset_axes((number * width, 0, 0.85 * width, 0.76))
        tree_panel(_without_end_of_chain(class_tree, parts[0].acceptance), inset)
        inset.set(ylim=(0.6 - MAX_LEVELS_DRAWN, 0.4), ylabel="", yticks=[])
        inset.margins(x=0.4)
        lengths = [f"{part.match_length}+" if part.match_length else "none" for part in parts]
        lines = [
            f"match: {' or '.join(lengths)}",
            f"{sum(part.share for part in parts):.0%} of steps",
            f"{class_tree.size} nodes",
            "looked up" if class_tree.looks_up else "drafted",
        ]
        inset.set_title("\n".join(lines), fontsize=10)


def _without_end_of_chain(tree: TokenTree, acceptance: Acceptance) -> TokenTree:
    """The first `MAX_LEVELS_DRAWN` levels of a tree, with the acceptance that its nodes have."""
    size = int(tree.level_offsets[min(tree.depth, MAX_LEVELS_DRAWN)])
    return TokenTree(tree.parents[:size], Plan(acceptance=acceptance), tree.looks_up)


def speedups_by_kind_panel(tree: TokenTree, axes: Any) -> None:
    """Draw the predicted speed-up of each kind of prompts, the highest at the top."""
    ratios = sorted(tree.plan.speedup_by_kind.items(), key=lambda item: item[1])
    kinds, speedups = zip(*ratios, strict=True)
    bars = axes.barh(kinds, speedups, color=GREEN)
    axes.bar_label(bars, fmt="%.2fx", padding=3)
    axes.axvline(1, linewidth=1.2, color=EDGE_COLOUR)
    axes.set(xlabel="times plain decoding, predicted", xlim=(0, 1.15 * max(speedups)))
    axes.tick_params(axis="y", length=0)


def speedups_panel(result: BenchResult, axes: Any) -> None:
    """Draw the speed-up over plain decoding of every method, a row for each.

    A dot with a bar is the measured speed-up and its 95 % interval, a diamond the predicted one.
    """
    from matplotlib import rcParams

    ratios = speedups_over_plain(result)
    methods = [result.methods[name] for name in ratios]
    rows = range(len(ratios))
    medians = np.array([ratio.median for ratio in ratios.values()])
    ends = np.array([(ratio.interval_low, ratio.interval_high) for ratio in ratios.values()]).T
    errors = np.maximum(0, [[-1], [1]] * (ends - medians))
    axes.errorbar(medians, rows, xerr=errors, fmt="o", color=BLUE, capsize=2.5, label="measured")
    predictions = [method.prediction and method.prediction.speedup for method in methods]
    if any(predictions):
        predicted = [prediction or np.nan for prediction in predictions]
        axes.plot(predicted, rows, "D", color=BLUE, markerfacecolor="none", label="predicted")
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.8)
    titles = [textwrap.fill(method.title, MAX_TITLE_COLUMNS, max_lines=2) for method in methods]
    axes.set_yticks(rows, titles)
    for name, text in zip(ratios, axes.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if name in TREE_METHODS else "normal")
    axes.set(ylim=(len(ratios) - 0.5, -0.5), xlabel="times plain decoding")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.8)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def _set_log2_scale(axis: Any) -> None:
    """Make an axis logarithmic with ticks at 1, 2, 4, ..., written as plain numbers."""
    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log", base=2)
    axis.set_major_formatter(lambda number, _: f"{number:g}")


def _horizontal_places(tree: TokenTree) -> Floats:
    """x of every node: leaves are side by side in preorder, and a parent is above the middle of its
    children.

    Returns float64 [size].
    """
    places = np.zeros(tree.size)
    num_leaves = 0
    waiting = [0]
    while waiting:  # in preorder: a node's children wait before what waited already
        node = waiting.pop()
        first, count = int(tree.first_child[node]), int(tree.child_count[node])
        waiting.extend(range(first + count - 1, first - 1, -1))
        if not count:
            places[node], num_leaves = num_leaves, num_leaves + 1
    for node in np.flatnonzero(tree.child_count)[::-1]:
        first = tree.first_child[node]
        places[node] = (places[first] + places[first + tree.child_count[node] - 1]) / 2
    return places
