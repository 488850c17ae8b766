"""What bench found, as one HTML file to mail: no network, no script, light and dark, plots as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from sequoia_plan.artifacts import BenchResult, TokenTree
from sequoia_plan.artifacts.cost import by_class
from sequoia_plan.planner.report import panels
from sequoia_plan.planner.report.bench_table import OURS, finding, parts_text, settings_text, table
from sequoia_plan.planner.report.speedup_panel import compared, promised, speedups_panel

INK, LINE = "#010203", "#010204"
"""Stand for the page's colours of text and lines in a plot; no plot uses them otherwise."""
WIDTH, HEIGHT = 4.9, 3.6
"""Inches of a plot: at 10 points, text can be read where a telephone shrinks it and is not coarse in two columns."""
STYLE = """:root{color-scheme:light dark;--ink:#1d2723;--soft:#5a6861;--paper:#fff;--line:#d5ddd8;--mine:#eef6f0}
@media(prefers-color-scheme:dark){:root{--ink:#e3e9e5;--soft:#9fada6;--paper:#151a18;--line:#38423d;--mine:#1d2a23}}
*{box-sizing:border-box}body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:64rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .5rem}h2{font-size:1.15rem;margin:2.5rem 0 .5rem}
p{margin:.5rem 0}h1 span{display:inline-block}.finding{font-size:1.1rem;max-width:48rem}
.soft,small,figcaption{color:var(--soft)}.soft,figcaption,small{font-size:.875rem}.wide{overflow-x:auto}.wide+.soft{margin-top:1.5rem}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}td,th{padding:.3rem .7rem;border-bottom:1px solid var(--line);text-align:right}
.figures td,.figures th{white-space:nowrap}.figures tr>:first-child{position:sticky;left:0;background:var(--paper);white-space:normal;min-width:7.5rem}
tr>:first-child{text-align:left;padding-left:.3rem}.figures .mine td,.figures .mine>:first-child{background:var(--mine)}.mine>:first-child{font-weight:600}
.facts td{text-align:left;vertical-align:top;overflow-wrap:anywhere}.facts td:first-child{white-space:nowrap;color:var(--soft)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:2rem 1.5rem;margin-top:2rem}
figure{margin:0}svg{width:100%;height:auto}svg text{font-family:system-ui,sans-serif!important}
@media print{figure,table{break-inside:avoid}}"""

Plot = tuple[Callable[[Any], None], str, float]
"""A drawing onto axes, its caption, and its height in inches."""


def page(tree: TokenTree, results: Sequence[BenchResult]) -> str:
    """The report of `tree`; `results` are of `sequoia-plan bench`, the main one first, others at other temperatures after it."""
    first, *others = results
    names = [str(first.models[role]["name"]) for role in ("target", "draft") if first.models.get(role, {}).get("name")]
    title = "Speculative decoding of " + " with ".join(names) if names else "Speculative decoding, measured"
    # a line may end between names rather than within one
    heading = "Speculative decoding of " + " with ".join(f"<span>{escape(name)}</span>" for name in names) if names else title
    plots = "".join(f"<figure>{_svg(*plot, number)}<figcaption>{escape(plot[1])}</figcaption></figure>" for number, plot in enumerate(_plots(tree, results)))
    more = "<h2>With other settings</h2>" + "".join(map(_table, others)) if others else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{heading}</h1>"
        f'<p class="finding">{escape(finding(first, others))}</p>{_table(first)}<p class="soft">{escape(parts_text(first))}</p>'
        f'<p class="soft">Over plain: the median of the ratios prompt by prompt, and its 95 % interval. '
        f"Predicted: from the profile that the tree was made of. Tokens/s: median and quartiles over prompts.</p>"
        f'<div class="plots">{plots}</div>{more}<h2>What it was measured with</h2><div class="wide"><table class="facts">{_facts(tree, first)}</table></div>'
        f"</body></html>\n"
    )


def _plots(tree: TokenTree, results: Sequence[BenchResult]) -> list[Plot]:
    """What can be drawn of what is known; the pair on top may be taller."""
    plan, plots = tree.plan, list[Plot]()
    tall = HEIGHT
    if names := compared(results):
        tall = max(HEIGHT, 0.9 + len(names) * max(0.36, 0.16 * len(results)))
        text = "Measured speed-up over plain decoding with its 95 % interval" + ("; a diamond is the predicted one." if promised(results) else ".")
        plots.append((lambda axes: speedups_panel(results, axes), text, tall))
    if tree.size > 1:
        plots.append((lambda axes: panels.tree_panel(tree, axes), "The tree. A node's area and shade are its probability of being accepted.", tall))
    if acceptance := plan.acceptance:
        text = "Predicted tokens a step against size, for every shape of tree at its best."
        plots.append((lambda axes: panels.tokens_panel(tree, axes), text, HEIGHT))
        trials = plan.trials or 0
        text = "Acceptance by rank" + (", and the power law through it. Ranks that were never accepted are not shown." if np.size(acceptance) > 1 else ".")
        text += " Dashed: children of nodes off the spine, whose path has a rank above 1." if by_class(acceptance).shape[1] > 1 else ""
        plots.append((lambda axes: panels.acceptance_panel(acceptance, axes, trials), text, HEIGHT))
    if acceptance and plan.latency:
        text = "Predicted speed-up of the best tree of each size and depth. The star is this tree."
        plots.append((lambda axes: panels.speed_panel(tree, axes), text, HEIGHT))
        context = plan.latency.context
        text = "Median time of one pass against the tokens in it" + (f", with {context} in the KV cache." if context else ".")
        plots.append((lambda axes: panels.latency_panel(tree, axes), text, HEIGHT))
    return plots


def _table(result: BenchResult) -> str:
    columns, rows = table(result, ["plain"] if "plain" in result.contenders else [])
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = ""
    for name, cells in zip(result.contenders, rows, strict=True):
        # what is in brackets after a figure is its spread
        figures = "".join(f"<td>{escape(cell).replace('(', '<small>').replace(')', '</small>')}</td>" for cell in cells[1:])
        mine = ' class="mine"' if name in OURS else ""
        body += f"<tr{mine}><td>{escape(cells[0])}</td>{figures}</tr>"
    return f'<p class="soft">{escape(settings_text(result))}</p><div class="wide"><table class="figures"><tr>{head}</tr>{body}</table></div>'


def _facts(tree: TokenTree, result: BenchResult) -> str:
    """Models, machine and tree, a row each."""
    plan = tree.plan
    rows = {role: _listed(named) for role, named in sorted(result.models.items(), reverse=True)}
    rows["machine"] = _listed(result.hardware)
    rows["tree"] = f"{tree.size} node{'s' * (tree.size > 1)}, depth {tree.depth}, level widths {' '.join(map(str, tree.level_widths))}"
    rows["made by"] = ", ".join(name + found for name, found in (("", plan.tool), ("solver ", plan.solver), ("objective ", plan.objective)) if found)
    return "".join(f"<tr><td>{escape(role)}</td><td>{escape(text)}</td></tr>" for role, text in rows.items() if text)


def _listed(named: Mapping[str, Any]) -> str:
    """The name first, then every other fact after its own."""
    facts = [str(named["name"])] if named.get("name") else []
    return ", ".join(facts + [f"{key} {value:,}" if key == "parameters" else f"{key} {value}" for key, value in named.items() if key != "name"])


def _svg(plot: Callable[[Any], None], text: str, height: float, number: int) -> str:
    """One plot, its text and axes in the page's colours."""
    import matplotlib
    from matplotlib.figure import Figure

    style = panels.style(INK, LINE, f"plot {number}") | {"svg.fonttype": "none", "axes.facecolor": "none", "font.size": 10}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        plot(figure.add_subplot())
        picture = io.StringIO()
        figure.savefig(picture, format="svg", transparent=True, dpi=200, metadata={"Date": None})
    drawn = picture.getvalue().replace(INK, "currentColor").replace(LINE, "var(--line)")
    return drawn[drawn.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(text)}"', 1)
