"""What machine a profile was measured on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def fingerprint(device: torch.device | str) -> dict[str, Any]:
    """Device, threads and library versions; nothing that names a person or a path."""
    device = torch.device(device)
    facts: dict[str, Any] = {"device": device.type, "processor": _processor(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts | {"torch": str(torch.__version__), "transformers": transformers.__version__, "python": platform.python_version()}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
