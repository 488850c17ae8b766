"""The machine that a profile was measured on."""

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch
import transformers

from sequoia_plan.artifacts.processor import processor_name
from sequoia_plan.models.backends import integer_products
from sequoia_plan.models.base.dtype import dtype_name, resolve_dtype
from sequoia_plan.models.base.kernel_launch import kernels_available
from sequoia_plan.models.base.threads import num_threads
from sequoia_plan.models.layers.layer_operations import silu_mul

TIME_KEYS = ("device", "processor", "instructions", "threads", "gpu", "torch")
"""Keys of a fingerprint that change step times."""
MODEL_KEYS = (
    "dtype", "placement", "weights", "vocabulary", "resident_layers", "fused_layers", "content",
    "digest",
)  # fmt: skip
"""Keys of a model's metadata that change acceptance or step times."""


def fingerprint(device: torch.device | str) -> dict[str, Any]:
    """Device, processor and what it multiplies with, threads, versions; no names of persons."""
    device = torch.device(device)
    metadata: dict[str, Any] = {
        "device": device.type,
        "processor": processor_name(),
        "instructions": integer_products(),
        "threads": num_threads(),
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

    None where the system does not say.
    """
    with suppress(OSError):
        return sum(1 - busy / 100 for busy in psutil.cpu_percent(0.3, percpu=True))
    return None


def differences(
    measured: Mapping[str, Any], current: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    """Which of the keys `names` differ, as "threads 2, here 4"; only those that both have."""
    return [
        f"{name} {measured[name]}, here {current[name]}"
        for name in names
        if name in measured and name in current and measured[name] != current[name]
    ]
