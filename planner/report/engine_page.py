"""The diagnosis of an engine as one HTML file."""

from html import escape

from sequoia_plan.engines.plan import EnginePlan
from sequoia_plan.planner.report.engine_table import sentences, table
from sequoia_plan.planner.report.html import document
from sequoia_plan.planner.report.tables import html_paragraphs, html_table


def engine_page(plan: EnginePlan) -> str:
    """Writes the report of a diagnosis as HTML."""
    title, *lines = sentences(plan)
    text = html_paragraphs("finding", *lines)
    return document(title, f"<h1>{escape(title)}</h1>{html_table(table(plan))}{text}")
