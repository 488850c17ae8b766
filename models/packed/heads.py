"""Attention of a pass's rows, by worker, and how its numbers are stored in words of the cache."""

import numpy as np

from sequoia_plan.models.packed.attention import BATCHES, BLOCK, QUERIES
from sequoia_plan.models.packed.records import compiled
from sequoia_plan.models.packed.vectors import LANES, call
from sequoia_plan.models.packed.workers import take


@compiled
def put(numbers, halves):
    """Store float32 numbers (uint32 [n], their bits) in uint16 [n, 1], as bfloat16, or [n, 2]."""
    for i in range(numbers.shape[0]):
        number = numbers[i]
        if halves.shape[1] == 1:
            odd = (number >> np.uint32(16)) & np.uint32(1)
            halves[i, 0] = (number + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        else:
            halves[i, 0], halves[i, 1] = number, number >> np.uint32(16)


@compiled
def attend(reader, layer, rows, worker, counter, workers):
    """Attention of `reader.heads`, written to `reader.attended`, in batches that workers take."""
    shared = reader.model.heads // reader.keys.shape[1]
    count = reader.keys.shape[1] * -(-rows * shared // QUERIES)  # batches of all cached heads
    first, end = take(counter, workers, count)
    while first < count:
        attend_some(reader, layer, rows, worker, first, end)
        first, end = take(counter, workers, count)


@compiled
def attend_some(reader, layer, rows, worker, item, end_item):
    """Attention of some batches: item i is batch i % batches of the cached head i // batches.

    A batch has up to `QUERIES` queries, row by row, of the heads that share the cached one. A row
    of `scratch` is what `attention.attender` reads of a query.
    """
    model, keys, values, spans = reader.model, reader.keys, reader.values, reader.spans
    head_dim, visible = model.head_dim, reader.visible
    shared = model.heads // keys.shape[1]  # heads that share a cached one
    per_word = head_dim // keys.shape[3]  # numbers of a cached word: 2 bfloat16, or one float32
    bits, scratch = reader.heads.view(np.uint32), reader.attention[worker]
    seen = np.empty(QUERIES * BATCHES, np.int64)  # addresses
    queries = scratch.view(np.uint16)
    batches = -(-rows * shared // QUERIES)
    while item < end_item:
        kv_head, batch = item // batches, item % batches
        taken = min(BATCHES, end_item - item, batches - batch)
        start = batch * QUERIES
        count = min(rows * shared - start, taken * QUERIES)
        first, end = visible.shape[1], 0
        for query in range(count):
            row, head = (start + query) // shared, kv_head * shared + (start + query) % shared
            if query and query % QUERIES == 0 and spans[row, 0] >= end:  # another sequence's
                count, taken = query, query // QUERIES
                break
            first, end = min(first, spans[row, 0]), max(end, spans[row, 1])
            for i in range(LANES + head_dim):
                scratch[query, i] = 0
            halves = queries[query, 2 * (LANES + head_dim) :].reshape(-1, 3 - per_word)
            put(bits[row, head], halves)
            seen[query] = visible[row].ctypes.data
        item += taken
        first_block = first // BLOCK
        seen += first_block * BLOCK  # bytes: one for each slot
        call(
            model.attend,
            (seen.ctypes.data, count, keys[layer, kv_head, first_block:].ctypes.data,
            values[layer, kv_head, first_block * BLOCK // per_word :].ctypes.data, head_dim,
            -(-end // BLOCK) - first_block, scratch.ctypes.data, scratch.strides[0]),
        )  # fmt: skip
        for query in range(count):
            row, head = (start + query) // shared, kv_head * shared + (start + query) % shared
            # the largest weight is 1; a row that sees no slot has none
            total = max(scratch[query // QUERIES * QUERIES, query % QUERIES], np.float32(1))
            for i in range(head_dim):
                reader.attended[row, head, i] = scratch[query, LANES + i] / total
