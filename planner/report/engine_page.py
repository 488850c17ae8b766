"""A plan for another engine as one HTML file: the curve of throughput over the number of speculative tokens for each batch size."""

from __future__ import annotations

from functools import partial
from html import escape
from typing import Any

from sequoia_plan.artifacts.engine_plan import EnginePlan
from sequoia_plan.planner.report.engine_table import COLUMNS, KEY, acceptance_lines, findings, misses, rows
from sequoia_plan.planner.report.html import HEIGHT, Plot, document, figures
from sequoia_plan.planner.report.panels import AMBER, BLUE, GREEN

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def page(plan: EnginePlan) -> str:
    """The report."""
    title = f"Speculative tokens for {NAMES.get(plan.engine, plan.engine)} {plan.version}".strip()
    found = "".join(f'<p class="finding">{escape(line[0].upper() + line[1:])}</p>' for line in findings(plan))
    lines = "".join(f"<p><code>{escape(line)}</code></p>" for line in plan.lines) or "<p>Start the engine without speculation.</p>"
    missed = "".join(f'<p class="soft">{escape(line)}</p>' for line in misses(plan))
    said = "".join(
        f'<p class="soft">{escape(line)}</p>' for line in acceptance_lines(plan.acceptance, [cell.tokens_per_step for cell in plan.at(plan.batches[0])])
    )
    return document(
        title, f"<h1>{escape(title)}</h1>{found}{lines}{figures(_plots(plan))}{missed}{_table(plan)}{said}<h2>What it was measured with</h2>{_facts(plan)}"
    )


def throughput_panel(plan: EnginePlan, batch: int, axes: Any) -> None:
    """Predicted throughput with its interval, what was measured with its range, and the chosen number."""
    cells = plan.at(batch)
    lengths = [cell.speculative_tokens for cell in cells]
    axes.fill_between(lengths, [cell.low for cell in cells], [cell.high for cell in cells], color=GREEN, alpha=0.18, linewidth=0, label="its 95 % interval")
    axes.plot(lengths, [cell.throughput for cell in cells], "-", color=GREEN, label="predicted")
    timed = [cell for cell in cells if cell.timed]
    axes.plot([cell.speculative_tokens for cell in timed], [cell.throughput for cell in timed], "o", color=GREEN, markersize=4.5, label="step time measured")
    seen = [(cell.speculative_tokens, cell.measured) for cell in cells if cell.measured]
    if seen:
        middle = [each.throughput for _, each in seen]
        reach = [[each.throughput - each.low for _, each in seen], [each.high - each.throughput for _, each in seen]]
        axes.errorbar(
            [length for length, _ in seen], middle, yerr=reach, fmt="D", color=AMBER, markersize=5, elinewidth=1.6, capsize=2.5, label="then measured"
        )
    best = plan.best(batch)
    axes.axvline(best.speculative_tokens, color=BLUE, linewidth=1, linestyle=":", label=f"chosen: {best.speculative_tokens}")
    axes.set_xticks(lengths if len(lengths) <= 12 else lengths[:: -(-len(lengths) // 12)])
    axes.set(xlabel="speculative tokens", ylabel="tokens/s", ylim=(0, 1.15 * max(cell.high for cell in cells)))
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="best")


def _plots(plan: EnginePlan) -> list[Plot]:
    return [(partial(throughput_panel, plan, batch), f"Batch {batch}: generated tokens a second of all requests together.", HEIGHT) for batch in plan.batches]


def _table(plan: EnginePlan) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = ""
    for cell, texts in rows(plan):
        mine = ' class="mine"' if cell == plan.best(cell.batch) else ""
        body += f"<tr{mine}>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>"
    note = f"{KEY}. ~: on the line between two measured times. a / b: predicted / measured."
    return f'<div class="wide"><table class="figures"><tr>{head}</tr>{body}</table></div><p class="soft">{note}</p>'


def _facts(plan: EnginePlan) -> str:
    named = {"engine": f"{plan.engine} {plan.version}".strip(), "target": plan.target, "draft": plan.draft, "method": plan.method, "made by": plan.tool}
    named |= {name: str(value) for name, value in plan.settings.items()} | ({"measured in": f"{plan.seconds:.0f} s"} if plan.seconds else {})
    table = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in named.items() if text)
    return f'<div class="wide"><table class="facts">{table}</table></div>'
