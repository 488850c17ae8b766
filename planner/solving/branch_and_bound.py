"""The fastest tree, with a proof: branch and bound over how many nodes a tree has and how many of them have children on each level.

A box is closed when its bound (relaxation.py) says that none of its trees is faster than the best one known. A box that stays open is split
at the resource whose cost differs most from what its price pays. Once each draft pass in a box has one known cost, and where no row of p
increases and the rows favour the spine, best-first growth within the box's widths gives its best tree of every size, and the box is closed as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from sequoia_plan.planner.solving.best_first import grow, pop, push
from sequoia_plan.planner.solving.relaxation import LEVEL, PATH, Box, Ints, Use, certain_rounds, curve, improve, shared, surplus

FIRST_STEPS, STEPS = 200, 12
SHARES, LARGEST_SHARE = 6, 1 - 1e-6
"""Shares that are tried where a step's least time may be the longer one, see relaxation.py."""
MOST_BOXES = 20_000
CLOSED = 1e-10
"""A box is closed when nothing in it is faster than the best tree known by more than this, relative."""


class Found(NamedTuple):
    """The fastest tree (parents precede their children; empty if none was found), its tokens a second, and a bound on any tree's."""

    parents: Ints
    rate: float
    bound: float


@numba.njit(cache=True)
def fastest_part(parents, levels, rows, costs):  # type: ignore[no-untyped-def]
    """Tokens a second, and size, of the fastest of the trees that the first 2, 3, ... nodes are."""
    value, children, ranks = np.ones(len(parents)), np.zeros(len(parents), np.int64), np.zeros(len(parents), np.int64)
    left, walk, kind = np.ones(len(parents)), 0.0, np.zeros(len(parents), np.int64)
    wide, most = np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64)
    tokens, drafts, rounds = 1.0, 0.0, 0
    best, size = 0.0, 1
    for node in range(1, len(parents)):
        above, here = parents[node], levels[node] - 1
        value[node] = value[above] * rows[here, kind[above], children[above]]
        kind[node] = kind[above] if children[above] == 0 else rows.shape[1] - 1
        tokens += value[node]
        children[above] += 1
        ranks[node], left[node] = ranks[above] + children[above], value[node]
        left[above] = max(0.0, left[above] - value[node])
        walk += costs.by_visit * value[node] + costs.by_rejection * left[above]
        if children[above] == 1 and here > 0:
            drafts += costs.draft[wide[here] + 1] - costs.draft[wide[here]]
            wide[here] += 1
        of = here if costs.order == LEVEL else 0
        if (ranks[node] if costs.order == PATH else children[above]) > most[of]:
            most[of] += 1
            rounds += 1
        rate = tokens / max(costs.least, costs.target[node + 1] + drafts + walk + costs.by_round * rounds + costs.constant)
        if rate > best:
            best, size = rate, node + 1
    return best, size


@numba.njit(cache=True)
def relaxed_work(costs, use):  # type: ignore[no-untyped-def]
    """Seconds of work of a step with the tree behind a bound; inf if it is too large or too wide to know."""
    if use.used[0] >= len(costs.target):
        return np.inf
    seconds = costs.target[use.used[0]] + costs.constant + use.walk[0]
    for ranks in use.ranks:
        seconds += costs.by_round * (ranks - 1)
    for r in range(1, len(use.used)):
        if use.used[r] > costs.draft_ends[-1]:
            return np.inf
        seconds += costs.draft[use.used[r]]
    return seconds


@numba.njit(cache=True)
def least_work(costs, box):  # type: ignore[no-untyped-def]
    """No step with a tree in the box works less."""
    seconds = costs.target[box.low[0]] + costs.constant + costs.by_round * certain_rounds(box)
    for r in range(1, len(box.low)):
        seconds += costs.draft[box.low[r]]
    return seconds


@numba.njit(cache=True)
def lower(nodes, costs, box, price, goal, exact, floor, steps, share, use):  # type: ignore[no-untyped-def]
    """`improve` for steps of at least `costs.least`: the bound on F - goal * step, its tokens, and the share that it was found at.

    The work of the tree behind a bound says which way a better share lies.
    """
    if least_work(costs, box) >= costs.least:
        return *improve(nodes, costs, box, price, goal, exact, floor, steps, use), 0.0
    low, high = 0.0, 1.0
    excess, tokens = improve(nodes, shared(costs, share), box, price, goal * (1 - share), exact, floor, steps, use)
    for _ in range(SHARES):
        if excess <= 0:
            break
        if relaxed_work(costs, use) < costs.least:
            low = share
        else:
            high = share
        share = min((low + high) / 2, LARGEST_SHARE)
        excess, tokens = improve(nodes, shared(costs, share), box, price, goal * (1 - share), exact, floor, STEPS, use)
    return excess, tokens, share


@numba.njit(cache=True)
def tighten(costs, box, price, rate, paid, excess):  # type: ignore[no-untyped-def]
    """Take numbers off both ends of each interval for which the bound, `excess` in the whole box, is not above 0."""
    for r in range(len(price)):
        cost, ends = curve(costs, r)
        enough = price[r] * paid[r] - rate * cost[paid[r]] - excess
        while box.low[r] < box.high[r]:
            end = min(box.high[r], ends[np.searchsorted(ends, box.low[r])]) if box.low[r] > 0 else 0
            if surplus(cost, ends, price[r], rate, box.low[r], end)[0] > enough:
                break
            box.low[r] = min(end + 1, box.high[r])
        while box.low[r] < box.high[r]:
            at = np.searchsorted(ends, box.high[r])
            start = max(box.low[r], ends[at - 1] + 1 if at > 0 else 1)
            if surplus(cost, ends, price[r], rate, start, box.high[r])[0] > enough:
                break
            box.high[r] = max(start - 1, box.low[r])


@numba.njit(cache=True)
def cut(cost, ends, used, low, high):  # type: ignore[no-untyped-def]
    """Where to split an interval into low ... cut and cut + 1 ... high: at a jump of the cost beside `used`; -1 if the cost is one number."""
    if low == 0 < high:
        return 0
    at = np.searchsorted(ends, used)
    if ends[at] < high:
        return ends[at]
    if at > 0 and ends[at - 1] >= low:
        return ends[at - 1]
    return min(used, high - 1) if cost[high] > cost[low] else -1


@numba.njit(cache=True)
def choose_cut(costs, box, price, rate, use, grows_best):  # type: ignore[no-untyped-def]
    """Which interval to split, and where: resources come first, then ranks. (-1, -1) if all that matters is known.

    Where best-first growth tells the best tree of each size, sizes need not be split.
    """
    worst, which, where, matters = -1.0, -1, -1, False
    for r in range(len(price)):
        cost, ends = curve(costs, r)
        u = min(max(use.used[r], box.low[r]), box.high[r])
        at = cut(cost, ends, u, box.low[r], box.high[r])
        if at >= 0:
            matters |= r > 0 or not grows_best
            paid = price[r] * use.paid[r] - rate * cost[use.paid[r]]
            gap = paid - price[r] * u + rate * cost[u] + price[r] * abs(use.used[r] - u)
            if gap > worst:
                worst, which, where = gap, r, at
    for of in range(len(use.ranks)):
        low, high = box.least_ranks[of], box.most_ranks[of]
        if low < high and (of == 0 or box.low[of] > 0):
            matters = True
            beyond = min(use.ranks[of], high) - low
            gap = max(beyond, 0) * rate * costs.by_round - use.charges[of]
            if gap > worst:
                worst, which, where = gap, len(price) + of, low + max(beyond - 1, 0)
    return (which, where) if matters else (-1, -1)


@numba.njit(cache=True)
def split(boxes, b, new, which, where):  # type: ignore[no-untyped-def]
    """Boxes `new` and `new` + 1 become the parts of box `b` on both sides of a cut."""
    resources = boxes.low.shape[1]
    for part in (new, new + 1):
        boxes.low[part], boxes.high[part] = boxes.low[b], boxes.high[b]
        boxes.least_ranks[part], boxes.most_ranks[part] = boxes.least_ranks[b], boxes.most_ranks[b]
    if which >= resources:
        boxes.most_ranks[new, which - resources] = where
        boxes.least_ranks[new + 1, which - resources] = where + 1
        return
    boxes.high[new, which] = where
    boxes.low[new + 1, which] = where + 1
    for r in range(1, resources):  # a level that has children lies below levels that have
        if r > which and where == 0:
            boxes.high[new, r] = 0
        if r < which:
            boxes.low[new + 1, r] = max(1, boxes.low[new + 1, r])


@numba.njit(cache=True)
def limits(costs, box, use, settled, widths, ranks):  # type: ignore[no-untyped-def]
    """What best-first growth may use: the box's limits if it is settled, else what the relaxed tree uses, up to where the cost jumps. Returns
    the largest sum of ranks along a path."""
    for r in range(len(widths)):
        of = r if costs.order == LEVEL else 0
        ranks[r] = box.most_ranks[of]
        if not settled and costs.by_round > 0:
            ranks[r] = min(use.ranks[of], box.most_ranks[of])
        if r > 0 and settled:
            widths[r] = box.high[r]
        elif r > 0:
            u = min(use.used[r], box.high[r])
            end = costs.draft_ends[np.searchsorted(costs.draft_ends, u)]
            widths[r] = end if u > 0 and costs.draft[end] == costs.draft[u] else u
    return ranks[0] if costs.order == PATH else len(widths) * ranks.max()


@numba.njit(cache=True)
def search(nodes, order, rows, costs, floor, exact, grows_best, rate, most_work):  # type: ignore[no-untyped-def]
    """The fastest tree of two nodes or more, if it is faster than `rate`.

    Args:
        nodes: `candidates(rows, floor)`.
        order: rows that never increase, close to `rows`: what best-first growth goes by.
        rows: float64 [levels, classes, branching], p.
        floor: the value of every other node is at most this.
        exact: no later sibling adds more than an earlier one: no row increases, the rows favour the spine, and rejections cost nothing.
        grows_best: best-first growth within limits of a box gives its best tree of every size.
        rate: tokens a second of the best tree known.
        most_work: how many nodes may be looked at; then the bound is the largest of the boxes still open.
    """
    resources, _, branching = rows.shape
    of_ranks = resources if costs.order == LEVEL else 1
    room = min(MOST_BOXES, 2 + 4_000_000 // resources)
    shape, most_ranks_of_all = (room, resources), branching * resources if costs.order == PATH else branching
    boxes = Box(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.ones((room, of_ranks), np.int64), np.full((room, of_ranks), most_ranks_of_all))
    prices, shares, open_boxes = np.zeros(shape), np.zeros(room), np.empty((room + 1, 3))
    integers, ranks = np.zeros(resources, np.int64), np.zeros(of_ranks, np.int64)
    use = Use(integers, integers.copy(), ranks, np.zeros(of_ranks), np.empty(len(nodes.value), np.int64), np.zeros(1))
    widths, most_ranks = np.ones(resources, np.int64), np.ones(resources, np.int64)
    size, widest = costs.target_ends[-1], costs.draft_ends[-1]
    boxes.low[0, 0], boxes.high[0, 0], prices[0, 0] = 2, size, floor
    for r in range(1, resources):
        boxes.high[0, r] = widest
        if r < nodes.level[-1]:
            prices[0, r] = rate * costs.draft[widest] / widest
    if costs.by_round == 0:
        boxes.least_ranks[0, 0] = most_ranks_of_all
    best = np.empty(0, np.int64)
    push(open_boxes, 0, np.inf, 0.0, 0.0)
    waiting, made, work, unsettled = 1, 1, 0, 0.0
    while waiting > 0 and open_boxes[0, 0] > rate * (1 + CLOSED):
        bound, b = open_boxes[0, 0], int(open_boxes[0, 1])
        if work > most_work or made + 2 > room:
            unsettled = max(unsettled, bound)
            break
        pop(open_boxes, waiting)
        waiting -= 1
        box, price = Box(boxes.low[b], boxes.high[b], boxes.least_ranks[b], boxes.most_ranks[b]), prices[b]
        goal, steps = rate * (1 + CLOSED), FIRST_STEPS if b == 0 else STEPS
        excess, tokens, share = lower(nodes, costs, box, price, goal, exact, floor, steps, shares[b], use)
        work += steps * (len(nodes.value) + resources * len(costs.draft_ends)) + 10 * size
        if excess <= 0:
            continue
        bound = min(bound, goal + excess / max(costs.least, least_work(costs, box)))
        reached = tokens / max(costs.least, relaxed_work(costs, use))
        if reached > rate:
            rate, best = reached, use.parents[: use.used[0]].copy()
        charged = goal * (1 - share)
        tighten(costs, box, price, charged, use.paid, excess)
        which, where = choose_cut(costs, box, price, charged, use, grows_best)
        longest = limits(costs, box, use, which < 0, widths, most_ranks)
        grown, _, levels = grow(order, size, widths, np.minimum(most_ranks, branching), longest)
        reached, nodes_of_it = fastest_part(grown, levels, rows, costs)
        if reached > rate:
            rate, best = reached, grown[:nodes_of_it].copy()
        if bound <= rate * (1 + CLOSED):
            continue
        if which >= 0:
            split(boxes, b, made, which, where)
            for part in (made, made + 1):
                prices[part], shares[part] = price, share
                push(open_boxes, waiting, bound, float(part), 0.0)
                waiting += 1
            made += 2
        elif not grows_best:  # growth need not find the best tree here: the bound stays, as small as it can be made
            goal = rate * (1 + CLOSED)
            steps = max(steps, FIRST_STEPS)
            excess, _, _ = lower(nodes, costs, box, price, goal, exact, floor, steps, share, use)
            work += steps * len(nodes.value)
            unsettled = max(unsettled, min(bound, goal + max(0.0, excess) / max(costs.least, least_work(costs, box))))
    return Found(best, rate, max(rate * (1 + CLOSED), unsettled))
