"""The processor of this machine, as Python and Linux name it. Nothing heavy is imported."""

import os
import platform
from pathlib import Path

INSTRUCTION_SETS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
"""Instruction sets of x86 and Arm that decide which dtype is fast, under Linux's names."""
CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """The processor's model name, or what Python knows of it where Linux's /proc does not say."""
    return _first_value("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str] | None:
    """Those of `INSTRUCTION_SETS` that the processor has; None where Linux's /proc does not say."""
    flags = _first_value("flags") or _first_value("Features")  # x86, Arm
    return None if flags is None else [name for name in INSTRUCTION_SETS if name in flags.split()]


def usable_cores() -> int | None:
    """How many cores this process may use; None if the system does not say."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _first_value(key: str) -> str | None:
    """The value of the first line of /proc/cpuinfo with this key; None if there is none."""
    if not CPUINFO.exists():
        return None
    for line in CPUINFO.read_text().splitlines():
        name, separator, value = line.partition(":")
        if separator and name.strip() == key:
            return value.strip()
    return None
