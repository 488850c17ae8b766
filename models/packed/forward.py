"""The pass: all layers of a Llama-like model in one function, which each worker thread calls."""

from functools import partial
from typing import Any

import numpy as np

from sequoia_plan.models.packed.attention import BLOCK, LOG2_E, gate
from sequoia_plan.models.packed.formats import OUTPUTS
from sequoia_plan.models.packed.heads import attend, put
from sequoia_plan.models.packed.largest import largest_of
from sequoia_plan.models.packed.records import Record, compiled
from sequoia_plan.models.packed.vectors import LANES, call
from sequoia_plan.models.packed.workers import take, wait

UNIT = OUTPUTS  # workers share a matrix by tiles, so widths are rounded up to the outputs of one
FIRST: Any = np.int64(0)
"""The first layer, row or node, for numba an integer as any: literals are compiled apart."""
ENCODE, MULTIPLY, TILES, NUM_TILES, TILE_BYTES, STEPS, INPUTS, ROW_BYTES = range(8)
"""The columns of a matrix's description: addresses, sizes in bytes, and counts."""
QUERY, KEY, VALUE, OUT, GATE, UP, DOWN = range(7)  # a layer's matrices


class Model(Record):
    """A model's weights. Matrices are int64 [columns above], of a layer int64 [7, columns].

    `head` int64 [parts, columns]: parts of as many tiles, but for the last one.
    `norms` float32 [layers, 2, width]; `head_norms` float32 [layers, 2, head_dim] or [0, 2, 0];
    `biases` float32 [layers, outputs of query, key and value] or [0, 0].
    """


class Reader(Record):
    """What the workers of a pass read and write; each has a part of arrays [workers, ...].

    Read are the `model`, and of the rows (tokens) `positions`, `slots` int64 [rows]; `visible` bool
    [rows, extent], the slots that a row sees; `spans` int64 [rows, 2], the first of these and the
    end. `rotary` float32 [positions, 2, head_dim / 2]: cosines and sines. `attended_first` float32
    [rows, n]: what the first layer attends to, if n = 0 the normed `x`. The cache is uint16, words
    of n = 2 numbers in bfloat16, or of one in float32: `keys` [layers, heads, slots / BLOCK,
    head_dim / n, BLOCK, 2], `values` [layers, heads, slots / n, head_dim, 2].

    `x` float32 [workers, rows, width] is the residual stream, at first the embeddings. Scratch
    memory: `normed`, `encoded`, `attention` [workers, ...]; `heads`, `attended`, `added`, `gate`,
    `up` [rows, n]. Written are `logits` float32 [rows to keep, outputs]; of each worker's part of
    the first `vocabulary` of them, `largest` float32 (NaN if one is NaN) and its token `best` int64
    [workers, rows to keep]; `hidden` float32 [states, rows, width], after as many layers as
    `state_layers` int64 [states] says. Of steps alone: `tokens`, `read_slots` int64 [rows]; `last`
    int64 [2], the last token and position.
    """


@compiled
def encode(matrix, num_rows, rows, encoded):
    """Store float32 [rows, inputs] in `encoded` (uint8) as products by `matrix` read them."""
    call(
        matrix[ENCODE],
        (rows.ctypes.data, rows.strides[0], num_rows, matrix[INPUTS], encoded.ctypes.data,
        matrix[ROW_BYTES]),
    )  # fmt: skip


@compiled
def multiply(matrix, num_rows, encoded, results, column, first, end):
    """Multiply rows that `encode` stored by the weights of the outputs from `first` to `end`.

    `results` float32 [rows, n]: the matrix's output i goes to column `column` + i.
    """
    tile = first // UNIT
    call(
        matrix[MULTIPLY],
        (encoded.ctypes.data, num_rows, matrix[TILES] + tile * matrix[TILE_BYTES],
        min(end // UNIT, matrix[NUM_TILES]) - tile, matrix[TILE_BYTES], matrix[STEPS],
        results.ctypes.data + 4 * (column + first), results.strides[0]),
    )  # fmt: skip


@partial(compiled, fastmath=True)
def normalise(row, weight, epsilon, result):
    """Write the RMS norm of float32 [width]; rows go one by one, so that all sum in one order."""
    total = np.float32(0)
    for column in range(weight.shape[0]):
        total += row[column] * row[column]
    factor = np.float32(1) / np.sqrt(total / np.float32(weight.shape[0]) + epsilon)
    for column in range(weight.shape[0]):
        result[column] = row[column] * factor * weight[column]


@compiled
def rotate(row, cosines, sines, factor):
    """Apply a rotary embedding, times a factor, to one head's float32 [head_dim], in place."""
    half = cosines.shape[0]
    for i in range(half):
        left, right = row[i] * factor, row[i + half] * factor
        row[i] = left * cosines[i] - right * sines[i]
        row[i + half] = right * cosines[i] + left * sines[i]


@compiled
def project_heads(reader, layer, rows, normed, encoded, counter, workers):
    """Write queries of `normed` rows to `reader.heads`, keys and values to the cache.

    Heads that the worker takes share the rows in `encoded` while their matrix's `encoder` is one.
    """
    encoder, num_heads = np.int64(0), reader.heads.shape[1]  # 0: `encoded` has no rows yet
    first, end = take(counter, workers, num_heads)
    while first < num_heads:
        encoder = project_some(reader, layer, rows, normed, encoded, encoder, first, end)
        first, end = take(counter, workers, num_heads)


@compiled
def project_some(reader, layer, rows, normed, encoded, encoder, first_head, end_head):
    """Compute the heads `first_head` to `end_head` - 1, counted over queries, keys, then values.

    `encoder`: address of the function that wrote `encoded` from `normed`, 0 for none. Only for a
    matrix in another format it is written again; returns the function that wrote it last.
    """
    model, keys, values = reader.model, reader.keys, reader.values
    num_heads, head_dim, kv_heads = model.heads, model.head_dim, keys.shape[1]
    per_word = head_dim // keys.shape[3]  # numbers of a cached word: 2 bfloat16, or one float32
    halves = 3 - per_word  # 16-bit halves of a word that a number takes: 1 or 2
    heads, bits = reader.heads, reader.heads.view(np.uint32)
    start = 0  # the number of the kind's first head
    for kind in range(3):  # QUERY, KEY, VALUE
        count = num_heads if kind == QUERY else kv_heads
        first, end = max(first_head, start), min(end_head, start + count)
        if first < end:
            matrix = model.matrices[layer, kind]
            if matrix[ENCODE] != encoder:
                encoder = matrix[ENCODE]
                encode(matrix, rows, normed, encoded)
            first_output, end_output = (first - start) * head_dim, (end - start) * head_dim
            multiply(matrix, rows, encoded, heads, start * head_dim, first_output, end_output)
        for row in range(rows):
            rotary, slot = reader.rotary[reader.positions[row]], reader.slots[row]
            for head in range(first, end):
                numbers, number_bits = heads[row, head], bits[row, head]
                if model.biases.shape[0]:
                    for i in range(head_dim):
                        numbers[i] += model.biases[layer, head * head_dim + i]
                if kind != VALUE and model.head_norms.shape[0]:
                    normalise(numbers, model.head_norms[layer, kind], model.epsilon, numbers)
                if kind == QUERY:  # scores are in units of log 2
                    rotate(numbers, rotary[0], rotary[1], np.float32(LOG2_E / np.sqrt(head_dim)))
                elif kind == KEY:
                    rotate(numbers, rotary[0], rotary[1], np.float32(1))
                    key = keys[layer, head - start, slot // BLOCK, :, slot % BLOCK]
                    for half in range(per_word):  # a word has two neighbouring dimensions
                        put(number_bits[half::per_word], key[:, half : half + halves])
                else:  # a word has two neighbouring slots, the earlier one in its upper half
                    half, word = per_word - 1 - slot % per_word, slot // per_word
                    put(number_bits, values[layer, head - start, word, :, half : half + halves])
        start += count
    return encoder


@compiled
def copy(row, result):
    """result[i] = row[i] for as many numbers as `result` has."""
    for i in range(result.shape[0]):
        result[i] = row[i]


@compiled
def add(row, added):
    """row[i] += added[i], in place."""
    for i in range(row.shape[0]):
        row[i] += added[i]


@compiled
def forward(
    worker, workers, counter, rounds, reader, rows, start, kept, first_layer, end_layer
):  # fmt: skip
    """One worker's share of a pass over some layers; `counter`, `rounds`: see `wait`.

    Numbers after the last layer's are those of the head's parts. The last `kept` rows' logits go to
    `reader.logits` from row `start` on. All workers compute all norms. Returns the rounds after it.
    """
    model, epsilon = reader.model, reader.model.epsilon
    x, normed, encoded = reader.x[worker], reader.normed[worker], reader.encoded[worker]
    num_layers = model.matrices.shape[0]
    added = reader.added
    for layer in range(first_layer, min(end_layer, num_layers)):
        keep_hidden_states(reader, layer, rows, x, worker)
        matrices, attended_to = model.matrices[layer], normed
        if layer == 0 and reader.attended_first.shape[1]:
            attended_to = reader.attended_first
        else:
            for row in range(rows):
                normalise(x[row], model.norms[layer, 0], epsilon, normed[row])
        project_heads(reader, layer, rows, attended_to, encoded, counter, workers)
        rounds = wait(counter, workers, rounds)
        attend(reader, layer, rows, worker, counter, workers)
        rounds = wait(counter, workers, rounds)
        multiply_all(matrices[OUT], rows, reader.attended, encoded, added, counter, workers)
        rounds = wait(counter, workers, rounds)
        for row in range(rows):
            add(x[row], added[row])
            normalise(x[row], model.norms[layer, 1], epsilon, normed[row])
        gate_all(reader, matrices, rows, normed, encoded, counter, workers)
        rounds = wait(counter, workers, rounds)
        multiply_all(matrices[DOWN], rows, reader.gate, encoded, added, counter, workers)
        rounds = wait(counter, workers, rounds)
        for row in range(rows):
            add(x[row], added[row])
    if end_layer > num_layers:
        keep_hidden_states(reader, num_layers, rows, x, worker)
        for row in range(rows):
            normalise(x[row], model.final_norm, epsilon, normed[row])
        keep_hidden_states(reader, -1, rows, normed, worker)
        for part in range(max(first_layer - num_layers, 0), end_layer - num_layers):
            if part:
                rounds = wait(counter, workers, rounds)
            compute_logits(
                reader, part, normed[rows - kept : rows], start, worker, counter, workers
            )
    return wait(counter, workers, rounds)


@compiled
def multiply_all(matrix, num_rows, rows, encoded, results, counter, workers):
    """Write the products of float32 `rows` by the tiles of a matrix that this worker takes."""
    encode(matrix, num_rows, rows, encoded)
    count = matrix[NUM_TILES]
    first, end = take(counter, workers, count)
    while first < count:
        multiply(matrix, num_rows, encoded, results, 0, first * UNIT, end * UNIT)
        first, end = take(counter, workers, count)


@compiled
def gate_all(reader, matrices, num_rows, rows, encoded, counter, workers):
    """reader.gate = SiLU(gate) * up of float32 `rows`, in the tiles that this worker takes."""
    gates, ups, count = reader.gate, reader.up, matrices[GATE, NUM_TILES]
    is_encoded, same = False, matrices[UP, ENCODE] == matrices[GATE, ENCODE]
    first, end = take(counter, workers, count)
    while first < count:
        if not is_encoded:
            encode(matrices[GATE], num_rows, rows, encoded)
        multiply(matrices[GATE], num_rows, encoded, gates, 0, first * UNIT, end * UNIT)
        if not same:
            encode(matrices[UP], num_rows, rows, encoded)
        multiply(matrices[UP], num_rows, encoded, ups, 0, first * UNIT, end * UNIT)
        is_encoded = same
        for row in range(num_rows):
            gates_address, ups_address = gates[row].ctypes.data, ups[row].ctypes.data
            for offset in range(4 * UNIT * first, 4 * UNIT * end, 4 * LANES):
                gate(gates_address + offset, ups_address + offset, gates_address + offset)
        first, end = take(counter, workers, count)


@compiled
def compute_logits(reader, part, rows, start, worker, counter, workers):
    """Write logits of normed rows, by a part of the head, and note the largest (see `Reader`)."""
    head, encoded, num_rows = reader.model.head, reader.encoded[worker], rows.shape[0]
    matrix, column = head[part], part * head[0, NUM_TILES] * UNIT
    encode(matrix, num_rows, rows, encoded)
    if part == 0:
        reader.largest[worker, :num_rows], reader.best[worker, :num_rows] = -np.inf, 0
    count = matrix[NUM_TILES]
    first, end = take(counter, workers, count)
    while first < count:
        multiply(matrix, num_rows, encoded, reader.logits[start:], column, first * UNIT, end * UNIT)
        first_token, end_token = column + first * UNIT, min(column + end * UNIT, reader.vocabulary)
        for row in range(num_rows):  # while they are in cache
            if first_token < end_token:
                largest, token = largest_of(reader.logits[start + row, first_token:end_token])
                # of equal ones the first: what a worker takes ascends
                if largest > reader.largest[worker, row] or largest != largest:
                    reader.largest[worker, row] = largest
                    reader.best[worker, row] = first_token + token
        first, end = take(counter, workers, count)


@compiled
def keep_hidden_states(reader, layer, rows, x, worker):
    """Copy `x`, the rows after `layer` layers (-1: normed), where `state_layers` asks for it."""
    for state in range(reader.state_layers.shape[0]):
        if worker == 0 and reader.state_layers[state] == layer:
            for row in range(rows):
                copy(x[row], reader.hidden[state, row])


@compiled
def project(matrix, rows, results):
    """Write the products of float32 `rows` by one matrix to `results`, in the calling thread."""
    encoded = np.empty(rows.shape[0] * matrix[ROW_BYTES], np.uint8)
    encode(matrix, rows.shape[0], rows, encoded)
    multiply(matrix, rows.shape[0], encoded, results, 0, 0, results.shape[1])
