"""The documentation site has every page, and its reference every public name.

Nothing here needs Sphinx: `make docs` builds the site, and fails at a warning.
"""

import ast
import importlib
import inspect
import os
import re
from functools import cached_property
from pathlib import Path

import api_reference
import cli_reference
import pytest
from api_reference import PACKAGES
from paths import ROOT

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.planner.cli import main

SETTINGS = (ROOT / "docs" / "site" / "conf.py").read_text()
GENERATED = ["build/reference/api", "build/reference/cli"]


def setting(name):
    """The value that conf.py gives to a name."""
    return next(
        ast.literal_eval(statement.value)
        for statement in ast.parse(SETTINGS).body
        if isinstance(statement, ast.Assign) and statement.targets[0].id == name
    )


PAGES = sorted(
    str(page.relative_to(ROOT).with_suffix(""))
    for pattern in setting("include_patterns")
    if not pattern.startswith("build")
    for page in ROOT.glob(pattern)
)


def test_every_page_is_in_the_navigation():
    files = [file for pages in setting("NAVIGATION").values() for _, file in pages]
    assert sorted([*files, "README"]) == sorted([*PAGES, *GENERATED])  # README has the navigation


@pytest.mark.parametrize("page", PAGES)
def test_linked_pages_are_on_the_site(page):
    """A link to another Markdown file makes the build fail."""
    files = re.findall(r"\]\((?!\w+:)([^)\s#]+)\.md[)#]", (ROOT / f"{page}.md").read_text())
    assert {os.path.normpath(Path(page).parent / file) for file in files} <= set(PAGES)


def without_docstring(name, value):
    """Of a public name and its public members, those that have no docstring of their own."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return []  # the reference refuses a value without one
    members = {"": value} | (vars(value) if inspect.isclass(value) else {})
    kinds = (property, cached_property, classmethod, staticmethod)
    return [
        f"{name}.{key}".rstrip(".")
        for key, member in members.items()
        if not key.startswith("_") and (callable(member) or isinstance(member, kinds))
        if not (getattr(member, "__func__", member).__doc__ or "").strip()
    ]


def test_every_public_name_has_a_docstring_and_is_in_the_reference():
    modules = [importlib.import_module(f"sequoia_plan.{package}") for package in PACKAGES]
    names = [name for module in modules for name in module.__all__]
    assert re.findall(r"^### (\w+)$", api_reference.reference(), re.MULTILINE) == names
    for module in modules:
        for name in module.__all__:
            assert without_docstring(name, getattr(module, name)) == []


def test_a_missing_docstring_is_found(monkeypatch):
    monkeypatch.setattr(TokenTree.chain.__func__, "__doc__", None)
    assert without_docstring("TokenTree", TokenTree) == ["TokenTree.chain"]


def test_every_command_is_in_the_reference():
    names = [name for name, _ in cli_reference.commands(main)]
    assert re.findall(r"^## (.*)$", cli_reference.reference(), re.MULTILINE)[:-1] == names
