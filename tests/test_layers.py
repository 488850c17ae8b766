"""Layering: what each package must not bring along, seen in a fresh process."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

OWN = {
    f"sequoia_plan.{name}" for name in ("artifacts", "engines", "planner", "profiler", "runtime")
}


@functools.cache
def modules_after(statement):
    """sys.modules of a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        (
            "import sequoia_plan.artifacts",
            {"torch", "transformers", "numba", "click", "yaml"} | OWN - {"sequoia_plan.artifacts"},
        ),
        (
            "import sequoia_plan.artifacts.interchange",
            {"torch", "networkx", "yaml"} | OWN - {"sequoia_plan.artifacts"},
        ),
        (
            "from sequoia_plan.planner import solve; solve([0.5, 0.2], budget=8, depth=4)",
            {"torch", "transformers", "sequoia_plan.runtime", "sequoia_plan.profiler"},
        ),
        (
            "from sequoia_plan.artifacts.prompts import built_in; import "
            "sequoia_plan.engines.planning; built_in()",
            {"torch", "transformers", "vllm", "sequoia_plan.runtime", "sequoia_plan.profiler"},
        ),
        ("import sequoia_plan.runtime", {"numba", "sequoia_plan.planner", "sequoia_plan.profiler"}),
        ("import sequoia_plan.profiler", {"numba", "sequoia_plan.planner"}),
        (
            "import sequoia_plan.planner.cli",
            {
                "torch",
                "transformers",
                "numba",
                "numpy",
                "rich",
                "matplotlib",
                "sequoia_plan.artifacts",
                "sequoia_plan.runtime",
            },
        ),
    ],
)
def test_a_layer_brings_nothing_it_should_not(statement, absent):
    assert not modules_after(statement) & absent


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        (
            "artifacts",
            {"torch", "transformers", "numba", "click", "planner", "profiler", "runtime"},
        ),
        ("planner", {"torch", "transformers", "profiler", "runtime"}),
        ("runtime", {"numba", "click", "yaml", "planner", "profiler"}),
        ("profiler", {"numba", "click", "yaml", "planner"}),
    ],
)
def test_a_layer_names_nothing_it_should_not(package, forbidden):
    """transformers itself imports yaml and click, so sys.modules cannot tell for them: the sources
    do."""
    folder = Path(importlib.import_module(f"sequoia_plan.{package}").__file__).parent
    for file in folder.rglob("*.py"):
        if "cli" in file.parts:
            continue  # the one file that may import from every layer
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            lazy = (
                {"torch"} if file.name == "interchange.py" else set()
            )  # reads growmaps, which torch saved; the fresh process shows that it is lazy
            assert (
                not {name.removeprefix("sequoia_plan.").split(".")[0] for name in names}
                & forbidden - lazy
            ), file


@pytest.mark.parametrize("name", sorted(OWN))
def test_nothing_is_installed_under_a_bare_name(name):
    found = modules_after(f"import {name}")
    assert not found & {n.removeprefix("sequoia_plan.") for n in OWN}


def test_no_test_module_imports_another():
    """What two test modules share is in a module of its own, so that each runs and fails alone."""
    found = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            found += [
                f"{file.name} imports {name}" for name in names if name and name.startswith("test_")
            ]
    assert found == []


PARTS = {
    "planner": ("solving", "report", "cli", "package"),
    "runtime": ("base", "models", "offload", "draft", "verify"),
    "engines": (),
    "profiler": (),
    "artifacts": (),
}
"""The folders within a package that have a subject of their own."""
MAY_IMPORT = {
    "artifacts": set(),
    "planner": {"planner.solving"},
    "planner.solving": {"artifacts"},
    "engines": {"artifacts"},
    "planner.report": {"artifacts", "planner.solving", "engines"},
    "planner.cli": {
        "artifacts",
        "planner.solving",
        "engines",
        "planner.report",
        "runtime",
        "profiler",
    },
    "planner.package": {"planner.cli"},
    "runtime.base": {"artifacts"},
    "runtime.verify": {"artifacts", "runtime.base"},
    "runtime.models": {"artifacts", "runtime.base"},
    "runtime.offload": {"artifacts", "runtime.base", "runtime.models"},
    "runtime.draft": {"artifacts", "runtime.base", "runtime.models"},
    "runtime": {
        "artifacts",
        "runtime.base",
        "runtime.models",
        "runtime.offload",
        "runtime.draft",
        "runtime.verify",
    },
    "profiler": {
        "artifacts",
        "runtime",
        "runtime.base",
        "runtime.models",
        "runtime.draft",
        "runtime.verify",
    },
}
"""Which part may import from which; docs/architecture.md draws it."""


def sources():
    """Every module of the package by name, as a syntax tree."""
    for package in PARTS:
        folder = Path(importlib.import_module(f"sequoia_plan.{package}").__file__).parent
        for file in folder.rglob("*.py"):
            name = ".".join(
                ("sequoia_plan", package, *file.relative_to(folder).with_suffix("").parts)
            ).removesuffix(".__init__")
            yield name, ast.parse(file.read_text())


def imported(tree):
    """What a module imports, wherever in it: `from a.b import c` gives a.b.c and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def part_of(module):
    """`sequoia_plan.planner.solving.solve` -> `planner.solving`; None for other packages."""
    _, package, *rest = (*module.split("."), "", "")
    if not module.startswith("sequoia_plan.") or package not in PARTS:
        return None
    return f"{package}.{rest[0]}" if rest[0] in PARTS[package] else package


def test_no_part_imports_upwards():
    found = {}
    for module, tree in sources():
        found.setdefault(part_of(module), set()).update(filter(None, map(part_of, imported(tree))))
    assert found.keys() == MAY_IMPORT.keys()
    for part, used in found.items():
        assert used - {part} <= MAY_IMPORT[part], part


def test_no_files_import_each_other_in_a_circle():
    import networkx

    faces = {
        "sequoia_plan",
        *(f"sequoia_plan.{part}" for part in MAY_IMPORT),
    }  # an __init__.py only hands names on
    modules = {module: tree for module, tree in sources() if module not in faces}
    graph = networkx.DiGraph(
        (module, used)
        for module, tree in modules.items()
        for used in imported(tree)
        if used in modules and used != module
    )
    circles = [
        circle for circle in networkx.strongly_connected_components(graph) if len(circle) > 1
    ]
    assert not circles
    graph.add_edge(
        "sequoia_plan.artifacts.tree", "sequoia_plan.planner.solving.solve"
    )  # the control
    assert any(len(circle) > 1 for circle in networkx.strongly_connected_components(graph))
