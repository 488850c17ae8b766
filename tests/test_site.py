"""The documentation site has every page, and its reference every public name.

Nothing here needs Sphinx: `make docs` builds the site, and fails at a warning.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from functools import cached_property
from pathlib import Path

import pytest
from api_reference import PACKAGES, reference
from paths import ROOT

from sequoia_plan.artifacts import TokenTree

SETTINGS = ROOT / "docs" / "site" / "conf.py"


def setting(source, name):
    """The value that the source text of conf.py gives to a name."""
    return next(
        ast.literal_eval(statement.value)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign) and statement.targets[0].id == name
    )


PAGES = {
    str(page.relative_to(ROOT).with_suffix(""))
    for pattern in setting(SETTINGS.read_text(), "include_patterns")
    for page in ROOT.glob(pattern)
}
REGENERATE = "python tools/api_reference.py > docs/api.md"


def navigation(source):
    """The files that NAVIGATION lists in the source text of conf.py, in its order."""
    return [file for pages in setting(source, "NAVIGATION").values() for _, file in pages]


def public_values():
    """(package, name, value) of every public name."""
    for package in PACKAGES:
        module = importlib.import_module(f"sequoia_plan.{package}")
        for name in module.__all__:
            yield package, name, getattr(module, name)


def names_without_docstring(name, value):
    """Of a public name and its public members, those that have no docstring of their own."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return []  # the reference refuses a value without one
    members = [(name, value)]
    if inspect.isclass(value):
        members += [
            (f"{name}.{key}", getattr(member, "__func__", member))
            for key, member in vars(value).items()
            if not key.startswith("_")
            and (
                callable(member)
                or isinstance(member, (property, cached_property, classmethod, staticmethod))
            )
        ]
    return [key for key, member in members if not (member.__doc__ or "").strip()]


def test_every_page_is_in_the_navigation():
    files = navigation(SETTINGS.read_text())
    assert sorted([*files, "README"]) == sorted(PAGES)  # the home page holds the navigation


def test_a_page_that_is_missing_is_found():
    source = SETTINGS.read_text()
    without_speed = source.replace('("Speed", "docs/speed"),', "")
    assert PAGES - {*navigation(without_speed), "README"} == {"docs/speed"}


def links_off_the_site(text, folder):
    """The links to Markdown files that are no page of the site, in a page of this folder."""
    files = re.findall(r"\]\((?!\w+:)([^)\s#]+)\.md[)#]", text)
    return [file for file in files if os.path.normpath(Path(folder, file)) not in PAGES]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_linked_pages_are_on_the_site(page):
    """A link to another Markdown file makes the build fail."""
    text = (ROOT / f"{page}.md").read_text()
    assert links_off_the_site(text, Path(page).parent) == []


def test_a_link_off_the_site_is_found():
    text = "[1](drafts/README.md) [2](docs/api.md#plan) [3](https://example.org/a.md) [4](x.py)"
    assert links_off_the_site(text, ".") == ["drafts/README"]


def test_every_public_name_has_a_docstring():
    missing = [
        f"{package}.{key}"
        for package, name, value in public_values()
        for key in names_without_docstring(name, value)
    ]
    assert missing == []


def test_a_missing_docstring_is_found(monkeypatch):
    monkeypatch.setattr(TokenTree.chain.__func__, "__doc__", None)
    assert names_without_docstring("TokenTree", TokenTree) == ["TokenTree.chain"]


def test_every_public_name_is_in_the_reference():
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert headings == [name for _, name, _ in public_values()]


def test_the_reference_is_current():
    assert (ROOT / "docs" / "api.md").read_text() == reference(), f"run: {REGENERATE}"
    assert REGENERATE in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(("file", "comments"), [("profiling.md", 1), ("engines.md", 1)])
def test_reports_are_linked_on_the_site(file, comments):
    """The comments that conf.py shows on the site alone link to the reports that it writes."""
    text = (ROOT / "docs" / file).read_text()
    links = re.findall(r'<!-- site: .*?<a href="\.\./reports/(\w+)\.html">.*? -->', text)
    source = SETTINGS.read_text()
    assert len(links) == comments
    assert all(f'reports / "{name}.html"' in source for name in links)
