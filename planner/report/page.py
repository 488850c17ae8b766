"""bench's result as one HTML file to mail, without network or script, with the tree as SVG."""

from collections.abc import Mapping
from html import escape
from typing import Any

from sequoia_plan.artifacts import BenchResult, TokenTree
from sequoia_plan.planner.report.bench_table import finding, settings_text, step_parts_text, table
from sequoia_plan.planner.report.html import document, figure
from sequoia_plan.planner.report.tables import html_facts, html_paragraphs, html_table

TABLE_NOTE = (
    "Over plain: the median of the ratios prompt by prompt, and its 95 % interval. Predicted: "
    "from the profile that the tree was made of. Tokens/s: the median over prompts."
)


def page(tree: TokenTree, result: BenchResult) -> str:
    """The report of a tree."""
    plan = tree.plan
    models = {role: result.models.get(role, {}) for role in ("target", "draft")}
    names = [str(model["name"]) for model in models.values() if model.get("name")]
    title = f"Speculative decoding of {' with '.join(names)}" if names else "Speculative decoding"
    caption = "The tree. A node's area and shade are its probability of being accepted."
    made_by = ", ".join(filter(None, (plan.tool, plan.solver, plan.objective)))
    return document(
        title,
        f"<h1>{escape(title)}</h1>"
        + html_paragraphs("finding", finding(result))
        + html_paragraphs("soft", settings_text(result))
        + html_table(table(result))
        + html_paragraphs("soft", step_parts_text(result), TABLE_NOTE)
        + (figure(tree, plan.acceptance, caption) if tree.size > 1 else "")
        + html_facts(
            {role: _metadata_text(model) for role, model in models.items()}
            | {"machine": _metadata_text(result.hardware), "tree": tree, "made by": made_by}
        ),
    )


def _metadata_text(metadata: Mapping[str, Any]) -> str:
    """List metadata, as "NAME, parameters 134515008, dtype float32"."""
    items = metadata.items()
    return ", ".join(str(value) if key == "name" else f"{key} {value}" for key, value in items)
