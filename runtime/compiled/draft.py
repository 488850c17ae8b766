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
    """Let a row attend to the slots from `first` to `end` - 1, and to no others."""
    for slot in range(reader.visible.shape[1]):
        reader.visible[row, slot] = first <= slot < end
    reader.spans[row, 0], reader.spans[row, 1] = first, end


@compiled
def fill_committed_rows(step, reader, count, hides_first):
    """Fill a pass's rows with the last `count` committed tokens; each sees those up to itself.

    Rows before the text have its first token, in slots that no row sees. With `hides_first`, later
    rows do not see the first token either: a draft that reads features has none of it.
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
def fill_node_rows(step, tree, reader, nodes, hides_first):
    """Fill a pass's rows with these nodes; each sees committed tokens and its own path."""
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
    """Write the embeddings of the rows' tokens to a worker's own copy of the residual stream."""
    for row in range(rows):
        hidden = reader.x[worker, row, : reader.model.norms.shape[2]]
        read_row(embedding, min(reader.tokens[row], reader.last[0]), hidden)


@compiled
def fill_eagle_inputs(worker, workers, counter, rounds, step, rows, parent_rows, first_output):
    """Write what an EAGLE-3 pass reads: normed embeddings and features, and the residual stream.

    The first pass (`first_output` < 0) reads recorded features. Later, row i's feature is its
    parent's output in the pass before, `reader.hidden[0, first_output + parent_rows[i]]`.
    """
    eagle, reader = step.eagle, step.draft
    width, x, epsilon = eagle.norms.shape[1], reader.x[worker], reader.model.epsilon
    embedding = reader.normed[worker, 0, :width]
    for row in range(rows):
        if first_output < 0:
            copy(eagle.features[reader.read_slots[row]], x[row, :width])
        else:
            copy(reader.hidden[0, first_output + parent_rows[row]], x[row, :width])
        if row % workers == worker:
            read_row(step.draft_embedding, min(reader.tokens[row], reader.last[0]), embedding)
            normalise(embedding, eagle.norms[0], epsilon, reader.attended_first[row])
            normalise(x[row], eagle.norms[1], epsilon, reader.attended_first[row, width:])
    rounds = wait(counter, workers, rounds)
    if eagle.residual_is_normed:
        for row in range(rows):
            copy(reader.attended_first[row, width:], x[row, :width])
    return rounds


@compiled
def draw(worker, step, tree, inner_row, pass_row, num_draws, is_greedy, temperature):
    """Draw the children of an inner node from its logits, and write their tokens.

    The node is `tree.inner[inner_row]`, and row `pass_row` of the pass that made the logits, which
    weights replace, in proportion to probabilities. Each node has random numbers for `num_draws`
    draws. A child that is looked up is not drawn, and the others are drawn without its token.
    """
    node = tree.inner[inner_row]
    child, reader, left_out = tree.first_child[node], step.draft, np.int64(-1)
    logits = reader.logits[inner_row, : reader.vocabulary]
    largest = largest_in(reader, pass_row)
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
            number = 2 * tree.branching * inner_row + rank
            high, low = step.bits[number], step.bits[number + num_draws]
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
    """Draft the tree; returns the barrier's rounds so far, and whether all logits were finite."""
    reader, eagle, finite = step.draft, step.eagle, True
    is_eagle, num_read = eagle.fc.size > 0, FIRST
    hides_first, first_output, parent_rows = np.int64(is_eagle), FIRST - 1, tree.inner
    for number in range(tree.passes.shape[0]):
        start, count, num_draws, rows = tree.passes[number]
        nodes = tree.inner[start : start + count]
        if number == 0:
            rows = max(rows, num_unread + 1)
            fill_committed_rows(step, reader, rows, hides_first)
        else:
            fill_node_rows(step, tree, reader, nodes, hides_first)
        if is_eagle:
            if number:
                start_before, count_before = tree.passes[number - 1, 0], tree.passes[number - 1, 1]
                parent_rows = np.empty(count, np.int64)
                for row in range(count):
                    parent_rows[row] = tree.inner_index[tree.parents[nodes[row]]] - start_before
                first_output = num_read - count_before  # nodes with children were read last
            rounds = fill_eagle_inputs(
                worker, workers, counter, rounds, step, rows, parent_rows, first_output
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
