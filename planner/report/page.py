"""bench's result as one HTML file to mail: no network, no script, light and dark, plots as inline
SVG."""

from collections.abc import Mapping
from functools import partial
from html import escape
from typing import Any

from sequoia_plan.artifacts import BenchResult, TokenTree
from sequoia_plan.planner.report import panels
from sequoia_plan.planner.report.bench_table import (
    finding,
    settings_text,
    speedups_over_plain,
    step_parts_text,
    table,
)
from sequoia_plan.planner.report.html import HEIGHT, Plot, document, figures
from sequoia_plan.planner.report.tables import html_facts, html_paragraphs, html_table

TABLE_NOTE = (
    "Over plain: the median of the ratios prompt by prompt, and its 95 % interval. Predicted: "
    "from the profile that the tree was made of. Tokens/s: the median over prompts."
)


def page(tree: TokenTree, result: BenchResult) -> str:
    """The report of a tree."""
    models = [result.models.get(role, {}) for role in ("target", "draft")]
    names = [str(model["name"]) for model in models if model.get("name")]
    title = f"Speculative decoding of {' with '.join(names)}" if names else "Speculative decoding"
    plan = tree.plan
    origin = [("", plan.tool), ("solver ", plan.solver), ("objective ", plan.objective)]
    body = (
        f"<h1>{escape(title)}</h1>"
        + html_paragraphs("finding", finding(result))
        + html_paragraphs("soft", settings_text(result))
        + html_table(table(result))
        + html_paragraphs("soft", step_parts_text(result), TABLE_NOTE)
        + figures(_plots(tree, result))
        + html_facts(
            {role: _metadata_text(result.models.get(role, {})) for role in ("target", "draft")}
            | {
                "machine": _metadata_text(result.hardware),
                "tree": str(tree),
                "made by": ", ".join(label + value for label, value in origin if value),
            }
        )
    )
    return document(title, body)


def _plots(tree: TokenTree, result: BenchResult) -> list[Plot]:
    """The plots that the plan and the results allow, each with its caption and height.

    The first two may be taller than the others: they stand side by side, and the first has a row
    for each method.
    """
    plan, ratios = tree.plan, speedups_over_plain(result)
    first_height = max(HEIGHT, 0.9 + len(ratios) * 0.36)
    plots = [
        (
            ratios,
            partial(panels.speedups_panel, result),
            "Speed-up over plain decoding, measured with its 95 % interval, and predicted.",
            first_height,
        ),
        (
            tree.size > 1,
            partial(panels.tree_panel, tree),
            "The tree. A node's area and shade are its probability of being accepted.",
            first_height,
        ),
        (
            plan.acceptance,
            partial(panels.tokens_panel, tree),
            "Predicted tokens a step against size, for every shape of tree at its best.",
            HEIGHT,
        ),
        (
            plan.latency,
            partial(panels.latency_panel, tree),
            "Median time of one pass against the tokens in it.",
            HEIGHT,
        ),
    ]
    return [(draw, caption, height) for is_known, draw, caption, height in plots if is_known]


def _metadata_text(metadata: Mapping[str, Any]) -> str:
    """List metadata, as "NAME, parameters 134515008, dtype float32"."""
    items = metadata.items()
    return ", ".join(str(value) if key == "name" else f"{key} {value}" for key, value in items)
