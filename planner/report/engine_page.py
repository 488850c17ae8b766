"""A plan for another engine as one HTML file, with throughput by number of speculative tokens."""

from functools import partial
from html import escape
from typing import Any

from sequoia_plan.engines.plan import ContextPlan, EnginePlan
from sequoia_plan.planner.report.engine_table import (
    COLUMNS_NOTE,
    acceptance_lines,
    findings,
    kind_of_request,
    launch_groups,
    parts_and_batches,
    table,
)
from sequoia_plan.planner.report.html import HEIGHT, Plot, document, figures
from sequoia_plan.planner.report.panels import AMBER, BLUE, GREEN
from sequoia_plan.planner.report.tables import html_facts, html_paragraphs, html_table

ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
MAX_TICKS = 12


def engine_page(plan: EnginePlan) -> str:
    """Writes the report of a plan as HTML."""
    engine = ENGINE_NAMES.get(plan.engine, plan.engine)
    title = f"Speculative tokens for {engine} {plan.engine_version}".strip()
    finding_sentences = [line[0].upper() + line[1:] for line in findings(plan)]
    launch_lines = "".join(
        (f"<p>{purpose[0].upper()}{purpose[1:]}</p>" if purpose else "")
        + "".join(f"<p><code>{escape(line)}</code></p>" for line in lines)
        for purpose, lines in launch_groups(plan)
    )
    body = (
        f"<h1>{escape(title)}</h1>"
        + html_paragraphs("finding", *finding_sentences)
        + launch_lines
        + figures(_plots(plan))
        + html_table(table(plan))
        + html_paragraphs("soft", f"{COLUMNS_NOTE}.", *acceptance_lines(plan))
        + html_facts(
            {
                "engine": f"{plan.engine} {plan.engine_version}",
                "target": plan.target,
                "draft": plan.draft,
                "method": plan.method,
                "made by": plan.tool,
                **plan.settings,
                "measured in": plan.seconds and f"{plan.seconds:.0f} s",
            }
        )
    )
    return document(title, body)


def throughput_panel(part: ContextPlan, batch: int, axes: Any) -> None:
    """Draws throughput at one batch size: predicted, measured, and the chosen number.

    The prediction has its 95 % interval, and the measurement the range of its runs.
    """
    cells = part.cells_at(batch)
    lengths = [cell.speculative_tokens for cell in cells]
    low, high = [cell.low for cell in cells], [cell.high for cell in cells]
    throughputs = [cell.throughput for cell in cells]
    axes.fill_between(
        lengths, low, high, color=GREEN, alpha=0.18, linewidth=0, label="its 95 % interval"
    )
    axes.plot(lengths, throughputs, "-", color=GREEN, label="predicted")
    timed = [(cell.speculative_tokens, cell.throughput) for cell in cells if cell.is_timed]
    axes.plot(
        *zip(*timed, strict=True), "o", color=GREEN, markersize=4.5, label="step time measured"
    )
    measured = {cell.speculative_tokens: cell.measured for cell in cells if cell.measured}
    if measured:
        runs = measured.values()
        axes.errorbar(
            list(measured),
            [run.throughput for run in runs],
            yerr=[
                [run.throughput - run.low for run in runs],
                [run.high - run.throughput for run in runs],
            ],
            fmt="D",
            color=AMBER,
            markersize=5,
            elinewidth=1.6,
            capsize=2.5,
            label="then measured",
        )
    best = part.best_cell(batch).speculative_tokens
    axes.axvline(best, color=BLUE, linewidth=1, linestyle=":", label=f"chosen: {best}")
    lengths_per_tick = -(-len(lengths) // MAX_TICKS)  # rounded up
    axes.set_xticks(lengths[::lengths_per_tick])
    axes.set(xlabel="speculative tokens", ylabel="tokens/s", ylim=(0, 1.15 * max(high)))
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="best")


def _plots(plan: EnginePlan) -> list[Plot]:
    """A plot for each kind of request: the function that draws it, its caption, and its height."""
    return [
        (
            partial(throughput_panel, part, batch),
            f"{kind_of_request(part, batch).capitalize()}: "
            "generated tokens a second of all requests together.",
            HEIGHT,
        )
        for part, batch in parts_and_batches(plan)
    ]
