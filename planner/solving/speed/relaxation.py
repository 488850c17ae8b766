"""An upper bound on the gain of the trees in a box: expected tokens less the price of a step.

A tree uses resources. Resource 0 is its nodes. Resource l = 1, 2, ... is its nodes on level l that
have children, which set the width of that level's draft pass. Each resource has a cost in seconds
that never decreases with its use. A box limits the use of each resource to an interval. With a
`goal` in tokens a second, and for any prices x >= 0, in tokens for a unit of each resource, every
tree T in the box satisfies

    F(T) - goal * step(T)
        =   sum over nodes of (value - x[0]) - sum over nodes with children of x[level]
          + sum over resources r of (x[r] * use[r] - goal * cost[r][use[r]])
          - goal * constant

A recursion from the leaves up finds the tree that maximises the first line, whatever p is. Each
term of the second line is maximised over its interval. The sum of these maxima is the bound
(Lagrangian relaxation). Subgradient steps look for prices that make the bound small.

A step takes at least `min_step_seconds`, and the time of the tree's own work if that is longer. The
longer of two times is no sum over the tree, but it is at least
share * min_step_seconds + (1 - share) * work for every share from 0 to 1. The work is then charged
at `second_price` = (1 - share) * goal tokens a second.
"""

from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts.counts import Floats, Ints
from sequoia_plan.planner.solving.compiled import compiled
from sequoia_plan.planner.solving.speed.costs import Costs, max_profit

PATIENCE = 10
"""Subgradient steps become half as long after this many steps without a smaller bound."""


class CandidateNodes(NamedTuple):
    """The nodes whose value may exceed their price, numbered breadth-first; all [nodes]."""

    values: Floats
    levels: Ints
    first_child: Ints
    num_children: Ints


class Search(NamedTuple):
    """What a search is given.

    `rates` float64 [levels, node classes, ranks], the acceptance; `smoothed_rates`, the closest
    ones that never increase with rank; `nodes`, all nodes of a value above `floor`; `is_ordered`,
    as of a `SpeedProblem`: best-first search within limits of width then finds the best tree of
    every size.
    """

    rates: Floats
    smoothed_rates: Floats
    is_ordered: bool
    nodes: CandidateNodes
    floor: float
    costs: Costs


class Box(NamedTuple):
    """Limits of a set of trees, all inclusive: `low` and `high` int64 [resources]."""

    low: Ints
    high: Ints


class RelaxedTree(NamedTuple):
    """The tree behind a bound, which need not lie in the box; `relax` fills in the arrays.

    `use`, `profitable_use` int64 [resources]: what the tree uses, and where each resource has its
    largest profit; `parents` int64 [nodes].
    """

    use: Ints
    profitable_use: Ints
    parents: Ints


@compiled
def choose_children(search, box, prices):
    """Choose the children of each node so that its subtree has the largest gain, leaves first.

    `prices` float64 [resources]; returns the gain of the tree without the root's own value and
    price, and the number of children of each node.
    """
    values, levels, first_child, num_candidates = search.nodes
    gains, num_children = np.zeros(len(values)), np.zeros(len(values), np.int64)
    for node in range(len(values) - 1, -1, -1):
        level = levels[node]
        if level == len(prices) or (level > 0 and box.high[level] == 0):
            continue
        if values[node] <= prices[0]:
            continue  # no node below it has a value above its price either
        total_gain, max_gain = 0.0, prices[level] if level > 0 else 0.0
        for rank in range(num_candidates[node]):
            child = first_child[node] + rank
            gain = values[child] - prices[0] + gains[child]
            if search.is_ordered and gain <= 0:
                break
            total_gain += gain
            if total_gain > max_gain:
                max_gain, num_children[node] = total_gain, rank + 1
        gains[node] = max_gain - (prices[level] if level > 0 else 0.0)
    return gains[0], num_children


@compiled
def relax(search, box, prices, goal, share, tree):
    """Bound the gain F - goal * step of the trees in a box, for the given prices.

    `prices` float64 [resources]; returns the bound, and the expected tokens of the tree behind it.
    """
    nodes, costs = search.nodes, search.costs
    second_price = goal * (1 - share)
    gain, num_children = choose_children(search, box, prices)
    tree.use[:] = 0
    tree.use[0], tree.parents[0] = 1, -1
    # The tree is walked breadth-first: taken_nodes[i] is the candidate that is its node i.
    taken_nodes = np.zeros(len(nodes.values), np.int64)
    tokens, position = costs.other_tokens, 0
    while position < tree.use[0]:
        node = taken_nodes[position]
        tokens += nodes.values[node]
        if num_children[node] > 0 and nodes.levels[node] > 0:
            tree.use[nodes.levels[node]] += 1
        for rank in range(num_children[node]):
            taken_nodes[tree.use[0]] = nodes.first_child[node] + rank
            tree.parents[tree.use[0]] = position
            tree.use[0] += 1
        position += 1
    # 1 - prices[0]: the root's token and price
    bound = costs.other_tokens + 1.0 - prices[0] + gain
    bound -= second_price * costs.constant + goal * share * costs.min_step_seconds
    for r in range(len(prices)):
        profit, tree.profitable_use[r] = max_profit(
            costs, r, prices[r], second_price, box.low[r], box.high[r]
        )
        bound += profit
    return bound, tokens


@compiled
def optimise_prices(search, box, prices, goal, share, steps, tree):
    """Move `prices`, in place, to where the bound of `relax` is smaller, and return what it does.

        repeat at most `steps` times:
            bound, tree = relax(prices);  stop if bound <= 0: no tree in the box has a gain
            difference[r] = profitable_use[r] - use[r]     (a subgradient)
            prices[r] -= step_fraction * bound * difference[r] / |difference|^2
            halve step_fraction after PATIENCE steps without a smaller bound

    These are Polyak's subgradient steps towards a bound of 0. A node costs at least `floor`: every
    node that is not among `nodes` has at most this value, so it gains nothing.
    """
    trial = prices.copy()
    min_bound, step_fraction, idle_steps = np.inf, 1.0, 0
    for _ in range(steps):
        bound, _ = relax(search, box, trial, goal, share, tree)
        idle_steps += 1
        squared_norm = 0.0
        for r in range(len(trial)):
            squared_norm += (tree.profitable_use[r] - tree.use[r]) ** 2
            if bound < min_bound:
                prices[r], idle_steps = trial[r], 0
        min_bound = min(min_bound, bound)
        if bound <= 0 or squared_norm == 0:
            break
        if idle_steps == PATIENCE:
            step_fraction, idle_steps = step_fraction / 2, 0
        for r in range(len(trial)):
            difference = tree.profitable_use[r] - tree.use[r]
            least = search.floor if r == 0 else 0.0
            trial[r] = max(least, trial[r] - step_fraction * bound / squared_norm * difference)
    return relax(search, box, prices, goal, share, tree)


def candidate_nodes(rates: Floats, floor: float) -> CandidateNodes:
    """List every node of a value above `floor`, and its earlier siblings, breadth-first.

    A node's value is the product of the rates on its path. `rates` float64 [levels, node classes,
    ranks]; class 0 is the spine (the root's first child, its first child, ...), the last class all
    others.
    """
    values, counts, has_spine = [np.ones(1)], [], True
    for level_rates in rates:
        child_values = values[-1][:, None] * level_rates[-1]
        if has_spine:
            child_values[0] = level_rates[0] * values[-1][0]
        last_ranks = np.where(child_values > floor, np.arange(1, rates.shape[2] + 1), 0)
        counts.append(last_ranks.max(axis=1))
        is_listed = np.arange(rates.shape[2]) < counts[-1][:, None]
        if not is_listed.any():
            break
        has_spine &= bool(is_listed[0, 0])
        values.append(child_values[is_listed])
    counts.append(np.zeros(len(values[-1]), np.int64))
    num_children = np.concatenate(counts[: len(values)])
    levels = np.repeat(np.arange(len(values)), [len(level_values) for level_values in values])
    first_child = 1 + np.cumsum(num_children) - num_children
    return CandidateNodes(np.concatenate(values), levels, first_child, num_children)
