"""The pass: all layers of a Llama-like model in one function, which each worker thread calls."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sequoia_plan.runtime.backends.packed.attention import BATCHES, BLOCK, LOG2_E, QUERIES, gate
from sequoia_plan.runtime.backends.packed.formats import OUTPUTS
from sequoia_plan.runtime.backends.packed.vectors import LANES, LONG
from sequoia_plan.runtime.base.vocabulary_loops import largest_of

UNIT = OUTPUTS
"""Outputs of a matrix that one worker computes are a multiple of these: those of a tile."""
SPINS = 2000
"""How often a worker looks for the others before it yields its processor."""
ENCODE, MULTIPLY, TILES, NUM_TILES, TILE_BYTES, STEPS, INPUTS, ROW_BYTES = range(8)
"""The columns of a matrix's description: addresses, sizes in bytes, and counts."""
QUERY, KEY, VALUE, OUT, GATE, UP, DOWN = range(7)
"""A layer's matrices."""


class Model(NamedTuple):
    """A model's weights. Matrices are int64 [columns above], of a layer int64 [7, columns].

    `norms` float32 [layers, 2, width]; `head_norms` float32 [layers, 2, head_dim] or [0, 2, 0];
    `biases` float32 [layers, outputs of query, key and value] or [0, 0].
    """

    matrices: Any
    head: Any
    norms: Any
    final_norm: Any
    head_norms: Any
    biases: Any
    epsilon: Any
    attend: Any
    heads: Any
    head_dim: Any


class Inputs(NamedTuple):
    """What a pass reads. `x` float32 [workers, rows, width] is the residual stream, changed.

    `first` float32 [rows, n]: what the first layer attends to, [0, 0]: the normed `x`; `rotary`
    float32 [positions, 2, head_dim / 2]; `visible` bool [rows, extent]; `spans` int64 [rows, 2]:
    the first slot that a row sees, and the end; `keys` [layers, heads, slots / BLOCK, head_dim / n,
    BLOCK, n] and `values` [layers, heads, slots / n, head_dim, n], uint16 (bfloat16, n = 2) or
    uint32 (float32, n = 1).
    """

    x: Any
    first: Any
    positions: Any
    slots: Any
    visible: Any
    spans: Any
    rotary: Any
    keys: Any
    values: Any


class Scratch(NamedTuple):
    """Memory of a pass; `normed`, `encoded` and `attention` are each worker's own."""

    normed: Any
    encoded: Any
    attention: Any
    heads: Any
    attended: Any
    added: Any
    gate: Any
    up: Any


class Outputs(NamedTuple):
    """`logits` float32 [rows to keep, outputs]; `hidden` float32 [states, rows, width].

    `layers` int64 [states]: after how many layers each hidden state is taken. `largest` float32 and
    `best` int64 [workers, rows to keep]: of each worker's part of the first `vocabulary` logits,
    the largest one (NaN if one is NaN) and its token.
    """

    logits: Any
    hidden: Any
    layers: Any
    largest: Any
    best: Any
    vocabulary: Any


def _calls(num_values: int) -> Any:
    """What the intrinsics below return: a call of a function by its address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [LONG] * num_values)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (num_values + 1)), codegen


@intrinsic
def call_6(context, function, a, b, c, d, e, f):
    """Call a function of six int64 by its address."""
    return _calls(6)


@intrinsic
def call_8(context, function, a, b, c, d, e, f, g, h):
    """Call a function of eight int64 by its address."""
    return _calls(8)


@intrinsic
def add_and_fetch(context, address, count):
    """Add to the int64 at an address, as one step that other threads see; its value before."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], LONG.as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


sched_yield = types.ExternalFunction("sched_yield", types.int32())


@njit(nogil=True, cache=True, error_model="numpy")
def wait(counter, workers, rounds):
    """Wait until all workers have come here `rounds` times; returns `rounds` + 1.

    `counter`: the address of an int64 that was 0 in round 1.
    """
    if workers > 1:
        add_and_fetch(counter, 1)
        spins = 0
        while add_and_fetch(counter, 0) < workers * rounds:
            spins += 1
            if spins > SPINS:
                sched_yield()
    return rounds + 1


@njit(nogil=True, cache=True, error_model="numpy")
def share(count, worker, workers):
    """The part of `count` things that is one worker's: first, end."""
    return count * worker // workers, count * (worker + 1) // workers


@njit(nogil=True, cache=True, error_model="numpy")
def encode(matrix, num_rows, rows, encoded):
    """Store rows (float32 [rows, inputs]) as the products by `matrix` read them."""
    call_6(
        matrix[ENCODE], rows.ctypes.data, rows.strides[0], num_rows, matrix[INPUTS],
        encoded.ctypes.data, matrix[ROW_BYTES],
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def multiply(matrix, num_rows, encoded, results, column, first, end):
    """The outputs from `first` to `end` of encoded rows.

    `results` float32 [rows, n]; the matrix's first output goes to `column`.
    """
    tile = first // UNIT
    call_8(
        matrix[MULTIPLY], encoded.ctypes.data, num_rows, matrix[TILES] + tile * matrix[TILE_BYTES],
        min(end // UNIT, matrix[NUM_TILES]) - tile, matrix[TILE_BYTES], matrix[STEPS],
        results.ctypes.data + 4 * (column + first), results.strides[0],
    )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy", fastmath=True)
def normalise(row, weight, epsilon, result):
    """RMS norm of one row; all rows go through this function, one at a time."""
    total = np.float32(0)
    for column in range(weight.shape[0]):
        total += row[column] * row[column]
    factor = np.float32(1) / np.sqrt(total / np.float32(weight.shape[0]) + epsilon)
    for column in range(weight.shape[0]):
        result[column] = row[column] * factor * weight[column]


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(row, cosines, sines, factor):
    """Rotary embedding of one head, times a factor, in place."""
    half = cosines.shape[0]
    for i in range(half):
        left, right = row[i] * factor, row[i + half] * factor
        row[i] = left * cosines[i] - right * sines[i]
        row[i + half] = right * cosines[i] + left * sines[i]


@njit(nogil=True, cache=True, error_model="numpy")
def put(numbers, entries):
    """Store the bits of float32 numbers as a cache has them: as they are, or in bfloat16."""
    for i in range(numbers.shape[0]):
        number = numbers[i]
        if entries.itemsize == 2:
            odd = (number >> np.uint32(16)) & np.uint32(1)
            number = (number + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        entries[i] = number


@njit(nogil=True, cache=True, error_model="numpy")
def project_heads(model, layer, inputs, scratch, hidden, encoded, worker, workers):
    """Some heads' queries, keys and values; keys and values are then in the cache."""
    num_rows, head_dim, group = inputs.slots.shape[0], model.head_dim, model.heads
    kv_heads, per_word = inputs.keys.shape[1], inputs.keys.shape[5]
    first_head, end_head = share(group + 2 * kv_heads, worker, workers)
    heads, bits = scratch.heads, scratch.heads.view(np.uint32)
    encoder = 0
    start = 0
    for part in range(3):
        count = group if part == QUERY else kv_heads
        first, end = max(first_head, start), min(end_head, start + count)
        if first < end:
            matrix = model.matrices[layer, part]
            if matrix[ENCODE] != encoder:
                encoder = matrix[ENCODE]
                encode(matrix, num_rows, hidden, encoded)
            first_output, end_output = (first - start) * head_dim, (end - start) * head_dim
            multiply(matrix, num_rows, encoded, heads, start * head_dim, first_output, end_output)
        for row in range(num_rows):
            cosines, sines = inputs.rotary[inputs.positions[row]]
            slot = inputs.slots[row]
            for head in range(first, end):
                values, numbers = heads[row, head], bits[row, head]
                if model.biases.shape[0]:
                    values += model.biases[layer, head * head_dim : (head + 1) * head_dim]
                if part != VALUE and model.head_norms.shape[0]:
                    normalise(values, model.head_norms[layer, part], model.epsilon, values)
                if part == QUERY:  # scores are in units of log 2
                    rotate(values, cosines, sines, np.float32(LOG2_E / np.sqrt(head_dim)))
                elif part == KEY:
                    rotate(values, cosines, sines, np.float32(1))
                    key = inputs.keys[layer, head - start, slot // BLOCK, :, slot % BLOCK]
                    for place in range(per_word):
                        put(numbers[place::per_word], key[:, place])
                else:
                    words = inputs.values[layer, head - start, slot // per_word]
                    put(numbers, words[:, per_word - 1 - slot % per_word])
        start += count


@njit(nogil=True, cache=True, error_model="numpy")
def attend(model, layer, inputs, scratch, worker, workers):
    """Attention of some heads' queries; queries of one cached head go together."""
    num_rows, head_dim, kv_heads = inputs.slots.shape[0], model.head_dim, inputs.keys.shape[1]
    group, spans, visible = model.heads // kv_heads, inputs.spans, inputs.visible
    bits, scratch_rows = scratch.heads.view(np.uint32), scratch.attention[worker]
    seen, per_word = np.empty(QUERIES * BATCHES, np.int64), inputs.keys.shape[5]
    sums = scratch_rows[:, LANES : LANES + head_dim]
    queries = scratch_rows.view(inputs.keys.dtype)[:, per_word * (LANES + head_dim) :]
    batches = -(-num_rows * group // QUERIES)
    item, end_item = share(kv_heads * batches, worker, workers)
    while item < end_item:
        kv_head, batch = item // batches, item % batches
        taken = min(BATCHES, end_item - item, batches - batch)
        start = batch * QUERIES
        count = min(num_rows * group - start, taken * QUERIES)
        first, end = visible.shape[1], 0
        scratch_rows[:count, : LANES + head_dim] = 0
        for query in range(count):
            row, head = (start + query) // group, kv_head * group + (start + query) % group
            if query and query % QUERIES == 0 and spans[row, 0] >= end:  # another sequence's
                count, taken = query, query // QUERIES
                break
            first, end = min(first, spans[row, 0]), max(end, spans[row, 1])
            put(bits[row, head], queries[query])
            seen[query] = visible[row].ctypes.data
        item += taken
        first_block = first // BLOCK
        seen += first_block * BLOCK
        call_8(
            model.attend, seen.ctypes.data, count,
            inputs.keys[layer, kv_head, first_block:].ctypes.data,
            inputs.values[layer, kv_head, first_block * BLOCK // per_word :].ctypes.data, head_dim,
            -(-end // BLOCK) - first_block, scratch_rows.ctypes.data, scratch_rows.strides[0],
        )  # fmt: skip
        for query in range(count):
            row, head = (start + query) // group, kv_head * group + (start + query) % group
            # the largest weight is 1; a row that sees no slot has none
            total = max(scratch_rows[query // QUERIES * QUERIES, query % QUERIES], np.float32(1))
            scratch.attended[row, head] = sums[query] / total


@njit(nogil=True, cache=True, error_model="numpy")
def forward(
    worker, workers, counter, rounds, model, inputs, scratch, outputs, first_layer, end_layer
):  # fmt: skip
    """One worker's part of a pass over some layers; `counter`, `rounds`: see `wait`.

    With an end after the last layer, logits are computed, too. Returns the rounds after it.
    """
    x, hidden, encoded = inputs.x[worker], scratch.normed[worker], scratch.encoded[worker]
    rows, num_layers = inputs.slots.shape[0], model.matrices.shape[0]
    added, gates, ups = scratch.added, scratch.gate, scratch.up
    outer = share(added.shape[1] // UNIT, worker, workers)
    first_outer, end_outer = outer[0] * UNIT, outer[1] * UNIT
    inner = share(gates.shape[1] // UNIT, worker, workers)
    first_inner, end_inner = inner[0] * UNIT, inner[1] * UNIT
    for layer in range(first_layer, min(end_layer, num_layers)):
        keep_hidden_states(outputs, layer, rows, x, worker)
        matrices = model.matrices[layer]
        if layer == 0 and inputs.first.shape[0]:
            project_heads(model, layer, inputs, scratch, inputs.first, encoded, worker, workers)
        else:
            for row in range(rows):
                normalise(x[row], model.norms[layer, 0], model.epsilon, hidden[row])
            project_heads(model, layer, inputs, scratch, hidden, encoded, worker, workers)
        rounds = wait(counter, workers, rounds)
        attend(model, layer, inputs, scratch, worker, workers)
        rounds = wait(counter, workers, rounds)
        encode(matrices[OUT], rows, scratch.attended, encoded)
        multiply(matrices[OUT], rows, encoded, added, 0, first_outer, end_outer)
        rounds = wait(counter, workers, rounds)
        for row in range(rows):
            x[row] += added[row]
            normalise(x[row], model.norms[layer, 1], model.epsilon, hidden[row])
        encode(matrices[GATE], rows, hidden, encoded)
        multiply(matrices[GATE], rows, encoded, gates, 0, first_inner, end_inner)
        if matrices[UP, ENCODE] != matrices[GATE, ENCODE]:
            encode(matrices[UP], rows, hidden, encoded)
        multiply(matrices[UP], rows, encoded, ups, 0, first_inner, end_inner)
        for row in range(rows):
            gates_address, ups_address = gates[row].ctypes.data, ups[row].ctypes.data
            for offset in range(4 * first_inner, 4 * end_inner, 4 * LANES):
                gate(gates_address + offset, ups_address + offset, gates_address + offset)
        rounds = wait(counter, workers, rounds)
        encode(matrices[DOWN], rows, gates, encoded)
        multiply(matrices[DOWN], rows, encoded, added, 0, first_outer, end_outer)
        rounds = wait(counter, workers, rounds)
        for row in range(rows):
            x[row] += added[row]
    if end_layer <= num_layers:
        return rounds
    keep_hidden_states(outputs, num_layers, rows, x, worker)
    for row in range(rows):
        normalise(x[row], model.final_norm, model.epsilon, hidden[row])
    keep_hidden_states(outputs, -1, rows, hidden, worker)
    kept = outputs.logits.shape[0]
    encode(model.head, kept, hidden[rows - kept :], encoded)
    part = share(outputs.logits.shape[1] // UNIT, worker, workers)
    first, end = part[0] * UNIT, part[1] * UNIT
    multiply(model.head, kept, encoded, outputs.logits, 0, first, end)
    end = min(end, outputs.vocabulary)
    for row in range(kept):  # while they are in cache
        outputs.largest[worker, row], outputs.best[worker, row] = -np.inf, first
        if first < end:
            largest, token = largest_of(outputs.logits[row, first:end])
            outputs.largest[worker, row], outputs.best[worker, row] = largest, first + token
    return rounds


@njit(nogil=True, cache=True, error_model="numpy")
def keep_hidden_states(outputs, layer, rows, x, worker):
    """Copy hidden states to the outputs that are taken after so many layers (-1: normed)."""
    for state in range(outputs.layers.shape[0]):
        if worker == 0 and outputs.layers[state] == layer:
            outputs.hidden[state, :rows] = x[:rows]


@njit(nogil=True, cache=True, error_model="numpy")
def project(matrix, rows, results):
    """The products of rows by one matrix."""
    encoded = np.empty(rows.shape[0] * matrix[ROW_BYTES], np.uint8)
    encode(matrix, rows.shape[0], rows, encoded)
    multiply(matrix, rows.shape[0], encoded, results, 0, 0, results.shape[1])
