"""The largest of a row's numbers, which is looked for where they are computed."""

from functools import partial

import numpy as np

from sequoia_plan.models.packed.records import compiled

fast = partial(compiled, fastmath={"contract", "reassoc", "nsz", "arcp"})
"""Numbers are added in any order; NaN and infinity keep their meaning."""
BLOCK = 512  # tokens whose sum, or largest number, is known when one among them is looked for
LARGEST = np.float32(np.inf)


@fast
def in_order(bits):
    """Bits of a float32 as an int32; larger floats give larger ones. It is its own inverse.

    LLVM takes the maximum of integers faster than that of floats.
    """
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@fast
def maximum(values):
    """The largest of the values, float32 [n], as integers in the same order, which vectorise."""
    bits = values.view(np.int32)
    largest = np.int32(-(1 << 31))
    for index in range(bits.size):
        largest = max(largest, in_order(bits[index]))
    return np.int32(in_order(largest)).view(np.float32)


@fast
def largest_of(values):
    """The largest of the values, float32 [n], and its first index; NaN and 0 if one is NaN.

    Only the block of the largest one is searched for its index.
    """
    best, best_start, magnitude = np.float32(-LARGEST), 0, np.int32(0)
    for start in range(0, values.size, BLOCK):
        bits = values[start : start + BLOCK].view(np.int32)
        for index in range(bits.size):
            magnitude = max(magnitude, bits[index] & np.int32(0x7FFFFFFF))  # without the sign
        value = maximum(values[start : start + BLOCK])
        if value > best:
            best, best_start = value, start
    if magnitude > np.int32(0x7F800000):  # more than infinity's bits: a NaN's
        return np.float32(np.nan), 0
    index = best_start
    while index < values.size - 1 and values[index] != best:
        index += 1
    return best, index
