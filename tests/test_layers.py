"""Layering: which part may import which, and what a fresh process must not have loaded.

import-linter cannot say this: its graph does not follow the mapping of folders to packages.
"""

import ast
import functools
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

OWN = "sequoia_plan"
FROM_BASE = {"artifacts", "runtime.base"}
RUNTIME_NAMES = ("base", "models", "backends", "offload", "draft", "verify")
RUNTIME_PARTS = {f"runtime.{name}" for name in RUNTIME_NAMES}
MAY_IMPORT = {
    "artifacts": set(),
    "engines": {"artifacts"},
    "planner": {"planner.solving"},
    "planner.solving": {"artifacts"},
    "planner.report": {"artifacts", "planner.solving", "engines"},
    "planner.cli": {"artifacts", "engines", "planner.solving", "planner.report", "profiler"}
    | {"runtime"},
    "planner.package": {"planner.cli"},
    "runtime.base": {"artifacts"},
    "runtime.models": FROM_BASE,
    "runtime.offload": FROM_BASE | {"runtime.models"},
    "runtime.backends": FROM_BASE | {"runtime.models", "runtime.offload"},
    "runtime.draft": FROM_BASE | {"runtime.models"},
    "runtime.verify": FROM_BASE,
    "runtime": RUNTIME_PARTS | {"artifacts"},
    "profiler": RUNTIME_PARTS - {"runtime.offload"} | {"artifacts", "runtime"},
}
"""Which part may import which; docs/architecture.md draws it."""
EXTERNAL = {
    "artifacts": {"torch", "transformers", "numba", "click"},
    "engines": {"torch", "transformers", "numba", "click"},
    "planner.solving": {"torch", "transformers", "click"},
    "planner.report": {"torch", "transformers", "click"},
    "runtime": {"numba", "click", "yaml"},
    "profiler": {"numba", "click", "yaml"},
}
"""Libraries that a part and its parts never import, also not within a function."""
COMPILED = (f"{OWN}.runtime.backends.packed.", f"{OWN}.runtime.base.vocabulary_loops")
"""Parts of runtime that import numba, and are imported where there is numba."""
PLANNING = {"torch", "transformers", "sequoia_plan.runtime", "sequoia_plan.profiler"}


def modules_after(statement):
    """sys.modules of a fresh interpreter after `statement`."""
    command = [sys.executable, "-c", f"{statement}\nimport sys; print('\\n'.join(sys.modules))"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import sequoia_plan.artifacts", {"numba", "click", "yaml", "sequoia_plan.planner"}),
        ("import sequoia_plan.artifacts.interchange", {"yaml"}),
        ("from sequoia_plan.planner import solve; solve([0.5], budget=4, depth=4)", set()),
        ("import sequoia_plan.engines.planning", {"vllm", "sequoia_plan.planner"}),
        ("import sequoia_plan.planner.cli", {"numba", "numpy", "rich", "sequoia_plan.artifacts"}),
    ],
)
def test_planning_loads_nothing_heavy(statement, absent):
    assert not modules_after(statement) & (absent | PLANNING)


def test_decoding_loads_no_planner():
    """Nor does measuring it, which loads all that decoding does."""
    absent = {"numba", "sequoia_plan.planner", "artifacts", "planner", "profiler", "runtime"}
    loaded = modules_after("import sequoia_plan.profiler")
    assert "sequoia_plan.runtime.decoder" in loaded
    assert not loaded & absent, "nothing is installed under a bare name, either"


def part_of(module):
    """`sequoia_plan.planner.solving.solve` -> `planner.solving`; None for other packages."""
    root, _, rest = module.partition(".")
    names = ".".join(rest.split(".")[:2]), rest.split(".")[0]
    return next((name for name in names if name in MAY_IMPORT), None) if root == OWN else None


def imported(tree):
    """What a module imports, wherever in it: `from a.b import c` gives a.b.c and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def imports():
    """Every module of the package by name, with what it imports."""
    found = {}
    for package in ("artifacts", "engines", "planner", "profiler", "runtime"):
        folder = Path(importlib.import_module(f"{OWN}.{package}").__file__).parent
        for file in folder.rglob("*.py"):
            path = file.relative_to(folder).with_suffix("").parts
            name = ".".join((OWN, package, *path)).removesuffix(".__init__")
            found[name] = set(imported(ast.parse(file.read_text())))
    return found


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_no_part_imports_upwards(part):
    modules = {module: names for module, names in imports().items() if part_of(module) == part}
    assert modules
    used = {part_of(name) for names in modules.values() for name in names} - {None, part}
    assert used <= MAY_IMPORT[part]


def backends_named(modules):
    """Modules that import a part of runtime/backends/ in place of its face, or another backend."""
    face = f"{OWN}.runtime.backends."
    parts = {name.removeprefix(face).split(".")[0] for name in imports() if name.startswith(face)}
    used = {
        module: {name.removeprefix(face).split(".")[0] for name in names if name.startswith(face)}
        - {*module.removeprefix(face).split(".")[:1]}
        for module, names in modules.items()
        if module not in (face[:-1], f"{face}loading")  # the face, and what chooses a backend
    }
    assert {"packed", "modules", "loading"} == parts
    return [module for module, names in used.items() if names & parts]


def test_only_runtime_backends_names_a_backend():
    assert backends_named(imports()) == []
    face = importlib.import_module(f"{OWN}.runtime.backends")
    classes = [vars(face)[name] for name in face.__all__ if isinstance(vars(face)[name], type)]
    assert [made.__module__ for made in classes] == [f"{OWN}.runtime.backends.loading"]
    backend = f"{OWN}.runtime.backends.packed.backend"
    for module in ("profiler.bench", "runtime.pair", "runtime.backends.modules.probe"):
        assert backends_named({f"{OWN}.{module}": {backend}}) == [f"{OWN}.{module}"]  # the control


@pytest.mark.parametrize("part", EXTERNAL)
def test_no_part_names_a_library_it_should_not(part):
    """transformers itself imports yaml and click, so sys.modules cannot tell for them."""
    for module, names in imports().items():
        if module.startswith(f"{OWN}.{part}."):
            allowed = {"numba"} if module.startswith(COMPILED) else set()
            assert not {name.partition(".")[0] for name in names} & EXTERNAL[part] - allowed


def test_no_files_import_each_other_in_a_circle():
    faces = {OWN, *(f"{OWN}.{part}" for part in MAY_IMPORT)}  # an __init__.py hands names on
    modules = imports().keys() - faces
    graph = {module: imports()[module] & modules - {module} for module in modules}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises for a circle
    graph[f"{OWN}.artifacts.tree"] |= {f"{OWN}.planner.solving.solve"}  # the control
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph).static_order())


def test_no_test_module_imports_another():
    """What two test modules share is in a module of its own, so that each runs and fails alone."""
    for file in Path(__file__).parent.rglob("test_*.py"):
        names = imported(ast.parse(file.read_text()))
        assert not [name for name in names if name.startswith("test_")], file
