"""The seconds of a step as tables that the search reads."""

from typing import NamedTuple

import numpy as np

from sequoia_plan.artifacts.counts import Floats, Ints
from sequoia_plan.planner.solving.compiled import compiled
from sequoia_plan.planner.solving.problem import SpeedProblem


class Costs(NamedTuple):
    """Seconds of a step: max(min_step_seconds, target[nodes] + sum of draft[width] + constant).

    A pass over n tokens takes as long as one of the next measured size, so its time by n is a
    staircase, to which verification may add a straight line. The stair ends are the numbers n after
    which the staircase rises, and the last n. `target`, `draft` float64 [max_size + 1].
    """

    target: Floats
    target_stair_ends: Ints
    draft: Floats
    draft_stair_ends: Ints
    constant: float
    min_step_seconds: float
    other_tokens: float


def cost_tables(problem: SpeedProblem) -> Costs:
    """Return the seconds of a step whose first draft pass is that of the problem's depth."""
    times, numbers = problem.times, np.arange(problem.max_size + 1)
    passes = times.target_seconds(numbers)
    draft = np.zeros(len(numbers))
    if times.drafting.drafts_by_level:
        draft[1:] = times.draft_seconds(numbers[1:])
    widest = int(np.flatnonzero(np.isfinite(draft))[-1])  # beyond it nothing was measured: inf
    first_pass = times.draft_seconds(times.drafting.first_pass_width(len(problem.rates) + 1))
    # The longer of two times, each with the same seconds added, is the longer one with these added.
    return Costs(
        passes + times.verification_seconds(numbers),
        _stair_ends(passes),
        draft,
        _stair_ends(draft[: widest + 1]),
        first_pass + times.latency.overhead + problem.other_seconds,
        times.stream_seconds + problem.other_seconds,
        problem.other_tokens,
    )


def _stair_ends(cost: Floats) -> Ints:
    """Return the numbers of nodes, from 1 on, after which the cost rises, and the last number."""
    return np.append(np.flatnonzero(np.diff(cost[1:]) > 0) + 1, len(cost) - 1)


@compiled
def stair_of(stair_ends, number):
    """Return the index of the stair that holds a number of nodes, at most the last stair end."""
    stair = 0
    while stair_ends[stair] < number:
        stair += 1
    return stair


@compiled
def cost_curve(costs, resource):
    """Return a resource's cost in seconds, float64 by its use, and the stair ends of this curve."""
    if resource == 0:
        return costs.target, costs.target_stair_ends
    return costs.draft, costs.draft_stair_ends


@compiled
def max_profit(costs, resource, price, second_price, low, high):
    """Return the largest price * n - second_price * cost[n] over low <= n <= high, and its n.

    n is the use of the resource; `price` is in tokens for each unit of use, and `second_price` in
    tokens a second. Between two stair ends the cost is a straight line, so only its ends are tried.
    """
    cost, stair_ends = cost_curve(costs, resource)
    profit, best_n = price * low - second_price * cost[low], low
    start = 1
    for end in stair_ends:
        if start > high:
            break
        if end >= low:
            for n in (max(start, low), min(end, high)):
                if price * n - second_price * cost[n] > profit:
                    profit, best_n = price * n - second_price * cost[n], n
        start = end + 1
    return profit, best_n


@compiled
def work_seconds(costs, use):
    """Return the seconds of a step's own work, by its use of each resource, int64 [resources].

    They are inf if the tree has more nodes, or more parents on a level, than were measured.
    """
    if use[0] >= len(costs.target):
        return np.inf
    seconds = costs.target[use[0]] + costs.constant
    for r in range(1, len(use)):
        if use[r] > costs.draft_stair_ends[-1]:
            return np.inf
        seconds += costs.draft[use[r]]
    return seconds


@compiled
def fastest_prefix(parents, levels, rates, costs):
    """Find the fastest of the trees that the first 2, 3, ... nodes of a tree form.

    Returns its speed in tokens a second and its size. `parents`, `levels` int64 [size]; `rates`
    float64 [levels, node classes, ranks]: how often a child is accepted, by its parent's class.
    """
    size = len(parents)
    values, classes = np.ones(size), np.zeros(size, np.int64)
    num_children, widths = np.zeros(size, np.int64), np.zeros(len(rates), np.int64)
    tokens, draft_seconds = 1.0 + costs.other_tokens, 0.0
    max_speed, best_size = 0.0, 1
    for node in range(1, size):
        parent, parent_level = parents[node], levels[node] - 1
        rank = num_children[parent]
        values[node] = values[parent] * rates[parent_level, classes[parent], rank]
        # a first child stays on the spine if its parent is on it
        classes[node] = classes[parent] if rank == 0 else rates.shape[1] - 1
        tokens += values[node]
        num_children[parent] += 1
        if rank == 0 and parent_level > 0:
            width = widths[parent_level]
            draft_seconds += costs.draft[width + 1] - costs.draft[width]
            widths[parent_level] += 1
        seconds = costs.target[node + 1] + draft_seconds + costs.constant
        speed = tokens / max(costs.min_step_seconds, seconds)
        if speed > max_speed:
            max_speed, best_size = speed, node + 1
    return max_speed, best_size
