"""A whole step, from drafting to the commit, in one function that each worker thread calls."""

from __future__ import annotations

import numpy as np
from numba import njit

from sequoia_plan.runtime.backends.packed.forward import UNIT, encode, multiply, share, wait
from sequoia_plan.runtime.backends.packed.packed_pass import move_slots
from sequoia_plan.runtime.backends.packed.step_draft import draft, embed, place_nodes, run_pass
from sequoia_plan.runtime.backends.packed.step_memory import (
    COMPILED,
    DRAFT,
    GREEDY,
    SEQUOIA,
    TARGET,
    VERIFY,
    are_finite,
    note_time,
)
from sequoia_plan.runtime.backends.packed.step_verify import (
    draw_bonus,
    verify_greedily,
    walk_down,
    walk_up,
)

TARGET_NOT_FINITE, DRAFT_NOT_FINITE = -1, -2
"""A step's count of accepted nodes is one of these if that model's logits were not finite."""


@njit(**COMPILED)
def match(tokens, length, max_match, chain):
    """The length of the text's match; `chain` is then what followed it (see `base.lookup`)."""
    longest, best = -1, 0
    for slot in range(length):
        matched = 0
        while (
            matched < min(max_match, slot + 1)
            and tokens[slot - matched] == tokens[length - matched]
        ):
            matched += 1
        if matched >= longest:
            longest, best = matched, slot
    for place in range(chain.size):
        chain[place] = tokens[best + 1 + place % max(length - best, 1)]
    return max(longest, 0)


@njit(**COMPILED)
def commit(step, tree, path, count, bonus):
    """Commit the path to caches, tokens and length; the results are in `step.output`."""
    length, depth = step.length[0], path.size
    slots = length + path[:count]
    move_slots(step.target.keys, step.target.values, slots, length)
    if tree.passes.shape[0] and not step.eagle.fc.size:
        move_slots(step.draft.keys, step.draft.values, slots, length)
    step.output[0] = count
    for place in range(count):
        token = step.tokens[slots[place + 1]] if place + 1 < count else bonus
        step.output[1 + place], step.output[1 + depth + place] = path[place], token
    step.tokens[length + 1 : length + 1 + count] = step.output[1 + depth : 1 + depth + count]
    step.length[0] = length + count


@njit(**COMPILED)
def fuse(worker, workers, step, path, count, slot):
    """Record the features that the target's hidden states of the path make, from a slot on."""
    eagle, hidden = step.eagle, step.target.hidden
    rows, encoded = eagle.fused[worker], eagle.encoded[worker]
    width = eagle.state_width
    for place in range(count):
        for state in range(hidden.shape[0]):
            source = hidden[state, path[place], :width]
            rows[place, state * width : (state + 1) * width] = source
    encode(eagle.fc, count, rows, encoded)
    part = share(eagle.products.shape[1] // UNIT, worker, workers)
    first, end = part[0] * UNIT, part[1] * UNIT
    multiply(eagle.fc, count, encoded, eagle.products, 0, first, end)
    end = min(end, eagle.num_features)
    for place in range(count):
        eagle.features[slot + place, first:end] = eagle.products[place, first:end]


@njit(**COMPILED)
def decode(worker, workers, counter, step, tree, settings, rule, top_k, max_match, parts):
    """One worker's part of a step; `step.output` has the numbers of `TreeStep.commit` afterwards.

    `settings` float32: temperature, the draft's, top_p, min_p. `step.times` has the time when it
    began, after each draft pass with its draws, after the target's pass, and at the end.
    """
    length, size, path = step.length[0], tree.parents.size, step.path[: tree.depth]
    rounds, target, drafted_finite, num_passes = 1, step.target, True, tree.passes.shape[0]
    if parts != VERIFY:  # then a worker that begins late could write over committed tokens
        note_time(worker, step, 0)
        for node in range(1, size):
            if tree.looked_up[node]:
                step.tokens[length + node] = step.chain[tree.levels[node] - 1]
    if parts & DRAFT:
        rounds, drafted_finite = draft(
            worker, workers, counter, rounds, step, tree, rule == GREEDY, settings[1]
        )  # fmt: skip
    if parts & TARGET:
        place_nodes(step, tree, target, np.arange(size), 0)
        for row in range(size):
            embed(target, row, target.x[worker, row, : target.model.norms.shape[2]])
        rounds = run_pass(
            worker, workers, counter, rounds, target, step.eagle.first[:0], size, 0, size,
            0, target.model.matrices.shape[0] + target.model.head.shape[0],
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
                end = walk_down(step, tree, step.uniforms[0], settings, top_k)
            else:
                end = walk_up(step, tree, step.uniforms[0], settings, top_k)
            bonus = draw_bonus(step, tree, end, settings, top_k)
            count, node = tree.levels[end] + 1, end
            while node >= 0:
                path[tree.levels[node]] = node
                node = tree.parents[node]
        commit(step, tree, path, count, bonus)
        if max_match:
            step.output[1 + 2 * tree.depth] = match(
                step.tokens, step.length[0], max_match, step.chain
            )
    if step.eagle.fc.size:
        wait(counter, workers, rounds)
        fuse(worker, workers, step, path, step.output[0], length + 1)
    note_time(worker, step, num_passes + 2)
