"""What the pages have in common: one style, light and dark, and a tree as SVG in its colours."""

from html import escape

from sequoia_plan.artifacts import Acceptance, TokenTree
from sequoia_plan.planner.report import panels

INK = "#010203"
"""Placeholder in a plot for the page's colour of text; plots use it for nothing else."""

WIDTH, HEIGHT = 4.9, 3.6
"""Inches of a plot: text of 10 points can then be read where a telephone shrinks it, and is not
coarse in two columns."""

STYLE = """:root{color-scheme:light dark;--ink:#1d2723;--soft:#5a6861;--paper:#fff;--line:#d5ddd8;\
--mine:#eef6f0}
@media(prefers-color-scheme:dark){:root{--ink:#e3e9e5;--soft:#9fada6;--paper:#151a18;\
--line:#38423d;--mine:#1d2a23}}
*{box-sizing:border-box}body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);\
background:var(--paper);max-width:64rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .5rem}h2{font-size:1.15rem;margin:2.5rem 0 .5rem}
p{margin:.5rem 0}h1 span{display:inline-block}.finding{font-size:1.1rem;max-width:48rem}
.soft,small,figcaption{color:var(--soft)}.soft,figcaption,small{font-size:.875rem}\
.wide{overflow-x:auto}.wide+.soft{margin-top:1.5rem}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}\
td,th{padding:.3rem .7rem;border-bottom:1px solid var(--line);text-align:right}
.figures td,.figures th{white-space:nowrap}.figures tr>:first-child{position:sticky;left:0;\
background:var(--paper);white-space:normal;min-width:7.5rem}
tr>:first-child{text-align:left;padding-left:.3rem}\
.figures .mine td,.figures .mine>:first-child{background:var(--mine)}\
.mine>:first-child{font-weight:600}
.facts td{text-align:left;vertical-align:top;overflow-wrap:anywhere}\
.facts td:first-child{white-space:nowrap;color:var(--soft)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));\
gap:2rem 1.5rem;margin-top:2rem}
figure{margin:0}svg{width:100%;height:auto}svg text{font-family:system-ui,sans-serif!important}
@media print{figure,table{break-inside:avoid}}"""
"""The style sheet of all pages; a line ends with a backslash where the sheet goes on in it."""


def document(title: str, body: str) -> str:
    """The whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def figure(tree: TokenTree, acceptance: Acceptance | None, caption: str) -> str:
    """A tree with its caption as HTML."""
    picture = panels.picture([(tree, acceptance, "")], (WIDTH, HEIGHT), INK, in_page=True)
    text = picture.decode().replace(INK, "currentColor")
    svg = text[text.index("<svg") :]  # without the XML declaration
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)
    caption = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<div class="plots"><figure>{svg}{caption}</figure></div>'
