"""The drawing of bench's speed-ups: every method's measured one beside the predicted one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from sequoia_plan.artifacts import BenchResult
from sequoia_plan.planner.report.bench_table import TREE_METHODS, run_labels
from sequoia_plan.planner.report.panels import AMBER, BLUE, GREEN, PURPLE, RED

RUN_COLOURS = (BLUE, AMBER, RED, PURPLE, GREEN)
MAX_TITLE_COLUMNS = 20
"""Characters in a line of a method's title."""
MAX_LABEL_IN_TWO_COLUMNS = 20
"""The legend has two columns where every run's label is shorter than this."""


def speedups_panel(results: Sequence[BenchResult], axes: Any) -> None:
    """Draw the speed-up over plain decoding of every method in every run.

    A dot with a bar is the measured speed-up and its 95 % interval, a diamond the predicted one. A
    method has one row, in which the runs are one below the other, from the lowest temperature on.
    """
    from matplotlib import rcParams

    names = compared_methods(results)
    ink = rcParams["text.color"]
    distance = min(0.24, 0.8 / len(results))  # between two runs of a method, in rows
    labelled_results = sorted(
        zip(run_labels(results), results, strict=True),
        key=lambda labelled: labelled[1].settings.sampling["temperature"],
    )
    for number, ((label, result), colour) in enumerate(
        zip(labelled_results, cycle(RUN_COLOURS), strict=False)
    ):
        offset = (number - (len(results) - 1) / 2) * distance  # centred on the method's row
        _draw_run(result, names, offset, colour, label, axes)
    if has_predictions(results):
        diamond = {"markersize": 5, "markerfacecolor": "none", "markeredgecolor": ink}
        axes.plot([], [], "D", **diamond, label="predicted")  # draws only the legend's entry
    axes.axvline(1, color=ink, linewidth=0.8)
    titles = {name: method.title for result in results for name, method in result.methods.items()}
    row_titles = [
        textwrap.fill(titles[name], MAX_TITLE_COLUMNS, max_lines=2, placeholder=" ...")
        for name in names
    ]
    axes.set_yticks(range(len(names)), row_titles)
    for name, text in zip(names, axes.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if name in TREE_METHODS else "normal")
    axes.set(ylim=(len(names) - 0.5, -0.5), xlabel="times plain decoding")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.8)
    max_label_length = max(len(label) for label, _ in labelled_results)
    num_columns = 2 if max_label_length < MAX_LABEL_IN_TWO_COLUMNS else 1
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=num_columns)


def _draw_run(
    result: BenchResult,
    names: Sequence[str],
    offset: float,
    colour: str,
    label: str,
    axes: Any,
) -> None:
    """Draw one run's measured and predicted speed-ups over plain decoding."""
    methods = {
        name: method
        for name, method in result.methods.items()
        if name in names and "plain" in method.speedup
    }
    rows = np.array([names.index(name) + offset for name in methods])
    ratios = [method.speedup["plain"] for method in methods.values()]
    points = [[ratio.median, ratio.interval_low, ratio.interval_high] for ratio in ratios]
    medians, lows, highs = np.array(points).reshape(-1, 3).T  # no method gives three empty arrays
    error_bars = np.maximum(0, [medians - lows, highs - medians])
    axes.errorbar(
        medians,
        rows,
        xerr=error_bars,
        fmt="o",
        color=colour,
        markersize=5,
        elinewidth=1.6,
        capsize=2.5,
        label=label,
    )
    predictions = [method.prediction for method in methods.values()]
    predicted_speedups = np.array(
        [(prediction and prediction.speedup) or np.nan for prediction in predictions]
    )
    diamond = {"markersize": 5, "markerfacecolor": "none", "markeredgecolor": colour}
    axes.plot(predicted_speedups, rows, "D", **diamond)


def compared_methods(results: Sequence[BenchResult]) -> list[str]:
    """Names of the methods that any run compared with plain decoding.

    They are in the order of the run with the most methods, followed by those that it lacks.
    """
    largest_first = sorted(results, key=lambda result: -len(result.methods))
    names: dict[str, None] = {}  # keeps the order, without duplicates
    for result in largest_first:
        for name, method in result.methods.items():
            if name != "plain" and "plain" in method.speedup:
                names[name] = None
    return list(names)


def has_predictions(results: Sequence[BenchResult]) -> bool:
    """Whether any speed-up of a compared method was predicted."""
    names = compared_methods(results)
    predictions = [
        method.prediction
        for result in results
        for name, method in result.methods.items()
        if name in names
    ]
    return any(prediction and prediction.speedup for prediction in predictions)
