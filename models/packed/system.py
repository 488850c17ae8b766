"""What compiled code asks of the system, under POSIX's names, which Windows is given here."""

import ctypes
import sys
import time

import numpy as np
from llvmlite import binding
from numba import carray, cfunc, types

from sequoia_plan.models.packed.records import compiled

MONOTONIC = np.int32(getattr(time, "CLOCK_MONOTONIC", 0))
sched_yield = types.ExternalFunction("sched_yield", types.int32())
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@compiled
def now():
    """The seconds of the one clock that host and workers read."""
    memory = np.empty(2, np.int64)
    clock_gettime(MONOTONIC, memory.ctypes.data)
    return memory[0] + 1e-9 * memory[1]


if sys.platform == "win32":
    kernel, per_second = ctypes.WinDLL("kernel32"), ctypes.c_int64()
    for name, function in {
        "sched_yield": kernel.SwitchToThread, "query_counter": kernel.QueryPerformanceCounter,
    }.items():  # fmt: skip
        binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    kernel.QueryPerformanceFrequency(ctypes.byref(per_second))
    FREQUENCY = per_second.value
    query_counter = types.ExternalFunction("query_counter", types.int32(types.int64))

    @cfunc(types.int32(types.int32, types.CPointer(types.int64)))
    def read_clock(clock, address):
        """In place of `clock_gettime`: seconds, and nanoseconds beyond them."""
        memory = carray(address, 2)
        query_counter(memory.ctypes.data)
        seconds, ticks = divmod(memory[0], FREQUENCY)
        memory[0], memory[1] = seconds, ticks * 1_000_000_000 // FREQUENCY
        return 0

    binding.add_symbol("clock_gettime", read_clock.address)
