"""The diagnosis of an engine as one HTML file, with the picture of the step and the curves."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from sequoia_plan.engines.plan import EnginePlan
from sequoia_plan.planner.report.engine_table import kind_of_request, sentences, table
from sequoia_plan.planner.report.html import HEIGHT, Plot, document, figures
from sequoia_plan.planner.report.panels import AMBER, BLUE, GREEN
from sequoia_plan.planner.report.tables import html_table


def engine_page(plan: EnginePlan) -> str:
    """Writes the report of a diagnosis as HTML."""
    title, *lines = map(escape, sentences(plan))
    text = "".join(f"<p>{line}</p>" for line in lines)
    plots = figures([*_plots(plan)])
    return document(title, f"<h1>{title}</h1>{text}{plots}{html_table(table(plan))}")


def draw_curves(curves: Mapping[str, Sequence[tuple[int, float]]], unit: str, axes: Any) -> None:
    """Draws points by their names, with lines between them."""
    for (name, points), color in zip(curves.items(), (GREEN, AMBER, BLUE), strict=False):
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=name)
    axes.set(xlabel="tokens", ylabel=unit, ylim=(0, None))
    axes.legend(loc="best")


def draw_bars(parts: Mapping[str, float], axes: Any) -> None:
    """Draws a bar for each part of a step's time."""
    axes.barh([*parts], [1000 * seconds for seconds in parts.values()], color=GREEN)
    axes.set(xlabel="ms of a step of the best chain")


def _plots(plan: EnginePlan) -> Iterator[Plot]:
    """The functions that draw, their captions, and their heights."""
    for part in plan.contexts:
        for batch in part.batches:
            cells = [cell for cell in part.cells_at(batch) if cell.drafting.is_chain]
            best = part.best_cell(batch)
            length = best.drafting.length or best.drafting.lookup_length
            curves = {
                "predicted": [(cell.speculative_tokens, cell.throughput) for cell in cells],
                "then measured": [
                    (cell.speculative_tokens, cell.measured.throughput)
                    for cell in cells
                    if cell.measured
                ],
                f"best: {best.drafting}": [(length, best.throughput)],
            }
            caption = kind_of_request(part, batch).capitalize()
            yield partial(draw_curves, curves, "tokens/s by the chain's length"), caption, HEIGHT
        if part.target_seconds:
            passes = {"the target's pass": sorted(part.target_seconds.items())}
            yield partial(draw_curves, passes, "seconds"), "What is verified", HEIGHT
            yield partial(draw_bars, part.step), "Where a step's time goes", HEIGHT
