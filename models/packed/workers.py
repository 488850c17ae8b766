"""How the threads of a pass share its work and wait for each other, in compiled code."""

from llvmlite import ir
from llvmlite.ir import Value
from numba import types

from sequoia_plan.models.packed.features import LONG, WORD
from sequoia_plan.models.packed.records import compiled
from sequoia_plan.models.packed.system import sched_yield
from sequoia_plan.models.packed.vectors import Emitter, emitted

LOOKS = 500  # how often a worker looks for the others before it yields its processor
TAKEN, FINISHED, COUNTER_WORDS = 64, 128, 24
"""The counter that workers share is int64 [COUNTER_WORDS]: first, how often one came to `wait`; at
byte TAKEN, how often one has taken things in this round; at FINISHED, the rounds that all have
finished. Each has cache lines of its own, so that writing one does not delay the others."""


@emitted(result=types.int64)
def fetch_and_add(emit: Emitter, address: Value, count: Value) -> Value:
    """Add to the int64 at an address, as one step that other threads see; its value before."""
    pointer = emit.builder.inttoptr(address, LONG.as_pointer())
    return emit.builder.atomic_rmw("add", pointer, count, "seq_cst")


@emitted(result=types.int64)
def look_and_pause(emit: Emitter, address: Value) -> Value:
    """The int64 at an address as other threads left it, after a pause that lets them run."""
    builder = emit.builder
    is_x86 = "x86" in builder.module.triple
    name, *arguments = ("llvm.x86.sse2.pause",) if is_x86 else ("llvm.aarch64.hint", WORD(1))
    emit.call(name, ir.VoidType(), *arguments)
    pointer = builder.inttoptr(address, LONG.as_pointer())
    return builder.load_atomic(pointer, "acquire", align=8)


@compiled
def wait(counter, workers, rounds):
    """Wait until all `workers` threads have come here `rounds` times; returns `rounds` + 1.

    `counter`: the address of int64 [COUNTER_WORDS] that were 0 in round 1: how often threads came,
    at TAKEN how many pieces of work they took since the last round, at FINISHED the rounds that
    ended.
    """
    if fetch_and_add(counter, 1) + 1 == workers * rounds:  # the last one lets the others go
        taken = fetch_and_add(counter + TAKEN, 0)
        fetch_and_add(counter + TAKEN, -taken)
        fetch_and_add(counter + FINISHED, 1)
        return rounds + 1
    looks = 0
    while look_and_pause(counter + FINISHED) < rounds:
        looks += 1
        if looks > LOOKS:
            sched_yield()
    return rounds + 1


@compiled
def take(counter, workers, count):
    """Take some of `count` things (tiles, heads) that no worker has taken in this round.

    Returns the first one's number and the end; all are taken if the first is `count`. A worker
    takes half of an equal share at first, later an eighth: a slow one takes less in all.
    """
    number = fetch_and_add(counter + TAKEN, 1)
    many = (count + 2 * workers - 1) // (2 * workers)
    few = max(count // (8 * workers), 1)
    first, size = number * many, many
    if number >= workers:
        first, size = workers * many + (number - workers) * few, few
    return min(first, count), min(first + size, count)
