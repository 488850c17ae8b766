"""What bench found, as one HTML file: no network, light and dark, plots as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.planner.baselines import baseline
from sequoia_plan.planner.contenders import step_time
from sequoia_plan.planner.objective import expected_tokens, node_values
from sequoia_plan.planner.solver import solve

INK = "#010203"
"""Stands for the page's text colour in a plot; no plot uses it otherwise."""
COLOURS = ("#2f9d5f", "#c0803a", "#5b8fc6", "#a86fb8", "#888888")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
STYLE = """:root{color-scheme:light dark;--ink:#1d2723;--paper:#fff;--line:#d5ddd8}
@media(prefers-color-scheme:dark){:root{--ink:#e3e9e5;--paper:#151a18;--line:#38423d}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-size:.9rem}td,th{padding:.25rem .7rem;border-bottom:1px solid var(--line);text-align:right}
td:first-child,th:first-child{text-align:left}.wide{overflow-x:auto}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,28rem),1fr));gap:1.5rem}
figure{margin:0}figcaption{font-size:.9rem;opacity:.8}svg{width:100%;height:auto}h1{font-size:1.5rem}"""


def page(tree: TokenTree, results: Sequence[Mapping[str, Any]]) -> str:
    """The report of `tree`; `results` are of `sequoia-plan bench`, the main one first, others at other temperatures after it."""
    plots: list[tuple[Callable[[Any], None], str]] = [(lambda axes: _tree(tree, axes), "The tree: a node's area is its probability of being accepted.")]
    plan = tree.plan
    if plan.get("acceptance"):
        plots += [
            (lambda axes: _acceptance(plan["acceptance"], axes), "Acceptance by rank, and the power law through it."),
            (lambda axes: _tokens(plan["acceptance"], axes), "Predicted tokens a step against size, for every shape of tree."),
        ]
    if plan.get("acceptance") and step_time(plan):
        plots += [
            (lambda axes: _latency(plan, axes), "Time of one pass against tokens in it."),
            (lambda axes: _speed(tree, axes), "Predicted speed-up over size and depth; the star is this tree."),
        ]
    plots.append((lambda axes: _speedups(results, axes), "Measured speed-up over plain decoding, with its 95 % interval."))
    figures = "".join(f"<figure>{_svg(plot, number)}<figcaption>{escape(text)}</figcaption></figure>" for number, (plot, text) in enumerate(plots))
    tables = "".join(_table(result) for result in results)
    facts = "".join(
        f"<tr><td>{escape(str(role))}</td><td>{escape(', '.join(f'{k} {v}' for k, v in named.items()))}</td></tr>"
        for role, named in (*results[0]["models"].items(), ("machine", results[0]["hardware"]))
    )
    title = f"sequoia-plan: {tree.size} nodes, depth {tree.depth}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>{tables}"
        f'<div class="plots">{figures}</div><h2>What it was measured with</h2><div class="wide"><table>{facts}</table></div></body></html>\n'
    )


def _table(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    chosen = ", ".join(f"{name} {value}" for name, value in settings["sampling"].items() if value is not None)
    rows = []
    for arm in result["contenders"].values():
        rate, first, over, predicted = arm["tokens_per_second"], arm["first_token_seconds"], arm["speedup"].get("plain"), arm.get("predicted") or {}
        cells = [arm["title"], f"{rate['median']:.1f} ({rate['low']:.1f} to {rate['high']:.1f})", f"{first['median'] * 1000:.0f} ms"]
        cells += [_number(arm["tokens_per_step"]), _number(predicted.get("tokens_per_step"))]
        cells += [f"{over['median']:.2f} ({over['interval_low']:.2f} to {over['interval_high']:.2f})" if over else "-", _number(predicted.get("speedup"))]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    names = ("", "tokens/s", "first token", "tokens a step", "predicted", "over plain", "predicted")
    head = "".join(f"<th>{name}</th>" for name in names)
    text = f"{chosen}; {settings['dtype']}; {settings['prompts']} held-out prompts of {settings['tokens']} new tokens. Quartiles over prompts; 95 % intervals."
    return f'<p>{escape(text)}</p><div class="wide"><table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def _svg(plot: Callable[[Any], None], number: int) -> str:
    """One plot, its text and axes in the page's colour."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    style = {"svg.fonttype": "none", "svg.hashsalt": f"plot {number}", "axes.spines.top": False, "axes.spines.right": False, "font.size": 11}
    with matplotlib.rc_context(colours | style | {"font.family": "sans-serif", "axes.facecolor": "none", "legend.frameon": False}):
        figure = Figure(figsize=(6.2, 4.2), layout="constrained")
        plot(figure.add_subplot())
        picture = io.StringIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
    text = picture.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def _acceptance(acceptance: Any, axes: Any) -> None:
    rows = np.atleast_2d(np.asarray(acceptance, float))
    for level, row in enumerate(rows):
        ranks = np.flatnonzero(row > 0) + 1
        axes.plot(ranks, row[ranks - 1], "o-", markersize=4, color=COLOURS[level % len(COLOURS)], label=f"level {level}" if len(rows) > 1 else "measured")
    ranks = np.flatnonzero(rows[0] > 0) + 1
    if ranks.size > 1:
        slope, start = np.polyfit(np.log(ranks), np.log(rows[0][ranks - 1]), 1)
        axes.plot(ranks, np.exp(start) * ranks**slope, "--", color=COLOURS[-1], label=f"rank^{slope:.2f}")
    axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="probability of being the one accepted")
    axes.legend()


def _tokens(acceptance: Any, axes: Any) -> None:
    depth = 12
    shapes = {"chain": ["chain"], "k chains, best k": [f"chains:{k}" for k in (2, 4, 8)], "complete k-ary, best k": [f"k-ary:{k}" for k in (2, 3, 4)]}
    ours = []
    for size in SIZES:
        try:
            ours.append(solve(acceptance, size, depth if size > 1 else 1, objective="tokens").expected_tokens)
        except SequoiaPlanError:  # a vector so short that no larger tree fits
            break
    axes.plot(SIZES[: len(ours)], ours, "o-", markersize=4, color=COLOURS[0], label="best tree")
    for (label, names), colour in zip(shapes.items(), COLOURS[1:], strict=False):
        best = [max(expected_tokens(baseline(name, size, depth), acceptance) for name in names) for size in SIZES]
        axes.plot(SIZES, np.maximum.accumulate(best), color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set(xlabel="nodes", ylabel="tokens a step, predicted")
    axes.legend()


def _latency(plan: Mapping[str, Any], axes: Any) -> None:
    for name, colour in zip(("target", "draft"), COLOURS, strict=False):
        points = sorted(dict(plan["latency"][name]).items())
        axes.plot([int(n) for n, _ in points], [1000 * seconds for _, seconds in points], "o-", markersize=4, color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set(xlabel="tokens in the pass", ylabel="milliseconds, median", ylim=(0, None))
    axes.legend()


def _speed(tree: TokenTree, axes: Any) -> None:
    times = step_time(tree.plan)
    assert times is not None
    sizes = [size for size in SIZES if size <= times.largest()]
    depths = range(1, max(8, tree.depth + 2))
    speeds = np.full((len(depths), len(sizes)), np.nan)
    for row, depth in enumerate(depths):
        for column, size in enumerate(sizes):
            try:
                found = solve(tree.plan["acceptance"], size, depth, objective="tokens").tree
            except SequoiaPlanError:  # no tree of that size is so flat
                continue
            speeds[row, column] = expected_tokens(found, tree.plan["acceptance"]) * times.plain() / times.step(found)
    image = axes.imshow(np.ma.masked_invalid(speeds), origin="lower", aspect="auto", cmap="viridis")
    axes.figure.colorbar(image, ax=axes, label="speed-up")
    axes.plot(np.interp(tree.size, sizes, range(len(sizes))), tree.depth - 1, marker="*", markersize=16, color="#e4495b", markeredgecolor="white")
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set(xlabel="nodes", ylabel="depth (levels), at most")


def _speedups(results: Sequence[Mapping[str, Any]], axes: Any) -> None:
    titles = list(dict.fromkeys(arm["title"] for result in results for arm in result["contenders"].values() if "plain" in arm["speedup"]))
    height = 0.8 / len(results)
    for number, result in enumerate(results):
        colour = COLOURS[number % len(COLOURS)]
        for arm in result["contenders"].values():
            if ratio := arm["speedup"].get("plain"):
                place = titles.index(arm["title"]) + (number - (len(results) - 1) / 2) * height
                span = [[max(0.0, ratio["median"] - ratio["interval_low"])], [max(0.0, ratio["interval_high"] - ratio["median"])]]
                axes.barh(place, ratio["median"], height, xerr=span, color=colour, error_kw={"ecolor": INK, "elinewidth": 1})
        axes.barh(0, 0, color=colour, label=f"temperature {result['settings']['sampling']['temperature']}")
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(titles)), titles)
    axes.invert_yaxis()
    axes.set_xlabel("times plain decoding")
    axes.legend()


def _tree(tree: TokenTree, axes: Any) -> None:
    values = node_values(tree, tree.plan["acceptance"]) if tree.plan.get("acceptance") else np.ones(tree.size)
    across, stack, leaf = np.zeros(tree.size), [0], 0
    while stack:  # leaves side by side, in preorder
        node = stack.pop()
        first, count = int(tree.first_child[node]), int(tree.child_count[node])
        across[node], leaf = leaf, leaf + (count == 0)
        stack.extend(range(first + count - 1, first - 1, -1))
    for node in range(tree.size - 1, -1, -1):  # a parent above the middle of its children
        first, count = int(tree.first_child[node]), int(tree.child_count[node])
        across[node] = (across[first] + across[first + count - 1]) / 2 if count else across[node]
    for node in range(1, tree.size):
        parent = tree.parents[node]
        axes.plot(across[[node, parent]], [-tree.position_ids[node], -tree.position_ids[parent]], color=COLOURS[-1], linewidth=0.8, zorder=1)
    axes.scatter(across, -tree.position_ids, s=10 + 200 * values, color=COLOURS[0], zorder=2)
    axes.set_yticks(range(0, -tree.depth, -1), [str(level) for level in range(tree.depth)])
    axes.set_ylabel("tokens after the root")
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.margins(0.06)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
