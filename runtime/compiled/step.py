"""A whole step, from drafting to the commit, in one function that each worker thread calls."""

import numpy as np

from sequoia_plan.models.packed.forward import (
    FIRST,
    NUM_TILES,
    UNIT,
    copy,
    encode,
    forward,
    multiply,
)
from sequoia_plan.models.packed.packed_pass import move_slots
from sequoia_plan.models.packed.records import compiled
from sequoia_plan.models.packed.workers import take, wait
from sequoia_plan.runtime.compiled.draft import draft, embed, fill_node_rows
from sequoia_plan.runtime.compiled.memory import (
    DRAFT,
    GREEDY,
    SEQUOIA,
    TARGET,
    VERIFY,
    are_finite,
    note_time,
)
from sequoia_plan.runtime.compiled.verify import draw_bonus, verify_greedily, walk_down, walk_up
from sequoia_plan.runtime.sequence import DRAFT_NOT_FINITE, TARGET_NOT_FINITE


@compiled
def look_up(tokens, length, max_match, chain):
    """As `runtime.lookup`, write what followed the match to `chain`; returns the match's length."""
    longest, best = -1, 0  # `length` is the slot of the last token
    for slot in range(length):
        matched = 0
        while (
            matched < min(max_match, slot + 1)
            and tokens[slot - matched] == tokens[length - matched]
        ):
            matched += 1
        if matched >= longest:
            longest, best = matched, slot
    for offset in range(chain.size):  # what followed is repeated where the text ends
        chain[offset] = tokens[best + 1 + offset % max(length - best, 1)]
    return max(longest, 0)


@compiled
def commit(step, tree, path, count, bonus):
    """Commit the first `count` nodes of `path` and the bonus token; sets `step.output`."""
    length, depth = step.length[0], path.size
    slots = np.empty(count, np.int64)
    for level in range(count):
        slots[level] = length + path[level]
    move_slots(step.target.keys, step.target.values, slots, length)
    if tree.passes.shape[0] and not step.eagle.fc.size:
        move_slots(step.draft.keys, step.draft.values, slots, length)
    step.output[0] = count
    for level in range(count):
        token = step.tokens[slots[level + 1]] if level + 1 < count else bonus
        step.output[1 + level], step.output[1 + depth + level] = path[level], token
        step.tokens[length + 1 + level] = token  # the tokens still to be read lie behind
    step.length[0] = length + count


@compiled
def note_features(worker, counter, workers, step, path, count, slot):
    """Write `fc` times the target's hidden states of `path[:count]` to features from `slot` on."""
    eagle, hidden = step.eagle, step.target.hidden
    rows, encoded = eagle.rows[worker], eagle.encoded[worker]
    width = step.target.model.norms.shape[2]
    for level in range(count):  # each worker copies and encodes all rows, and multiplies some tiles
        for state in range(hidden.shape[0]):
            copy(hidden[state, path[level]], rows[level, state * width : (state + 1) * width])
    encode(eagle.fc, count, rows, encoded)
    num_tiles = eagle.fc[NUM_TILES]
    tile, end_tile = take(counter, workers, num_tiles)
    while tile < num_tiles:
        first, end = tile * UNIT, end_tile * UNIT
        multiply(eagle.fc, count, encoded, eagle.products, 0, first, end)
        end = min(end, eagle.features.shape[1])
        for level in range(count):
            copy(eagle.products[level, first:], eagle.features[slot + level, first:end])
        tile, end_tile = take(counter, workers, num_tiles)


@compiled
def decode(
    worker, workers, counter, step, tree, settings, rule, max_match, num_unread, parts
):  # fmt: skip
    """One worker's part of a step; `step.output` has the numbers of `TreeStep.commit` afterwards.

    `settings`: temperature, the draft's, top_p, min_p (float32), top_k. `parts`: `DRAFT`, `TARGET`
    and `VERIFY`, as bits. `step.times` has the time at the begin, after each draft pass with its
    draws, after the target's pass, and at the end.
    """
    length, size, path = step.length[0], tree.parents.size, step.path[: tree.depth]
    target, drafted_finite, num_passes = step.target, True, tree.passes.shape[0]
    rounds = FIRST + 1
    if parts != VERIFY:  # then a worker that begins late could write over committed tokens
        note_time(worker, step, 0)
        for node in range(1, size):
            if tree.looked_up[node]:
                step.tokens[length + node] = step.chain[tree.levels[node] - 1]
    if parts & DRAFT:
        rounds, drafted_finite = draft(
            worker, workers, counter, rounds, step, tree, num_unread, rule == GREEDY, settings[1]
        )  # fmt: skip
    if parts & TARGET:
        fill_node_rows(step, tree, target, np.arange(size), FIRST)
        embed(step.embedding, target, size, worker)
        rounds = forward(
            worker, workers, counter, rounds, target, size, FIRST, size,
            FIRST, target.model.matrices.shape[0] + target.model.head.shape[0],
        )  # fmt: skip
        note_time(worker, step, num_passes + 1)
    if not parts & VERIFY:
        if worker == 0:
            step.output[0] = drafted_finite
        return
    if not (drafted_finite and are_finite(target, size)):
        step.output[0] = DRAFT_NOT_FINITE if are_finite(target, size) else TARGET_NOT_FINITE
        return
    if worker == 0:
        if rule == GREEDY:
            count, bonus = verify_greedily(step, tree, path)
        else:
            if rule == SEQUOIA:
                end = walk_down(step, tree, step.uniforms[0], settings)
            else:
                end = walk_up(step, tree, step.uniforms[0], settings)
            bonus = draw_bonus(step, tree, end, settings)
            count, node = tree.levels[end] + 1, end
            while node >= 0:
                path[tree.levels[node]] = node
                node = tree.parents[node]
        commit(step, tree, path, count, bonus)
        if max_match:
            step.output[1 + 2 * tree.depth] = look_up(
                step.tokens, step.length[0], max_match, step.chain
            )
    if step.eagle.fc.size:
        wait(counter, workers, rounds)
        note_features(worker, counter, workers, step, path, step.output[0], length + 1)
    note_time(worker, step, num_passes + 2)
