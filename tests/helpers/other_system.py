"""Decodes here, and then without what another system lacks: other_system.py win32|darwin FOLDER.

The folder is one of `streamed.save_models`. Prints for both systems the texts of a mapped and of a
streamed file, what was refused, how often Windows' clock was read, and the folder of the cache.
"""

import ctypes
import json
import mmap
import os
import pkgutil
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

SYSTEM, FOLDER = sys.argv[1], Path(sys.argv[2])
LACKING = {
    "darwin": {os: "posix_fallocate sched_getaffinity O_DIRECT", mmap: "MADV_HUGEPAGE"},
    "win32": {
        os: "posix_fallocate sched_getaffinity O_DIRECT fork killpg preadv pread register_at_fork",
        mmap: "MADV_HUGEPAGE MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS PROT_READ PROT_WRITE",
        time: "CLOCK_MONOTONIC clock_gettime",
    },
}
open_file, replace, clock = os.open, os.replace, time.perf_counter_ns
calls = []


class Map(mmap.mmap):
    """Takes what Windows takes."""

    madvise = property()

    def __new__(cls, fileno, length, tagname=None, access=mmap.ACCESS_DEFAULT, offset=0):
        return super().__new__(cls, fileno, length, access=access, offset=offset)


class Kernel:
    """Functions of Windows that the compiled pass uses, with ten million ticks a second."""

    SwitchToThread = ctypes.CDLL(None).sched_yield

    @staticmethod
    def QueryPerformanceFrequency(result):
        result._obj.value = 10_000_000

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
    def QueryPerformanceCounter(result):
        calls.append(1)
        result[0] = clock() // 100
        return 1


def open_as_bytes(path, flags, *mode):
    assert flags & os.O_BINARY or not str(path).endswith("packed"), path
    return open_file(path, flags & ~os.O_BINARY, *mode)


def replace_what_is_not_mapped(source, target):
    assert str(source) not in Path("/proc/self/maps").read_text(), source
    replace(source, target)


def become_another_system():
    """Take away what that lacks; our modules are imported anew, those of others stay."""
    for module, names in LACKING[SYSTEM].items():
        for name in names.split():
            delattr(module, name)
    time.monotonic = lambda: 0.0  # another clock than the one of compiled steps
    if SYSTEM == "win32":
        sys.modules |= dict.fromkeys(["fcntl", "resource", "pwd", "grp", "termios"])
        os.O_BINARY, os.open, os.replace = 1 << 40, open_as_bytes, replace_what_is_not_mapped
        mmap.mmap, ctypes.WinDLL = Map, lambda name: Kernel
    sys.platform = SYSTEM
    for name in list(sys.modules):
        if name.startswith(("sequoia_plan", "streamed", "architectures")):
            del sys.modules[name]


def decode(cache):
    """Import every module, and decode."""
    os.environ["SEQUOIA_PLAN_CACHE"] = str(FOLDER / cache)
    for module in pkgutil.walk_packages(import_module("sequoia_plan").__path__, "sequoia_plan."):
        if not module.name.endswith(("_kernels", "__main__")):
            import_module(module.name)
    models, texts, refused = import_module("streamed"), [], []
    for pair in (models.in_memory(FOLDER), models.streamed(FOLDER)):
        decoder = models.decoder(pair)
        texts.append(decoder.generate(models.PROMPT, 40).sequences.tolist())
        sampling = import_module("sequoia_plan.runtime").Sampling()
        seconds = decoder.step.part_seconds(sampling)
        assert min(seconds) >= 0, "two clocks"
    process = import_module("sequoia_plan.engines.engine_process")
    for attempt in (
        lambda: import_module("fcntl"), lambda: mmap.mmap(-1, 1, flags=mmap.MAP_PRIVATE),
        lambda: os.preadv, lambda: process.EngineProcess(sys.executable).close(),
    ):  # fmt: skip
        try:
            attempt()
        except (AttributeError, ImportError, process.SequoiaPlanError) as error:
            refused.append(str(error))
    del os.environ["SEQUOIA_PLAN_CACHE"]
    folder = import_module("sequoia_plan.models.offload.weight_cache").cache_folder()
    return texts, refused, len(calls), str(folder)


torch.set_num_threads(2)
here = decode("linux")
become_another_system()
print(json.dumps([here, decode(SYSTEM)]))
