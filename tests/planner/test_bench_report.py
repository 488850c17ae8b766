"""What bench measured, in sentences, in a table and on a page."""

import re
from xml.etree import ElementTree

import pytest
from bench_results import TREE, decoded_by_kind, figures_of
from msgspec.structs import replace

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.bench_result import Prediction
from sequoia_plan.planner.report.bench_table import finding, print_result, table
from sequoia_plan.planner.report.html import INK
from sequoia_plan.planner.report.page import page
from sequoia_plan.planner.report.tables import print_table
from sequoia_plan.profiler.bench_figures import TITLES


def check_page(text, plots):
    """One file that needs nothing else: own colours, unique ids, every tag closed."""
    assert text.count("<svg") == text.count("</svg>") == text.count("<figure>") == plots
    assert INK not in text
    assert "currentColor" in text and "prefers-color-scheme:dark" in text
    links = set(filter(None, sum(re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', text), ())))
    assert all(link.startswith(("#", "data:")) for link in links)
    ids = re.findall(r' id="([^"]*)"', text)
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    clips = re.findall(r'<clipPath id="([^"]*)"', text)
    assert len(clips) == len(set(clips))
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)


@pytest.mark.slow
def test_a_page_says_what_it_knows():
    """Without acceptance there is the tree and the speed-ups; text from files is never markup."""
    result = figures_of(TREE, sequoia=1.5)
    text = page(TokenTree(TREE.parents), result)
    check_page(text, plots=1)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "1.50x <small>1.40-1.60</small>" in text and finding(result) in text
    alone = page(TokenTree([-1], TREE.plan), figures_of(TokenTree.chain(1)))
    assert "<svg" not in alone
    assert "nothing is speculated" in alone
    assert "Recommended is the portfolio" in finding(figures_of(TokenTree.chain(1), sequoia=1.5))


GOOD = figures_of(TREE, sequoia=1.5, traversal=1.6, generate=0.8)
GOOD.methods["traversal"] = replace(GOOD.methods["traversal"], prediction=Prediction(2.0, 1.55))


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (
            GOOD,
            (
                "Recommended is the tree of 7 nodes and depth 4, verified with traversal: 1.60",
                "at temperature 0 (95 % interval 1.50 to 1.70; predicted 1.55x).",
            ),
        ),
        (
            figures_of(TREE, sequoia=1.5, lookup=1.7),
            (
                "Not the fastest is the tree",
                "Faster was Hugging Face prompt lookup: 1.13 times our tree (1.03 to 1.23).",
            ),
        ),
        (
            figures_of(TREE, sequoia=1.5, lookup=1.6),
            ("Recommended is the tree", "Faster, but not certainly, was Hugging Face prompt"),
        ),
        (figures_of(TREE, sequoia=1.05), ("No gain is certain",)),
        (figures_of(TREE, sequoia=0.8), ("Recommended is plain decoding, not the tree",)),
        (figures_of(TREE, sequoia=0.8, chain=1.2), ("Faster was chain",)),
        (figures_of(TREE, chain=1.2), ("was not measured",)),
    ],
)
def test_what_bench_found_in_a_sentence(result, parts):
    """Who wins, and by how much, is said as it was measured."""
    text = finding(result)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("columns", [80, 140])
def test_the_table_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(table(figures_of(TREE, **dict.fromkeys(set(TITLES) - {"plain"}, 1.5))))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    assert sum("1.50x (1.40-1.60)" in line for line in lines) == len(TITLES) - 1


@pytest.mark.parametrize(
    ("interval", "part"),
    [
        (None, ""),
        ((1.45, 1.80), ""),
        ((1.10, 1.41), ""),  # the intervals meet: 1.40 to 1.60 was measured
        ((1.61, 1.90), "The predicted interval (1.61 to 1.90) does not meet"),
        ((1.05, 1.39), "predicted interval (1.05 to 1.39)"),
    ],
)
def test_a_promise_that_was_not_kept_is_said(interval, part):
    result = figures_of(TREE, sequoia=1.5)
    prediction = Prediction(2.0, 1.75, interval)
    result.methods["sequoia"] = replace(result.methods["sequoia"], prediction=prediction)
    text = finding(result)
    assert ("does not meet" in text) == bool(part) and part in text


def test_bench_says_for_which_prompts_it_predicts(capsys):
    """A row for each kind, and the interval first for prompts of kinds that the plan lacks."""
    result = figures_of(TREE, sequoia=1.5)
    result.methods["sequoia"] = decoded_by_kind(["copy", "copy", "poem"])
    print_result(result)
    text = " ".join(capsys.readouterr().out.split())
    assert "copy (2) 3.00x (3.00-3.00) 3.00x 6.00 6.00" in text
    assert "new kinds (1) 2.00x (2.00-2.00) 1.00-4.00x (1.20x for the profiled mix)" in text
    result.methods["sequoia"] = decoded_by_kind(["poem"])
    assert "predicted 1.00-4.00x (1.20x for the profiled mix)" in finding(result)
