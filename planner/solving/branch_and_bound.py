"""The fastest tree, with a proof, by branch and bound.

A box (relaxation.py) limits how many nodes a tree has and how many of them have children on each
level. A box is closed when its bound says that none of its trees is faster than the best tree so
far. A box that stays open is split at the resource whose cost differs most from what its price
pays. Once each draft pass in a box has a single cost, and if no row of p increases and the rows
favour the spine, best-first search within the box's widths finds its best tree of every size, and
the box is closed as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from sequoia_plan.planner.solving.best_first import (
    heap_pop,
    heap_push,
    most_valuable_nodes_within,
)
from sequoia_plan.planner.solving.relaxation import (
    LEVEL,
    PATH,
    Box,
    Ints,
    RelaxedTree,
    cost_curve,
    costs_with_share,
    max_profit,
    min_extra_rounds,
    optimise_prices,
)

ROOT_STEPS = 200
"""Subgradient steps for the box of all trees, and for a box that cannot be split further."""
STEPS = 12
"""Subgradient steps for any other box, which starts from the prices of the box it was part of."""
MAX_SHARES = 6
"""Shares tried for a box where `min_step_seconds` may be the longer time, see relaxation.py."""
MAX_SHARE = 1 - 1e-6
MAX_BOXES = 20_000
TOLERANCE = 1e-10
"""A box is closed when none of its trees is faster than the best one by more than this share."""


class SearchResult(NamedTuple):
    """The fastest tree that a search has found.

    `parents` int64 [size].
    """

    parents: Ints
    speed: float
    bound: float


@numba.njit(cache=True)
def fastest_prefix(parents, levels, rows, costs):
    """Find the fastest of the trees that the first 2, 3, ... nodes of a tree form.

    Each loop adds one node, and updates the expected tokens and the seconds of a step. `parents`,
    `levels` int64 [size]; `rows` float64 [levels, classes, branching].
    """
    size = len(parents)
    # Probability that each node is accepted, and that it is but no child so far is.
    values, rejected_values = np.ones(size), np.ones(size)
    num_children, rank_sums = np.zeros(size, np.int64), np.zeros(size, np.int64)
    classes = np.zeros(size, np.int64)
    widths = np.zeros(len(rows), np.int64)  # nodes with children on each level
    # Most children of a node (or, for PATH, the largest sum of ranks along a path) by scope: by
    # level if verification rounds are by level, else for the whole tree at index 0.
    ranks = np.ones(len(rows), np.int64)
    tokens = 1.0 + costs.other_tokens
    draft_seconds, walk_seconds, extra_rounds = 0.0, 0.0, 0
    max_speed, best_size = 0.0, 1
    for node in range(1, size):
        parent, parent_level = parents[node], levels[node] - 1
        p = rows[parent_level, classes[parent], num_children[parent]]
        values[node] = values[parent] * p
        classes[node] = classes[parent] if num_children[parent] == 0 else rows.shape[1] - 1
        tokens += values[node]
        num_children[parent] += 1
        rank_sums[node] = rank_sums[parent] + num_children[parent]
        rejected_values[node] = values[node]
        rejected_values[parent] = max(0.0, rejected_values[parent] - values[node])
        walk_seconds += costs.by_visit * values[node] + costs.by_rejection * rejected_values[parent]
        if num_children[parent] == 1 and parent_level > 0:
            width = widths[parent_level]
            draft_seconds += costs.draft[width + 1] - costs.draft[width]
            widths[parent_level] += 1
        scope = parent_level if costs.round_order == LEVEL else 0
        node_ranks = rank_sums[node] if costs.round_order == PATH else num_children[parent]
        if node_ranks > ranks[scope]:
            ranks[scope] += 1
            extra_rounds += 1
        work_seconds = (
            costs.target[node + 1]
            + draft_seconds
            + walk_seconds
            + costs.by_round * extra_rounds
            + costs.constant
        )
        speed = tokens / max(costs.min_step_seconds, work_seconds)
        if speed > max_speed:
            max_speed, best_size = speed, node + 1
    return max_speed, best_size


@numba.njit(cache=True)
def relaxed_work_seconds(costs, tree):
    """Return the seconds of work of a step with the tree behind a bound.

    They are inf if the tree has more nodes, or more parents on a level, than were measured.
    """
    size = tree.resource_use[0]
    if size >= len(costs.target):
        return np.inf
    seconds = costs.target[size] + costs.constant + tree.walk_seconds[0]
    for ranks in tree.ranks:
        seconds += costs.by_round * (ranks - 1)
    for r in range(1, len(tree.resource_use)):
        if tree.resource_use[r] > costs.draft_stair_ends[-1]:
            return np.inf
        seconds += costs.draft[tree.resource_use[r]]
    return seconds


@numba.njit(cache=True)
def min_work_seconds(costs, box):
    """Return seconds of work that every step with a tree in the box takes at least."""
    seconds = costs.target[box.low[0]] + costs.constant + costs.by_round * min_extra_rounds(box)
    for r in range(1, len(box.low)):
        seconds += costs.draft[box.low[r]]
    return seconds


@numba.njit(cache=True)
def speed_bound(costs, box, goal, gain_bound):
    """Return tokens a second that no tree in the box exceeds.

    A tree that gains g = F - goal * step expected tokens makes goal + g / step tokens a second, and
    the step takes at least `min_step_seconds` and at least the least work of the box.
    """
    return goal + gain_bound / max(costs.min_step_seconds, min_work_seconds(costs, box))


@numba.njit(cache=True)
def bound_gain(nodes, costs, box, prices, goal, siblings_never_add_more, floor, steps, share, tree):
    """Bound the gain F - goal * step of the trees in a box, whatever limits their step.

    `prices` float64 [resources].
    """
    # The work is the longer time for every tree in the box: a single share, 0, is enough.
    if min_work_seconds(costs, box) >= costs.min_step_seconds:
        gain_bound, tokens = optimise_prices(
            nodes, costs, box, prices, goal, siblings_never_add_more, floor, steps, tree
        )
        return gain_bound, tokens, 0.0
    low, high = 0.0, 1.0
    gain_bound, tokens = optimise_prices(
        nodes,
        costs_with_share(costs, share),
        box,
        prices,
        goal * (1 - share),
        siblings_never_add_more,
        floor,
        steps,
        tree,
    )
    for _ in range(MAX_SHARES):
        if gain_bound <= 0:
            break
        if relaxed_work_seconds(costs, tree) < costs.min_step_seconds:
            low = share
        else:
            high = share
        share = min((low + high) / 2, MAX_SHARE)
        gain_bound, tokens = optimise_prices(
            nodes,
            costs_with_share(costs, share),
            box,
            prices,
            goal * (1 - share),
            siblings_never_add_more,
            floor,
            STEPS,
            tree,
        )
    return gain_bound, tokens, share


@numba.njit(cache=True)
def tighten_box(costs, box, prices, rate, profitable_use, gain_bound):
    """Cut off both ends of each interval of a box, in place, where no tree can be faster.

    The bound on the gain of a box is a sum that contains, for each resource, its largest profit
    price * use - rate * cost[use] over its interval. Uses with so small a profit that the bound
    would not be above 0 are cut off, one stair (a range of uses with a straight cost) at a time.
    `prices` float64 [resources]; `profitable_use` int64 [resources].
    """
    for r in range(len(prices)):
        cost, stair_ends = cost_curve(costs, r)
        use = profitable_use[r]
        # With this profit of resource r in place of its largest one, the bound is 0.
        needed_profit = prices[r] * use - rate * cost[use] - gain_bound
        while box.low[r] < box.high[r]:  # cut off the lowest stair, or the use 0
            end = 0
            if box.low[r] > 0:
                end = min(box.high[r], stair_ends[np.searchsorted(stair_ends, box.low[r])])
            profit, _ = max_profit(cost, stair_ends, prices[r], rate, box.low[r], end)
            if profit > needed_profit:
                break
            box.low[r] = min(end + 1, box.high[r])
        while box.low[r] < box.high[r]:  # cut off the highest stair
            stair = np.searchsorted(stair_ends, box.high[r])
            start = max(box.low[r], stair_ends[stair - 1] + 1 if stair > 0 else 1)
            profit, _ = max_profit(cost, stair_ends, prices[r], rate, start, box.high[r])
            if profit > needed_profit:
                break
            box.high[r] = max(start - 1, box.low[r])


@numba.njit(cache=True)
def cut_point(cost, stair_ends, use, low, high):
    """Return where to split the interval of a resource, into low ... cut and cut + 1 ... high.

    The cut is at a stair end beside `use`, or at `use` if no stair ends in the interval. It is -1
    if the cost is the same in the whole interval, so that no split is needed.
    """
    if low == 0 < high:
        return 0  # to use nothing of the resource is a part of its own
    stair = np.searchsorted(stair_ends, use)
    if stair_ends[stair] < high:
        return stair_ends[stair]
    if stair > 0 and stair_ends[stair - 1] >= low:
        return stair_ends[stair - 1]
    return min(use, high - 1) if cost[high] > cost[low] else -1


@numba.njit(cache=True)
def choose_cut(costs, box, prices, rate, tree, best_first_is_exact):
    """Choose the interval of a box to split, and where.

    It is the interval whose term of the bound exceeds most, in tokens, the same term at the use of
    the tree behind the bound: a split there may lower the bound most. Where best-first search finds
    the best tree of each size, sizes alone need not be split. `prices` float64 [resources].
    """
    max_gap, interval, cut, is_needed = -1.0, -1, -1, False
    for r in range(len(prices)):
        cost, stair_ends = cost_curve(costs, r)
        use = min(max(tree.resource_use[r], box.low[r]), box.high[r])
        cut_of_resource = cut_point(cost, stair_ends, use, box.low[r], box.high[r])
        if cut_of_resource >= 0:
            is_needed |= r > 0 or not best_first_is_exact
            profitable_use = tree.profitable_use[r]
            profit = prices[r] * profitable_use - rate * cost[profitable_use]
            outside = abs(tree.resource_use[r] - use)  # how far the tree is from the interval
            gap = profit - prices[r] * use + rate * cost[use] + prices[r] * outside
            if gap > max_gap:
                max_gap, interval, cut = gap, r, cut_of_resource
    for scope in range(len(tree.ranks)):
        low, high = box.min_ranks[scope], box.max_ranks[scope]
        if low < high and (scope == 0 or box.low[scope] > 0):
            is_needed = True
            extra_rounds = min(tree.ranks[scope], high) - low
            gap = max(extra_rounds, 0) * rate * costs.by_round - tree.round_charges[scope]
            if gap > max_gap:
                max_gap, interval = gap, len(prices) + scope
                cut = low + max(extra_rounds - 1, 0)
    return (interval, cut) if is_needed else (-1, -1)


@numba.njit(cache=True)
def split_box(boxes, box, first_part, dimension, cut):
    """Split a box in two: write its parts to boxes[first_part] and boxes[first_part + 1].

    A box is a set of trees, given by an interval for each resource (0: nodes; l: nodes with
    children on level l), and by one for ranks (the most children of a node, or the largest sum of
    ranks along a path) in each scope (a level, or 0 for the whole tree).
    """
    num_resources = boxes.low.shape[1]
    second_part = first_part + 1
    for part in (first_part, second_part):
        boxes.low[part], boxes.high[part] = boxes.low[box], boxes.high[box]
        boxes.min_ranks[part], boxes.max_ranks[part] = boxes.min_ranks[box], boxes.max_ranks[box]
    if dimension >= num_resources:
        boxes.max_ranks[first_part, dimension - num_resources] = cut
        boxes.min_ranks[second_part, dimension - num_resources] = cut + 1
        return
    boxes.high[first_part, dimension] = cut
    boxes.low[second_part, dimension] = cut + 1
    # The intervals of other levels follow: if a level has no parents, no deeper level has any, and
    # if it has some, every level above it has some, too.
    for level in range(1, num_resources):
        if level > dimension and cut == 0:
            boxes.high[first_part, level] = 0
        if level < dimension:
            boxes.low[second_part, level] = max(1, boxes.low[second_part, level])


@numba.njit(cache=True)
def set_best_first_limits(costs, box, tree, is_settled, max_parents, max_children):
    """Write the limits of the best-first search in a box, and return its limit `max_rank_sum`.

    `max_parents` int64 [levels]; `max_children` int64 [levels].
    """
    for level in range(len(max_parents)):
        # The index of the limit on ranks that holds for this level.
        scope = level if costs.round_order == LEVEL else 0
        max_children[level] = box.max_ranks[scope]
        # If rounds cost no time, more children cost no more, and the box's limit stays.
        if not is_settled and costs.by_round > 0:
            max_children[level] = min(tree.ranks[scope], box.max_ranks[scope])
        if level > 0 and is_settled:
            max_parents[level] = box.high[level]
        elif level > 0:
            width = min(tree.resource_use[level], box.high[level])
            # The largest width whose draft pass takes as long. `costs.draft` may still be larger
            # there, because it also contains verification, which may charge for each parent.
            stair_end = costs.draft_stair_ends[np.searchsorted(costs.draft_stair_ends, width)]
            costs_the_same = width > 0 and costs.draft[stair_end] == costs.draft[width]
            max_parents[level] = stair_end if costs_the_same else width
    if costs.round_order == PATH:
        return max_children[0]  # with PATH, this is a limit on the sum of ranks along a path
    # No path has a larger sum, so this is no limit.
    return len(max_parents) * max_children.max()


@numba.njit(cache=True)
def set_first_box(boxes, prices, nodes, costs, floor, speed):
    """Write the box of all trees of two nodes or more to boxes[0], and its prices to prices[0].

    `prices` float64 [boxes, resources].
    """
    widest = costs.draft_stair_ends[-1]  # most nodes with children on one level that was measured
    boxes.low[0, 0], boxes.high[0, 0] = 2, costs.target_stair_ends[-1]
    prices[0, 0] = floor
    for level in range(1, prices.shape[1]):
        boxes.high[0, level] = widest
        # Nodes on the last candidate level have no children to pay for. Above it, a parent pays its
        # share of the widest draft pass, at `speed` tokens a second.
        if level < nodes.levels[-1]:
            prices[0, level] = speed * costs.draft[widest] / widest
    if costs.by_round == 0:  # ranks cost nothing, so there is nothing to split
        boxes.min_ranks[0, 0] = boxes.max_ranks[0, 0]


@numba.njit(cache=True)
def search(
    nodes,
    non_increasing_rows,
    rows,
    costs,
    floor,
    siblings_never_add_more,
    best_first_is_exact,
    speed,
    max_work,
):
    """Find the fastest tree of two nodes or more that is faster than `speed`, with a bound.

        open = {the box of all trees}
        while the box of the largest bound has a bound above the best speed:
            bound = speed_bound(box) by Lagrangian relaxation;  close the box if bound <= speed
            best = max(best, relaxed tree, prefixes of a best-first search within the box)
            if each draft pass in the box has a single cost: the best-first search closes it
            else: split the box in two

    A box is a set of trees, given by intervals for their resources (0: nodes; l: nodes with
    children on level l) and for their ranks, which determine how many verification rounds a tree
    takes. `costs.round_order` says what a round verifies, and so what the ranks of a tree are:

        TREE: the children of one rank in the whole tree. Ranks: the most children of a node.
        LEVEL: the children of one rank on one level. Ranks: for each level, the most children of a
            node on it.
        PATH: the nodes of one sum of ranks along their paths. Ranks: the largest such sum.

    Args:
        nodes: CandidateNodes, all nodes of a value above `floor`, see `candidate_nodes`.
        non_increasing_rows: rows close to `rows` that never increase with rank; they give the order
            of the best-first search.
        rows: float64 [levels, classes, branching], the probability that a node's child of each
            rank is accepted if the node is, by the node's level and class. Class 0 is the spine
            (the root, its first child, that node's first child, ...), class 1 all other nodes; a
            single class stands for all nodes.
        costs: the Costs, which give the seconds of a step.
        floor: no node that is not among `nodes` has a larger value (probability to be accepted).
        siblings_never_add_more: whether no later sibling adds more than an earlier one, see
            `relax`.
        best_first_is_exact: whether best-first search within the limits of a box finds its best
            tree of every size.
        speed: tokens a second of the best tree known.
        max_work: how many nodes and stairs of cost curves the search may look at. When it stops
            there, the bound is the largest of those of the open boxes.
    """
    # `rows` has one entry for each level that may have children: the root's level 0, and level l
    # for each resource l. So there are as many such levels as resources.
    num_resources, _, branching = rows.shape
    num_scopes = num_resources if costs.round_order == LEVEL else 1  # how many limits on ranks
    largest_rank = branching * num_resources if costs.round_order == PATH else branching
    max_boxes = min(MAX_BOXES, 2 + 4_000_000 // num_resources)
    # Rows for low, high, min_ranks and max_ranks of each box; `set_first_box` fills in the first.
    boxes = Box(
        np.zeros((max_boxes, num_resources), np.int64),
        np.zeros((max_boxes, num_resources), np.int64),
        np.ones((max_boxes, num_scopes), np.int64),
        np.full((max_boxes, num_scopes), largest_rank),
    )
    # The prices and the share that `bound_gain` starts from in each box. A part of a box starts
    # from those found for that box.
    prices, start_shares = np.zeros((max_boxes, num_resources)), np.zeros(max_boxes)
    set_first_box(boxes, prices, nodes, costs, floor, speed)
    # resource_use, profitable_use, ranks, round_charges, parents and walk_seconds, for `relax`
    tree = RelaxedTree(
        np.zeros(num_resources, np.int64),
        np.zeros(num_resources, np.int64),
        np.zeros(num_scopes, np.int64),
        np.zeros(num_scopes),
        np.empty(len(nodes.values), np.int64),
        np.zeros(1),
    )
    max_parents = np.ones(num_resources, np.int64)
    max_children = np.ones(num_resources, np.int64)
    max_size = costs.target_stair_ends[-1]
    work_per_step = len(nodes.values) + num_resources * len(costs.draft_stair_ends)
    best_parents = np.empty(0, np.int64)
    unsettled_bound = 0.0  # the largest bound of the boxes that are neither closed nor split
    # A heap of [bound, index of the box, 0]. Entries of `heap_push` have three numbers; the third
    # is not used here.
    open_boxes = np.empty((max_boxes + 1, 3))
    heap_push(open_boxes, 0, np.inf, 0.0, 0.0)
    num_open = num_boxes = 1
    work = 0
    while num_open > 0 and open_boxes[0, 0] > speed * (1 + TOLERANCE):
        bound, b = open_boxes[0, 0], int(open_boxes[0, 1])
        if work > max_work or num_boxes + 2 > max_boxes:
            unsettled_bound = max(unsettled_bound, bound)
            break
        heap_pop(open_boxes, num_open)
        num_open -= 1
        box = Box(boxes.low[b], boxes.high[b], boxes.min_ranks[b], boxes.max_ranks[b])
        goal = speed * (1 + TOLERANCE)
        steps = ROOT_STEPS if b == 0 else STEPS
        # No tree in the box has (expected tokens - goal * seconds of a step) above `gain_bound`. A
        # step takes at least share * min_step_seconds + (1 - share) * work; `share` is the weight
        # that this bound was computed with.
        gain_bound, tokens, share = bound_gain(
            nodes,
            costs,
            box,
            prices[b],
            goal,
            siblings_never_add_more,
            floor,
            steps,
            start_shares[b],
            tree,
        )
        work += steps * work_per_step + 10 * max_size
        if gain_bound <= 0:
            continue  # no tree in the box makes more than `goal` tokens a second
        bound = min(bound, speed_bound(costs, box, goal, gain_bound))
        relaxed_seconds = max(costs.min_step_seconds, relaxed_work_seconds(costs, tree))
        if tokens / relaxed_seconds > speed:  # the tree behind the bound is a tree like any other
            speed = tokens / relaxed_seconds
            best_parents = tree.parents[: tree.resource_use[0]].copy()
        rate = goal * (1 - share)  # expected tokens that a second of work is charged
        tighten_box(costs, box, prices[b], rate, tree.profitable_use, gain_bound)
        # Which interval to split (a resource, or num_resources + a scope of ranks), and the last
        # number of its lower part. The interval is -1 if the box needs no further split.
        interval, cut = choose_cut(costs, box, prices[b], rate, tree, best_first_is_exact)
        is_settled = interval < 0
        max_rank_sum = set_best_first_limits(
            costs, box, tree, is_settled, max_parents, max_children
        )
        parents, _, levels = most_valuable_nodes_within(
            non_increasing_rows,
            max_size,
            max_parents,
            np.minimum(max_children, branching),
            max_rank_sum,
        )
        prefix_speed, prefix_size = fastest_prefix(parents, levels, rows, costs)
        if prefix_speed > speed:
            speed, best_parents = prefix_speed, parents[:prefix_size].copy()
        if bound <= speed * (1 + TOLERANCE):
            continue
        if not is_settled:
            split_box(boxes, b, num_boxes, interval, cut)
            for part in (num_boxes, num_boxes + 1):
                prices[part], start_shares[part] = prices[b], share
                heap_push(open_boxes, num_open, bound, float(part), 0.0)
                num_open += 1
            num_boxes += 2
        elif not best_first_is_exact:
            # The best tree of the box may be a different one, so its bound stays, as small as
            # more steps can make it.
            goal = speed * (1 + TOLERANCE)
            steps = max(steps, ROOT_STEPS)
            gain_bound, _, _ = bound_gain(
                nodes,
                costs,
                box,
                prices[b],
                goal,
                siblings_never_add_more,
                floor,
                steps,
                share,
                tree,
            )
            work += steps * len(nodes.values)
            box_bound = speed_bound(costs, box, goal, max(0.0, gain_bound))
            unsettled_bound = max(unsettled_bound, min(bound, box_bound))
    return SearchResult(best_parents, speed, max(speed * (1 + TOLERANCE), unsettled_bound))
