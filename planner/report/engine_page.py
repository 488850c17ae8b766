"""The diagnosis of an engine as one HTML file, with the picture of the step and the curves."""

from collections.abc import Iterator
from functools import partial
from html import escape
from typing import Any

from sequoia_plan.engines.plan import ContextPlan, EnginePlan
from sequoia_plan.planner.report.engine_table import kind_of_request, sentences, table
from sequoia_plan.planner.report.html import HEIGHT, Plot, document, figures
from sequoia_plan.planner.report.panels import AMBER, BLUE, GREEN
from sequoia_plan.planner.report.tables import html_table


def engine_page(plan: EnginePlan) -> str:
    """Writes the report of a diagnosis as HTML."""
    title, *lines = map(escape, sentences(plan))
    text = "".join(f"<p>{line}</p>" for line in lines)
    return document(
        title, f"<h1>{title}</h1>{text}{figures([*_plots(plan)])}{html_table(table(plan))}"
    )


def throughput_panel(part: ContextPlan, batch: int, axes: Any) -> None:
    """Draws throughput by length of the chain: predicted with its interval, and measured."""
    cells = [cell for cell in part.cells_at(batch) if cell.drafting.is_chain]
    lengths = [cell.speculative_tokens for cell in cells]
    low, high = [cell.low for cell in cells], [cell.high for cell in cells]
    axes.fill_between(lengths, low, high, color=GREEN, alpha=0.18, linewidth=0)
    axes.plot(lengths, [cell.throughput for cell in cells], "o-", color=GREEN, label="predicted")
    measured = [(c.speculative_tokens, c.measured.throughput) for c in cells if c.measured]
    if measured:
        axes.plot(*zip(*measured, strict=True), "D", color=AMBER, label="then measured")
    best = part.best_cell(batch)
    axes.axhline(best.throughput, color=BLUE, linestyle=":", label=f"best: {best.drafting}")
    axes.set(xlabel="drafted tokens", ylabel="tokens/s", ylim=(0, None))
    axes.legend(loc="best")


def pass_panel(part: ContextPlan, axes: Any) -> None:
    """Draws the seconds of the target's pass over its tokens."""
    sizes, seconds = zip(*sorted(part.target_seconds.items()), strict=True)
    axes.plot(sizes, [1000 * each for each in seconds], "o-", color=GREEN)
    axes.set(xlabel="tokens of the target's pass", ylabel="ms", ylim=(0, None))


def step_panel(part: ContextPlan, axes: Any) -> None:
    """Draws the parts of a step's time as one bar each."""
    axes.barh([*part.step], [1000 * seconds for seconds in part.step.values()], color=GREEN)
    axes.set(xlabel="ms of a step of the best chain")


def _plots(plan: EnginePlan) -> Iterator[Plot]:
    """The functions that draw, their captions, and their heights."""
    for part in plan.contexts:
        for batch in part.batches:
            caption = kind_of_request(part, batch).capitalize()
            yield partial(throughput_panel, part, batch), caption, HEIGHT
        if part.target_seconds:
            yield partial(pass_panel, part), "What is verified", HEIGHT
        if part.step:
            yield partial(step_panel, part), "Where a step's time goes", HEIGHT
