"""The drawing of bench's speed-ups: every method's measured one beside the predicted one."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from sequoia_plan.artifacts import BenchResult
from sequoia_plan.planner.report.bench_table import TREE_METHODS, speedups_over_plain
from sequoia_plan.planner.report.panels import BLUE

MAX_TITLE_COLUMNS = 20
"""Characters in a line of a method's title."""


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
