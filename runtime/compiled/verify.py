"""Verification in a compiled step, by the rules of `verify`; rows are read where a path goes."""

import numpy as np

from sequoia_plan.models.packed.forward import FIRST, copy
from sequoia_plan.models.packed.largest import BLOCK as SUM_BLOCK
from sequoia_plan.models.packed.records import compiled
from sequoia_plan.runtime.compiled.memory import PROB, SCALE, C, E, largest_in
from sequoia_plan.runtime.compiled.vocabulary_loops import draw_from, probs_of_row, sum_blocks

LARGEST = 3e38
"""Nearly the largest float32."""


@compiled
def verify_greedily(step, tree, path):
    """Accept children that have the most probable token, into `path`; returns count and bonus."""
    reader, node, count = step.target, FIRST, 1
    while True:
        largest, choice = -np.inf, np.int64(0)
        for worker in range(reader.largest.shape[0]):
            logit, token = reader.largest[worker, node], reader.best[worker, node]
            if logit > largest or (logit == largest and token < choice):
                largest, choice = logit, token
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


@compiled
def begin_node(step, tree, node, prob, settings):
    """Compute the target's probabilities p after a node; its residual R is then p, and a `prob`."""
    reader, p = step.target, step.probs[node]
    copy(reader.logits[node], p)
    temperature, _, top_p, min_p, top_k = settings
    sums, scratch = step.sums[0, : -(-p.size // SUM_BLOCK)], step.scratch[0]
    probs_of_row(p, largest_in(reader, node), temperature, top_k, top_p, min_p, sums, scratch)
    sum_blocks(p, sums)
    state = step.residuals[node]
    state[C], state[E], state[PROB], state[SCALE] = 0, 0, prob, prob / sums.sum()
    child = tree.first_child[node]
    if tree.num_children[node] and tree.looked_up[child]:
        token = step.tokens[step.length[0] + child]
        step.masses[child], p[token] = p[token], 0


@compiled
def child_terms(step, tree, node, child):
    """Of a drawn child: its weight w, 1 / D at it, and what its rejection adds to c and e."""
    mass = step.masses[child]
    weight = np.float64(step.draft.logits[tree.inner_index[node], step.own_tokens[child]])
    if mass > 0:
        return weight, mass / weight if weight > 0 else 0.0, 1 / mass, 0.0
    first = tree.first_child[node]
    # the draft has no other token left: D is uniform over those not drawn
    num_undrawn = step.draft.vocabulary - (child - first)
    if tree.looked_up[first] and step.t2d.size:
        num_undrawn += step.t2d[step.tokens[step.length[0] + first]] < 0
    return weight, np.float64(num_undrawn), 0.0, 1.0 / num_undrawn


@compiled
def accept_prob(step, tree, node, child):
    """The probability to accept a child s: min(1, a R[s] / D[s]). One looked up has D[s] = 1."""
    state = step.residuals[node]
    if tree.looked_up[child]:
        return min(step.masses[child] * state[SCALE], 1.0)
    weight, inverse, _, _ = child_terms(step, tree, node, child)
    p = step.probs[node, step.tokens[step.length[0] + child]]
    return min(max((p - state[C] * weight - state[E]) * state[SCALE] * inverse, 0.0), 1.0)


@compiled
def residual(step, tree, node):
    """Write R = max(p - c w - e, 0) to `step.scratch[0]`; returns its sums by blocks of tokens."""
    p, rest, row = step.probs[node], step.scratch[0], tree.inner_index[node]
    state = step.residuals[node]
    copy(p, rest)
    num_drafted = tree.passes[-1, 0] + tree.passes[-1, 1] if tree.passes.shape[0] else 0
    # an inner node after the drafted ones has only a looked-up child: R is p
    if tree.num_children[node] and row < num_drafted:
        weights, c, e = step.draft.logits[row], np.float32(state[C]), np.float32(state[E])
        if step.d2t.size:
            for own in range(step.d2t.size):
                token = step.d2t[own]
                rest[token] = max(p[token] - c * weights[own] - e, np.float32(0))
        else:
            for token in range(p.size):
                rest[token] = max(p[token] - c * weights[token] - e, np.float32(0))
    sums = step.sums[0, : -(-p.size // SUM_BLOCK)]
    sum_blocks(rest, sums)
    return sums


@compiled
def reject(step, tree, node, child):
    """Reject a child: r = max(a R - D, 0);  S = sum(r);  R = r / S;  a = S / (S + 1 - a).

    R is the target's residual distribution at the node, D the draft's for this child, and a the
    probability to accept the node.
    """
    state = step.residuals[node]
    if not tree.looked_up[child]:
        _, _, factor, uniform = child_terms(step, tree, node, child)
        scale = max(state[SCALE], 1e-37)
        state[C] = min(state[C] + factor / scale, LARGEST)
        state[E] = min(state[E] + uniform / scale, LARGEST)
    mass = residual(step, tree, node).sum() * state[SCALE]
    total = max(1 - state[PROB] + mass, 1e-37)
    state[PROB] = mass / total
    state[SCALE] = min(state[SCALE] / total, LARGEST)


@compiled
def walk_down(step, tree, uniform, settings):
    """The node where the path ends by `verify.residual.sequoia`: a walk from the root down."""
    node = FIRST
    while True:
        begin_node(step, tree, node, 1.0, settings)
        accepted, first = FIRST - 1, tree.first_child[node]
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


@compiled
def walk_up(step, tree, uniform, settings):
    """The node where the path ends by `verify.traversal`: children before their parent."""
    next_child = tree.first_child.copy()
    node = FIRST
    begin_node(step, tree, node, 1.0, settings)
    while True:
        child = next_child[node]
        if child < tree.first_child[node] + tree.num_children[node]:
            next_child[node] += 1
            prob = accept_prob(step, tree, node, child)
            if prob > 0:
                if tree.num_children[child]:
                    begin_node(step, tree, child, prob, settings)
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


@compiled
def draw_bonus(step, tree, end, settings):
    """The token after the path, drawn from R after the rejection of all children of its end."""
    if not tree.num_children[end]:
        begin_node(step, tree, end, 1.0, settings)
    rest, sums = step.scratch[0], residual(step, tree, end)
    if not sums.sum() > 0:  # only rounding leads here: a child was certain to be accepted
        copy(step.probs[end], rest)
        sum_blocks(rest, sums)
    token = np.empty(1, np.int64)
    draw_from(rest, step.uniforms[1:2], sums, token, np.empty(1))
    return token[0]
