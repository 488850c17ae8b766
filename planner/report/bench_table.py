"""What bench measured, in sentences and as a table in the terminal."""

from sequoia_plan.artifacts import BenchResult
from sequoia_plan.artifacts.bench_result import KindResult, MethodResult, Prediction, Ratio
from sequoia_plan.planner.report.tables import Table, print_table

TREE_METHODS = ("sequoia", "traversal")
"""Methods that decode with the tree under test: the names of their verifiers."""

COLUMNS = ["", "over plain", "predicted", "tokens a step", "predicted", "tokens/s", "first token"]
CERTAIN = " Faster was"
NEUTRAL_SETTINGS = {"top_p": 1, "top_k": 0, "min_p": 0}
"""Values that switch a filter off; settings with these values are not printed."""


def finding(result: BenchResult) -> str:
    """Sum a run of bench up in a few sentences.

    They give the tree's measured speed-up over plain decoding with its 95 % interval and the
    predicted one, and say which other method was faster.
    """
    tree, methods, speedups = result.tree, result.methods, speedups_over_plain(result)
    ours = [name for name in TREE_METHODS if name in speedups]
    if not ours:
        opening = f"The tree of {tree.size} nodes was not measured."
        if tree.size == 1:
            opening = "Recommended is plain decoding: the tree has one node: nothing is speculated."
        return opening + _faster_method_sentence(result, "plain")
    best = max(ours, key=lambda name: speedups[name].median)
    speedup, prediction = speedups[best], methods[best].prediction or Prediction()
    faster = _faster_method_sentence(result, best if speedup.median > 1 else "plain")
    opening = "No gain is certain with the"
    if speedup.interval_low > 1:
        opening = "Not the fastest is the" if faster.startswith(CERTAIN) else "Recommended is the"
    elif speedup.interval_high < 1:
        opening = "Recommended is plain decoding, not the"
    tested = f"tree of {tree.size} nodes and depth {tree.depth}"
    if tree.size == 1:
        tested = "portfolio, which looks up where the text repeats itself and drafts nothing"
    predicted = f"; predicted {_promise_text(prediction)}" if prediction.speedup else ""
    return (
        f"{opening} {tested}, verified with {best}: "
        f"{speedup.median:.2f} times the speed of plain decoding at {sampling_text(result)} "
        f"(95 % interval {_ends(speedup)}{predicted})."
        + _missed_prediction(speedup, prediction)
        + faster
    )


def speedups_over_plain(result: BenchResult) -> dict[str, Ratio]:
    """Each other method's speed-up over plain decoding, where it was measured."""
    return {
        name: method.speedup["plain"]
        for name, method in result.methods.items()
        if name != "plain" and "plain" in method.speedup
    }


def _missed_prediction(speedup: Ratio, prediction: Prediction) -> str:
    """A sentence if the intervals of the measured and the predicted speed-up do not overlap."""
    ends = prediction.interval or prediction.interval_new_kind
    if ends is None:
        return ""
    low, high = ends
    if low <= speedup.interval_high and speedup.interval_low <= high:
        return ""
    return (
        f" The predicted interval ({low:.2f} to {high:.2f}) does not meet the measured one: "
        "profile again with --prompts of this kind, on a machine with nothing else to do."
    )


def _ends(ratio: Ratio, between: str = " to ") -> str:
    """The ends of a ratio's interval, as "1.20 to 1.40"."""
    return f"{ratio.interval_low:.2f}{between}{ratio.interval_high:.2f}"


def _faster_method_sentence(result: BenchResult, reference: str) -> str:
    """A sentence on the fastest method, if it is no tree and beat `reference`; "" otherwise."""
    speedups, methods = speedups_over_plain(result), result.methods
    fastest = max(speedups, key=lambda name: speedups[name].median, default="plain")
    ratio = methods[fastest].speedup.get(reference) if fastest in methods else None
    if fastest in TREE_METHODS or ratio is None or ratio.median <= 1:
        return ""
    opening = CERTAIN if ratio.interval_low > 1 else " Faster, but not certainly, was"
    reference_title = "plain decoding" if reference == "plain" else "our tree"
    return (
        f"{opening} {methods[fastest].title}: {ratio.median:.2f} times {reference_title} "
        f"({_ends(ratio)})."
    )


def sampling_text(result: BenchResult) -> str:
    """The temperature and every filter that is on, as "temperature 0.6, top_p 0.9".

    The verifier is left out, because every method has its own.
    """
    return ", ".join(
        f"{name} {value:g}"
        for name, value in result.settings.sampling.items()
        if name != "verifier" and value not in (None, NEUTRAL_SETTINGS.get(name))
    )


def settings_text(result: BenchResult) -> str:
    """The settings of a run, without the models' names and the machine."""
    settings, tree = result.settings, result.tree
    shape = f"tree of {tree.size} nodes, depth {tree.depth}" if tree.size > 1 else "no drafted tree"
    prompts = f"{settings.prompts} held-out prompts, {settings.tokens} new tokens each"
    return f"{sampling_text(result)}; {settings.dtype}; {prompts}; {shape}"


def step_parts_text(result: BenchResult) -> str:
    """The parts of a step of the tree in milliseconds; empty if they were not measured."""
    breakdown = result.breakdown
    if breakdown is None:
        return ""
    parts = ", ".join(
        f"{part} {max(getattr(breakdown, part), 0) * 1000:.1f}"
        for part in ("draft", "target", "verify", "host")
    )
    return (
        f"A step of the tree: {breakdown.step * 1000:.1f} ms ({parts}); "
        f"{max(breakdown.share_not_model, 0):.1%} of it is not model time."
    )


def table(result: BenchResult) -> Table:
    """A row for each method, those that use the tree marked; predicted is right of measured."""
    rows, is_ours = [], []
    for name, method in result.methods.items():
        shown = cells(method, method.speedup.get("plain"))
        if name == "plain":
            shown[:2] = "1", "-"
        speed, first = method.tokens_per_second.median, method.first_token_seconds.median
        rows.append([method.title, *shown, f"{speed:.1f}", f"{first * 1000:.0f} ms"])
        is_ours.append(name in TREE_METHODS)
        for kind, of_kind in method.by_kind.items():
            rows.append([f"  {kind} ({of_kind.prompts})", *cells(of_kind, of_kind.speedup), "", ""])
            is_ours.append(False)
    return Table(COLUMNS, rows, is_ours)


def cells(result: MethodResult | KindResult, ratio: Ratio | None) -> list[str]:
    """Measured and predicted speed-up, and tokens a step."""
    prediction = result.prediction or Prediction()
    speedup = f"{ratio.median:.2f}x ({_ends(ratio, '-')})" if ratio else "-"
    tokens = [_number_text(result.tokens_per_step), _number_text(prediction.tokens_per_step)]
    return [speedup, _promise_text(prediction), *tokens]


def _promise_text(prediction: Prediction) -> str:
    """A predicted speed-up: with its interval, or of a new kind the interval first."""
    text = _number_text(prediction.speedup, "x")
    ends = "-".join(map(_number_text, prediction.interval or prediction.interval_new_kind or ()))
    if prediction.interval_new_kind:
        return f"{ends}x ({text} for the profiled mix)"
    return f"{text} ({ends})" if ends else text


def _number_text(value: float | None, unit: str = "") -> str:
    """A number with two decimals and its unit, as "1.30x"; "-" for None."""
    return "-" if value is None else f"{value:.2f}{unit}"


def print_result(result: BenchResult) -> None:
    """Print the settings, the table, the finding, and how the time of a step divides into parts."""
    print(settings_text(result))
    print_table(table(result))
    print(
        "over plain: median of ratios prompt by prompt and its 95 % interval; predicted: the same "
        "for as many prompts; tokens/s: median over prompts"
    )
    print(finding(result), step_parts_text(result))
