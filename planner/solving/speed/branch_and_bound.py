"""The fastest tree, with a proof, by branch and bound.

A box (relaxation.py) limits how many nodes a tree has and how many of them have children on each
level. A box is closed when its bound says that none of its trees is faster than the best tree so
far. A box that stays open is split at the resource whose cost differs most from what its price
pays. Once each draft pass in a box has a single cost, and if no row of p increases and the rates
favour the spine, best-first search within the box's widths finds its best tree of every size, and
the box is closed as well.
"""

from heapq import heappop, heappush

import numpy as np

from sequoia_plan.planner.solving.compiled import compiled
from sequoia_plan.planner.solving.speed.costs import (
    cost_curve,
    fastest_prefix,
    stair_of,
    work_seconds,
)
from sequoia_plan.planner.solving.speed.relaxation import Box, RelaxedTree, optimise_prices
from sequoia_plan.planner.solving.tokens.best_first import most_valuable_nodes_within

ROOT_STEPS = 200
"""Subgradient steps for the box of all trees, and for a box that cannot be split further."""
STEPS = 12
"""Subgradient steps for any other box, which starts from the prices of the box it was part of."""
MAX_SHARES = 6
"""Shares tried for a box where `min_step_seconds` may be the longer time, see relaxation.py."""
MAX_BOXES = 20_000
TOLERANCE = 1e-10
"""A box is closed when none of its trees is faster than the best one by more than this share."""


@compiled
def find_fastest(search, speed, max_work):
    """Find the fastest tree of two nodes or more that is faster than `speed`, with a bound.

        open = {the box of all trees}
        while the box of the largest bound has a bound above the best speed:
            bound = speed_bound(box) by Lagrangian relaxation;  close the box if bound <= speed
            best = max(best, relaxed tree, prefixes of a best-first search within the box)
            if each draft pass in the box has a single cost: the best-first search closes it
            else: split the box in two

    `max_work` is how many nodes and stairs of cost curves the search may look at. When it stops
    there, the bound is the largest of those of the open boxes. Returns the parents, int64 [size],
    empty if no tree is faster than `speed`, and the speed that no tree exceeds.
    """
    costs, num_nodes = search.costs, len(search.nodes.values)
    # Level 0, the root's, has no limit of its own: resource 0 is the nodes of the tree.
    num_resources = len(search.rates)
    max_boxes = min(MAX_BOXES, 2 + 4_000_000 // num_resources)
    low = np.zeros((max_boxes, num_resources), np.int64)
    high = np.zeros((max_boxes, num_resources), np.int64)
    # The prices and the share that `bound_gain` starts from in each box: those of the box that it
    # was part of.
    prices, shares = np.zeros((max_boxes, num_resources)), np.zeros(max_boxes)
    set_first_box(search, low[0], high[0], prices[0], speed)
    tree = RelaxedTree(
        np.zeros(num_resources, np.int64),
        np.zeros(num_resources, np.int64),
        np.empty(num_nodes, np.int64),
    )
    max_size = costs.target_stair_ends[-1]
    work_per_step = num_nodes + num_resources * len(costs.draft_stair_ends)
    best_parents = np.empty(0, np.int64)
    unsettled_bound = 0.0  # the largest bound of the boxes that are neither closed nor split
    open_boxes = [(-np.inf, 0)]  # a heap, by their bounds less than 0
    num_boxes, work = 1, 0
    while open_boxes and -open_boxes[0][0] > speed * (1 + TOLERANCE):
        negative_bound, b = heappop(open_boxes)
        bound = -negative_bound
        if work > max_work or num_boxes == max_boxes:
            unsettled_bound = max(unsettled_bound, bound)
            break
        box = Box(low[b], high[b])
        goal = speed * (1 + TOLERANCE)
        steps = ROOT_STEPS if work == 0 else STEPS
        gain, tokens, share = bound_gain(search, box, prices[b], goal, shares[b], steps, tree)
        work += steps * work_per_step + 10 * max_size
        if gain <= 0:
            continue  # no tree in the box makes more than `goal` tokens a second
        bound = min(bound, speed_bound(costs, box, goal, gain))
        relaxed_seconds = max(costs.min_step_seconds, work_seconds(costs, tree.use))
        if tokens / relaxed_seconds > speed:  # the tree behind the bound is a tree like any other
            speed = tokens / relaxed_seconds
            best_parents = tree.parents[: tree.use[0]].copy()
        second_price = goal * (1 - share)  # expected tokens that a second of work is charged
        resource, cut = choose_cut(costs, box, prices[b], second_price, tree, search.is_ordered)
        is_settled = resource < 0
        parents, _, levels = most_valuable_nodes_within(
            search.smoothed_rates, max_size, width_limits(costs, box, tree, is_settled)
        )
        prefix_speed, prefix_size = fastest_prefix(parents, levels, search.rates, costs)
        if prefix_speed > speed:
            speed, best_parents = prefix_speed, parents[:prefix_size].copy()
        if bound <= speed * (1 + TOLERANCE):
            continue
        if not is_settled:
            split_box(low, high, prices, b, num_boxes, resource, cut)
            shares[b] = shares[num_boxes] = share
            for part in (b, num_boxes):
                heappush(open_boxes, (-bound, part))
            num_boxes += 1
        elif not search.is_ordered:
            # The best tree of the box may be a different one, so its bound stays, as small as
            # more steps can make it.
            goal, steps = speed * (1 + TOLERANCE), max(steps, ROOT_STEPS)
            gain, _, _ = bound_gain(search, box, prices[b], goal, share, steps, tree)
            work += steps * num_nodes
            box_bound = speed_bound(costs, box, goal, max(0.0, gain))
            unsettled_bound = max(unsettled_bound, min(bound, box_bound))
    return best_parents, max(speed * (1 + TOLERANCE), unsettled_bound)


@compiled
def set_first_box(search, low, high, prices, speed):
    """Write the box of all trees of two nodes or more, and its prices in expected tokens.

    All are [resources], zeros before: the first is nodes, the others are parents, by level.
    """
    costs = search.costs
    widest = costs.draft_stair_ends[-1]  # most nodes with children on one level that was measured
    low[0], high[0], prices[0] = 2, costs.target_stair_ends[-1], search.floor
    for level in range(1, len(prices)):
        high[level] = widest
        # Nodes on the last candidate level have no children to pay for. Above it, a parent pays its
        # share of the widest draft pass, at `speed` tokens a second.
        if level < search.nodes.levels[-1]:
            prices[level] = speed * costs.draft[widest] / widest


@compiled
def bound_gain(search, box, prices, goal, share, steps, tree):
    """Bound the gain F - goal * step of the trees in a box, whatever limits their step.

    `share` of the step is charged as `min_step_seconds`, the rest as work: it is bisected while
    that may lower the bound. Returns the bound, the expected tokens of `tree`, and the share.
    `tree` and `prices`, float64 [resources], are overwritten.
    """
    low, high, gain, tokens = 0.0, 1.0, 0.0, 0.0
    if work_seconds(search.costs, box.low) >= search.costs.min_step_seconds:
        share = high = 0.0  # the work is the longer time for every tree in the box
    for attempt in range(1 + MAX_SHARES):
        if attempt > 0:
            if gain <= 0 or high == 0:
                break
            if work_seconds(search.costs, tree.use) < search.costs.min_step_seconds:
                low = share
            else:
                high = share
            share, steps = (low + high) / 2, min(steps, STEPS)
        gain, tokens = optimise_prices(search, box, prices, goal, share, steps, tree)
    return gain, tokens, share


@compiled
def speed_bound(costs, box, goal, gain):
    """Return tokens a second that no tree in the box exceeds.

    A tree that gains g = F - goal * step expected tokens makes goal + g / step tokens a second, and
    the step takes at least `min_step_seconds` and at least the least work of the box.
    """
    return goal + gain / max(costs.min_step_seconds, work_seconds(costs, box.low))


@compiled
def choose_cut(costs, box, prices, second_price, tree, is_ordered):
    """Choose the resource whose interval is split, and the last use of the lower part.

    It is the one whose term of the bound exceeds most, in tokens, the same term at the use of the
    tree behind the bound: a split there may lower the bound most. Where best-first search finds the
    best tree of each size, sizes alone need not be split. The resource is -1 if no split is needed.
    `prices` float64 [resources].
    """
    max_gap, resource, cut, is_needed = -1.0, -1, -1, False
    for r in range(len(prices)):
        cost, stair_ends = cost_curve(costs, r)
        use = min(max(tree.use[r], box.low[r]), box.high[r])
        cut_of_resource = cut_point(cost, stair_ends, use, box.low[r], box.high[r])
        if cut_of_resource >= 0:
            is_needed |= r > 0 or not is_ordered
            profitable_use = tree.profitable_use[r]
            profit = prices[r] * profitable_use - second_price * cost[profitable_use]
            outside = abs(tree.use[r] - use)  # how far the tree is from the interval
            gap = profit - prices[r] * use + second_price * cost[use] + prices[r] * outside
            if gap > max_gap:
                max_gap, resource, cut = gap, r, cut_of_resource
    return (resource, cut) if is_needed else (-1, -1)


@compiled
def cut_point(cost, stair_ends, use, low, high):
    """Return where to split the interval of a resource, into low ... cut and cut + 1 ... high.

    The cut is at a stair end beside `use`, or at `use` if no stair ends in the interval. It is -1
    if the cost is the same in the whole interval, so that no split is needed.
    """
    if low == 0 < high:
        return 0  # to use nothing of the resource is a part of its own
    stair = stair_of(stair_ends, use)
    if stair_ends[stair] < high:
        return stair_ends[stair]
    if stair > 0 and stair_ends[stair - 1] >= low:
        return stair_ends[stair - 1]
    return min(use, high - 1) if cost[high] > cost[low] else -1


@compiled
def split_box(low, high, prices, box, part, resource, cut):
    """Split a box in two: it keeps the uses up to `cut`, and the box `part` has the others.

    `low`, `high` int64 [boxes, resources]; `prices` float64 [boxes, resources].
    """
    for r in range(low.shape[1]):
        low[part, r], high[part, r], prices[part, r] = low[box, r], high[box, r], prices[box, r]
        # If a level has no parents, no deeper level has any; if it has some, so has every one above
        if cut == 0 and r > resource:
            high[box, r] = 0
        if 0 < r < resource:
            low[part, r] = max(1, low[part, r])
    high[box, resource] = cut
    low[part, resource] = cut + 1


@compiled
def width_limits(costs, box, tree, is_settled):
    """Return the most nodes with children on each level for the best-first search in a box.

    They are the box's own if it `is_settled`, else those of `tree`, up to the end of their stair.
    """
    limits = box.high.copy()
    limits[0] = 1
    for level in range(1, len(limits)):
        if not is_settled:
            limits[level] = min(tree.use[level], box.high[level])
            if limits[level] > 0:  # as wide as a draft pass of this cost may be
                stair = stair_of(costs.draft_stair_ends, limits[level])
                limits[level] = costs.draft_stair_ends[stair]
    return limits
