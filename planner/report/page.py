"""What bench found, as one HTML file to mail: no network, no script, light and dark, plots as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from sequoia_plan.artifacts import BenchResult, TokenTree
from sequoia_plan.artifacts.cost import by_class
from sequoia_plan.planner.report import panels
from sequoia_plan.planner.report.bench_table import OURS, finding, parts_text, settings_text, table
from sequoia_plan.planner.report.html import HEIGHT, Plot, document, figures
from sequoia_plan.planner.report.speedup_panel import compared, promised, speedups_panel


def page(tree: TokenTree, results: Sequence[BenchResult]) -> str:
    """The report of `tree`; `results` are of `sequoia-plan bench`, the main one first, others at other temperatures after it."""
    first, *others = results
    names = [str(first.models[role]["name"]) for role in ("target", "draft") if first.models.get(role, {}).get("name")]
    title = "Speculative decoding of " + " with ".join(names) if names else "Speculative decoding, measured"
    # a line may end between names rather than within one
    heading = "Speculative decoding of " + " with ".join(f"<span>{escape(name)}</span>" for name in names) if names else title
    more = "<h2>With other settings</h2>" + "".join(map(_table, others)) if others else ""
    return document(
        title,
        f"<h1>{heading}</h1>"
        f'<p class="finding">{escape(finding(first, others))}</p>{_table(first)}<p class="soft">{escape(parts_text(first))}</p>'
        f'<p class="soft">Over plain: the median of the ratios prompt by prompt, and its 95 % interval. '
        f"Predicted: from the profile that the tree was made of. Tokens/s: median and quartiles over prompts.</p>"
        f'{figures(_plots(tree, results))}{more}<h2>What it was measured with</h2><div class="wide"><table class="facts">{_facts(tree, first)}</table></div>',
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
