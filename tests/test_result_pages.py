"""Tables and figures of pages come from the files that `make results` measured."""

import json
import shutil
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from pages import with_figures
from results import PAGES, RESULTS

BENCH = "bench-compiled-bfloat16-t0"
PAGE = (
    "<!-- table machine --><!-- end --> <!-- table speeds -->old<!-- end -->"
    f"<!-- table kinds --><!-- end --> <!-- figure {BENCH} contenders sequoia speedup plain -->"
    "9.99x<!-- end --><!-- table passes --><!-- end -->"
)


@pytest.fixture
def results(tmp_path):
    for name in (BENCH, "passes"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    log = {"processor": "EPYC", "cores": 2, "commit": "a1b2", "prompts": "prompts of our own"}
    parts = {BENCH: {"other_work": 0.3}, "passes": {"other_work": 0.0}}
    (tmp_path / "run.json").write_text(json.dumps(log | {"parts": parts}))
    return tmp_path


def test_figures_are_those_of_the_files(results):
    page = with_figures(PAGE, results)
    contenders = json.loads((results / f"{BENCH}.json").read_text())["contenders"]
    for name in ("plain", "generate", "sequoia"):
        assert f" {contenders[name]['tokens_per_second']['median']:.1f} |" in page
    ratio = contenders["sequoia"]["speedup"]["plain"]
    text = f"{ratio['median']:.2f}x ({ratio['interval_low']:.2f}-{ratio['interval_high']:.2f})"
    assert page.count(text) == 2  # in the table and in the sentence
    assert f"{BENCH} 0.30" in page  # measured beside other work
    assert "old" not in page
    assert "9.99" not in page
    assert with_figures(page, results) == page


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_what_was_measured(page):
    text = (ROOT / page).read_text()
    assert with_figures(text, RESULTS) == text
