"""Write the tables of pages from the files that benchmarks/results.py measured.

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sequoia_plan.artifacts import BenchResult
from sequoia_plan.artifacts.bench_result import MethodResult
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner.report.bench_table import cells

TABLE = re.compile(r"<!-- table (\w+) -->.*?<!-- end -->", re.DOTALL)
BUSY = 0.1
"""Cores that other programs take, above which a part is named as measured beside other work."""
METHODS = ("generate", "assisted", "lookup", "plain")
"""The methods of bench beside our tree in a table of speeds."""


def with_tables(text: str, results: Path) -> str:
    """The page with its tables as the files have them."""

    def filled(match: re.Match[str]) -> str:
        rows = "\n".join(TABLES[match[1]](results))
        return f"<!-- table {match[1]} -->\n{rows}\n<!-- end -->"

    return TABLE.sub(filled, text)


def refill(page: Path, output: Path) -> None:
    """Write a page's tables again if the output is one of the files that pages show."""
    results = page.parents[1] / "benchmarks" / "results"
    if output.resolve().parent == results:
        write_atomically(page, with_tables(page.read_text(), results).encode())


def read(results: Path, name: str) -> Any:
    """A part's file."""
    return json.loads((results / f"{name}.json").read_text())


def row(*texts: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(texts)} |"


def header(*titles: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield row(*titles)
    yield "|" + "---|" * len(titles)


def benches(results: Path) -> Iterator[tuple[str, Mapping[str, MethodResult]]]:
    """(weights, T and threads; the methods) of each run of bench, "tree" among them."""
    for part in read(results, "run")["parts"]:
        if part.startswith("bench-"):
            result = BenchResult.load(results / f"{part}.json")
            tree = result.methods.get("traversal") or result.methods["sequoia"]
            _, weights, _, threads, prompts = part.replace("bits", "the file's bits").split("-")
            copies = ", copies" * (prompts == "copies")
            title = f"{weights}, {result.settings.sampling['temperature']:g}, {threads}{copies}"
            yield title, {**result.methods, "tree": tree}


def machine(results: Path) -> Iterator[str]:
    """The machine, the state of the code, and the load beside the parts."""
    log = read(results, "run")
    yield f"{log['processor']}, {log['cores']} cores; code of {log['commit']}; {log['prompts']}."
    shares = {name: part["other_work"] for name, part in log["parts"].items()}
    busy = ", ".join(f"{name} {share:.2f}" for name, share in shares.items() if share > BUSY)
    yield f"Cores that other programs took, where more than {BUSY}: {busy or 'nowhere'}."


def speeds(results: Path) -> Iterator[str]:
    """Tokens a second of each method, and our tree over others."""
    names = (*METHODS, "tree")
    ratios = ("tree over plain", "promised", "tree over `generate`")
    yield from header("weights, T, threads", *names, *ratios)
    for title, methods in benches(results):
        tree = methods["tree"]
        yield row(
            title,
            *(f"{methods[name].tokens_per_second.median:.1f}" for name in names),
            *cells(tree, tree.speedup["plain"])[:2],
            cells(tree, tree.speedup["generate"])[0],
        )


def kinds(results: Path) -> Iterator[str]:
    """Our tree over plain decoding by kind of prompt, measured and promised."""
    settings = {title: methods["tree"].by_kind for title, methods in benches(results)}
    yield from header("kind", *settings)
    for kind in dict.fromkeys(kind for by_kind in settings.values() for kind in by_kind):
        figures = [by_kind.get(kind) for by_kind in settings.values()]
        yield row(kind, *("; ".join(cells(f, f.speedup)[:2]) if f else "" for f in figures))


def passes(results: Path, of_prompts: bool = False) -> Iterator[str]:
    """Milliseconds of a pass, and how many times as long as ours in the file's bits."""
    settings = read(results, "passes")["figures"]
    chosen = {name: ways for name, ways in settings.items() if (", 0 slots" in name) == of_prompts}
    if not chosen:  # --quick reads no whole prompts
        return
    rows = next(iter(next(iter(chosen.values())).values()))
    yield from header("threads, slots", "pass", *(f"{number} rows" for number in rows))
    for name, ways in chosen.items():
        for way, times in ways.items():
            shown = (
                f"{time['ms'][0]:.1f} ({time['over_ours'][0]:.2f}x)" for time in times.values()
            )
            yield row(name.replace(" of context", ""), way, *shown)


def contexts(results: Path) -> Iterator[str]:
    """Seconds of long prompts, and milliseconds of steps after them, by nodes of the tree."""
    nodes = ("1", "2", "6")
    steps = (f"ms of a step: {number}" for number in nodes)
    yield from header("weights", "tokens before", "cache, MB", "prompt, s", *steps)
    for dtype, figures in read(results, "contexts")["figures"].items():
        for length, values in figures["steps"].items():
            times = (f"{values[number]['step'][0]:.1f}" for number in nodes)
            cache, prompt = str(values["cache_mb"]), f"{values['prompt_s']:.1f}"
            yield row(dtype.replace("auto", "the file's bits"), length, cache, prompt, *times)


def texts(results: Path) -> Iterator[str]:
    """Decoding with two trees over plain decoding, in short texts and in long ones."""
    trees, figures = {"6": "tree of six", "2": "chain of two"}, read(results, "contexts")["figures"]
    lengths = list(next(iter(next(iter(figures.values()))["texts"].values())))
    titles = (f"{title}, {length} tokens" for title in trees.values() for length in lengths)
    yield from header("weights", "text", *titles)
    for dtype, parts in figures.items():
        for text, ratios in parts["texts"].items():
            shown = (
                f"{ratios[length][tree]['over_plain'][0]:.2f}x"
                for tree in trees
                for length in lengths
            )
            yield row(dtype.replace("auto", "the file's bits"), text, *shown)


def sizes(results: Path) -> Iterator[str]:
    """Loading, memory and passes of a pair of files."""
    if not (results / "sizes.json").exists():  # it needs files that are fetched
        return
    report = read(results, "sizes")
    loads, all_bytes = report["loads"], sum(report["files"].values())
    first, later = loads["first"], loads["later"]

    def shown(quartiles: list[float], digits: int = 1) -> str:
        middle, low, high = (f"{value:.{digits}f}" for value in quartiles)
        return f"{middle} ({low} to {high})"

    yield f"{report['processor']}, {report['threads']} threads; {', '.join(report['files'])}."
    yield ""
    yield from header("", "measured")
    yield row("first load of both files, s", f"{first['seconds']:.1f}")
    yield row("later loads, s", shown(later["seconds"]))
    for name, memory in (("first", first["peak_mb"]), ("later", later["peak_mb"][0])):
        parts = f"{memory:.0f} MB, {1e6 * memory / all_bytes:.2f} times the files"
        yield row(f"loading and decoding, {name} time, peak memory", parts)
    yield row("of it no file's, later", f"{later['anonymous_mb'][0]:.0f} MB")
    cache = f"{loads['cache_bytes'] / all_bytes:.3f} times the files"
    yield row("cache folder", cache)
    yield row("bandwidth of memory, GB/s", shown(report["bandwidth_gb"]))
    for role in ("target", "draft"):
        yield row(f"{role}'s pass, MB", f"{report[role]['pass_bytes'] / 1e6:.0f}")
        share = shown(report[role]["share_of_bandwidth"], 2)
        yield row(f"{role}'s pass of one row, share of bandwidth", share)
    yield ""
    yield from header("pass, rows", "ms", "llama.cpp, ms", "times as fast")
    for role, by_rows in report["passes"].items():
        for number, times in by_rows.items():
            theirs = shown(times["llamacpp_ms"]) if "llamacpp_ms" in times else ""
            ratio = shown(times["times_as_fast"], 2) if theirs else ""
            yield row(f"{role} {number}", shown(times["ms"]), theirs, ratio)


def processors(results: Path) -> Iterator[str]:
    """Passes of the 1.5B by kind of processor, and how many times as fast as llama.cpp's."""
    if not (results / "processors.json").exists():  # it needs files that are fetched
        return
    reports = read(results, "processors")
    first = next(iter(reports.values()))
    yield f"{first['processor']}, {first['threads']} threads; {next(iter(first['files']))}."
    yield ""
    yield from header(
        "rows", *(f"{kind}, ms{of}" for kind in reports for of in ("", " (llama.cpp)"))
    )
    for role in ("target", "prompt"):
        for number in first["passes"][role]:
            cells = []
            for report in reports.values():
                times = report["passes"][role][number]
                theirs, ratio = times["llamacpp_ms"][0], times["times_as_fast"][0]
                cells += [f"{times['ms'][0]:.1f}", f"{theirs:.1f}, {ratio:.2f}x"]
            yield row(number if role == "target" else f"{role} of {number}", *cells)
    shares = [f"{x['target']['share_of_bandwidth'][0]:.2f}" for x in reports.values()]
    yield row("one row, share of bandwidth", *(cell for share in shares for cell in (share, "")))


def coder(results: Path) -> Iterator[str]:
    """Methods on the pair of 1.5B and .5B in each setting, by kind of prompt."""
    if not (results / "coder.json").exists():  # it needs files that are fetched
        return
    shown = "{:.2f}x ({:.2f}-{:.2f})".format
    for setting, report in read(results, "coder").items():
        methods = report["methods"]
        yield ""
        yield f"{setting}; {report['prompts']} prompts x {report['tokens']} tokens."
        yield ""
        kinds = (f"over plain, {kind}" for kind in methods)
        yield from header("", "tokens/s", "tokens a step", *kinds)
        for name, figures in methods["all"].items():
            rate, step_tokens = figures["tokens_per_second"][0], figures["tokens_per_step"]
            ratios = (shown(*by_name[name]["over_plain"]) for by_name in methods.values())
            yield row(name, f"{rate:.1f}", str(step_tokens), *ratios)


def steps(results: Path) -> Iterator[str]:
    """Milliseconds of steps of a model that is all but empty, and of what is not their passes."""
    report = read(results, "step")
    ways = {"whole": "", "rest": " less its passes", "by_parts": " by parts"}
    samplings = ("T = 0", "T = 0.6, top-p 0.9")
    titles = (f"six nodes{way}, {sampling}" for sampling in samplings for way in ways.values())
    yield f"{report['processor']}."
    yield ""
    yield from header("vocabulary, threads", "plain less its pass, T = 0", *titles)
    for setting, trees in report["figures"].items():
        six = (trees["tree of six"][sampling][way][0] for sampling in samplings for way in ways)
        times = (trees["plain"]["T = 0"]["rest"][0], *six)
        yield row(setting, *(f"{time:.2f}" for time in times))


def clock(results: Path) -> Iterator[str]:
    """Decoding with plans that are wrong, over plain decoding."""
    if not (results / "clock.json").exists():
        return
    report = read(results, "clock")
    yield f"{report['processor']}; {report['prompts']} prompts x {report['tokens']} tokens."
    yield ""
    columns = report["figures"].values()
    yield from header("plan", *report["figures"])
    for name in next(iter(columns)):
        cells = []
        for by_plan in columns:
            promised, (middle, low, high) = by_plan[name]["promised"], by_plan[name]["over_plain"]
            cells.append(f"{middle:.2f}x ({low:.2f}-{high:.2f}) of {promised:.2f}x")
        yield row(name, *cells)


TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    "machine": machine,
    "speeds": speeds,
    "kinds": kinds,
    "passes": passes,
    "prompts": partial(passes, of_prompts=True),
    "contexts": contexts,
    "texts": texts,
    "sizes": sizes,
    "processors": processors,
    "coder": coder,
    "steps": steps,
    "clock": clock,
}
