"""Write the tables and figures of pages from the files that benchmarks/results.py measured.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; a figure in a sentence between
`<!-- figure PART KEY KEY ... -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"<!-- (figure|table) ([^>]+) -->.*?<!-- end -->", re.DOTALL)
BUSY = 0.1
"""Cores that other programs take, above which a part is named as measured beside other work."""
METHODS = {
    "plain": "plain",
    "generate": "`generate`",
    "assisted": "assisted",
    "lookup": "lookup",
    "tree": "tree alone",
    "ours": "tree",
}
"""The methods of bench in a table of speeds; "ours" is the tree under test."""


def with_figures(text: str, results: Path) -> str:
    """The page with its tables and figures as the files have them."""

    def filled(match: re.Match[str]) -> str:
        kind, words = match[1], match[2].split()
        if kind == "figure":
            content = figure(read(results, words[0]), words[1:])
        else:
            content = "\n" + "\n".join(TABLES[words[0]](results)) + "\n"
        return f"<!-- {kind} {match[2]} -->{content}<!-- end -->"

    return BLOCK.sub(filled, text)


def read(results: Path, name: str) -> Any:
    """A part's file."""
    return json.loads((results / f"{name}.json").read_text())


def figure(value: Any, keys: list[str]) -> str:
    """A number, a text, or a ratio with its interval."""
    for key in keys:
        value = value[key]
    if isinstance(value, Mapping):
        return ratio(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def ratio(value: Mapping[str, float] | None) -> str:
    """A ratio of speeds with its 95 % interval."""
    if not value:
        return ""
    return f"{value['median']:.2f}x ({value['interval_low']:.2f}-{value['interval_high']:.2f})"


def promise(prediction: Mapping[str, Any] | None) -> str:
    """A predicted speed-up with its interval, if there is one."""
    if not prediction or not prediction.get("speedup"):
        return ""
    interval = prediction.get("interval")
    ends = f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else ""
    return f"{prediction['speedup']:.2f}x{ends}"


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def header(*cells: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield row(*cells)
    yield "|" + "---|" * len(cells)


def benches(results: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(weights, T and threads; the methods) of each run of bench, "ours" among them."""
    for part in read(results, "run")["parts"]:
        if part.startswith("bench-"):
            result = read(results, part)
            methods, sampling = result["contenders"], result["settings"]["sampling"]
            methods["ours"] = methods.get("traversal") or methods["sequoia"]
            weights = result["models"]["target"].get("weights", result["settings"]["dtype"])
            threads = result["hardware"]["threads"]
            yield f"{weights}, {sampling['temperature']:g}, {threads}", methods


def machine(results: Path) -> Iterator[str]:
    """The machine, the state of the code, and the load beside the parts."""
    log = read(results, "run")
    yield f"{log['processor']}, {log['cores']} cores; code of {log['commit']}; {log['prompts']}."
    shares = {name: part["other_work"] for name, part in log["parts"].items()}
    busy = ", ".join(f"{name} {share:.2f}" for name, share in shares.items() if share > BUSY)
    yield f"Cores that other programs took, where more than {BUSY}: {busy or 'nowhere'}."


def speeds(results: Path) -> Iterator[str]:
    """Tokens a second of each method, and our tree over others."""
    names = ("weights, T, threads", *METHODS.values())
    yield from header(*names, "tree over plain", "promised", "over `generate`")
    for title, methods in benches(results):
        ours = methods["ours"]
        per_second = (methods.get(name, {}).get("tokens_per_second") for name in METHODS)
        yield row(
            title,
            *(f"{value['median']:.1f}" if value else "" for value in per_second),
            ratio(ours["speedup"]["plain"]),
            promise(ours.get("predicted")),
            ratio(ours["speedup"].get("generate")),
        )


def kinds(results: Path) -> Iterator[str]:
    """Our tree over plain decoding by kind of prompt, measured and promised."""
    yield from header("weights, T, threads", "kind", "tokens a step", "over plain", "promised")
    for title, methods in benches(results):
        for kind, figures in methods["ours"]["by_kind"].items():
            tokens = f"{figures['tokens_per_step']:.2f}"
            measured, promised = ratio(figures.get("speedup")), promise(figures.get("predicted"))
            yield row(title, kind, tokens, measured, promised)


def passes(results: Path) -> Iterator[str]:
    """Milliseconds of a pass, and how many times as long as ours in the file's bits."""
    contexts = read(results, "passes")["figures"]
    rows = next(iter(next(iter(contexts.values())).values()))
    yield from header("threads, slots", "pass", *(f"{number} rows" for number in rows))
    for context, ways in contexts.items():
        for way, times in ways.items():
            cells = (
                f"{time['ms'][0]:.1f} ({time['over_ours'][0]:.2f}x)" for time in times.values()
            )
            yield row(context, way, *cells)


TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    "machine": machine,
    "speeds": speeds,
    "kinds": kinds,
    "passes": passes,
}
