"""The fastest tree, with a proof: branch and bound over how many nodes a tree has and how many of them have children on each level.

Resource 0 is the tree's nodes; resource l = 1, 2, ... is the nodes of level l that have children, which set the width of that level's
draft pass. Each resource has a cost in seconds that never decreases. A box limits every resource to an interval. With a price x[r] >= 0 in
tokens for a unit of each resource, every tree T in the box satisfies

    F(T) - rate * step(T) =   sum over nodes of (value - x[0]) - sum over nodes with children of x[level]
                            + sum over r of (x[r] * used[r] - rate * cost[r][used[r]]) - rate * constant

The first line is largest for a tree that a recursion from the leaves finds, each r of the second line for some number in its interval,
so the sum of these maxima is a bound (Lagrangian relaxation). If it is not above 0, no tree in the box is faster than `rate`. Subgradient
steps look for prices that make it small. A box that stays open is split at the resource whose cost differs most from what its price pays.
Once every draft pass of a box has one known cost, and no row of p increases, best-first growth within the box's widths gives its optimum of every size.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from sequoia_plan.planner.solving.best_first import _pop, _push, grow

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST_STEPS, STEPS, PATIENCE = 200, 12, 5
MOST_BOXES, MOST_WORK = 20_000, 100_000_000
STATS = False
CLOSED = 1e-10
"""A box is closed when nothing in it is faster than the best tree known by more than this, relative."""


class Costs(NamedTuple):
    """Seconds of a step, in tables.

    Args:
        target: float64 [most + 1], by nodes: the target's pass and what verification takes per node.
        target_ends: int64, the largest sizes of equal target passes, ascending; the last is `most`.
        draft: float64 [most + 1], by nodes with children on a level below the root's: the draft pass and what verification takes for them.
        draft_ends: int64, the largest widths of equal draft passes, ascending; the last is the widest that was measured.
        by_round: for each further round of verification, beyond those that `draft` and `constant` hold.
        rounds_by_level: is a round a rank on a level; else it is a rank in the tree.
        constant: of any tree that speculates.
    """

    target: Floats
    target_ends: Ints
    draft: Floats
    draft_ends: Ints
    by_round: float
    rounds_by_level: bool
    constant: float


class Nodes(NamedTuple):
    """The nodes that may be worth their price, breadth-first: value and level, and where children begin and how many there are."""

    value: Floats
    level: Ints
    first: Ints
    count: Ints


class Box(NamedTuple):
    """Inclusive limits: of every resource, and of the children a node may have (on each level, or in the whole tree: `rounds_by_level`)."""

    low: Ints
    high: Ints
    least_ranks: Ints
    most_ranks: Ints


class Use(NamedTuple):
    """What `relax` fills in.

    Args:
        used: of each resource, by the tree behind the bound.
        paid: of each resource, the number that its price pays for best.
        ranks: the most children of a node, like Box.most_ranks.
        charges: tokens charged for rounds beyond Box.least_ranks.
        parents: of that tree, breadth-first; the first used[0] entries count.
    """

    used: Ints
    paid: Ints
    ranks: Ints
    charges: Floats
    parents: Ints


class Found(NamedTuple):
    """The fastest tree, a parent before its children, its tokens a second, and tokens a second that no tree exceeds."""

    parents: Ints
    rate: float
    bound: float


@numba.njit(cache=True)
def offered(rows, floor):  # type: ignore[no-untyped-def]
    """Every node of a value above `floor`, and its siblings of lower rank."""
    levels, branching = rows.shape
    capacity = 1024
    value, level = np.ones(capacity), np.zeros(capacity, np.int64)
    first, count = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
    size, node = 1, 0
    while node < size:
        here = level[node]
        if here < levels:
            for rank in range(branching):
                if value[node] * rows[here, rank] > floor:
                    count[node] = rank + 1
        first[node] = size
        if size + count[node] > len(value):
            more = len(value) + branching
            value, level = np.append(value, np.ones(more)), np.append(level, np.zeros(more, np.int64))
            first, count = np.append(first, np.zeros(more, np.int64)), np.append(count, np.zeros(more, np.int64))
        for rank in range(count[node]):
            value[size], level[size] = value[node] * rows[here, rank], here + 1
            size += 1
        node += 1
    return Nodes(value[:size], level[:size], first[:size], count[:size])


@numba.njit(cache=True)
def fastest_part(parent, level, rows, costs):  # type: ignore[no-untyped-def]
    """Tokens a second, and size, of the fastest tree among the first 2, 3, ... of these nodes."""
    value = np.ones(len(parent))
    children = np.zeros(len(parent), np.int64)
    wide, most = np.zeros(len(rows) + 1, np.int64), np.ones(len(rows) + 1, np.int64)
    tokens, drafts, rounds = 1.0, 0.0, 0
    best, size = 0.0, 1
    for node in range(1, len(parent)):
        above, here = parent[node], level[node] - 1
        value[node] = value[above] * rows[here, children[above]]
        tokens += value[node]
        children[above] += 1
        if children[above] == 1 and here > 0:
            drafts += costs.draft[wide[here] + 1] - costs.draft[wide[here]]
            wide[here] += 1
        of = here if costs.rounds_by_level else 0
        if children[above] > most[of]:
            most[of] += 1
            rounds += 1
        rate = tokens / (costs.target[node + 1] + drafts + costs.by_round * rounds + costs.constant)
        if rate > best:
            best, size = rate, node + 1
    return best, size


@numba.njit(cache=True)
def surplus(cost, ends, price, rate, low, high):  # type: ignore[no-untyped-def]
    """max of price * u - rate * cost[u] over low <= u <= high, and the u: between two ends the cost is a straight line."""
    most, at = price * low - rate * cost[low], low
    start = 1
    for end in ends:
        if end >= low and start <= high:
            for u in (max(start, low), min(end, high)):
                if price * u - rate * cost[u] > most:
                    most, at = price * u - rate * cost[u], u
        start = end + 1
    return most, at


@numba.njit(cache=True)
def least_seconds(costs, box):  # type: ignore[no-untyped-def]
    """No step with a tree in the box takes less."""
    seconds = costs.target[box.low[0]] + costs.constant + costs.by_round * (box.least_ranks - 1).sum()
    for r in range(1, len(box.low)):
        seconds += costs.draft[box.low[r]]
    return seconds


@numba.njit(cache=True)
def choose_children(nodes, costs, box, price, rate, exact):  # type: ignore[no-untyped-def]
    """From the leaves up: how many children each node should have, what they add (less its own price), and what is charged for rounds there.

    A round that the box does not hold yet is paid by the children of its rank. On a level they share it in proportion to what each adds, so
    they take the rank if they pay for it together; in the whole tree all that there can be share it equally.
    """
    value, level, first, count = nodes
    gain, charged = np.zeros(len(value)), np.zeros(len(value))
    taken = np.zeros(len(value), np.int64)
    together = np.zeros(box.most_ranks.max())
    a_round = rate * costs.by_round
    equally = a_round / (1 + box.high[1:].sum())
    stop = len(value)
    while stop > 0:
        here = level[stop - 1]
        start = np.searchsorted(level, here)
        of = here if costs.rounds_by_level else 0
        least_ranks, most_ranks = box.least_ranks[of], box.most_ranks[of]
        if here == 0 or box.high[here] > 0:
            if costs.rounds_by_level:
                together[:] = 0.0
                for node in range(start, stop):
                    if value[node] > price[0]:
                        for rank in range(least_ranks, min(count[node], most_ranks)):
                            child = first[node] + rank
                            together[rank] += max(0.0, value[child] - price[0] + gain[child])
            for node in range(start, stop):
                if count[node] == 0 or value[node] <= price[0]:
                    continue
                run = most = charges = 0.0
                for rank in range(min(count[node], most_ranks)):
                    child = first[node] + rank
                    net = value[child] - price[0] + gain[child]
                    if exact and net <= 0:
                        break  # no later sibling adds more
                    if rank >= least_ranks:
                        charge = equally
                        if costs.rounds_by_level:
                            charge = a_round * max(0.0, net) / together[rank] if together[rank] > 0 else 0.0
                        charges += charge
                        net -= charge
                    run += net
                    if run > most:
                        most, taken[node], charged[node] = run, rank + 1, charges
                least = 0.0 if here == 0 else price[here]
                if most > least:
                    gain[node] = most - least
                else:
                    taken[node] = 0
        stop = start
    return gain[0], taken, charged


@numba.njit(cache=True)
def relax(nodes, costs, box, price, rate, exact, use):  # type: ignore[no-untyped-def]
    """The bound on F - rate * step over the box, and the expected tokens of the tree behind it, which `use` describes."""
    used, paid, ranks, charges, parents = use
    gain, taken, charged = choose_children(nodes, costs, box, price, rate, exact)
    used[:], ranks[:], charges[:] = 0, 1, 0.0
    used[0], parents[0] = 1, -1
    inside = np.zeros(len(nodes.value), np.int64)
    tokens, at = 0.0, 0
    while at < used[0]:
        node = inside[at]
        tokens += nodes.value[node]
        if taken[node] > 0:
            here = nodes.level[node]
            of = here if costs.rounds_by_level else 0
            if here > 0:
                used[here] += 1
            ranks[of] = max(ranks[of], taken[node])
            charges[of] += charged[node]
            for rank in range(taken[node]):
                inside[used[0]], parents[used[0]] = nodes.first[node] + rank, at
                used[0] += 1
        at += 1
    bound = 1.0 - price[0] + gain - rate * (costs.constant + costs.by_round * (box.least_ranks - 1).sum())
    for r in range(len(price)):
        cost, ends = (costs.target, costs.target_ends) if r == 0 else (costs.draft, costs.draft_ends)
        most, paid[r] = surplus(cost, ends, price[r], rate, box.low[r], box.high[r])
        bound += most
    return bound, tokens


@numba.njit(cache=True)
def lower(nodes, costs, box, price, rate, exact, floor, steps, use):  # type: ignore[no-untyped-def]
    """Subgradient steps (Polyak's, towards 0) to prices with a smaller bound; `relax` for the best of them, and how many steps there were."""
    trial = price.copy()
    least, scale, idle = np.inf, 1.0, 0
    for step in range(steps):
        bound, _ = relax(nodes, costs, box, trial, rate, exact, use)
        idle += 1
        if bound < least:
            least, idle = bound, 0
            price[:] = trial
        if idle == PATIENCE:
            scale, idle = scale / 2, 0
            trial[:] = price
        away = use.paid - use.used
        length = (away**2).sum()
        if bound <= 0 or length == 0:
            break
        trial -= scale * bound / length * away
        trial[0] = max(floor, trial[0])
        trial[1:] = np.maximum(0.0, trial[1:])
    bound, tokens = relax(nodes, costs, box, price, rate, exact, use)
    return bound, tokens, step + 2


@numba.njit(cache=True)
def tighten(costs, box, price, rate, paid, excess):  # type: ignore[no-untyped-def]
    """Take numbers off both ends of each interval, as long as the bound without them is not above 0 there."""
    for r in range(len(price)):
        cost, ends = (costs.target, costs.target_ends) if r == 0 else (costs.draft, costs.draft_ends)
        spare = price[r] * paid[r] - rate * cost[paid[r]] - excess  # what a number may fall short of the best one
        while box.low[r] < box.high[r]:
            end = min(box.high[r], ends[np.searchsorted(ends, box.low[r])]) if box.low[r] > 0 else 0
            if surplus(cost, ends, price[r], rate, box.low[r], end)[0] > spare:
                break
            box.low[r] = end + 1
        while box.low[r] < box.high[r]:
            at = np.searchsorted(ends, box.high[r])
            start = max(box.low[r], ends[at - 1] + 1 if at > 0 else 1)
            if surplus(cost, ends, price[r], rate, start, box.high[r])[0] > spare:
                break
            box.high[r] = start - 1


@numba.njit(cache=True)
def cut(cost, ends, used, low, high):  # type: ignore[no-untyped-def]
    """Where to split an interval into low ... cut and cut + 1 ... high: at a jump of the cost beside `used`; -1 where the cost is one number."""
    if low == 0 < high:
        return 0
    at = np.searchsorted(ends, used)
    if ends[at] < high:
        return ends[at]
    if at > 0 and ends[at - 1] >= low:
        return ends[at - 1]
    if cost[high] > cost[low]:
        return min(used, high - 1)
    return -1


@numba.njit(cache=True)
def choose_cut(costs, box, price, rate, use, exact):  # type: ignore[no-untyped-def]
    """The resource whose cost is furthest from what its price pays, and where to cut it. Ranks are numbered after the resources. -1: nothing is left to cut."""
    used, paid, ranks, charges, _ = use
    worst, which, where = -1.0, -1, -1
    resources = len(price)
    open_widths = not exact  # best-first growth settles the size
    for r in range(resources):
        cost, ends = (costs.target, costs.target_ends) if r == 0 else (costs.draft, costs.draft_ends)
        u = min(max(used[r], box.low[r]), box.high[r])
        at = cut(cost, ends, u, box.low[r], box.high[r])
        if at >= 0:
            open_widths |= r > 0
            gap = price[r] * paid[r] - rate * cost[paid[r]] - price[r] * u + rate * cost[u] + price[r] * abs(used[r] - u)
            if gap > worst:
                worst, which, where = gap, r, at
    for of in range(len(ranks)):
        low, high = box.least_ranks[of], box.most_ranks[of]
        if low < high and (of == 0 or box.low[of] > 0):
            open_widths = True
            beyond = min(ranks[of], high) - low
            gap = max(beyond, 0) * rate * costs.by_round - charges[of]
            if gap > worst:
                worst, which, where = gap, resources + of, low + max(beyond - 1, 0)
    return (which, where) if open_widths else (-1, -1)


@numba.njit(cache=True)
def relaxed_rate(costs, use, tokens):  # type: ignore[no-untyped-def]
    """Tokens a second of the tree behind a bound."""
    used, ranks = use.used, use.ranks
    if used[0] >= len(costs.target) or used[1:].max() > costs.draft_ends[-1]:
        return 0.0
    seconds = costs.target[used[0]] + costs.constant + costs.by_round * (ranks - 1).sum()
    for r in range(1, len(used)):
        seconds += costs.draft[used[r]]
    return tokens / seconds


@numba.njit(cache=True)
def search(nodes, order, rows, costs, floor, exact, rate, most_work):  # type: ignore[no-untyped-def]
    """The fastest tree of two nodes or more, if it is faster than `rate`; no parents if none was found.

    Args:
        nodes: `offered(rows, floor)`.
        order: rows that never increase, close to `rows`: what best-first growth goes by.
        floor: all other nodes are worth at most this.
        exact: `rows` never increase.
        most_work: nodes that may be priced.
    """
    resources = max(2, nodes.level[-1])
    of_ranks = resources if costs.rounds_by_level else 1
    room = min(MOST_BOXES, 1 + 4_000_000 // resources)
    low, high = np.zeros((room, resources), np.int64), np.zeros((room, resources), np.int64)
    least_ranks, most_ranks = np.ones((room, of_ranks), np.int64), np.full((room, of_ranks), rows.shape[1])
    prices = np.zeros((room, resources))
    heap = np.empty((room + 1, 3))
    none, none_of_ranks = np.zeros(resources, np.int64), np.zeros(of_ranks, np.int64)
    use = Use(none, none.copy(), none_of_ranks, np.zeros(of_ranks), np.empty(len(nodes.value), np.int64))
    best = np.empty(0, np.int64)
    most, widest = costs.target_ends[-1], costs.draft_ends[-1]
    low[0, 0], high[0, 0], high[0, 1:] = 2, most, widest
    prices[0, 0], prices[0, 1:] = floor, rate * costs.draft[widest] / widest
    if costs.by_round == 0:
        least_ranks[0] = rows.shape[1]
    widths, limits = np.ones(resources, np.int64), np.ones(resources, np.int64)
    _push(heap, 0, np.inf, 0.0, 0.0)
    waiting, boxes, work = 1, 1, 0
    unsettled = 0.0
    while waiting > 0:
        bound, b = heap[0, 0], int(heap[0, 1])
        goal = rate * (1 + CLOSED)
        if bound <= goal:
            break
        if work > most_work or boxes + 2 > room:
            unsettled = max(unsettled, bound)
            break
        _pop(heap, waiting)
        waiting -= 1
        box, price = Box(low[b], high[b], least_ranks[b], most_ranks[b]), prices[b]
        excess, tokens, steps = lower(nodes, costs, box, price, goal, exact, floor, FIRST_STEPS if b == 0 else STEPS, use)
        work += steps * (len(nodes.value) + 10 * resources)
        if excess <= 0:
            continue
        reached = relaxed_rate(costs, use, tokens)
        if reached > rate:
            rate, best = reached, use.parents[: use.used[0]].copy()
        bound = min(bound, goal + excess / least_seconds(costs, box))
        tighten(costs, box, price, goal, use.paid, excess)
        which, where = choose_cut(costs, box, price, goal, use, exact)
        for r in range(resources):
            of = r if costs.rounds_by_level else 0
            limits[r] = box.most_ranks[of] if which < 0 or costs.by_round == 0 else min(use.ranks[of], box.most_ranks[of])
            if r > 0:
                u = min(use.used[r], box.high[r])
                end = costs.draft_ends[np.searchsorted(costs.draft_ends, u)]
                widths[r] = box.high[r] if which < 0 else u if u == 0 or costs.draft[end] > costs.draft[u] else end
        grown, _, level = grow(order, most, widths, limits)
        reached, size = fastest_part(grown, level, rows, costs)
        if reached > rate:
            rate, best = reached, grown[:size].copy()
        if bound <= rate * (1 + CLOSED):
            continue
        if which < 0:
            if not exact:
                excess, _, _ = lower(nodes, costs, box, price, rate * (1 + CLOSED), exact, floor, FIRST_STEPS, use)
                unsettled = max(unsettled, min(bound, rate * (1 + CLOSED) + max(0.0, excess) / least_seconds(costs, box)))
            continue
        for upper in (False, True):
            new = boxes
            boxes += 1
            low[new], high[new], least_ranks[new], most_ranks[new], prices[new] = low[b], high[b], least_ranks[b], most_ranks[b], price
            if which >= resources and upper:
                least_ranks[new, which - resources] = where + 1
            elif which >= resources:
                most_ranks[new, which - resources] = where
            elif upper:
                low[new, which] = where + 1
                low[new, 1:which] = np.maximum(1, low[new, 1:which])  # a level that has children lies below levels that have
            else:
                high[new, which] = where
                if where == 0:
                    high[new, which:] = 0
            _push(heap, waiting, bound, new, 0.0)
            waiting += 1
    if STATS:
        print(boxes, work, waiting)
    return Found(best, rate, max(rate * (1 + CLOSED), unsettled))
