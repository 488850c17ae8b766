"""What machine a profile was measured on."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


def fingerprint(device: torch.device | str) -> dict[str, Any]:
    """Device, driver, clocks as found, threads and library versions; nothing that names a person or a path."""
    device = torch.device(device)
    facts: dict[str, Any] = {"device": device.type, "processor": _processor(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts |= _nvidia(device)
    return facts | {"torch": str(torch.__version__), "transformers": transformers.__version__, "python": platform.python_version()}


def differences(measured: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What of two fingerprints differs that moves step times, one line each; keys that one of them lacks do not count."""
    names = ("device", "processor", "threads", "gpu", "torch")
    return [f"{name} {measured[name]}, here {here[name]}" for name in names if name in measured and name in here and measured[name] != here[name]]


def _nvidia(device: torch.device) -> dict[str, Any]:
    """Driver and clocks as found; nothing if the driver's own tool does not tell. It is asked by the card's UUID: its numbers are
    not ours if CUDA_VISIBLE_DEVICES hides cards."""
    fields = {"driver_version": "driver", "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.limit": "watts"}
    command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields.values(), found, strict=False))


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
