"""Tables in the terminal and as HTML."""

from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

MAX_WIDTH = 200
"""Columns that a table may take: the terminal wraps a wider one, and cuts no figure off."""


class Table(NamedTuple):
    """Titles of columns, rows of cells, and which rows stand out."""

    columns: list[str]
    rows: list[list[str]]
    is_marked: list[bool]


def print_table(table: Table) -> None:
    """Print a table whose first column is text, and whose others are numbers."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    drawn = RichTable(box=None, padding=(0, 1, 0, 0))
    for number, column in enumerate(table.columns):
        justify: Any = "right" if number else "left"
        drawn.add_column(column.replace(" ", "\n", 1), justify=justify, no_wrap=number > 0)
    for row, is_marked in zip(table.rows, table.is_marked, strict=True):
        drawn.add_row(*map(escape, row), style="bold" if is_marked else None)
    widths = console.measure(drawn, options=console.options.update(width=MAX_WIDTH))
    # a file or a pipe takes lines as wide as the whole table
    width = max(console.width, widths.minimum) if console.is_terminal else widths.maximum
    Console(highlight=False, width=width).print(drawn)


def html_table(table: Table) -> str:
    """A table as HTML; what is in brackets is in small type."""
    mark = ' class="mine"'
    text = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    for row, is_marked in zip(table.rows, table.is_marked, strict=True):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        cells = cells.replace("(", "<small>").replace(")", "</small>")
        text += f"<tr{mark if is_marked else ''}>{cells}</tr>"
    return f'<div class="wide"><table class="figures">{text}</table></div>'


def html_facts(facts: Mapping[str, Any]) -> str:
    """Names and what is known of them, as HTML; what is empty is left out."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(fact))}</td></tr>"
        for name, fact in facts.items()
        if fact
    )
    title = "<h2>What it was measured with</h2>"
    return f'{title}<div class="wide"><table class="facts">{rows}</table></div>'


def html_paragraphs(css_class: str, *texts: str) -> str:
    """Texts as HTML paragraphs of a class of the style sheet."""
    return "".join(f'<p class="{css_class}">{escape(text)}</p>' for text in texts)
