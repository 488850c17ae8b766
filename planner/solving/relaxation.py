"""An upper bound on the gain of the trees in a box: expected tokens less the price of a step.

A tree uses resources. Resource 0 is its nodes. Resource l = 1, 2, ... is its nodes on level l that
have children, which set the width of that level's draft pass. Each resource has a cost in seconds
that never decreases with its use. A box limits the use of each resource to an interval. At a rate
of `rate` tokens a second, and for any prices x >= 0, in tokens for a unit of each resource, every
tree T in the box satisfies

    F(T) - rate * step(T)
        =   sum over nodes of (value - x[0]) - sum over nodes with children of x[level]
          + sum over resources r of (x[r] * use[r] - rate * cost[r][use[r]])
          - rate * constant

A recursion from the leaves up finds the tree that maximises the first line, whatever p is. Each
term of the second line is maximised over its interval. The sum of these maxima is the bound
(Lagrangian relaxation). Subgradient steps look for prices that make the bound small.

A step takes at least `min_step_seconds`, and the time of the tree's own work if that is longer. The
longer of two times is no sum over the tree, but it is at least
share * min_step_seconds + (1 - share) * work for every share from 0 to 1. `costs_with_share` puts
such a sum in place of the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TREE, LEVEL, PATH = range(3)
"""What a verification round is (see `VerificationCost.round_order`).

A rank in the whole tree, a rank on one level, or a sum of ranks along a path.
"""
PATIENCE = 10
"""Subgradient steps become half as long after this many steps without a smaller bound."""


class Costs(NamedTuple):
    """Seconds of a step, in tables.

    A cost curve is a staircase, or a staircase and a straight line together. The stair ends of a
    curve are the last numbers of its stairs. `target` float64 [max_size + 1]; `draft` float64
    [max_size + 1].
    """

    target: Floats
    target_stair_ends: Ints
    draft: Floats
    draft_stair_ends: Ints
    by_round: float
    round_order: int
    constant: float
    by_visit: float
    by_rejection: float
    min_step_seconds: float
    other_tokens: float


class CandidateNodes(NamedTuple):
    """The nodes whose value may exceed their price, numbered breadth-first.

    `values` float64 [nodes]; `levels` int64 [nodes]; `first_child` int64 [nodes]; `num_children`
    int64 [nodes]; `rank_sums` int64 [nodes]; `walk_seconds` float64 [nodes].
    """

    values: Floats
    levels: Ints
    first_child: Ints
    num_children: Ints
    rank_sums: Ints
    walk_seconds: Floats


class Box(NamedTuple):
    """Limits of a set of trees, all inclusive.

    "Ranks" are the most children that a node has. If the round order is PATH, they are the largest
    sum of ranks along a path. They have a limit for each scope: for each level if the round order
    is LEVEL, else one for the whole tree. `low`, `high` int64 [resources]; `min_ranks`, `max_ranks`
    int64 [scopes].
    """

    low: Ints
    high: Ints
    min_ranks: Ints
    max_ranks: Ints


class RelaxedTree(NamedTuple):
    """The tree behind a bound, which need not lie in the box; `relax` fills in the arrays.

    `resource_use` int64 [resources]; `profitable_use` int64 [resources]; `ranks` int64 [scopes];
    `round_charges` float64 [scopes]; `parents` int64 [nodes]; `walk_seconds` float64 [1].
    """

    resource_use: Ints
    profitable_use: Ints
    ranks: Ints
    round_charges: Floats
    parents: Ints
    walk_seconds: Floats


@numba.njit(cache=True)
def candidate_nodes(rows, floor, by_visit, by_rejection):
    """List every node of a value above `floor`, and its earlier siblings, breadth-first.

    `rows` float64 [levels, classes, branching].
    """
    max_level, classes, branching = rows.shape
    capacity = 1024  # entries of the arrays, which grow when they are full
    values, levels = np.ones(capacity), np.zeros(capacity, np.int64)
    first_child, num_children = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
    rank_sums, walk_seconds = np.zeros(capacity, np.int64), np.zeros(capacity)
    size = 1
    node = spine_end = 0  # spine_end: the last node listed on the spine
    while node < size:
        level = levels[node]
        node_class = 0 if node == spine_end else classes - 1
        if level < max_level:
            for rank in range(branching):
                if values[node] * rows[level, node_class, rank] > floor:
                    num_children[node] = rank + 1
            if node == spine_end and num_children[node] > 0:
                spine_end = size
        first_child[node] = size
        if size + num_children[node] > capacity:
            extra = capacity + branching
            values = np.append(values, np.ones(extra))
            levels = np.append(levels, np.zeros(extra, np.int64))
            first_child = np.append(first_child, np.zeros(extra, np.int64))
            num_children = np.append(num_children, np.zeros(extra, np.int64))
            rank_sums = np.append(rank_sums, np.zeros(extra, np.int64))
            walk_seconds = np.append(walk_seconds, np.zeros(extra))
            capacity += extra
        rejected_value = values[node]  # probability that no child so far is accepted
        for rank in range(num_children[node]):
            values[size] = values[node] * rows[level, node_class, rank]
            levels[size] = level + 1
            rejected_value = max(0.0, rejected_value - values[size])
            rank_sums[size] = rank_sums[node] + rank + 1
            walk_seconds[size] = by_visit * values[size] + by_rejection * rejected_value
            size += 1
        node += 1
    return CandidateNodes(
        values[:size],
        levels[:size],
        first_child[:size],
        num_children[:size],
        rank_sums[:size],
        walk_seconds[:size],
    )


@numba.njit(cache=True)
def choose_children(nodes, costs, box, prices, rate, siblings_never_add_more):
    """Choose the children of each node so that its subtree has the largest gain, leaves first.

    `prices` float64 [resources].
    """
    values, levels, first_child, num_candidates, rank_sums, walk_seconds = nodes
    subtree_gains, charges = np.zeros(len(values)), np.zeros(len(values))
    num_children = np.zeros(len(values), np.int64)
    gain_by_rank = np.zeros(1 if costs.by_round == 0 else box.max_ranks.max())  # of one level
    round_price = rate * costs.by_round
    max_parents = 1  # most nodes with children of a tree in the box: the root, and `high` a level
    for r in range(1, len(prices)):
        max_parents += box.high[r]
    level_end = len(values)
    while level_end > 0:
        level = levels[level_end - 1]
        level_start = np.searchsorted(levels, level)
        nodes_of_level = range(level_start, level_end)
        level_end = level_start
        if level == len(prices) or (level > 0 and box.high[level] == 0):
            continue
        scope = level if costs.round_order == LEVEL else 0
        min_ranks, max_ranks = box.min_ranks[scope], box.max_ranks[scope]
        if costs.round_order == LEVEL:
            for rank in range(min_ranks, max_ranks):
                gain_by_rank[rank] = 0.0
            for node in nodes_of_level:
                if values[node] > prices[0]:
                    for rank in range(min_ranks, min(num_candidates[node], max_ranks)):
                        child = first_child[node] + rank
                        gain_by_rank[rank] += max(
                            0.0,
                            values[child]
                            - rate * walk_seconds[child]
                            - prices[0]
                            + subtree_gains[child],
                        )
        for node in nodes_of_level:
            if values[node] <= prices[0]:
                continue  # no node below it has a value above its price either
            total_gain = max_gain = total_charges = 0.0
            path_ranks = rank_sums[node] if costs.round_order == PATH else 0
            for rank in range(min(num_candidates[node], max_ranks - path_ranks)):
                child = first_child[node] + rank
                gain = values[child] - rate * walk_seconds[child] - prices[0] + subtree_gains[child]
                if siblings_never_add_more and gain <= 0:
                    break
                if path_ranks + rank >= min_ranks:
                    charge = round_price / max_parents
                    if costs.round_order == LEVEL:
                        charge = round_price * gain / gain_by_rank[rank] if gain > 0 else 0.0
                    total_charges += charge
                    gain -= charge
                total_gain += gain
                if total_gain > max_gain:
                    max_gain = total_gain
                    num_children[node], charges[node] = rank + 1, total_charges
            parent_price = prices[level] if level > 0 else 0.0
            subtree_gains[node] = max(0.0, max_gain - parent_price)
            if max_gain <= parent_price:
                num_children[node] = 0
    return subtree_gains[0], num_children, charges


@numba.njit(cache=True)
def max_profit(cost, stair_ends, price, rate, low, high):
    """Return the largest profit price * n - rate * cost[n] over low <= n <= high, and its n.

    Between two stair ends the cost is a straight line, so only the ends of lines are tried.
    """
    profit, best_n = price * low - rate * cost[low], low
    start = 1
    for end in stair_ends:
        if start > high:
            break
        if end >= low:
            for n in (max(start, low), min(end, high)):
                if price * n - rate * cost[n] > profit:
                    profit, best_n = price * n - rate * cost[n], n
        start = end + 1
    return profit, best_n


@numba.njit(cache=True)
def cost_curve(costs, resource):
    """Return a resource's cost in seconds, float64 by its use, and the stair ends of this curve."""
    if resource == 0:
        return costs.target, costs.target_stair_ends
    return costs.draft, costs.draft_stair_ends


@numba.njit(cache=True)
def costs_with_share(costs, share):
    """Return costs in which `min_step_seconds` has the weight `share`, and work 1 - share.

    At the rate (1 - share) * rate, they charge the same as rate * (share * min_step_seconds + (1 -
    share) * work). So only the constant differs.
    """
    return Costs(
        costs.target,
        costs.target_stair_ends,
        costs.draft,
        costs.draft_stair_ends,
        costs.by_round,
        costs.round_order,
        costs.constant + share / (1 - share) * costs.min_step_seconds,
        costs.by_visit,
        costs.by_rejection,
        costs.min_step_seconds,
        costs.other_tokens,
    )


@numba.njit(cache=True)
def min_extra_rounds(box):
    """Return how many rounds every tree in the box has beyond those that other costs contain.

    A tree has as many verification rounds in a scope (a level, or the whole tree) as it has ranks
    there, and the other costs contain the first round of each scope.
    """
    rounds = 0
    for min_ranks in box.min_ranks:  # by scope
        rounds += min_ranks - 1
    return rounds


@numba.njit(cache=True)
def relax(nodes, costs, box, prices, rate, siblings_never_add_more, tree):
    """Bound the gain F - rate * step of the trees in a box, for the given prices.

    The bound is the largest gain of a tree that pays `prices` for its resources, plus the largest
    profit price * use - rate * cost[use] of each resource over its interval. `prices` float64
    [resources].
    """
    resource_use, profitable_use, ranks, round_charges, parents, walk_seconds = tree
    gain, num_children, charges = choose_children(
        nodes, costs, box, prices, rate, siblings_never_add_more
    )
    resource_use[:], ranks[:], round_charges[:] = 0, 1, 0.0
    resource_use[0], parents[0], walk_seconds[0] = 1, -1, 0.0
    # The tree is walked breadth-first: taken_nodes[i] is the candidate that is its node i.
    taken_nodes = np.zeros(len(nodes.values), np.int64)
    tokens, position = costs.other_tokens, 0
    while position < resource_use[0]:
        node = taken_nodes[position]
        tokens += nodes.values[node]
        walk_seconds[0] += nodes.walk_seconds[node]
        if num_children[node] > 0:
            level = nodes.levels[node]
            scope = level if costs.round_order == LEVEL else 0
            if level > 0:
                resource_use[level] += 1
            path_ranks = nodes.rank_sums[node] if costs.round_order == PATH else 0
            ranks[scope] = max(ranks[scope], num_children[node] + path_ranks)
            round_charges[scope] += charges[node]
            for rank in range(num_children[node]):
                taken_nodes[resource_use[0]] = nodes.first_child[node] + rank
                parents[resource_use[0]] = position
                resource_use[0] += 1
        position += 1
    constant = costs.constant + costs.by_round * min_extra_rounds(box)
    # 1 - prices[0]: the root's token and price
    bound = costs.other_tokens + 1.0 - prices[0] + gain - rate * constant
    for r in range(len(prices)):
        cost, stair_ends = cost_curve(costs, r)
        profit, profitable_use[r] = max_profit(
            cost, stair_ends, prices[r], rate, box.low[r], box.high[r]
        )
        bound += profit
    return bound, tokens


@numba.njit(cache=True)
def optimise_prices(nodes, costs, box, prices, rate, siblings_never_add_more, floor, steps, tree):
    """Move `prices`, in place, to where the bound of `relax` is smaller.

        repeat at most `steps` times:
            bound, tree = relax(prices);  stop if bound <= 0: no tree in the box has a gain
            difference[r] = profitable_use[r] - resource_use[r]     (a subgradient)
            prices[r] -= step_fraction * bound * difference[r] / |difference|^2
            halve step_fraction after PATIENCE steps without a smaller bound

    These are Polyak's subgradient steps towards a bound of 0.

    Args:
        nodes: the candidates, CandidateNodes.
        costs: the Costs, which give the seconds of a step.
        box: the Box, limits of a set of trees.
        prices: float64 [resources], expected tokens that a unit of each resource is charged.
        rate: expected tokens that a second is charged.
        siblings_never_add_more: whether no later sibling adds more than an earlier one, see
            `relax`.
        floor: the smallest price of a node. Every node that is not among `nodes` has at most this
            value (probability to be accepted), so it gains nothing.
        steps: the most steps.
        tree: a RelaxedTree, into which the tree behind the bound is written.

    Returns:
        What `relax` returns at the best prices: the bound on F - rate * step in tokens, and the
        expected tokens of the tree behind it.
    """
    trial = prices.copy()
    min_bound, step_fraction, idle_steps = np.inf, 1.0, 0
    for _ in range(steps):
        bound, _ = relax(nodes, costs, box, trial, rate, siblings_never_add_more, tree)
        if bound < min_bound:
            min_bound, idle_steps = bound, 0
            prices[:] = trial
        else:
            idle_steps += 1
        squared_norm = 0.0
        for r in range(len(prices)):
            squared_norm += (tree.profitable_use[r] - tree.resource_use[r]) ** 2
        if bound <= 0 or squared_norm == 0:
            break
        if idle_steps == PATIENCE:
            step_fraction, idle_steps = step_fraction / 2, 0
        for r in range(len(prices)):
            min_price = floor if r == 0 else 0.0
            difference = tree.profitable_use[r] - tree.resource_use[r]
            trial[r] = max(min_price, trial[r] - step_fraction * bound / squared_norm * difference)
    return relax(nodes, costs, box, prices, rate, siblings_never_add_more, tree)
