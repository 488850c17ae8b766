"""bench's result as one HTML file to mail: no network, no script, light and dark, plots as inline
SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from sequoia_plan.artifacts import BenchResult, TokenTree
from sequoia_plan.planner.report import panels
from sequoia_plan.planner.report.bench_table import (
    TREE_METHODS,
    finding,
    settings_text,
    step_parts_text,
    table,
)
from sequoia_plan.planner.report.html import HEIGHT, Plot, document, figures
from sequoia_plan.planner.report.speedup_panel import (
    compared_methods,
    has_predictions,
    speedups_panel,
)

TABLE_NOTE = (
    "Over plain: the median of the ratios prompt by prompt, and its 95 % interval. Predicted: "
    "from the profile that the tree was made of. Tokens/s: median and quartiles over prompts."
)


def page(tree: TokenTree, result: BenchResult) -> str:
    """The report of a tree."""
    title, heading = _titles(result)
    body = (
        f"<h1>{heading}</h1>"
        f'<p class="finding">{escape(finding(result))}</p>'
        f"{_table(result)}"
        f'<p class="soft">{escape(step_parts_text(result))}</p>'
        f'<p class="soft">{TABLE_NOTE}</p>'
        f"{figures(_plots(tree, result))}"
        "<h2>What it was measured with</h2>"
        f'<div class="wide"><table class="facts">{_metadata_rows(tree, result)}</table></div>'
    )
    return document(title, body)


def _titles(result: BenchResult) -> tuple[str, str]:
    """The page's title as text, and its heading as HTML, where a line ends only between names."""
    models = [result.models.get(role, {}) for role in ("target", "draft")]
    names = [str(model["name"]) for model in models if model.get("name")]
    if not names:
        return "Speculative decoding, measured", "Speculative decoding, measured"
    unbroken_names = [f"<span>{escape(name)}</span>" for name in names]
    title = "Speculative decoding of " + " with ".join(names)
    heading = "Speculative decoding of " + " with ".join(unbroken_names)
    return title, heading


def _plots(tree: TokenTree, result: BenchResult) -> list[Plot]:
    """The plots that the plan and the results allow, each with its caption and height.

    The first two may be taller than the others: they stand side by side, and the first has a row
    for each method.
    """
    plan = tree.plan
    plots: list[Plot] = []
    first_height = HEIGHT
    if names := compared_methods(result):
        first_height = max(HEIGHT, 0.9 + len(names) * 0.36)
        caption = "Measured speed-up over plain decoding with its 95 % interval"
        caption += "; a diamond is the predicted one." if has_predictions(result) else "."
        plots.append((lambda axes: speedups_panel(result, axes), caption, first_height))
    if tree.size > 1:
        caption = "The tree. A node's area and shade are its probability of being accepted."
        plots.append((lambda axes: panels.tree_panel(tree, axes), caption, first_height))
    if plan.acceptance:
        caption = "Predicted tokens a step against size, for every shape of tree at its best."
        plots.append((lambda axes: panels.tokens_panel(tree, axes), caption, HEIGHT))
    if plan.acceptance and plan.latency:
        caption = (
            "Predicted speed-up of the best tree of each size and depth. The star is this tree."
        )
        plots.append((lambda axes: panels.speed_panel(tree, axes), caption, HEIGHT))
        context = plan.latency.context
        caption = "Median time of one pass against the tokens in it"
        caption += f", with {context} in the KV cache." if context else "."
        plots.append((lambda axes: panels.latency_panel(tree, axes), caption, HEIGHT))
    return plots


def _table(result: BenchResult) -> str:
    """Settings and figures of one run as HTML; the methods that use the tree are marked."""
    columns, rows = table(result, ["plain"] if "plain" in result.methods else [])
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = ""
    for name, (title, *figure_texts) in zip(result.methods, rows, strict=True):
        cells = "".join(f"<td>{_figure_html(text)}</td>" for text in figure_texts)
        mark = ' class="mine"' if name in TREE_METHODS else ""
        body += f"<tr{mark}><td>{escape(title)}</td>{cells}</tr>"
    return (
        f'<p class="soft">{escape(settings_text(result))}</p>'
        f'<div class="wide"><table class="figures"><tr>{head}</tr>{body}</table></div>'
    )


def _figure_html(text: str) -> str:
    """Escape a figure and set its spread, which is in brackets, in small type."""
    return escape(text).replace("(", "<small>").replace(")", "</small>")


def _metadata_rows(tree: TokenTree, result: BenchResult) -> str:
    """Rows of a table: models, machine, tree, and what solved for it."""
    plan = tree.plan
    models_target_first = sorted(result.models.items(), reverse=True)  # by role
    texts = {role: _metadata_text(metadata) for role, metadata in models_target_first}
    texts["machine"] = _metadata_text(result.hardware)
    texts["tree"] = (
        f"{tree.size} node{'s' * (tree.size > 1)}, depth {tree.depth}, "
        f"level widths {' '.join(map(str, tree.level_widths))}"
    )
    origin = [("", plan.tool), ("solver ", plan.solver), ("objective ", plan.objective)]
    texts["made by"] = ", ".join(label + value for label, value in origin if value)
    rows = [
        f"<tr><td>{escape(label)}</td><td>{escape(text)}</td></tr>"
        for label, text in texts.items()
        if text
    ]
    return "".join(rows)


def _metadata_text(metadata: Mapping[str, Any]) -> str:
    """List metadata, as "NAME, parameters 134,515,008, dtype float32"; the name comes first."""
    texts = [str(metadata["name"])] if metadata.get("name") else []
    for key, value in metadata.items():
        if key == "parameters":
            texts.append(f"{key} {value:,}")
        elif key != "name":
            texts.append(f"{key} {value}")
    return ", ".join(texts)
