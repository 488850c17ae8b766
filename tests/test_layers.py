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
ONE_MODEL = {"artifacts", "models", "models.base", "models.files", "models.layers"}
MODELS = ONE_MODEL | {"models.offload", "models.modules", "models.packed"}
LOW_RUNTIME = {"runtime.constraints", "runtime.lookup", "runtime.sampling", "runtime.sequence"}
RUNTIME_PARTS = LOW_RUNTIME | {"runtime.compiled", "runtime.draft", "runtime.verify"}
MAY_IMPORT = {
    "artifacts": set(),
    "engines": {"artifacts"},
    "planner": {"planner.solving"},
    "planner.solving": {"artifacts"},
    "planner.report": {"artifacts", "planner.solving", "engines"},
    "planner.cli": {"artifacts", "engines", "planner.solving", "planner.report", "profiler"}
    | {"runtime", "models.backends"},
    "planner.package": {"planner.cli"},
    "models.base": {"artifacts"},
    "models.files": {"artifacts", "models.base"},
    "models.layers": {"artifacts", "models.base"},
    "models.offload": ONE_MODEL - {"models.layers"},
    "models.modules": ONE_MODEL | {"models.offload"},
    "models.packed": ONE_MODEL | {"models.offload"},
    "models.backends": MODELS,  # which chooses one
    "models": ONE_MODEL - {"models.files"},
    "runtime.constraints": {"artifacts"},
    "runtime.lookup": {"artifacts"},
    "runtime.sampling": {"artifacts", "models.base"},
    "runtime.sequence": {"artifacts", "models.base", "runtime.constraints"},
    "runtime.verify": {"artifacts", "models.base", "runtime.sampling", "runtime.sequence"},
    "runtime.draft": ONE_MODEL | {"models.backends", "models.packed"} | LOW_RUNTIME,
    "runtime.compiled": ONE_MODEL | {"models.packed", "runtime.draft"} | LOW_RUNTIME,
    "runtime": ONE_MODEL | {"models.backends", "models.offload"} | RUNTIME_PARTS,
    "profiler": ONE_MODEL | {"models.backends", "runtime"} | RUNTIME_PARTS - {"runtime.compiled"},
}
"""Which part may import which; docs/architecture.md draws it."""
EXTERNAL = {
    "artifacts": {"torch", "transformers", "numba", "click"},
    "engines": {"torch", "transformers", "numba", "click"},
    "planner.solving": {"torch", "transformers", "click"},
    "planner.report": {"torch", "transformers", "click"},
    "models": {"numba", "click", "yaml"},
    "runtime": {"numba", "click", "yaml"},
    "profiler": {"numba", "click", "yaml"},
}
"""Libraries that a part and its parts never import, also not within a function."""
COMPILED = (f"{OWN}.models.packed.", f"{OWN}.runtime.compiled.")
"""Modules that import numba, and are imported where there is numba."""
PLANNING = {"torch", "transformers", *(f"{OWN}.{x}" for x in ("models", "runtime", "profiler"))}


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
    absent = {
        "numba",
        "sequoia_plan.planner",
        "artifacts",
        "planner",
        "profiler",
        "models",
        "runtime",
    }
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
    for package in ("artifacts", "engines", "models", "planner", "profiler", "runtime"):
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


NAMES_PACKED = {f"{OWN}.runtime.draft.packed_eagle", f"{OWN}.models.backends"}


def backends_named(modules):
    """Modules that import a backend and are neither a part of it, nor choose it, nor compile."""
    return [
        module
        for module, names in modules.items()
        if any(
            name.startswith(backend) and not module.startswith(backend)
            for backend in (f"{OWN}.models.packed", f"{OWN}.models.modules")
            for name in names
        )
        and not module.startswith(f"{OWN}.runtime.compiled")
        and module not in NAMES_PACKED
    ]


def test_only_models_names_a_backend():
    assert backends_named(imports()) == []
    backend = f"{OWN}.models.packed.backend"
    for module in ("profiler.bench", "runtime.pair", "models.modules.probe"):
        assert backends_named({f"{OWN}.{module}": {backend}}) == [f"{OWN}.{module}"]  # the control


INSIDES = {"runner", "packed", "recurrent", "twin", "reads_embeddings", "head_matrix"}
"""What backends have, and what decoding and profiling never ask for."""


def insides_read(source):
    """The attributes of a source that are a backend's insides, also where it asks for them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr"):
            yield getattr(node.args[1], "value", "")


def sources(*packages):
    """Each source of packages outside the compiled step, by its path."""
    for package in packages:
        folder = Path(importlib.import_module(f"{OWN}.{package}").__file__).parent
        for file in folder.rglob("*.py"):
            if file.parent.name != "compiled" and file.stem != "packed_eagle":
                yield file, file.read_text()


def test_decoding_asks_nothing_about_how_passes_run():
    traits = 0
    for file, source in sources("runtime", "profiler"):
        found = [*insides_read(source)]
        assert not INSIDES & {*found}, file
        traits += found.count("traits")
    assert traits <= 12
    for wrong in ("a.draft.packed", "hasattr(part, 'runner')"):
        assert INSIDES & {*insides_read(wrong)}  # the control


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
