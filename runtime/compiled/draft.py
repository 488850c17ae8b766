"""Drafting in a compiled step: its passes, and the draws of children (see `draft.drafter`)."""

import numpy as np

from sequoia_plan.models.packed.forward import FIRST, copy, forward, normalise
from sequoia_plan.models.packed.largest import BLOCK as SUM_BLOCK
from sequoia_plan.models.packed.largest import maximum
from sequoia_plan.models.packed.records import compiled
from sequoia_plan.models.packed.tiles import read_row
from sequoia_plan.models.packed.workers import wait
from sequoia_plan.runtime.compiled.memory import are_finite, largest_in, note_time
from sequoia_plan.runtime.compiled.vocabulary_loops import draw_from, top_of_row, weigh


@compiled
def see(reader, row, first, end):
    """Let a row see the slots from `first` to `end`."""
    for slot in range(reader.visible.shape[1]):
        reader.visible[row, slot] = first <= slot < end
    reader.spans[row, 0], reader.spans[row, 1] = first, end


@compiled
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
        reader.positions[row] = min(max(slot - hides_first, 0), reader.last[1])
        if hides_first:
            see(reader, row, min(read, 1), read + 1)
        else:
            see(reader, row, 0, slot + 1)


@compiled
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


@compiled
def embed(embedding, reader, rows, worker):
    """Put the embeddings of the rows' tokens into a worker's residual stream."""
    for row in range(rows):
        place = reader.x[worker, row, : reader.model.norms.shape[2]]
        read_row(embedding, min(reader.tokens[row], reader.last[0]), place)


@compiled
def put_features(worker, workers, counter, rounds, step, rows, previous, first_output):
    """Prepare an EAGLE-3 pass: embeddings and features side by side, and the residual stream.

    Features are those of committed tokens, or `previous`: of nodes, the rows of their parents'
    outputs from `first_output` on.
    """
    eagle, reader = step.eagle, step.draft
    width, x, epsilon = eagle.norms.shape[1], reader.x[worker], reader.model.epsilon
    own = reader.normed[worker, 0, :width]
    for row in range(rows):
        if first_output < 0:
            copy(eagle.features[reader.read_slots[row]], x[row, :width])
        else:
            copy(reader.hidden[0, first_output + previous[row]], x[row, :width])
        if row % workers == worker:
            read_row(step.draft_embedding, min(reader.tokens[row], reader.last[0]), own)
            normalise(own, eagle.norms[0], epsilon, reader.attended_first[row])
            normalise(x[row], eagle.norms[1], epsilon, reader.attended_first[row, width:])
    rounds = wait(counter, workers, rounds)
    if eagle.residual_is_normed:
        for row in range(rows):
            copy(reader.attended_first[row, width:], x[row, :width])
    return rounds


@compiled
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
        if not weigh(logits, largest, np.float32(-np.inf), temperature, sums) > 0:
            # the draft had no other token: each is as likely
            logits[:] = FIRST
            sums[:] = FIRST
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


@compiled
def draft(worker, workers, counter, rounds, step, tree, num_unread, is_greedy, temperature):
    """Draft the tree; returns the rounds after it, and whether all logits were finite."""
    reader, eagle, finite = step.draft, step.eagle, True
    is_eagle, num_read = eagle.fc.size > 0, FIRST
    hides_first, first_output, previous = np.int64(is_eagle), FIRST - 1, tree.inner
    for number in range(tree.passes.shape[0]):
        start, count, num_draws, rows = tree.passes[number]
        parents = tree.inner[start : start + count]
        if number == 0:
            rows = max(rows, num_unread + 1)
            place_committed(step, reader, rows, hides_first)
        else:
            place_nodes(step, tree, reader, parents, hides_first)
        if is_eagle:
            if number:  # the rows of parents among the outputs of the pass before
                previous = np.empty(count, np.int64)
                for row in range(count):
                    previous[row] = (
                        tree.inner_index[tree.parents[parents[row]]] - tree.passes[number - 1, 0]
                    )
                first_output = num_read - tree.passes[number - 1, 1]
            rounds = put_features(
                worker, workers, counter, rounds, step, rows, previous, first_output
            )  # fmt: skip
        else:
            embed(step.draft_embedding, reader, rows, worker)
        rounds = forward(
            worker, workers, counter, rounds, reader, rows, start, count,
            FIRST, reader.model.matrices.shape[0] + reader.model.head.shape[0],
        )  # fmt: skip
        num_read, finite = rows, finite and are_finite(reader, count)
        for row in range(worker, count, workers):
            draw(worker, step, tree, start + row, row, num_draws, is_greedy, temperature)
        rounds = wait(counter, workers, rounds)
        note_time(worker, step, number + 1)
    return rounds, finite
