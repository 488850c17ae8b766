"""Verification as Triton kernels: one program walks down the accepted path, and laws of other nodes are never computed.

They decide as the tensor versions do from the same random numbers: those are their oracle (tests/test_fused.py). A law is never stored:
of a node's logits x the token's share is exp((x - highest) / temperature) where the filters keep it, else 0, and their sum is `total`.
What rejections leave of it is max(share - c q - e, 0), see `residual.py`, with c and e in the same units.

Vectors go over the target's vocabulary block by block; `draft_of` says which of the draft's tokens each one is, -1 for none.
"""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
LOWEST = tl.constexpr(-1e30)
TINY, LARGEST = tl.constexpr(1.1754944e-38), tl.constexpr(3.4028235e38)


@triton.jit
def shares(logits, tokens, inside, highest, least, temperature, min_p, NUMBER: tl.constexpr):
    """The shares of `tokens`; `least` is the order (see `order`) of the lowest logit that top-k and top-p keep."""
    x = tl.load(logits + tokens, mask=inside, other=-float("inf")).to(NUMBER)
    share = tl.exp((x - highest) / temperature)
    return tl.where(inside & (order(x) >= least) & (share >= min_p), share, 0.0)


@triton.jit
def order(x):
    """Whole numbers in the order of float32 numbers."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def kept(logits, vocabulary, highest, least, temperature, min_p, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens are kept, and the sum of their shares."""
    count, mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], NUMBER)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocabulary
        x = tl.load(logits + tokens, mask=inside, other=-float("inf")).to(NUMBER)
        count += (inside & (order(x) >= least)).to(tl.int32)
        mass += shares(logits, tokens, inside, highest, least, temperature, min_p, NUMBER)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def law(logits, vocabulary, temperature, top_k, top_p, min_p, NUMBER: tl.constexpr, LOW_BIT: tl.constexpr, FILTER: tl.constexpr, BLOCK: tl.constexpr):
    """A node's law as three numbers: `highest`, `least` and `total`. `LOW_BIT` is the lowest bit that tells logits apart as float32."""
    high, mass = tl.full([BLOCK], LOWEST, NUMBER), tl.zeros([BLOCK], NUMBER)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(logits + tokens, mask=tokens < vocabulary, other=-float("inf")).to(NUMBER)
        higher = tl.maximum(high, x)
        mass = mass * tl.exp((high - higher) / temperature) + tl.exp((x - higher) / temperature)
        high = higher
    highest = tl.max(high)
    total = tl.sum(mass * tl.exp((high - highest) / temperature))
    least = tl.full((), -(1 << 31), tl.int64)
    if FILTER:
        if top_k > 0:
            for bit in range(31, LOW_BIT - 1, -1):
                candidate = least + (tl.full((), 1, tl.int64) << bit)
                count, _ = kept(logits, vocabulary, highest, candidate, temperature, 0.0, NUMBER, BLOCK)
                least = tl.where(count >= top_k, candidate, least)
        if top_p < 1:
            _, wanted = kept(logits, vocabulary, highest, least, temperature, 0.0, NUMBER, BLOCK)
            wanted = wanted * top_p
            lowest = least
            least = tl.full((), -(1 << 31), tl.int64)
            for bit in range(31, LOW_BIT - 1, -1):
                candidate = least + (tl.full((), 1, tl.int64) << bit)
                _, above = kept(logits, vocabulary, highest, tl.maximum(candidate, lowest), temperature, 0.0, NUMBER, BLOCK)
                least = tl.where(above >= wanted, candidate, least)
            least = tl.maximum(least, lowest)
        _, total = kept(logits, vocabulary, highest, least, temperature, min_p, NUMBER, BLOCK)
    return highest, least, total


@triton.jit
def drafts(laws, draft_of, tokens, inside, draft_vocabulary, REDUCED: tl.constexpr, NUMBER: tl.constexpr):
    """The draft's law at `tokens`, 0 where it does not cover them, and whether it does."""
    if REDUCED:
        at = tl.load(draft_of + tokens, mask=inside, other=-1)
    else:
        at = tokens.to(tl.int64)
    covered = inside & (at >= 0) & (at < draft_vocabulary)
    return tl.load(laws + at, mask=covered, other=0.0).to(NUMBER), covered


@triton.jit
def left(logits, laws, draft_of, tokens, inside, draft_vocabulary, highest, least, c, e, temperature, min_p, REDUCED: tl.constexpr, NUMBER: tl.constexpr):
    """What rejections have left of the shares of `tokens`."""
    share = shares(logits, tokens, inside, highest, least, temperature, min_p, NUMBER)
    q, covered = drafts(laws, draft_of, tokens, inside, draft_vocabulary, REDUCED, NUMBER)
    return tl.where(covered, tl.maximum(share - c * q - e, 0.0), share)


@triton.jit
def mass_left(
    logits, laws, draft_of, vocabulary, draft_vocabulary, highest, least, c, e, temperature, min_p,
    REDUCED: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr,
):
    """Its sum."""
    mass = tl.zeros([BLOCK], NUMBER)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        mass += left(logits, laws, draft_of, tokens, tokens < vocabulary, draft_vocabulary, highest, least, c, e, temperature, min_p, REDUCED, NUMBER)
    return tl.sum(mass)


@triton.jit
def nobodys(laws, drawn, count, draft_vocabulary, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """The draft's mass on tokens that none of a node's children has: summed, as a difference would be all rounding where little is left."""
    mass = tl.zeros([BLOCK], NUMBER)
    for start in range(0, draft_vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        q = tl.load(laws + tokens, mask=tokens < draft_vocabulary, other=0.0).to(NUMBER)
        for rank in range(0, count):
            token = tl.load(drawn + rank)
            if (token >= start) & (token < start + BLOCK):
                q = tl.where(tokens == token, 0.0, q)
        mass += q
    return tl.sum(mass)


@triton.jit
def child(
    logits, laws, drawn, token_of, rank, count, nobody, draft_vocabulary, highest, least, c, e, scale, temperature, min_p,
    REDUCED: tl.constexpr, NUMBER: tl.constexpr, CHILDREN: tl.constexpr,
):
    """A child's turn (see `Residual.judge`): the probability that its subtree is accepted, and c and e once it is not."""
    ranks = tl.arange(0, CHILDREN)
    theirs = tl.load(drawn + ranks, mask=ranks < count, other=0)
    q = tl.load(laws + theirs, mask=(ranks >= rank) & (ranks < count), other=0.0).to(NUMBER)
    mass, mine = nobody + tl.sum(q), tl.sum(tl.where(ranks == rank, q, 0.0))
    undrawn = (draft_vocabulary - rank).to(NUMBER)
    exhausted = mass <= 0
    token = tl.load(drawn + rank)
    if REDUCED:
        token = tl.load(token_of + token)
    share = tl.sum(shares(logits, token + tl.arange(0, 1), tl.full([1], True, tl.int1), highest, least, temperature, min_p, NUMBER))
    scarcity = tl.where(exhausted, undrawn, tl.where(mine > 0, mass / tl.maximum(mine, TINY), 0.0))
    take = tl.minimum(tl.maximum(share - c * mine - e, 0.0) * scale * scarcity, 1.0)
    divisor = tl.maximum(scale, TINY)
    c = tl.minimum(c + tl.where(exhausted, 0.0, 1 / tl.maximum(mass, TINY)) / divisor, LARGEST)
    return take, c, e + tl.where(exhausted, 1 / undrawn, 0.0) / divisor


@triton.jit
def bonus(
    logits, laws, draft_of, vocabulary, draft_vocabulary, highest, least, c, e, uniform, temperature, min_p,
    REDUCED: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr,
):
    """A token drawn from what is left by inversion; from the law itself if nothing is, which only rounding can bring about."""
    total = mass_left(logits, laws, draft_of, vocabulary, draft_vocabulary, highest, least, c, e, temperature, min_p, REDUCED, NUMBER, BLOCK)
    if total <= 0:
        c, e = c * 0, e * 0
        total = mass_left(logits, laws, draft_of, vocabulary, draft_vocabulary, highest, least, c, e, temperature, min_p, REDUCED, NUMBER, BLOCK)
    wanted = uniform * total.to(tl.float64)
    before = tl.full((), 0.0, tl.float64)
    found, start = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int32)
    while (found < 0) & (start < vocabulary):
        tokens = start + tl.arange(0, BLOCK)
        mass = left(logits, laws, draft_of, tokens, tokens < vocabulary, draft_vocabulary, highest, least, c, e, temperature, min_p, REDUCED, NUMBER)
        here = tl.sum(mass).to(tl.float64)
        positive = tl.max(tl.where(mass > 0, tokens, -1))
        last = tl.maximum(last, positive)  # rounding may leave `wanted` at the very end
        if (before + here > wanted) & (positive >= 0):
            reached = before + tl.cumsum(mass.to(tl.float64), 0) > wanted
            found = tl.minimum(tl.min(tl.where(reached & (mass > 0), tokens, vocabulary)), positive)
        before += here
        start += BLOCK
    return tl.where(found < 0, last, found)


@triton.jit
def accept(out, paths, offsets, end, token, depth, LEVELS: tl.constexpr):
    """Write what a step yields: the path, how long it is, and the bonus token."""
    levels = tl.arange(0, LEVELS)
    tl.store(out + levels, tl.load(paths + end * depth + levels, mask=levels < depth, other=0), mask=levels < depth)
    tl.store(out + depth, tl.load(offsets + end) + 1)
    tl.store(out + depth + 1, token.to(tl.int64))


@triton.jit
def sequoia(
    logits, laws, drawn, uniforms, child_count, first_child, row_of, paths, offsets, draft_of, token_of, out,
    vocabulary, draft_vocabulary, branching, depth, temperature, top_k, top_p, min_p,
    REDUCED: tl.constexpr, NUMBER: tl.constexpr, LOW_BIT: tl.constexpr, FILTER: tl.constexpr,
    BLOCK: tl.constexpr, CHILDREN: tl.constexpr, LEVELS: tl.constexpr,
):
    """Walk down from the root: see `sequoia.py`. The uniform number falls into the interval of one child after the other, or of none."""
    uniform = tl.load(uniforms)
    low, width = tl.full((), 0.0, tl.float64), tl.full((), 1.0, tl.float64)
    node, walking = tl.full((), 0, tl.int64), tl.full((), 1, tl.int32)
    token = tl.full((), 0, tl.int32)
    while walking > 0:
        mine = logits + node * vocabulary
        count, row = tl.load(child_count + node), tl.load(row_of + node)
        law_of, picks = laws + row * draft_vocabulary, drawn + row * branching
        highest, least, total = law(mine, vocabulary, temperature, top_k, top_p, min_p, NUMBER, LOW_BIT, FILTER, BLOCK)
        nobody = tl.full((), 0.0, NUMBER)
        if count > 0:
            nobody = nobodys(law_of, picks, count, draft_vocabulary, NUMBER, BLOCK)
        c, e = tl.full((), 0.0, NUMBER), tl.full((), 0.0, NUMBER)
        scale = 1 / tl.maximum(total, TINY)
        rank, taken = tl.full((), 0, tl.int64), tl.full((), -1, tl.int64)
        while (rank < count) & (taken < 0):
            take, c_after, e_after = child(
                mine, law_of, picks, token_of, rank, count, nobody, draft_vocabulary, highest, least, c, e, scale, temperature, min_p, REDUCED, NUMBER,
                CHILDREN,
            )
            share = width * take.to(tl.float64)
            if uniform < low + share:
                taken = tl.load(first_child + node) + rank
                width = share
            else:
                low += share
                width -= share
                c, e = c_after, e_after
                mass = mass_left(mine, law_of, draft_of, vocabulary, draft_vocabulary, highest, least, c, e, temperature, min_p, REDUCED, NUMBER, BLOCK)
                scale = tl.minimum(1 / tl.maximum(mass, TINY), LARGEST)
            rank += 1
        if taken >= 0:
            node = taken
        else:
            walking = tl.full((), 0, tl.int32)
            token = bonus(
                mine, law_of, draft_of, vocabulary, draft_vocabulary, highest, least, c, e, tl.load(uniforms + 1), temperature, min_p, REDUCED, NUMBER, BLOCK
            )
    accept(out, paths, offsets, node, token, depth, LEVELS)


@triton.jit
def greedy(
    logits, tokens, child_count, first_child, paths, offsets, out, vocabulary, depth, BLOCK: tl.constexpr, CHILDREN: tl.constexpr, LEVELS: tl.constexpr
):
    """Follow the child that holds the target's most probable token while there is one: see `greedy.py`."""
    node, walking = tl.full((), 0, tl.int64), tl.full((), 1, tl.int32)
    choice = tl.full((), 0, tl.int32)
    while walking > 0:
        high, best = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + node * vocabulary + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
            best = tl.where(x > high, at, best)
            high = tl.maximum(high, x)
        choice = tl.min(tl.where(high == tl.max(high), best, vocabulary - 1))
        count, first = tl.load(child_count + node), tl.load(first_child + node)
        ranks = tl.arange(0, CHILDREN)
        theirs = tl.load(tokens + first + ranks, mask=ranks < count, other=-1)
        rank = tl.min(tl.where((ranks < count) & (theirs == choice), ranks, CHILDREN))
        if rank < CHILDREN:
            node = first + rank
        else:
            walking = tl.full((), 0, tl.int32)
    accept(out, paths, offsets, node, choice, depth, LEVELS)


@triton.jit
def prepare(
    logits, laws, drawn, inner, child_count, state, floors, vocabulary, draft_vocabulary, branching, temperature, top_k, top_p, min_p,
    NUMBER: tl.constexpr, LOW_BIT: tl.constexpr, FILTER: tl.constexpr, BLOCK: tl.constexpr,
):
    """For `traversal`, one program for each inner node: its law's numbers, and where its children begin.

    A row of `state`: highest, c, e, a, a / mass left, the draft's mass on what no child has. `floors`: what `law` calls least."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.load(inner + row)
    mine = state + row * 6
    highest, least, total = law(logits + node * vocabulary, vocabulary, temperature, top_k, top_p, min_p, NUMBER, LOW_BIT, FILTER, BLOCK)
    nobody = nobodys(laws + row * draft_vocabulary, drawn + row * branching, tl.load(child_count + node), draft_vocabulary, NUMBER, BLOCK)
    tl.store(floors + row, least)
    tl.store(mine, highest)
    tl.store(mine + 1, total * 0)
    tl.store(mine + 2, total * 0)
    tl.store(mine + 3, total * 0 + 1)
    tl.store(mine + 4, 1 / tl.maximum(total, TINY))
    tl.store(mine + 5, nobody)


@triton.jit
def judge(
    logits, laws, drawn, inner, child_count, first_child, row_of, state, floors, accepted, draft_of, token_of, rows, ranks,
    vocabulary, draft_vocabulary, branching, temperature, min_p,
    REDUCED: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr, CHILDREN: tl.constexpr,
):
    """One round of `traversal`, one program for each node that judges a child in it: see `traversal.py`."""
    row, rank = tl.load(rows + tl.program_id(0)), tl.load(ranks + tl.program_id(0))
    node = tl.load(inner + row)
    mine, law_of, at = logits + node * vocabulary, laws + row * draft_vocabulary, state + row * 6
    highest, c, e, a, scale, nobody = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    least = tl.load(floors + row)
    take, c, e = child(
        mine, law_of, drawn + row * branching, token_of, rank, tl.load(child_count + node), nobody, draft_vocabulary, highest, least, c, e, scale,
        temperature, min_p, REDUCED, NUMBER, CHILDREN,
    )
    below = tl.load(first_child + node) + rank
    tl.store(accepted + below, take.to(tl.float64))
    if tl.load(child_count + below) > 0:  # it begins in the next round
        its = state + tl.load(row_of + below) * 6
        tl.store(its + 3, take)
        tl.store(its + 4, tl.load(its + 4) * take)
    mass = scale * mass_left(mine, law_of, draft_of, vocabulary, draft_vocabulary, highest, least, c, e, temperature, min_p, REDUCED, NUMBER, BLOCK)
    everything = tl.maximum((1 - a) + mass, TINY)
    a = mass / everything
    tl.store(at + 1, c)
    tl.store(at + 2, e)
    tl.store(at + 3, a)
    tl.store(at + 4, tl.minimum(scale / everything, LARGEST))
    tl.store(accepted + node, a.to(tl.float64))


@triton.jit
def settle(
    logits, laws, uniforms, accepted, post_order, child_count, row_of, state, floors, paths, offsets, draft_of, out,
    size, vocabulary, draft_vocabulary, depth, temperature, top_k, top_p, min_p,
    REDUCED: tl.constexpr, NUMBER: tl.constexpr, LOW_BIT: tl.constexpr, FILTER: tl.constexpr,
    BLOCK: tl.constexpr, NODES: tl.constexpr, LEVELS: tl.constexpr,
):
    """The end of `traversal`: nodes in post-order, the first one that is accepted ends the path."""
    turns = tl.arange(0, NODES)
    visited = tl.load(post_order + turns, mask=turns < size, other=0)
    refused = 1 - tl.load(accepted + visited, mask=turns < size, other=0.0)
    turn = tl.min(tl.where((tl.cumprod(refused, 0) < 1 - tl.load(uniforms)) & (turns < size), turns, NODES))
    end = tl.load(post_order + tl.minimum(turn, size - 1))
    row, mine = tl.load(row_of + end), logits + end * vocabulary
    if tl.load(child_count + end) > 0:
        at = state + row * 6
        highest, c, e, least = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(floors + row)
    else:
        highest, least, total = law(mine, vocabulary, temperature, top_k, top_p, min_p, NUMBER, LOW_BIT, FILTER, BLOCK)
        c, e = total * 0, total * 0
    token = bonus(
        mine, laws + row * draft_vocabulary, draft_of, vocabulary, draft_vocabulary, highest, least, c, e, tl.load(uniforms + 1), temperature, min_p,
        REDUCED, NUMBER, BLOCK,
    )
    accept(out, paths, offsets, end, token, depth, LEVELS)


@triton.jit
def race(logits, bits, laws, keys, vocabulary, temperature, BLOCK: tl.constexpr):
    """The draft's laws and what their exponential races are decided by, one program a node: see `drawing.without_replacement`."""
    row = tl.program_id(0).to(tl.int64) * vocabulary
    high, mass = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row + tokens, mask=tokens < vocabulary, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(high, x)
        mass = mass * tl.exp((high - higher) / temperature) + tl.exp((x - higher) / temperature)
        high = higher
    highest = tl.max(high)
    total = tl.sum(mass * tl.exp((high - highest) / temperature))
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocabulary
        x = tl.load(logits + row + tokens, mask=inside, other=-float("inf")).to(tl.float32)
        q = tl.exp((x - highest) / temperature) / total
        time = -log1p(-(tl.load(bits + row + tokens, mask=inside, other=0).to(tl.float32) + 0.5) / 2147483648.0)
        tl.store(laws + row + tokens, q, mask=inside)
        tl.store(keys + row + tokens, tl.where(q > 0, q / time, -time), mask=inside)


@triton.jit
def log1p(x):
    """log(1 + x) to the last bits also where x is small (Kahan)."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / (y - 1.0)))
