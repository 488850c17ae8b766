"""The drawing of what bench measured: every contender's speed-up, beside the predicted one."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from sequoia_plan.artifacts import BenchResult
from sequoia_plan.planner.report.bench_table import OURS, told_apart
from sequoia_plan.planner.report.panels import AMBER, BLUE, GREEN, PURPLE, RED


def speedups_panel(results: Sequence[BenchResult], axes: Any) -> None:
    """Measured speed-up over plain decoding with its interval, beside the predicted one, for every contender and run."""
    from matplotlib import rcParams

    names = compared(results)
    titles = {name: arm.title for result in results for name, arm in result.contenders.items()}
    ink, apart = rcParams["text.color"], min(0.24, 0.8 / len(results))
    warmer = sorted(zip(told_apart(results), results, strict=True), key=lambda each: each[1].settings.sampling["temperature"])
    for number, ((label, result), colour) in enumerate(zip(warmer, cycle((BLUE, AMBER, RED, PURPLE, GREEN)), strict=False)):
        mine = {name: arm for name, arm in result.contenders.items() if name in names and "plain" in arm.speedup}
        places = np.array([names.index(name) + (number - (len(results) - 1) / 2) * apart for name in mine])
        ratios = [arm.speedup["plain"] for arm in mine.values()]
        middle, low, high = np.array([[ratio.median, ratio.interval_low, ratio.interval_high] for ratio in ratios]).reshape(-1, 3).T
        reach = np.maximum(0, [middle - low, high - middle])
        axes.errorbar(middle, places, xerr=reach, fmt="o", color=colour, markersize=5, elinewidth=1.6, capsize=2.5, label=label)
        predicted = np.array([(arm.predicted and arm.predicted.speedup) or np.nan for arm in mine.values()])
        axes.plot(predicted, places, "D", markersize=5, markerfacecolor="none", markeredgecolor=colour)
    if promised(results):
        axes.plot([], [], "D", markersize=5, markerfacecolor="none", markeredgecolor=ink, label="predicted")
    axes.axvline(1, color=ink, linewidth=0.8)
    axes.set_yticks(range(len(names)), [textwrap.fill(titles[name], 20, max_lines=2, placeholder=" ...") for name in names])
    for name, text in zip(names, axes.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if name in OURS else "normal")
    axes.set(ylim=(len(names) - 0.5, -0.5), xlabel="times plain decoding")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", linewidth=0.8)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2 if max(len(label) for label, _ in warmer) < 20 else 1)


def compared(results: Sequence[BenchResult]) -> list[str]:
    """The contenders set against plain decoding in any of the runs, in bench's order."""
    fullest = sorted(results, key=lambda result: -len(result.contenders))
    return list(dict.fromkeys(name for result in fullest for name, arm in result.contenders.items() if name != "plain" and "plain" in arm.speedup))


def promised(results: Sequence[BenchResult]) -> bool:
    """Was any of their speed-ups predicted?"""
    names = compared(results)
    return any(arm.predicted and arm.predicted.speedup for result in results for name, arm in result.contenders.items() if name in names)
