"""Verification as Triton kernels: one program walks down the accepted path.

The kernels accept the same nodes as the tensor versions do from the same random numbers; those are
their oracle (tests/runtime/test_fused.py).

Probabilities are never stored. The weight of a token is its unnormalised probability: with a node's
logits x, it is exp((x - max_logit) / temperature) if the filters keep the token, else 0; `total` is
the sum of all weights. These three numbers of every node are found first, by programs that each
read one block of one node's logits. The residual after rejections is max(weight - c q - e, 0), as
in `residual.py`, with c and e in the same units.

Common arguments:
    logits: [size, vocabulary], the target's; within the helper functions, the row of one node.
    draft_probs: float [inner nodes, draft vocabulary]; within the helper functions, one row.
    drawn: int64 [inner nodes, branching], each node's children as indices into the draft's
        vocabulary, in draw order; within the helper functions, one row.
    row_of_node: int64 [size], each inner node's row in `draft_probs` and `drawn`.
    t2d: int64 [vocabulary], the draft's token for each of the target's, -1 for none.
    d2t: int64 [draft vocabulary], the target's token for each of the draft's. Both maps are read
        only if HAS_D2T.
    max_logits, totals: DTYPE [size], the largest logit and the sum of all weights of each node.
    thresholds: int64 [size], `sort_keys` of the lowest logit that top-k and top-p keep.
    DTYPE: of the arithmetic.
    BLOCK: tokens that a program reads at once.
    MAX_CHILDREN, MAX_LEVELS, MAX_NODES: powers of two, at least the tree's branching, depth, size.

Vectors go over the target's vocabulary block by block; `inside` is true for tokens within it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
TINY, LARGEST = tl.constexpr(1.1754944e-38), tl.constexpr(3.4028234e38)

NUM_DIGITS = tl.constexpr(16)
"""Digits of sort keys, of 4 bits each."""

STATE_C = tl.constexpr(0)
STATE_E = tl.constexpr(1)
STATE_A = tl.constexpr(2)
STATE_SCALE = tl.constexpr(3)
STATE_NEVER_DRAWN_MASS = tl.constexpr(4)
STATE_COLUMNS = tl.constexpr(5)
"""The columns of what the traversal kernels store of each inner node. Its a is as in `traversal.py`
and its scale is a / mass of the residual."""


@triton.jit
def target_weights(
    logits, tokens, inside, max_logit, threshold, temperature, min_p, DTYPE: tl.constexpr,
):
    """The weights exp((x - max_logit) / temperature) of `tokens`; 0 where a filter removes one."""
    x = tl.load(logits + tokens, mask=inside, other=-float("inf")).to(DTYPE)
    weight = tl.exp((x - max_logit) / temperature)
    return tl.where(inside & (sort_keys(x) >= threshold) & (weight >= min_p), weight, 0.0)


@triton.jit
def sort_keys(x):
    """int64 numbers from 0 to 2^32 - 1 that are in the same order as the float32 numbers x."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + (1 << 31)


@triton.jit
def kept_masses(
    logits, max_logits, thresholds, masses, vocabulary, temperature, min_p,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """The weights that the filters keep, summed. The programs are [nodes, blocks of tokens].

    `masses` [nodes, blocks].
    """
    node, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    weight = target_weights(
        logits + node * vocabulary, tokens, tokens < vocabulary, tl.load(max_logits + node),
        tl.load(thresholds + node), temperature, min_p, DTYPE,
    )
    tl.store(masses + node * tl.num_programs(1) + block, tl.sum(weight))


@triton.jit
def digit_masses(
    logits, max_logits, thresholds, masses, shift, vocabulary, temperature,
    COUNTS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """The mass of each value of one digit of the sort keys, among keys whose higher digits are the
    threshold's. The programs are [nodes, blocks of tokens].

    It is a pass of a radix selection; `select_digit` follows. Masses are added in registers: in
    memory, programs would add them in no fixed order. `thresholds` int64 [nodes]; `masses` [nodes,
    blocks, NUM_DIGITS].
    """
    node, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    x = tl.load(logits + node * vocabulary + tokens, mask=inside, other=0.0).to(DTYPE)
    keys = sort_keys(x)
    same_prefix = (keys >> shift >> 4) == (tl.load(thresholds + node) >> shift >> 4)
    mass = tl.exp((x - tl.load(max_logits + node)) / temperature)
    if COUNTS:
        mass = tl.full([BLOCK], 1.0, DTYPE)
    mass = tl.where(inside & same_prefix, mass, 0.0)
    key_digits, digits = ((keys >> shift) & 15).to(tl.int32), tl.arange(0, NUM_DIGITS)
    has_digit = key_digits[None, :] == digits[:, None]
    mass_of_digit = tl.sum(tl.where(has_digit, mass[None, :], 0.0), 1)
    place = (node * tl.num_programs(1) + block) * NUM_DIGITS
    tl.store(masses + place + digits, mass_of_digit)


@triton.jit
def select_digit(masses, goals, thresholds, shift, num_blocks, MAX_BLOCKS: tl.constexpr):
    """Set a digit of each node's threshold: the largest that leaves the goal's mass at or above it.

    The programs are the nodes. If rounding lets no digit reach the goal, it is 0. `goals` float
    [nodes]; `thresholds` int64 [nodes].
    """
    node = tl.program_id(0).to(tl.int64)
    blocks, digits = tl.arange(0, MAX_BLOCKS), tl.arange(0, NUM_DIGITS)
    places = (node * num_blocks + blocks[:, None]) * NUM_DIGITS + digits[None, :]
    mass = tl.sum(tl.load(masses + places, mask=blocks[:, None] < num_blocks, other=0.0), 0)
    goal = tl.load(goals + node)
    is_reached = (tl.cumsum(mass, 0, reverse=True) >= goal) & (mass > 0)
    digit = tl.max(tl.where(is_reached, digits, 0))
    tl.store(goals + node, goal - tl.sum(tl.where(digits > digit, mass, 0.0)))
    tl.store(thresholds + node, tl.load(thresholds + node) | (digit.to(tl.int64) << shift))


@triton.jit
def draft_probs_at(
    draft_probs, t2d, tokens, inside, draft_vocabulary, HAS_D2T: tl.constexpr, DTYPE: tl.constexpr,
):
    """The draft's probabilities of `tokens` (0 if it lacks them), and whether it has them."""
    if HAS_D2T:
        draft_tokens = tl.load(t2d + tokens, mask=inside, other=-1)
    else:
        draft_tokens = tokens.to(tl.int64)
    has_token = inside & (draft_tokens >= 0) & (draft_tokens < draft_vocabulary)
    return tl.load(draft_probs + draft_tokens, mask=has_token, other=0.0).to(DTYPE), has_token


@triton.jit
def residual_weights(
    logits, draft_probs, t2d, tokens, inside, draft_vocabulary, max_logit, threshold, c, e,
    temperature, min_p, HAS_D2T: tl.constexpr, DTYPE: tl.constexpr,
):
    """The residual of `tokens`, max(weight - c q - e, 0); the weight where the draft has none."""
    weight = target_weights(logits, tokens, inside, max_logit, threshold, temperature, min_p, DTYPE)
    q, has_token = draft_probs_at(
        draft_probs, t2d, tokens, inside, draft_vocabulary, HAS_D2T, DTYPE
    )
    return tl.where(has_token, tl.maximum(weight - c * q - e, 0.0), weight)


@triton.jit
def residual_mass(
    logits, draft_probs, t2d, vocabulary, draft_vocabulary, max_logit, threshold, c, e,
    temperature, min_p, HAS_D2T: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """The sum of the residual, max(weight - c q - e, 0), over the target's vocabulary.

    The arguments are those of `residual_weights`, without a vector of tokens.
    """
    mass = tl.zeros([BLOCK], DTYPE)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        mass += residual_weights(
            logits, draft_probs, t2d, tokens, tokens < vocabulary, draft_vocabulary, max_logit,
            threshold, c, e, temperature, min_p, HAS_D2T, DTYPE,
        )
    return tl.sum(mass)


@triton.jit
def sum_never_drawn(
    draft_probs, drawn, count, draft_vocabulary, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """The draft's mass on tokens that none of a node's `count` children has.

    It is a sum, because 1 minus the children's mass would be all rounding if little remains.
    """
    mass = tl.zeros([BLOCK], DTYPE)
    for start in range(0, draft_vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        q = tl.load(draft_probs + tokens, mask=tokens < draft_vocabulary, other=0.0).to(DTYPE)
        for rank in range(0, count):
            token = tl.load(drawn + rank)
            if (token >= start) & (token < start + BLOCK):
                q = tl.where(tokens == token, 0.0, q)
        mass += q
    return tl.sum(mass)


@triton.jit
def reject_child(
    logits, draft_probs, drawn, d2t, rank, count, never_drawn_mass, draft_vocabulary, max_logit,
    threshold, c, e, scale, temperature, min_p,
    HAS_D2T: tl.constexpr, DTYPE: tl.constexpr, MAX_CHILDREN: tl.constexpr,
):
    """The probability that a child's subtree is accepted, and c and e after its rejection.

    This is one iteration of `Residual.reject_children`.
    """
    ranks = tl.arange(0, MAX_CHILDREN)
    children = tl.load(drawn + ranks, mask=ranks < count, other=0)
    is_undrawn = (ranks >= rank) & (ranks < count)  # this child included
    q = tl.load(draft_probs + children, mask=is_undrawn, other=0.0).to(DTYPE)
    mass = never_drawn_mass + tl.sum(q)
    q_child = tl.sum(tl.where(ranks == rank, q, 0.0))
    num_undrawn = (draft_vocabulary - rank).to(DTYPE)
    is_exhausted = mass <= 0
    token = tl.load(drawn + rank)
    if HAS_D2T:
        token = tl.load(d2t + token)
    token_as_vector, inside = token + tl.arange(0, 1), tl.full([1], True, tl.int1)
    weight = tl.sum(target_weights(
        logits, token_as_vector, inside, max_logit, threshold, temperature, min_p, DTYPE
    ))
    inverse_d = tl.where(q_child > 0, mass / tl.maximum(q_child, TINY), 0.0)
    inverse_d = tl.where(is_exhausted, num_undrawn, inverse_d)
    residual = tl.maximum(weight - c * q_child - e, 0.0)
    accept_prob = tl.minimum(residual * scale * inverse_d, 1.0)
    divisor = tl.maximum(scale, TINY)
    q_factor = tl.where(is_exhausted, 0.0, 1 / tl.maximum(mass, TINY))
    uniform_factor = tl.where(is_exhausted, 1 / num_undrawn, 0.0)
    c = tl.minimum(c + q_factor / divisor, LARGEST)
    return accept_prob, c, e + uniform_factor / divisor


@triton.jit
def draw_bonus(
    logits, draft_probs, t2d, vocabulary, draft_vocabulary, max_logit, threshold, c, e, uniform,
    temperature, min_p, HAS_D2T: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """A token drawn from the residual by inversion.

    If the residual has no mass, which only rounding causes, the token is drawn from the target's
    distribution.
    """
    total = residual_mass(
        logits, draft_probs, t2d, vocabulary, draft_vocabulary, max_logit, threshold, c, e,
        temperature, min_p, HAS_D2T, DTYPE, BLOCK,
    )
    if total <= 0:
        c, e = c * 0, e * 0
        total = residual_mass(
            logits, draft_probs, t2d, vocabulary, draft_vocabulary, max_logit, threshold, c, e,
            temperature, min_p, HAS_D2T, DTYPE, BLOCK,
        )
    goal = uniform * total.to(tl.float64)
    mass_before = tl.full((), 0.0, tl.float64)
    drawn_token, start = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    last_positive = tl.full((), 0, tl.int32)
    while (drawn_token < 0) & (start < vocabulary):
        tokens = start + tl.arange(0, BLOCK)
        mass = residual_weights(
            logits, draft_probs, t2d, tokens, tokens < vocabulary, draft_vocabulary, max_logit,
            threshold, c, e, temperature, min_p, HAS_D2T, DTYPE,
        )
        block_mass = tl.sum(mass).to(tl.float64)
        block_positive = tl.max(tl.where(mass > 0, tokens, -1))
        last_positive = tl.maximum(last_positive, block_positive)  # rounding may exceed all mass
        if (mass_before + block_mass > goal) & (block_positive >= 0):
            is_reached = mass_before + tl.cumsum(mass.to(tl.float64), 0) > goal
            first_reached = tl.min(tl.where(is_reached & (mass > 0), tokens, vocabulary))
            drawn_token = tl.minimum(first_reached, block_positive)
        mass_before += block_mass
        start += BLOCK
    return tl.where(drawn_token < 0, last_positive, drawn_token)


@triton.jit
def store_path(out, paths, offsets, end, token, depth, MAX_LEVELS: tl.constexpr):
    """Write the result of a step: the path to `end`, its number of nodes, and the bonus token.

    `out` int64 [depth + 2]; `paths` int64 [size, depth]; `offsets` int64 [size].
    """
    levels = tl.arange(0, MAX_LEVELS)
    inside = levels < depth
    tl.store(out + levels, tl.load(paths + end * depth + levels, mask=inside, other=0), mask=inside)
    tl.store(out + depth, tl.load(offsets + end) + 1)
    tl.store(out + depth + 1, token.to(tl.int64))


@triton.jit
def sequoia(
    logits, max_logits, thresholds, totals, draft_probs, drawn, uniforms, child_count, first_child,
    row_of_node, paths, offsets, t2d, d2t, out, vocabulary, draft_vocabulary, branching, depth,
    temperature, min_p,
    HAS_D2T: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, MAX_CHILDREN: tl.constexpr,
    MAX_LEVELS: tl.constexpr,
):
    """Walk from the root down by the rule of `sequoia.py`.

    Each node has an interval of the first uniform number, from `low` on and `width` wide. Each of
    its children gets a part of it. The walk goes on to the child whose part has the number; if no
    child's part has it, the path ends at the node.

    Args:
        logits: [size, vocabulary], the target's.
        draft_probs, drawn: one row for each inner node: the draft's probabilities, and the children
            as indices into the draft's vocabulary.
        uniforms: float64 [2], for the end of the path and for the bonus token.
        child_count, first_child, offsets: int64 [size]; offsets are depths.
        row_of_node: int64 [size], each inner node's row in `draft_probs` and `drawn`.
        paths: int64 [size, depth], the nodes from the root to each node.
        t2d, d2t: the draft's token for each of the target's, and the reverse.
        out: int64 [depth + 2], the result (`store_path`).
    """
    uniform = tl.load(uniforms)
    low, width = tl.full((), 0.0, tl.float64), tl.full((), 1.0, tl.float64)
    node, is_walking = tl.full((), 0, tl.int64), tl.full((), 1, tl.int32)
    token = tl.full((), 0, tl.int32)
    while is_walking > 0:
        node_logits = logits + node * vocabulary
        count, row = tl.load(child_count + node), tl.load(row_of_node + node)
        node_draft_probs, node_drawn = draft_probs + row * draft_vocabulary, drawn + row * branching
        max_logit, threshold = tl.load(max_logits + node), tl.load(thresholds + node)
        never_drawn_mass = tl.full((), 0.0, DTYPE)
        if count > 0:
            never_drawn_mass = sum_never_drawn(
                node_draft_probs, node_drawn, count, draft_vocabulary, DTYPE, BLOCK
            )
        c, e = tl.full((), 0.0, DTYPE), tl.full((), 0.0, DTYPE)
        scale = 1 / tl.maximum(tl.load(totals + node), TINY)
        rank, accepted_child = tl.full((), 0, tl.int64), tl.full((), -1, tl.int64)
        while (rank < count) & (accepted_child < 0):
            accept_prob, c_rejected, e_rejected = reject_child(
                node_logits, node_draft_probs, node_drawn, d2t, rank, count, never_drawn_mass,
                draft_vocabulary, max_logit, threshold, c, e, scale, temperature, min_p,
                HAS_D2T, DTYPE, MAX_CHILDREN,
            )
            child_width = width * accept_prob.to(tl.float64)
            if uniform < low + child_width:
                accepted_child = tl.load(first_child + node) + rank
                width = child_width
            else:
                low += child_width
                width -= child_width
                c, e = c_rejected, e_rejected
                mass = residual_mass(
                    node_logits, node_draft_probs, t2d, vocabulary, draft_vocabulary, max_logit,
                    threshold, c, e, temperature, min_p, HAS_D2T, DTYPE, BLOCK,
                )
                scale = tl.minimum(1 / tl.maximum(mass, TINY), LARGEST)
            rank += 1
        if accepted_child >= 0:
            node = accepted_child
        else:
            is_walking = tl.full((), 0, tl.int32)
            token = draw_bonus(
                node_logits, node_draft_probs, t2d, vocabulary, draft_vocabulary, max_logit,
                threshold, c, e, tl.load(uniforms + 1), temperature, min_p, HAS_D2T, DTYPE, BLOCK,
            )
    store_path(out, paths, offsets, node, token, depth, MAX_LEVELS)


@triton.jit
def greedy(
    choices, tokens, child_count, first_child, paths, offsets, out, depth,
    MAX_CHILDREN: tl.constexpr, MAX_LEVELS: tl.constexpr,
):
    """Walk from the root down to the target's most probable tokens, as in `greedy.py`.

    `choices` int64 [size]; `tokens` int64 [size]; `child_count`, `first_child`, `offsets` int64
    [size]; `paths` int64 [size, depth]; `out` int64 [depth + 2].
    """
    node, is_walking = tl.full((), 0, tl.int64), tl.full((), 1, tl.int32)
    choice = tl.full((), 0, tl.int64)
    while is_walking > 0:
        choice = tl.load(choices + node)
        count, first = tl.load(child_count + node), tl.load(first_child + node)
        ranks = tl.arange(0, MAX_CHILDREN)
        children = tl.load(tokens + first + ranks, mask=ranks < count, other=-1)
        is_chosen = (ranks < count) & (children == choice)
        rank = tl.min(tl.where(is_chosen, ranks, MAX_CHILDREN))
        if rank < MAX_CHILDREN:
            node = first + rank
        else:
            is_walking = tl.full((), 0, tl.int32)
    store_path(out, paths, offsets, node, choice, depth, MAX_LEVELS)


@triton.jit
def traversal_start(
    totals, draft_probs, drawn, inner_nodes, child_count, state, draft_vocabulary, branching,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Write the state of every inner node before any rejection, one program per inner node.

    `inner_nodes` int64 [inner nodes]; `state` float [inner nodes, STATE_COLUMNS].
    """
    row = tl.program_id(0).to(tl.int64)
    node = tl.load(inner_nodes + row)
    total = tl.load(totals + node)
    never_drawn_mass = sum_never_drawn(
        draft_probs + row * draft_vocabulary, drawn + row * branching, tl.load(child_count + node),
        draft_vocabulary, DTYPE, BLOCK,
    )
    node_state = state + row * STATE_COLUMNS
    tl.store(node_state + STATE_C, total * 0)
    tl.store(node_state + STATE_E, total * 0)
    tl.store(node_state + STATE_A, total * 0 + 1)
    tl.store(node_state + STATE_SCALE, 1 / tl.maximum(total, TINY))
    tl.store(node_state + STATE_NEVER_DRAWN_MASS, never_drawn_mass)


@triton.jit
def traversal_round(
    logits, max_logits, thresholds, draft_probs, drawn, inner_nodes, child_count, first_child,
    row_of_node, state, accept_probs, t2d, d2t, rows, ranks, vocabulary, draft_vocabulary,
    branching, temperature, min_p,
    HAS_D2T: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, MAX_CHILDREN: tl.constexpr,
):
    """Test and reject one child of several nodes, one program per node, by `traversal.py`'s rule.

    `accept_probs` float64 [size]; `rows`, `ranks` int64 [programs].
    """
    row, rank = tl.load(rows + tl.program_id(0)), tl.load(ranks + tl.program_id(0))
    node = tl.load(inner_nodes + row)
    node_logits, node_draft_probs = logits + node * vocabulary, draft_probs + row * draft_vocabulary
    node_state = state + row * STATE_COLUMNS
    max_logit, threshold = tl.load(max_logits + node), tl.load(thresholds + node)
    c, e = tl.load(node_state + STATE_C), tl.load(node_state + STATE_E)
    a, scale = tl.load(node_state + STATE_A), tl.load(node_state + STATE_SCALE)
    never_drawn_mass = tl.load(node_state + STATE_NEVER_DRAWN_MASS)
    accept_prob, c, e = reject_child(
        node_logits, node_draft_probs, drawn + row * branching, d2t, rank,
        tl.load(child_count + node), never_drawn_mass, draft_vocabulary, max_logit, threshold,
        c, e, scale, temperature, min_p, HAS_D2T, DTYPE, MAX_CHILDREN,
    )
    child = tl.load(first_child + node) + rank
    tl.store(accept_probs + child, accept_prob.to(tl.float64))
    if tl.load(child_count + child) > 0:  # the child's own children follow from the next round on
        child_state = state + tl.load(row_of_node + child) * STATE_COLUMNS
        tl.store(child_state + STATE_A, accept_prob)
        tl.store(child_state + STATE_SCALE, tl.load(child_state + STATE_SCALE) * accept_prob)
    mass = scale * residual_mass(
        node_logits, node_draft_probs, t2d, vocabulary, draft_vocabulary, max_logit, threshold,
        c, e, temperature, min_p, HAS_D2T, DTYPE, BLOCK,
    )
    total = tl.maximum((1 - a) + mass, TINY)
    a = mass / total
    tl.store(node_state + STATE_C, c)
    tl.store(node_state + STATE_E, e)
    tl.store(node_state + STATE_A, a)
    tl.store(node_state + STATE_SCALE, tl.minimum(scale / total, LARGEST))
    tl.store(accept_probs + node, a.to(tl.float64))


@triton.jit
def traversal_finish(
    logits, max_logits, thresholds, draft_probs, uniforms, accept_probs, post_order, child_count,
    row_of_node, state, paths, offsets, t2d, out, size, vocabulary, draft_vocabulary, depth,
    temperature, min_p,
    HAS_D2T: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, MAX_NODES: tl.constexpr,
    MAX_LEVELS: tl.constexpr,
):
    """Visit the nodes in post-order; the first one accepted ends the path. Draw the bonus token.

    `uniforms` float64 [2]; `accept_probs` float64 [size]; `post_order` int64 [size]; `out` int64
    [depth + 2].
    """
    visits = tl.arange(0, MAX_NODES)
    inside = visits < size
    nodes = tl.load(post_order + visits, mask=inside, other=0)
    reject_probs = 1 - tl.load(accept_probs + nodes, mask=inside, other=0.0)
    is_ended = (tl.cumprod(reject_probs, 0) < 1 - tl.load(uniforms)) & inside
    visit = tl.min(tl.where(is_ended, visits, MAX_NODES))
    end = tl.load(post_order + tl.minimum(visit, size - 1))
    row = tl.load(row_of_node + end)
    has_children = tl.load(child_count + end) > 0
    node_state = state + row * STATE_COLUMNS
    c = tl.load(node_state + STATE_C, mask=has_children, other=0.0)
    e = tl.load(node_state + STATE_E, mask=has_children, other=0.0)
    token = draw_bonus(
        logits + end * vocabulary, draft_probs + row * draft_vocabulary, t2d, vocabulary,
        draft_vocabulary, tl.load(max_logits + end), tl.load(thresholds + end), c, e,
        tl.load(uniforms + 1), temperature, min_p, HAS_D2T, DTYPE, BLOCK,
    )
    store_path(out, paths, offsets, end, token, depth, MAX_LEVELS)
