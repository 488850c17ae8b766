"""The processor of this machine, as Python and Linux name it. Nothing heavy is imported."""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

INSTRUCTION_SETS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
"""Instruction sets of x86 and Arm that decide which dtype is fast, under Linux's names."""
CPUINFO = Path("/proc/cpuinfo")
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""This process's control groups: their names, and the folder of all."""
QUOTA_FILES = {"": ["cpu.max"], "cpu": ["cpu.cfs_quota_us", "cpu.cfs_period_us"]}
"""By controller ("" is version 2): the files with a group's time on processors, and its period."""


def processor_name() -> str:
    """The processor's model name, or what Python knows of it where Linux's /proc does not say."""
    return _first_value("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str] | None:
    """Those of `INSTRUCTION_SETS` that the processor has; None where Linux's /proc does not say."""
    flags = _first_value("flags") or _first_value("Features")  # x86, Arm
    return None if flags is None else [name for name in INSTRUCTION_SETS if name in flags.split()]


def usable_cores() -> int:
    """How many cores this process may use: its affinity, and its control groups' quotas."""
    is_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return min([cores, *_quotas()])


def _quotas() -> Iterator[int]:
    """The whole cores, at least 1, of each quota on this process: of its groups and those above."""
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else ():
        _, controllers, name = line.split(":", 2)
        for controller in QUOTA_FILES.keys() & controllers.split(","):
            # in a container, the name may be the host's; its own group is then the top one
            for group in (PurePosixPath(name), *PurePosixPath(name).parents):
                folder = GROUPS / controller / group.relative_to("/")
                with suppress(OSError, ValueError):  # no such group, or no limit ("max")
                    texts = [(folder / file).read_text() for file in QUOTA_FILES[controller]]
                    quota, period = map(int, " ".join(texts).split())
                    if quota > 0:  # -1: no limit
                        yield max(quota // period, 1)


def _first_value(key: str) -> str | None:
    """The value of the first line of /proc/cpuinfo with this key; None if there is none."""
    if not CPUINFO.exists():
        return None
    for line in CPUINFO.read_text().splitlines():
        name, separator, value = line.partition(":")
        if separator and name.strip() == key:
            return value.strip()
    return None
