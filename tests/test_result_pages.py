"""Tables of pages are those of the files that benchmarks/results.py measured."""

import re
import shutil

import pytest
from pages import TABLES, with_tables
from paths import ROOT
from results import PAGES, RESULTS


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_what_was_measured(page):
    text = (ROOT / page).read_text()
    assert "<!-- table speeds -->" in text and with_tables(text, RESULTS) == text


def test_other_measurements_give_other_tables(tmp_path):
    """The control: each number of each file in turn would be noticed in some table."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    empty = "".join(f"<!-- table {name} --><!-- end -->" for name in TABLES)
    before = with_tables(empty, tmp_path)
    for name in ("bench-bits-t0-1-kinds", "passes", "contexts", "run"):
        path = tmp_path / f"{name}.json"
        path.write_text(re.sub(r"(\d)\.", r"\1.9", path.read_text()))
        after = with_tables(empty, tmp_path)
        assert after != before
        before = after
