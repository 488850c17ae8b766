"""The drawing of bench's speed-ups: every method's measured one beside the predicted one."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from sequoia_plan.artifacts import BenchResult
from sequoia_plan.planner.report.bench_table import TREE_METHODS
from sequoia_plan.planner.report.panels import BLUE

MAX_TITLE_COLUMNS = 20
"""Characters in a line of a method's title."""


def speedups_panel(result: BenchResult, axes: Any) -> None:
    """Draw the speed-up over plain decoding of every method, a row for each.

    A dot with a bar is the measured speed-up and its 95 % interval, a diamond the predicted one.
    """
    from matplotlib import rcParams

    names = compared_methods(result)
    methods = [result.methods[name] for name in names]
    ratios = [method.speedup["plain"] for method in methods]
    points = np.array([[ratio.median, ratio.interval_low, ratio.interval_high] for ratio in ratios])
    medians, lows, highs = points.T
    rows = range(len(names))
    axes.errorbar(
        medians,
        rows,
        xerr=np.maximum(0, [medians - lows, highs - medians]),
        fmt="o",
        color=BLUE,
        markersize=5,
        elinewidth=1.6,
        capsize=2.5,
        label="measured",
    )
    if has_predictions(result):
        predictions = [method.prediction and method.prediction.speedup for method in methods]
        diamond = {"markersize": 5, "markerfacecolor": "none", "markeredgecolor": BLUE}
        predicted = [prediction or np.nan for prediction in predictions]
        axes.plot(predicted, rows, "D", label="predicted", **diamond)
    axes.axvline(1, color=rcParams["text.color"], linewidth=0.8)
    titles = [
        textwrap.fill(method.title, MAX_TITLE_COLUMNS, max_lines=2, placeholder=" ...")
        for method in methods
    ]
    axes.set_yticks(rows, titles)
    for name, text in zip(names, axes.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if name in TREE_METHODS else "normal")
    axes.set(ylim=(len(names) - 0.5, -0.5), xlabel="times plain decoding")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.8)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def compared_methods(result: BenchResult) -> list[str]:
    """Names of the methods that were compared with plain decoding."""
    methods = result.methods.items()
    return [name for name, method in methods if name != "plain" and "plain" in method.speedup]


def has_predictions(result: BenchResult) -> bool:
    """Whether any speed-up of a compared method was predicted."""
    predictions = [result.methods[name].prediction for name in compared_methods(result)]
    return any(prediction and prediction.speedup for prediction in predictions)
