"""What bench measured, in sentences and as a table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sequoia_plan.artifacts import BenchResult
from sequoia_plan.artifacts.bench_result import MethodResult, Prediction, Ratio

TREE_METHODS = {"sequoia": "sequoia", "traversal": "traversal", "top-k": "topk"}
"""Methods that decode with the tree under test -> the verifier of each."""

FULL_TABLE_WIDTH = 130
"""Columns of a terminal that hold the whole table."""

NEUTRAL_SETTINGS = {"top_p": 1, "top_k": 0, "min_p": 0}
"""Values that switch a filter off; settings with these values are not printed."""


def finding(result: BenchResult) -> str:
    """Sum a run of bench up in a few sentences.

    They give the tree's measured speed-up over plain decoding with its 95 % interval and the
    predicted one, and say which other method was faster.
    """
    tree, methods = result.tree, result.methods
    speedups = _speedups_over_plain(methods)
    tree_speedups = {name: speedups[name] for name in TREE_METHODS if name in speedups}
    if tree.size == 1:
        sentence = "Recommended is plain decoding: the tree has one node, so nothing is speculated."
        return sentence + _faster_method(methods, speedups, "plain")[0]
    if not tree_speedups:
        return (
            f"The tree has {tree.size} nodes and depth {tree.depth}; "
            "its speed-up over plain decoding was not measured."
        )

    best_method = max(tree_speedups, key=lambda name: tree_speedups[name].median)
    speedup = tree_speedups[best_method]
    prediction = methods[best_method].prediction or Prediction()
    reference = best_method if speedup.median > 1 else "plain"
    faster_sentence, is_certain = _faster_method(methods, speedups, reference)
    shape = (
        f"tree of {tree.size} nodes and depth {tree.depth}, "
        f"verified with {TREE_METHODS[best_method]}"
    )
    prediction_text = f"; predicted {prediction.speedup:.2f}" if prediction.speedup else ""
    speedup_text = (
        f"{speedup.median:.2f} times the speed of plain decoding at {sampling_text(result)} "
        f"(95 % interval {speedup.interval_low:.2f} to {speedup.interval_high:.2f}"
        f"{prediction_text})"
    )
    if speedup.interval_high < 1:
        return (
            f"Recommended is plain decoding: the {shape}, reaches {speedup_text}.{faster_sentence}"
        )
    if speedup.interval_low <= 1:
        opening = "No gain is certain with the"
    elif is_certain:
        opening = "Not the fastest is the"
    else:
        opening = "Recommended is the"
    missed = _missed_prediction(speedup, prediction)
    return f"{opening} {shape}: {speedup_text}.{missed}{faster_sentence}"


def _speedups_over_plain(methods: Mapping[str, MethodResult]) -> dict[str, Ratio]:
    """Each other method's speed-up over plain decoding, where it was measured."""
    return {
        name: method.speedup["plain"]
        for name, method in methods.items()
        if name != "plain" and "plain" in method.speedup
    }


def _missed_prediction(speedup: Ratio, prediction: Prediction) -> str:
    """A sentence if the intervals of the measured and the predicted speed-up do not overlap.

    It says by how much the prediction is off, and what to do. Else the text is empty.
    """
    if prediction.interval is None or prediction.speedup is None:
        return ""

    def meets_measured(low: float, high: float) -> bool:
        """Whether the interval from low to high overlaps the measured one."""
        return low <= speedup.interval_high and speedup.interval_low <= high

    if meets_measured(*prediction.interval):
        return ""
    relative_error = (prediction.speedup - speedup.median) / speedup.median
    direction = "high" if relative_error > 0 else "low"
    sentence = (
        f" The prediction is {abs(relative_error):.0%} too {direction}, and its interval "
        f"({_interval_text(prediction.interval)}) does not meet the measured one"
    )
    advice = "profile again with --prompts of the kind decoded here"
    if prediction.interval_new_kind is not None:
        new_kind = f"for prompts of a new kind ({_interval_text(prediction.interval_new_kind)})"
        if meets_measured(*prediction.interval_new_kind):
            return f"{sentence}; that {new_kind} does: for a closer prediction {advice}."
        sentence += f", nor does that {new_kind}"
    return f"{sentence}: {advice}, on a machine with nothing else to do."


def _interval_text(interval: tuple[float, float]) -> str:
    """The ends of an interval, as "1.20 to 1.40"."""
    return f"{interval[0]:.2f} to {interval[1]:.2f}"


def _faster_method(
    methods: Mapping[str, MethodResult], speedups: Mapping[str, Ratio], reference: str
) -> tuple[str, bool]:
    """Name the fastest method, if it does not use the tree and was faster than `reference`."""
    fastest = max(speedups, key=lambda name: speedups[name].median, default=None)
    ratio = methods[fastest].speedup.get(reference) if fastest else None
    if fastest is None or fastest in TREE_METHODS or ratio is None or ratio.median <= 1:
        return "", False
    is_certain = ratio.interval_low > 1
    opening = "Faster" if is_certain else "Faster, but not certainly,"
    reference_title = "plain decoding" if reference == "plain" else "our tree"
    sentence = (
        f" {opening} was {methods[fastest].title}: {ratio.median:.2f} times {reference_title} "
        f"({ratio.interval_low:.2f} to {ratio.interval_high:.2f})."
    )
    return sentence, is_certain


def sampling_text(result: BenchResult) -> str:
    """The temperature and every filter that is on, as "temperature 0.6, top-p 0.9".

    The verifier is left out, because every method has its own.
    """
    texts = []
    for name, value in result.settings.sampling.items():
        if name == "verifier" or value in (None, NEUTRAL_SETTINGS.get(name)):
            continue
        separator = "-" if name.startswith(("top", "min")) else " "
        texts.append(f"{name.replace('_', separator)} {value:g}")
    return ", ".join(texts)


def settings_text(result: BenchResult) -> str:
    """The settings of a run, without the models' names and the machine."""
    settings, tree = result.settings, result.tree
    shape = f"tree of {tree.size} nodes, depth {tree.depth}" if tree.size > 1 else "no tree"
    prompts = f"{settings.prompts} held-out prompts, {settings.tokens} new tokens each"
    text = f"{sampling_text(result)}; {settings.dtype}; {prompts}; {shape}"
    num_fused = result.models.get("target", {}).get("fused_layers")
    return text if num_fused is None else f"{text}; {num_fused} fused layers in the target"


def step_parts_text(result: BenchResult) -> str:
    """The parts of a step of the tree in milliseconds; empty if they were not measured."""
    breakdown = result.breakdown
    if breakdown is None:
        return ""
    parts = ", ".join(
        f"{part} {max(getattr(breakdown, part), 0) * 1000:.1f}"
        for part in ("draft", "target", "verify", "host")
    )
    share = max(breakdown.share_not_model, 0)
    return (
        f"A step of the tree: {breakdown.step * 1000:.1f} ms ({parts}); "
        f"{share:.1%} of it is not model time."
    )


def table(
    result: BenchResult, references: Sequence[str] = ("plain",), brief: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Column titles and rows of cells, a row for each method of a run of bench.

    A predicted figure is to the right of the measured one.
    """
    columns = ["", *(f"over {reference}" for reference in references), "tokens a step", "predicted"]
    if "plain" in references:
        columns.insert(2, "predicted")
    columns += ["tokens/s"] if brief else ["tokens/s", "first token"]
    rows = [_row(name, method, references, brief) for name, method in result.methods.items()]
    return columns, rows


def _row(name: str, method: MethodResult, references: Sequence[str], brief: bool) -> list[str]:
    """The cells of one method's row."""
    prediction = method.prediction or Prediction()
    rate = method.tokens_per_second
    cells = [method.title]
    for reference in references:
        ratio = method.speedup[reference]
        spread = f"({ratio.interval_low:.2f}-{ratio.interval_high:.2f})"
        cells.append("1" if name == reference else f"{ratio.median:.2f}x {spread}")
        if reference == "plain":
            cells.append(_number_text(None if name == "plain" else prediction.speedup, "x"))
    cells += [_number_text(method.tokens_per_step), _number_text(prediction.tokens_per_step)]
    if brief:
        return [*cells, f"{rate.median:.1f}"]
    first_token = f"{method.first_token_seconds.median * 1000:.0f} ms"
    return [*cells, f"{rate.median:.1f} ({rate.low:.1f}-{rate.high:.1f})", first_token]


def predicted_for_text(result: BenchResult) -> str:
    """Which prompts the tree's figures were predicted for; empty if its plan knows no kinds."""
    method = _predicted_by_kind(result)
    prediction = method.prediction if method else None
    num_others = prediction.prompts_as_mixture if prediction else None
    if num_others is None:
        return ""
    num_prompts = result.settings.prompts
    if num_others == 0:
        return "predicted for our tree: from the kind of each prompt"
    source = "from all profiled prompts together"
    if num_others < num_prompts:
        source = f"from the kind of each prompt, and for {num_others} of {num_prompts} {source}"
    return f"predicted for our tree: {source}, because the plan lacks the kind"


def kind_table(result: BenchResult) -> tuple[list[str], list[list[str]]]:
    """Column titles and a row of cells for each kind of prompts that the tree's plan knows."""
    columns = ["", "prompts", "over plain", "predicted", "tokens a step", "predicted"]
    rows = []
    method = _predicted_by_kind(result)
    for kind, figures in (method.by_kind if method else {}).items():
        prediction = figures.prediction or Prediction()
        rows.append(
            [
                kind,
                str(figures.prompts),
                _number_text(figures.speedup.median if figures.speedup else None, "x"),
                _number_text(prediction.speedup, "x"),
                _number_text(figures.tokens_per_step),
                _number_text(prediction.tokens_per_step),
            ]
        )
    return columns, rows


def _predicted_by_kind(result: BenchResult) -> MethodResult | None:
    """The fastest method with the tree that was predicted by kind; None if the plan knows none."""
    methods = [
        method
        for name, method in result.methods.items()
        if name in TREE_METHODS
        and method.prediction
        and method.prediction.prompts_as_mixture is not None
    ]
    return max(methods, key=lambda method: method.tokens_per_second.median, default=None)


def _number_text(value: float | None, unit: str = "") -> str:
    """A number with two decimals and its unit, as "1.30x"; "-" for None."""
    return "-" if value is None else f"{value:.2f}{unit}"


def print_table(result: BenchResult) -> None:
    """Print the settings, the table, the finding, and how the time of a step divides into parts.

    The table has fewer columns where the terminal is narrow.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe takes lines as wide as the whole table
        console = Console(highlight=False, width=140)
    brief = console.width < FULL_TABLE_WIDTH
    possible_references = ("plain",) if brief else ("plain", "generate")
    references = [name for name in possible_references if name in result.methods]
    columns, rows = table(result, references, brief)
    console.print(settings_text(result), markup=False)
    console.print(_rich_table(columns, rows))
    note = "tokens/s: median over prompts" + ("" if brief else " and quartiles")
    if references:
        ratios = "median of ratios prompt by prompt and its 95 % interval"
        note = f"over {' and '.join(references)}: {ratios}; {note}"
    console.print(note)
    if kinds_note := predicted_for_text(result):
        console.print(kinds_note)
    kind_columns, kind_rows = kind_table(result)
    if len(kind_rows) > 1:
        console.print(_rich_table(kind_columns, kind_rows))
    sentences = [text for text in (finding(result), step_parts_text(result)) if text]
    console.print(" ".join(sentences), markup=False)


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A table for the terminal, whose first column is text and whose others are numbers."""
    from rich.markup import escape
    from rich.table import Table

    rich_table = Table(box=None, pad_edge=False)
    for column in columns:
        title = column.replace("tokens a step", "tokens\na step")
        justify: Any = "right" if column else "left"
        rich_table.add_column(title, justify=justify, no_wrap=bool(column))
    for row in rows:
        rich_table.add_row(*map(escape, row))
    return rich_table
