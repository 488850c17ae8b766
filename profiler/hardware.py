"""The machine that a profile was measured on."""

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from sequoia_plan.artifacts.processor import processor_name
from sequoia_plan.runtime.base.kernel_launch import kernels_available
from sequoia_plan.runtime.models.dtype import dtype_name, resolve_dtype
from sequoia_plan.runtime.models.layer_operations import silu_mul

TIME_KEYS = ("device", "processor", "threads", "gpu", "torch")
"""Keys of a fingerprint that change step times."""
MODEL_KEYS = (
    *("dtype", "placement", "weights", "resident_layers", "fused_layers", "content", "digest"),
)
"""Keys of a model's metadata that change acceptance or step times."""


def fingerprint(device: torch.device | str) -> dict[str, Any]:
    """Device, processor, threads and library versions; no names of persons or paths."""
    device = torch.device(device)
    metadata: dict[str, Any] = {
        "device": device.type,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        metadata["gpu"] = torch.cuda.get_device_name(device)
        metadata["cuda"] = torch.version.cuda
    return metadata | {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def default_device() -> str:
    """The device that models run on where none is named: "cuda" if there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    """The dtype that `--dtype auto` stands for on a device."""
    return dtype_name(resolve_dtype("auto", device))


def run_small_kernel(device: str) -> bool:
    """Compile and launch a small Triton kernel; False where no kernels are used on the device."""
    if not kernels_available(torch.device(device)):
        return False
    silu_mul(torch.ones(1, 16, device=device))
    return True


def idle_cores() -> float | None:
    """How many of the machine's cores did nothing on average, while this waited for a moment.

    None where Linux's /proc does not say.
    """
    try:
        idle_before, started = _idle_seconds(), time.perf_counter()
        time.sleep(0.3)
        return (_idle_seconds() - idle_before) / (time.perf_counter() - started)
    except (OSError, ValueError, IndexError):
        return None


def _idle_seconds() -> float:
    """Seconds since the start that cores were idle or waited for disks, summed over all cores."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()  # cpu user nice system idle
    idle_ticks = int(fields[4]) + int(fields[5])
    return idle_ticks / float(os.sysconf("SC_CLK_TCK"))


def differences(
    measured: Mapping[str, Any], current: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    """Which of these keys of metadata differ, as "threads 2, here 4"."""
    return [
        f"{name} {measured[name]}, here {current[name]}"
        for name in names
        if name in measured and name in current and measured[name] != current[name]
    ]
