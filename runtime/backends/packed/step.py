"""A whole step, from drafting to the commit, in one function that each worker thread calls.

It follows the rules of `draft.drafter` and `verify`, and reads logits only where a path goes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from sequoia_plan.runtime.backends.packed.forward import (
    UNIT,
    Inputs,
    Outputs,
    encode,
    forward,
    multiply,
    normalise,
    share,
    wait,
)
from sequoia_plan.runtime.backends.packed.packed_pass import move_slots
from sequoia_plan.runtime.backends.packed.tiles import read_row
from sequoia_plan.runtime.base.vocabulary_loops import BLOCK as SUM_BLOCK
from sequoia_plan.runtime.base.vocabulary_loops import (
    draw_from,
    maximum,
    probs_of_row,
    residual_mass,
    sum_blocks,
    top_of_row,
    weigh,
)

COMPILED = {"nogil": True, "cache": True, "error_model": "numpy"}
GREEDY, SEQUOIA, TRAVERSAL = range(3)
C, E, PROB, SCALE, UNCOVERED = range(5)
"""The columns of `Step.residuals`: of R = max(p - c w - e, 0), a, 1 / mass of R, and p not in D."""
TARGET_NOT_FINITE, DRAFT_NOT_FINITE = -1, -2
LARGEST = 3e38


class Reader(NamedTuple):
    """A model, and the memory of its passes in a step (see `forward`).

    `visible` bool [rows, slots]; `logits` float32 [rows of a step, outputs]; `hidden` float32
    [states, rows, width]; `last` int64 [2]: its last token and position.
    """

    model: Any
    embedding: Any
    x: Any
    scratch: Any
    rotary: Any
    keys: Any
    values: Any
    tokens: Any
    read_slots: Any
    positions: Any
    slots: Any
    visible: Any
    spans: Any
    logits: Any
    largest: Any
    best: Any
    hidden: Any
    layers: Any
    vocabulary: Any
    last: Any


class Eagle(NamedTuple):
    """What an EAGLE-3 draft has beside its layer; `fc` int64 [0] if the draft is none.

    `first` float32 [rows, inputs of the layer]; `features` float32 [slots, width]: of the token
    before each slot; `norms` float32 [2, width]: of embeddings and features; `fused` float32
    [workers, nodes of a path, inputs of `fc`], `encoded` and `products`: of `fuse`.
    """

    fc: Any
    norms: Any
    first: Any
    features: Any
    fused: Any
    encoded: Any
    products: Any
    state_width: Any
    num_features: Any
    residual_is_normed: Any


class Tree(NamedTuple):
    """A tree's structure, int64 [nodes] each; `parents[0]` is -1.

    `looked_up`: 1 where a node's token is; `rows`: of an inner node, its place among these;
    `inner`: the inner nodes in order; `passes` int64 [passes, 4]: the first of the pass's parents
    in `inner`, how many, draws of each, and tokens that the pass reads.
    """

    parents: Any
    levels: Any
    first_child: Any
    num_children: Any
    looked_up: Any
    rows: Any
    inner: Any
    passes: Any
    depth: Any
    branching: Any


class Step(NamedTuple):
    """All that steps of a decoder read and write. Memory is as `SequenceState` has it.

    `own_tokens` int64 [nodes]: of drawn nodes, their number in the draft's vocabulary; `masses`
    float64 [nodes]: the weight of what was not drawn before a node; `sums`, `memory`: each worker's
    own; `probs` float32 [nodes, vocabulary]; `t2d` int64 [vocabulary], -1 for tokens that the draft
    lacks, `d2t` int64 [draft vocabulary]: both [0] if the vocabularies are the same; `output` int64
    [2 + 2 * nodes]: a step's numbers, as `TreeStep.commit` returns them.
    """

    target: Any
    draft: Any
    eagle: Any
    tokens: Any
    length: Any
    chain: Any
    bits: Any
    uniforms: Any
    path: Any
    own_tokens: Any
    masses: Any
    residuals: Any
    sums: Any
    memory: Any
    probs: Any
    t2d: Any
    d2t: Any
    output: Any


@njit(**COMPILED)
def see(reader, row, first, end):
    """Let a row see the slots from `first` to `end`."""
    reader.visible[row] = False
    reader.visible[row, first:end] = True
    reader.spans[row, 0], reader.spans[row, 1] = first, end


@njit(**COMPILED)
def place_committed(step, reader, count, hides_first):
    """Let a pass read the last `count` committed tokens, the root last; rows see those before.

    Short texts have fewer tokens: the first stands for them, in slots that no row sees. A draft
    that reads features has none of that one, and hides it from others.
    """
    length = step.length[0]
    for row in range(count):
        slot = length - count + 1 + row
        read = max(slot, 0)
        reader.tokens[row], reader.read_slots[row] = step.tokens[read], read
        reader.slots[row] = slot if slot >= 0 else length - slot
        reader.positions[row] = max(slot - hides_first, 0)
        if hides_first:
            see(reader, row, min(read, 1), read + 1)
        else:
            see(reader, row, 0, slot + 1)


@njit(**COMPILED)
def place_nodes(step, tree, reader, nodes, hides_first):
    """Let a pass read nodes, each of which sees committed tokens and its path."""
    length = step.length[0]
    for row in range(nodes.size):
        node = nodes[row]
        slot = length + node
        reader.tokens[row], reader.read_slots[row] = step.tokens[slot], slot
        reader.slots[row] = slot
        reader.positions[row] = min(length + tree.levels[node] - hides_first, reader.last[1])
        see(reader, row, hides_first, length)
        reader.spans[row, 1] = slot + 1
        while node >= 0:
            reader.visible[row, length + node] = length + node >= hides_first
            node = tree.parents[node]


@njit(**COMPILED)
def run_pass(
    worker, workers, counter, rounds, reader, first, rows, start, kept, first_layer, end_layer
):  # fmt: skip
    """One pass over the placed rows, or the part of it from one layer to another.

    The logits of the last `kept` rows go to those from `start` on.
    """
    inputs = Inputs(
        reader.x, first, reader.positions[:rows], reader.slots[:rows], reader.visible,
        reader.spans, reader.rotary, reader.keys, reader.values,
    )  # fmt: skip
    end = start + kept
    outputs = Outputs(
        reader.logits[start:end], reader.hidden, reader.layers, reader.largest, reader.best,
        reader.vocabulary,
    )  # fmt: skip
    rounds = forward(
        worker, workers, counter, rounds, reader.model, inputs, reader.scratch, outputs,
        first_layer, end_layer,
    )  # fmt: skip
    return wait(counter, workers, rounds)


@njit(**COMPILED)
def embed(reader, row, result):
    """The embedding of the token of a row."""
    read_row(reader.embedding, min(reader.tokens[row], reader.last[0]), result)


@njit(**COMPILED)
def put_features(worker, workers, counter, rounds, step, rows, previous, first_output):
    """Prepare an EAGLE-3 pass: embeddings and features side by side, and the residual stream.

    Features are those of committed tokens, or `previous`: of nodes, the rows of their parents'
    outputs from `first_output` on.
    """
    eagle, reader = step.eagle, step.draft
    width, x, epsilon = eagle.norms.shape[1], reader.x[worker], reader.model.epsilon
    own = reader.scratch.normed[worker, 0, :width]
    for row in range(rows):
        if first_output < 0:
            x[row, :width] = eagle.features[reader.read_slots[row]]
        else:
            x[row, :width] = reader.hidden[0, first_output + previous[row], :width]
        if row % workers == worker:
            embed(reader, row, own)
            normalise(own, eagle.norms[0], epsilon, eagle.first[row])
            normalise(x[row], eagle.norms[1], epsilon, eagle.first[row, width:])
    rounds = wait(counter, workers, rounds)
    if eagle.residual_is_normed:
        for row in range(rows):
            x[row, :width] = eagle.first[row, width : 2 * width]
    return rounds


@njit(**COMPILED)
def largest_in(reader, row):
    """A row's largest logit; NaN if one is NaN."""
    largest = reader.largest[0, row]
    for worker in range(1, reader.largest.shape[0]):
        other = reader.largest[worker, row]
        if other > largest or other != other:
            largest = other
    return largest


@njit(**COMPILED)
def are_finite(reader, count):
    """Are the logits of so many rows of the last pass finite?"""
    num_finite = 0
    for row in range(count):
        num_finite += np.isfinite(largest_in(reader, row))
    return num_finite == count


@njit(**COMPILED)
def draw(worker, step, tree, row, kept_row, num_draws, is_greedy, temperature):
    """Draw the children of an inner node from its logits, and write their tokens.

    Afterwards weights are in place of logits, in proportion to probabilities. `num_draws`: draws
    that the random numbers of the node are for. A child that is looked up is not drawn: the others
    are drawn without its token.
    """
    node = tree.inner[row]
    child, reader, left_out = tree.first_child[node], step.draft, np.int64(-1)
    logits = reader.logits[row, : reader.vocabulary]
    largest = largest_in(reader, kept_row)
    is_looked_up = tree.looked_up[child]
    if is_looked_up:
        step.own_tokens[child] = -1
        left_out = step.tokens[step.length[0] + child]
        if step.t2d.size:
            left_out = step.t2d[left_out]
        if 0 <= left_out < logits.size:
            logits[left_out] = -np.inf
            largest = maximum(logits)
    count = tree.num_children[node] - is_looked_up
    # where the draft leaves too few tokens, the one that is looked up may be drawn, too
    drawn = np.empty(min(count + is_looked_up, logits.size), np.int64)
    masses = np.zeros(drawn.size)
    if is_greedy:
        top_of_row(logits, drawn, np.empty(drawn.size, np.float32))
    else:
        sums = step.sums[worker, : -(-logits.size // SUM_BLOCK)]
        weigh(logits, largest, np.float32(-np.inf), temperature, sums)
        uniforms = np.empty(drawn.size)
        for rank in range(drawn.size):
            place = 2 * tree.branching * row + rank
            high, low = step.bits[place], step.bits[place + num_draws]
            uniforms[rank] = (high + low / 2.0**31) / 2.0**31
        draw_from(logits, uniforms, sums, drawn, masses)
    child += is_looked_up
    end = child + count
    for rank in range(drawn.size):
        token = drawn[rank]
        if token == left_out or child == end:
            continue
        step.own_tokens[child], step.masses[child] = token, masses[rank]
        if step.d2t.size:
            token = step.d2t[token]
        step.tokens[step.length[0] + child] = token
        child += 1


@njit(**COMPILED)
def draft(worker, workers, counter, rounds, step, tree, is_greedy, temperature):
    """Draft the tree; returns the rounds after it, and whether all logits were finite."""
    reader, eagle, finite = step.draft, step.eagle, True
    is_eagle = eagle.fc.size > 0
    hides_first, first_output, previous = np.int64(is_eagle), -1, tree.inner
    no_first = eagle.first if is_eagle else eagle.first[:0]
    for number in range(tree.passes.shape[0]):
        start, count, num_draws, rows = tree.passes[number]
        parents = tree.inner[start : start + count]
        if number == 0:
            place_committed(step, reader, rows, hides_first)
        else:
            place_nodes(step, tree, reader, parents, hides_first)
        if is_eagle:
            if number:  # the rows of parents among the outputs of the pass before
                previous = np.empty(count, np.int64)
                for row in range(count):
                    previous[row] = (
                        tree.rows[tree.parents[parents[row]]] - tree.passes[number - 1, 0]
                    )
                first_output = tree.passes[number - 1, 3] - tree.passes[number - 1, 1]
            rounds = put_features(
                worker, workers, counter, rounds, step, rows, previous, first_output
            )  # fmt: skip
        else:
            for row in range(rows):
                embed(reader, row, reader.x[worker, row, : reader.model.norms.shape[2]])
        rounds = run_pass(
            worker, workers, counter, rounds, reader, no_first, rows, start, count,
            0, reader.model.matrices.shape[0] + 1,
        )  # fmt: skip
        finite = finite and are_finite(reader, count)
        for row in range(worker, count, workers):
            draw(worker, step, tree, start + row, row, num_draws, is_greedy, temperature)
        rounds = wait(counter, workers, rounds)
    return rounds, finite


@njit(**COMPILED)
def verify_greedily(step, tree, path):
    """The path of the target's most probable tokens, its length, and the token after it."""
    reader, node, count = step.target, 0, 1
    while True:
        largest, choice = -np.inf, np.int64(0)
        for worker in range(reader.largest.shape[0]):
            if reader.largest[worker, node] > largest:
                largest, choice = reader.largest[worker, node], reader.best[worker, node]
        accepted = -1
        for child in range(
            tree.first_child[node], tree.first_child[node] + tree.num_children[node]
        ):
            if step.tokens[step.length[0] + child] == choice:
                accepted = child
                break
        if accepted < 0:
            return count, choice
        path[count] = node = accepted
        count += 1


@njit(**COMPILED)
def begin(step, tree, node, prob, settings, top_k):
    """Compute a node's target probabilities; R is then these and a is `prob`."""
    reader, p = step.target, step.probs[node]
    p[:] = reader.logits[node, : p.size]
    temperature, _, top_p, min_p = settings
    sums, memory = step.sums[0, : -(-p.size // SUM_BLOCK)], step.memory[0]
    probs_of_row(p, largest_in(reader, node), temperature, top_k, top_p, min_p, sums, memory)
    sum_blocks(p, sums)
    total, state = sums.sum(), step.residuals[node]
    state[C], state[E], state[PROB], state[SCALE], state[UNCOVERED] = 0, 0, prob, prob / total, 0
    child = tree.first_child[node]
    if tree.num_children[node] and tree.looked_up[child]:
        token = step.tokens[step.length[0] + child]
        step.masses[child] = p[token]
        total -= p[token]
        p[token] = 0
    if step.d2t.size and tree.num_children[node]:
        covered = 0.0
        for token in step.d2t:
            covered += p[token]
        state[UNCOVERED] = max(total - covered, 0.0)


@njit(**COMPILED)
def child_terms(step, tree, node, child):
    """Of a drawn child: its weight, 1 / D at it, and what its rejection adds to c and e."""
    weight, mass = 0.0, step.masses[child]
    own = step.own_tokens[child]
    weight = np.float64(step.draft.logits[tree.rows[node], own])
    if mass > 0:
        return weight, mass / weight if weight > 0 else 0.0, 1 / mass, 0.0
    first = tree.first_child[node]
    num_undrawn = step.draft.vocabulary - (child - first)  # each is as likely
    if tree.looked_up[first] and step.t2d.size:
        num_undrawn += step.t2d[step.tokens[step.length[0] + first]] < 0
    return weight, np.float64(num_undrawn), 0.0, 1.0 / num_undrawn


@njit(**COMPILED)
def accept_prob(step, tree, node, child):
    """min(1, a R[s] / D[s])."""
    state = step.residuals[node]
    if tree.looked_up[child]:
        return min(step.masses[child] * state[SCALE], 1.0)
    weight, inverse, _, _ = child_terms(step, tree, node, child)
    p = step.probs[node, step.tokens[step.length[0] + child]]
    return min(max((p - state[C] * weight - state[E]) * state[SCALE] * inverse, 0.0), 1.0)


@njit(**COMPILED)
def residual_sum(step, tree, node):
    """The mass of R on the draft's vocabulary."""
    p, state, row = step.probs[node], step.residuals[node], tree.rows[node]
    c, e = np.float32(state[C]), np.float32(state[E])
    has_weights = row < num_drafted(tree)
    if not step.d2t.size:
        weights = step.draft.logits[row, : p.size] if has_weights else p
        return residual_mass(p, weights, c if has_weights else np.float32(0), e)
    total = 0.0
    for own in range(step.d2t.size):
        weight = step.draft.logits[row, own] if has_weights else np.float32(0)
        total += max(p[step.d2t[own]] - c * weight - e, np.float32(0))
    return total


@njit(**COMPILED)
def num_drafted(tree):
    """Inner nodes that a draft pass reads: the first ones."""
    if not tree.passes.shape[0]:
        return 0
    return tree.passes[-1, 0] + tree.passes[-1, 1]


@njit(**COMPILED)
def reject(step, tree, node, child):
    """r = max(a R - D, 0);  S = sum(r);  R = r / S;  a = S / (S + 1 - a) (see `Residual`)."""
    state = step.residuals[node]
    if not tree.looked_up[child]:
        _, _, factor, uniform = child_terms(step, tree, node, child)
        scale = max(state[SCALE], 1e-37)
        state[C] = min(state[C] + factor / scale, LARGEST)
        state[E] = min(state[E] + uniform / scale, LARGEST)
    mass = (residual_sum(step, tree, node) + state[UNCOVERED]) * state[SCALE]
    total = max(1 - state[PROB] + mass, 1e-37)
    state[PROB] = mass / total
    state[SCALE] = min(state[SCALE] / total, LARGEST)


@njit(**COMPILED)
def walk_down(step, tree, uniform, settings, top_k):
    """The end of the path by `verify.residual.sequoia`: accept or reject from the root down."""
    node = 0
    while True:
        begin(step, tree, node, 1.0, settings, top_k)
        accepted, first = -1, tree.first_child[node]
        for child in range(first, first + tree.num_children[node]):
            prob = accept_prob(step, tree, node, child)
            if uniform < prob:
                accepted, uniform = child, uniform / prob
                break
            uniform = (uniform - prob) / (1 - prob)
            reject(step, tree, node, child)
        if accepted < 0:
            return node
        node = accepted


@njit(**COMPILED)
def walk_up(step, tree, uniform, settings, top_k):
    """The end of the path by `verify.traversal`: children before their parent, in draw order."""
    next_child = tree.first_child.copy()
    node = 0
    begin(step, tree, node, 1.0, settings, top_k)
    while True:
        child = next_child[node]
        if child < tree.first_child[node] + tree.num_children[node]:
            next_child[node] += 1
            prob = accept_prob(step, tree, node, child)
            if prob > 0:
                if tree.num_children[child]:
                    begin(step, tree, child, prob, settings, top_k)
                else:
                    step.residuals[child, PROB] = prob
                node = child
            else:  # nothing below it is accepted
                reject(step, tree, node, child)
            continue
        prob = step.residuals[node, PROB]
        if uniform < prob or node == 0:
            return node
        uniform = (uniform - prob) / (1 - prob)
        child, node = node, tree.parents[node]
        reject(step, tree, node, child)


@njit(**COMPILED)
def draw_bonus(step, tree, end, settings, top_k):
    """The token after the path: from R after the rejection of all children of its end."""
    if not tree.num_children[end]:
        begin(step, tree, end, 1.0, settings, top_k)
    p, rest = step.probs[end], step.memory[0]
    rest[:] = p
    if tree.num_children[end]:
        state, row = step.residuals[end], tree.rows[end]
        c, e = np.float32(state[C]), np.float32(state[E])
        weights = step.draft.logits[row if row < num_drafted(tree) else 0]
        if row >= num_drafted(tree):
            c = np.float32(0)
        count = step.d2t.size if step.d2t.size else p.size
        for own in range(count):
            token = step.d2t[own] if step.d2t.size else own
            left = p[token] - e
            if c > 0:
                left -= c * weights[own]
            rest[token] = max(left, np.float32(0))
    sums = step.sums[0, : -(-p.size // SUM_BLOCK)]
    sum_blocks(rest, sums)
    if not sums.sum() > 0:  # only rounding leads here: a child was certain to be accepted
        rest[:] = p
        sum_blocks(rest, sums)
    token = np.empty(1, np.int64)
    draw_from(rest, step.uniforms[1:2], sums, token, np.empty(1))
    return token[0]


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
def decode(worker, workers, counter, step, tree, settings, rule, top_k, max_match):
    """One worker's part of a step; `step.output` has the numbers of `TreeStep.commit` afterwards.

    `settings` float32: temperature, the draft's, top_p, min_p.
    """
    size, target = tree.parents.size, step.target
    rounds, finite = prepare(worker, workers, counter, 1, step, tree, settings, rule)
    for row in range(size):
        embed(target, row, target.x[worker, row, : target.model.norms.shape[2]])
    rounds = run_pass(
        worker, workers, counter, rounds, target, step.eagle.first[:0], size, 0, size,
        0, target.model.matrices.shape[0] + 1,
    )  # fmt: skip
    finish(worker, workers, counter, rounds, step, tree, settings, rule, top_k, max_match, finite)


@njit(**COMPILED)
def prepare(worker, workers, counter, rounds, step, tree, settings, rule):
    """Draft a tree, and place it for the target's pass; the rounds, and whether all was finite."""
    length, size = step.length[0], tree.parents.size
    for node in range(1, size):
        if tree.looked_up[node]:
            step.tokens[length + node] = step.chain[tree.levels[node] - 1]
    rounds, finite = draft(
        worker, workers, counter, rounds, step, tree, rule == GREEDY, settings[1]
    )  # fmt: skip
    place_nodes(step, tree, step.target, np.arange(size), 0)
    if worker == 0:
        step.output[0] = finite
    return rounds, finite


@njit(**COMPILED)
def finish(
    worker, workers, counter, rounds, step, tree, settings, rule, top_k, max_match, drafted_finite
):  # fmt: skip
    """Verify the tree, and commit a path."""
    length, size, path = step.length[0], tree.parents.size, step.path[: tree.depth]
    target = step.target
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
