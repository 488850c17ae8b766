"""What bench found, in words and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sequoia_plan.artifacts import BenchResult
from sequoia_plan.artifacts.bench_result import Contender, Prediction, Ratio

OURS = {"sequoia": "sequoia", "traversal": "traversal", "top-k": "topk"}
"""The contenders that decode with the tree under test, and the verifier of each."""
WIDE = 130
"""Columns of a terminal that hold the whole table."""


def finding(result: BenchResult, others: Sequence[BenchResult] = ()) -> str:
    """The result in a few sentences: the tree's measured speed-up with its interval, the predicted one, and which other method was faster.

    `others` are runs with other settings; each adds the tree's speed-up there.
    """
    tree, arms = result.tree, result.contenders
    compared = {name: arm.speedup["plain"] for name, arm in arms.items() if name != "plain" and "plain" in arm.speedup}
    mine = {name: compared[name] for name in OURS if name in compared}
    if tree.size == 1:
        return "Recommended is plain decoding: the tree has one node, so nothing is speculated." + _faster(arms, compared, "plain")[0]
    if not mine:
        return f"The tree has {tree.size} nodes and depth {tree.depth}; its speed-up over plain decoding was not measured."
    best = max(mine, key=lambda name: mine[name].median)
    ratio, predicted = mine[best], arms[best].predicted or Prediction()
    faster, surely = _faster(arms, compared, best if ratio.median > 1 else "plain")
    shape = f"tree of {tree.size} nodes and depth {tree.depth}, verified with {OURS[best]}"
    measured = f"{ratio.median:.2f} times the speed of plain decoding at {sampling_text(result)} (95 % interval {ratio.interval_low:.2f} to "
    measured += f"{ratio.interval_high:.2f}" + (f"; predicted {predicted.speedup:.2f})" if predicted.speedup else ")")
    if ratio.interval_high < 1:
        return f"Recommended is plain decoding: the {shape}, reaches {measured}.{faster}"
    text = "No gain is certain with the" if ratio.interval_low <= 1 else "Not the fastest is the" if surely else "Recommended is the"
    text += f" {shape}: {measured}"
    for label, other in list(zip(told_apart([result, *others]), [result, *others], strict=True))[1:]:
        there = {name: arm.speedup.get("plain") for name, arm in other.contenders.items() if name in OURS}
        if result.settings.sampling["temperature"] == 0:  # one verifier stands for all: elsewhere the best one counts
            found = max(filter(None, there.values()), key=lambda ratio: ratio.median, default=None)
        else:
            found = there.get(best) or there.get("sequoia")
        text += f"; {found.median:.2f} at {label}" if found else ""
    return f"{text}.{_missed(ratio, predicted)}{faster}"


def _missed(measured: Ratio, predicted: Prediction) -> str:
    """A sentence if the intervals of the measured and the predicted speed-up do not meet, and what to do then."""
    if predicted.interval is None or predicted.speedup is None:
        return ""

    def meets(low: float, high: float) -> bool:
        return low <= measured.interval_high and measured.interval_low <= high

    if meets(*predicted.interval):
        return ""
    off = (predicted.speedup - measured.median) / measured.median
    where = f"The prediction is {abs(off):.0%} too {'high' if off > 0 else 'low'}, and its interval "
    where += f"({_span(predicted.interval)}) does not meet the measured one"
    if predicted.interval_new_kind and meets(*predicted.interval_new_kind):
        inside = f"that for prompts of a new kind ({_span(predicted.interval_new_kind)}) does"
        return f" {where}; {inside}: for a closer prediction profile again with --prompts of the kind decoded here."
    beyond = f", nor does that for prompts of a new kind ({_span(predicted.interval_new_kind)})" if predicted.interval_new_kind else ""
    return f" {where}{beyond}: profile again with --prompts of the kind decoded here, on a machine with nothing else to do."


def _span(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def _faster(arms: Mapping[str, Contender], compared: Mapping[str, Ratio], than: str) -> tuple[str, bool]:
    """A sentence about the fastest of the others, if it was faster; and whether that is certain."""
    name = max(compared, key=lambda name: compared[name].median, default=None)
    ratio = arms[name].speedup.get(than) if name else None
    if name is None or name in OURS or ratio is None or ratio.median <= 1:
        return "", False
    surely = ratio.interval_low > 1
    who = f"{arms[name].title}: {ratio.median:.2f} times {'plain decoding' if than == 'plain' else 'our tree'}"
    return f" {'Faster' if surely else 'Faster, but not certainly,'} was {who} ({ratio.interval_low:.2f} to {ratio.interval_high:.2f}).", surely


def sampling_text(result: BenchResult) -> str:
    """The temperature, and what else differs from plain sampling; the verifier is each contender's own."""
    chosen = {name: value for name, value in result.settings.sampling.items() if name != "verifier"}
    neutral: dict[str, Any] = {"top_p": 1, "top_k": 0, "min_p": 0}
    kept = [
        f"{name.replace('_', '-' if name[:3] in ('top', 'min') else ' ')} {value:g}" for name, value in chosen.items() if value not in (None, neutral.get(name))
    ]
    return ", ".join(kept)


def settings_text(result: BenchResult) -> str:
    """The settings of a run, without models and machine."""
    settings, tree = result.settings, result.tree
    shape = f"tree of {tree.size} nodes, depth {tree.depth}" if tree.size > 1 else "no tree"
    run = f"{settings.prompts} held-out prompts, {settings.tokens} new tokens each; {shape}"
    return f"{sampling_text(result)}; {settings.dtype}; {run}"


def parts_text(result: BenchResult) -> str:
    """Where the time of a step of the tree goes; nothing if it was not measured."""
    parts = result.breakdown
    if parts is None:
        return ""
    named = ", ".join(f"{name} {max(getattr(parts, name), 0) * 1000:.1f}" for name in ("draft", "target", "verify", "keep", "host"))
    return f"A step of the tree: {parts.step * 1000:.1f} ms ({named}); {max(parts.share_not_model, 0):.1%} of it is not model time."


def told_apart(results: Sequence[BenchResult]) -> list[str]:
    """A short name for each run: its sampling settings, and its tree if the runs have different ones."""
    texts = [sampling_text(result) for result in results]
    trees = [f"{result.tree.size} nodes, depth {result.tree.depth}" for result in results]
    return texts if len(set(trees)) == 1 else [f"{text} ({tree})" for text, tree in zip(texts, trees, strict=True)]


def table(result: BenchResult, over: Sequence[str] = ("plain",), brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """Column titles and rows of cells; what is predicted stands to the right of what was measured.

    Args:
        over: the contenders that speed-ups are given over.
        brief: without quartiles and first tokens.
    """
    columns = [""]
    for name in over:
        columns += [f"over {name}"] + ["predicted"] * (name == "plain")
    columns += ["tokens a step", "predicted", "tokens/s", *([] if brief else ["first token"])]
    rows = []
    for name, arm in result.contenders.items():
        rate, predicted, cells = arm.tokens_per_second, arm.predicted or Prediction(), [arm.title]
        for other in over:
            ratio = arm.speedup[other]
            cells.append("1" if name == other else f"{ratio.median:.2f}x ({ratio.interval_low:.2f}-{ratio.interval_high:.2f})")
            cells += [_number(None if name == other else predicted.speedup, "x")] if other == "plain" else []
        cells += [_number(arm.tokens_per_step), _number(predicted.tokens_per_step)]
        cells += [f"{rate.median:.1f}" + ("" if brief else f" ({rate.low:.1f}-{rate.high:.1f})")]
        rows.append(cells + ([] if brief else [f"{arm.first_token_seconds.median * 1000:.0f} ms"]))
    return columns, rows


def print_table(result: BenchResult) -> None:
    """Measured and predicted figures of every contender side by side, fewer of them where the terminal is narrow."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=140)
    brief = console.width < WIDE
    over = [name for name in (("plain",) if brief else ("plain", "generate")) if name in result.contenders]
    columns, rows = table(result, over, brief)
    console.print(settings_text(result), markup=False)
    drawn = Table(box=None, pad_edge=False)
    for column in columns:
        drawn.add_column(column.replace("tokens a step", "tokens\na step"), justify="right" if column else "left", no_wrap=bool(column))
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)
    rates = "tokens/s: median over prompts" + ("" if brief else " and quartiles")
    console.print(f"over {' and '.join(over)}: median of ratios prompt by prompt and its 95 % interval; {rates}" if over else rates)
    console.print(" ".join(filter(None, (finding(result), parts_text(result)))), markup=False)


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
