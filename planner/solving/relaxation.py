"""An upper bound on what the trees of a box gain: expected tokens less what their steps cost at a given speed.

A tree uses resources: resource 0 is its nodes; resource l = 1, 2, ... is its nodes on level l that have children, which set the width of
that level's draft pass. Each resource has a cost in seconds that never decreases. A box limits each to an interval. For prices x >= 0, in
tokens for a unit of each resource, every tree T in the box satisfies

    F(T) - rate * step(T) =   sum over nodes of (value - x[0]) - sum over nodes with children of x[level]
                            + sum over r of (x[r] * used[r] - rate * cost[r][used[r]]) - rate * constant

A recursion from the leaves up finds the tree that maximises the first line, whatever p is; each term of the second line is maximised over
its interval. The sum of these maxima is the bound (Lagrangian relaxation). Subgradient steps look for prices that make it small.

A step takes at least `least` seconds, and what the tree's own work takes if that is more. The longer of two times is no sum over the tree, but
it is at least share * least + (1 - share) * work for every share from 0 to 1. `shared` is such a sum in place of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TREE, LEVEL, PATH = range(3)
"""What a round of verification is: a rank in the tree, a rank on a level, or a sum of ranks along a path (see `Verification.rounds`)."""
PATIENCE = 10
"""Steps without a smaller bound, after which subgradient steps become half as long."""


class Costs(NamedTuple):
    """Seconds of a step, in tables.

    Args:
        target: float64 [most + 1], by nodes: the target's pass and what verification takes for them.
        target_ends: int64, ascending: the sizes after which the target's pass takes longer; the last is `most`.
        draft: float64 [most + 1], by nodes with children on a level below the root's: the draft pass and what verification takes for them.
        draft_ends: int64, ascending: the widths after which a draft pass takes longer; the last is the widest that was measured.
        by_round: for each round of verification that `draft` and `constant` do not hold: they hold one for each level, or one for the tree.
        order: what a round is.
        constant: what every tree takes that speculates.
        by_visit, by_rejection: for each node on the accepted path, and each child rejected there, as often as p lets expect.
        least: no step is shorter, however little it does: a streamed target's weights must arrive.
    """

    target: Floats
    target_ends: Ints
    draft: Floats
    draft_ends: Ints
    by_round: float
    order: int
    constant: float
    by_visit: float
    by_rejection: float
    least: float


class Nodes(NamedTuple):
    """The nodes whose value may exceed their price, breadth-first.

    Args:
        value, level: of each.
        first, children: where its children begin, and how many there are.
        ranks: the sum of ranks along its path.
        seconds: what it adds to a walk down the accepted path, as expected.
    """

    value: Floats
    level: Ints
    first: Ints
    children: Ints
    ranks: Ints
    seconds: Floats


class Box(NamedTuple):
    """Limits, inclusive: of each resource, and of the most children that a node has (one number for each level, or one for the tree) or,
    with PATH, of the largest sum of ranks along a path.

    Many boxes are the same with one more dimension in front.
    """

    low: Ints
    high: Ints
    least_ranks: Ints
    most_ranks: Ints


class Use(NamedTuple):
    """What `relax` fills in.

    Args:
        used: of each resource, by the tree behind the bound.
        paid: of each resource, the number in its interval that its price pays for best.
        ranks: the most children of a node in that tree, or ranks along a path, as in Box.most_ranks.
        charges: tokens charged for rounds beyond Box.least_ranks.
        parents: of that tree, breadth-first; the first used[0] entries count.
        walk: float64 [1], the seconds that its nodes add to a walk down the accepted path.
    """

    used: Ints
    paid: Ints
    ranks: Ints
    charges: Floats
    parents: Ints
    walk: Floats


@numba.njit(cache=True)
def candidates(rows, floor, by_visit, by_rejection):  # type: ignore[no-untyped-def]
    """Every node of a value above `floor`, and its siblings of lower rank; the other two are as in `Costs`."""
    levels, classes, branching = rows.shape
    room, size, node, spine = 1024, 1, 0, 0
    value, level, first, count = np.ones(room), np.zeros(room, np.int64), np.zeros(room, np.int64), np.zeros(room, np.int64)
    ranks, seconds = np.zeros(room, np.int64), np.zeros(room)
    while node < size:
        here, kind = level[node], 0 if node == spine else classes - 1
        if here < levels:
            for rank in range(branching):
                if value[node] * rows[here, kind, rank] > floor:
                    count[node] = rank + 1
            if node == spine and count[node] > 0:
                spine = size
        first[node] = size
        if size + count[node] > room:
            more = room + branching
            value, level = np.append(value, np.ones(more)), np.append(level, np.zeros(more, np.int64))
            first, count = np.append(first, np.zeros(more, np.int64)), np.append(count, np.zeros(more, np.int64))
            ranks, seconds = np.append(ranks, np.zeros(more, np.int64)), np.append(seconds, np.zeros(more))
            room += more
        left = value[node]
        for rank in range(count[node]):
            value[size], level[size] = value[node] * rows[here, kind, rank], here + 1
            left = max(0.0, left - value[size])
            ranks[size], seconds[size] = ranks[node] + rank + 1, by_visit * value[size] + by_rejection * left
            size += 1
        node += 1
    return Nodes(value[:size], level[:size], first[:size], count[:size], ranks[:size], seconds[:size])


@numba.njit(cache=True)
def choose_children(nodes, costs, box, price, rate, exact):  # type: ignore[no-untyped-def]
    """From the leaves up: how many children each node should have, what they add (its own price as a parent taken off), and what was charged for rounds.

    Children pay for a round that is not certain in the box. On a level, those of one rank share it in proportion to what they add, so they
    are taken if they can pay for it together; in a whole tree, each pays what it would if all possible parents had such a child (a parent has
    one of each rank, and one of each sum of ranks).
    """
    value, level, first, children, ranks_so_far, seconds = nodes
    gain, charged, taken = np.zeros(len(value)), np.zeros(len(value)), np.zeros(len(value), np.int64)
    together = np.zeros(1 if costs.by_round == 0 else box.most_ranks.max())
    a_round, possible, stop = rate * costs.by_round, 1, len(value)
    for r in range(1, len(price)):
        possible += box.high[r]
    while stop > 0:
        here = level[stop - 1]
        start = np.searchsorted(level, here)
        nodes_of_level, stop = range(start, stop), start
        if here == len(price) or (here > 0 and box.high[here] == 0):
            continue
        of = here if costs.order == LEVEL else 0
        certain, most_ranks = box.least_ranks[of], box.most_ranks[of]
        if costs.order == LEVEL:
            for rank in range(certain, most_ranks):
                together[rank] = 0.0
            for node in nodes_of_level:
                if value[node] > price[0]:
                    for rank in range(certain, min(children[node], most_ranks)):
                        child = first[node] + rank
                        together[rank] += max(0.0, value[child] - rate * seconds[child] - price[0] + gain[child])
        for node in nodes_of_level:
            if value[node] <= price[0]:
                continue  # no node below it has a value above its price either
            run = most = charges = 0.0
            before = ranks_so_far[node] if costs.order == PATH else 0
            for rank in range(min(children[node], most_ranks - before)):
                child = first[node] + rank
                net = value[child] - rate * seconds[child] - price[0] + gain[child]
                if exact and net <= 0:
                    break  # no later sibling adds more
                if before + rank >= certain:
                    charge = a_round / possible
                    if costs.order == LEVEL:
                        charge = a_round * net / together[rank] if net > 0 else 0.0
                    charges += charge
                    net -= charge
                run += net
                if run > most:
                    most, taken[node], charged[node] = run, rank + 1, charges
            least = price[here] if here > 0 else 0.0
            gain[node] = max(0.0, most - least)
            if most <= least:
                taken[node] = 0
    return gain[0], taken, charged


@numba.njit(cache=True)
def surplus(cost, ends, price, rate, low, high):  # type: ignore[no-untyped-def]
    """max of price * u - rate * cost[u] over low <= u <= high, and the u. Between two ends the cost is a straight line."""
    most, at = price * low - rate * cost[low], low
    start = 1
    for end in ends:
        if start > high:
            break
        if end >= low:
            for u in (max(start, low), min(end, high)):
                if price * u - rate * cost[u] > most:
                    most, at = price * u - rate * cost[u], u
        start = end + 1
    return most, at


@numba.njit(cache=True)
def curve(costs, resource):  # type: ignore[no-untyped-def]
    """A resource's cost and where it jumps."""
    return (costs.target, costs.target_ends) if resource == 0 else (costs.draft, costs.draft_ends)


@numba.njit(cache=True)
def shared(costs, share):  # type: ignore[no-untyped-def]
    """Costs that, at the rate (1 - share) * rate, charge what rate * (share * least + (1 - share) * work) does; share < 1."""
    constant = costs.constant + share / (1 - share) * costs.least
    every = (costs.by_round, costs.order, constant, costs.by_visit, costs.by_rejection, costs.least)
    return Costs(costs.target, costs.target_ends, costs.draft, costs.draft_ends, *every)


@numba.njit(cache=True)
def certain_rounds(box):  # type: ignore[no-untyped-def]
    """Rounds that every tree in the box has, beyond the ones that other costs hold."""
    rounds = 0
    for least in box.least_ranks:
        rounds += least - 1
    return rounds


@numba.njit(cache=True)
def relax(nodes, costs, box, price, rate, exact, use):  # type: ignore[no-untyped-def]
    """The bound on F - rate * step over the box, and the expected tokens of the tree behind it, which `use` describes.

    Args:
        exact: no row of p increases, the rows favour the spine, and rejections cost nothing, so that no later sibling adds more than an earlier one.
    """
    used, paid, ranks, charges, parents, walk = use
    gain, taken, charged = choose_children(nodes, costs, box, price, rate, exact)
    used[:], ranks[:], charges[:] = 0, 1, 0.0
    used[0], parents[0], walk[0] = 1, -1, 0.0
    inside = np.zeros(len(nodes.value), np.int64)
    tokens, at = 0.0, 0
    while at < used[0]:
        node = inside[at]
        tokens += nodes.value[node]
        walk[0] += nodes.seconds[node]
        if taken[node] > 0:
            here = nodes.level[node]
            of = here if costs.order == LEVEL else 0
            if here > 0:
                used[here] += 1
            ranks[of] = max(ranks[of], taken[node] + (nodes.ranks[node] if costs.order == PATH else 0))
            charges[of] += charged[node]
            for rank in range(taken[node]):
                inside[used[0]], parents[used[0]] = nodes.first[node] + rank, at
                used[0] += 1
        at += 1
    bound = 1.0 - price[0] + gain - rate * (costs.constant + costs.by_round * certain_rounds(box))
    for r in range(len(price)):
        cost, ends = curve(costs, r)
        most, paid[r] = surplus(cost, ends, price[r], rate, box.low[r], box.high[r])
        bound += most
    return bound, tokens


@numba.njit(cache=True)
def improve(nodes, costs, box, price, rate, exact, floor, steps, use):  # type: ignore[no-untyped-def]
    """Move `price` to where the bound is smaller, by Polyak's subgradient steps towards 0. Returns `relax` there.

    Args:
        floor: the least price of a node: the value of every node that is not among `nodes` is at most this.
    """
    trial = price.copy()
    least, scale, idle = np.inf, 1.0, 0
    for _ in range(steps):
        bound, _ = relax(nodes, costs, box, trial, rate, exact, use)
        if bound < least:
            least, idle = bound, 0
            price[:] = trial
        else:
            idle += 1
        length = 0.0
        for r in range(len(price)):
            length += (use.paid[r] - use.used[r]) ** 2
        if bound <= 0 or length == 0:
            break
        if idle == PATIENCE:
            scale, idle = scale / 2, 0
        for r in range(len(price)):
            trial[r] = max(floor if r == 0 else 0.0, trial[r] - scale * bound / length * (use.paid[r] - use.used[r]))
    return relax(nodes, costs, box, price, rate, exact, use)
