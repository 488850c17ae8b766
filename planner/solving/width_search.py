"""The tree for this hardware: expected tokens over step time, with every draft pass at its own width.

With non-increasing rows a tree is worth most, among all that read e[l] nodes with the draft on level l, if these are the most valuable
nodes of their level and the rest are the most valuable leaves: any exchange only lowers values. So (e[0], e[1], ..., size) fixes it, and
the search is over these profiles. It starts from the trees with the most expected tokens of each size and depth, which are the answer
already where a draft pass costs the same at every width.
"""

from __future__ import annotations

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.cost import Floats, StepTime, node_values
from sequoia_plan.planner.solving.convolution import isotonic
from sequoia_plan.planner.solving.frontier import Frontier

MOST_REBUILT = 256
STARTS = 8

Profile = tuple[int, ...]


def speed(tree: TokenTree, rows: Floats, times: StepTime) -> float:
    """Predicted tokens a second."""
    return float(node_values(tree, rows).sum() if len(rows) else 1.0) / times.step(tree)


def fastest(frontier: Frontier, times: StepTime) -> tuple[TokenTree, float]:
    """The fastest tree found, and a speed (tokens a second) that no tree within the frontier's limits exceeds.

    The bound is max over (n, d) of F(n, d) / the least time of a tree of n nodes and d levels. Trees are rebuilt and timed exactly in
    the order of their own bound until it can no longer win; the profiles of the fastest ones start the profile search.
    """
    bounds = [values / times.steps_at_least(np.arange(1, len(values) + 1), d) for d, values in enumerate(frontier.values, 1)]
    at = [(d, n) for d, row in enumerate(bounds, 1) for n in range(1, len(row) + 1)]
    flat = np.concatenate(bounds)
    order = np.argsort(-flat, kind="stable")
    timed = [(1 / times.plain(), TokenTree.chain(1))]
    best = timed[0][0]
    for index in order[:MOST_REBUILT]:
        if flat[index] <= best:
            break
        depth, size = at[index]
        tree = frontier.tree(size, depth)
        timed.append((speed(tree, frontier.rows, times), tree))
        best = max(best, timed[-1][0])
    timed.sort(key=lambda each: -each[0])
    searched = [_search(profile, frontier, times) for profile in dict.fromkeys(_profile(tree) for _, tree in timed[:STARTS])]
    found = max([timed[0], *((speed(tree, frontier.rows, times), tree) for tree in searched)], key=lambda each: each[0])
    return found[1], float(max(flat.max(), 1 / times.plain()))


def fastest_by_the_paper(frontier: Frontier, times: StepTime) -> TokenTree:
    """max over (n, d) of F(n, d) / (t(n) + d c), c one draft pass of one token (Sequoia, arXiv 2402.12374, section 3.3)."""
    rates = [values / (times.targets(np.arange(1, len(values) + 1)) + d * times.draft(1)) for d, values in enumerate(frontier.values, 1)]
    depth = max(range(len(rates)), key=lambda d: rates[d].max())
    return frontier.tree(int(np.argmax(rates[depth])) + 1, depth + 1)


def _profile(tree: TokenTree) -> Profile:
    """Nodes that have children, level by level."""
    return tuple(len(tree.expanded(level)) for level in range(tree.depth - 1))


def _search(start: Profile, frontier: Frontier, times: StepTime) -> TokenTree:
    """Change one level by 1, 2, 4, ... nodes, or take the deepest level away or add one, as long as that is faster for the best size."""
    rows = isotonic(frontier.rows)  # what is searched; what is found is judged with the rows themselves
    most = min(len(frontier.values[-1]), times.largest())
    best, rate = start, _Profiled(start, rows, most, times).rate
    seen, improved = {start}, True
    while improved:
        improved = False
        for level in range(1, min(len(best) + 1, len(rows))):
            width = best[level] if level < len(best) else 0
            for change in (sign * 2**power for power in range(max(width, 4).bit_length() + 1) for sign in (1, -1)):
                width = best[level] if level < len(best) else 0
                if width + change < 0 or (width + change == 0 and level + 1 < len(best)):
                    continue
                moved = (*best[:level], width + change, *best[level + 1 :]) if width + change else best[:level]
                if moved in seen:
                    continue
                seen.add(moved)
                found = _Profiled(moved, rows, most, times).rate
                if found > rate * (1 + 1e-12):
                    best, rate, improved = moved, found, True
    return _Profiled(best, rows, most, times).tree()


class _Profiled:
    """The trees of one profile, of every size: which nodes are read by the draft, and the leaves in order of value."""

    def __init__(self, profile: Profile, rows: Floats, most: int, times: StepTime) -> None:
        branching = rows.shape[1] if len(rows) else 0
        value = np.ones(1)
        self.inner: list[tuple[np.ndarray, np.ndarray]] = []  # of each level's expanded nodes: parent among the level above's, value
        leaves, levels, parents = [], [], []
        above = np.array([-1])
        widths = []
        for level, count in enumerate(profile):
            count = min(count, value.size)
            if count == 0:
                break
            self.inner.append((above[:count], value[:count]))
            widths.append(count)
            if level:
                leaves.append(value[count:])
                parents.append(above[count:])
                levels.append(np.full(value.size - count, level))
            children = (value[:count, None] * rows[level]).ravel()
            order = np.argsort(-children, kind="stable")[:most]
            value, above = children[order], order // branching
        leaves.append(value)
        parents.append(above)
        levels.append(np.full(value.size, len(widths)))
        self.leaves, self.levels, self.parents = np.concatenate(leaves), np.concatenate(levels), np.concatenate(parents)
        if not widths:
            self.leaves = self.leaves[:0]
        self.order = np.argsort(-self.leaves, kind="stable")[: max(0, most - sum(widths))]
        tokens = sum(each.sum() for _, each in self.inner) + np.concatenate([[0.0], np.cumsum(self.leaves[self.order])])
        sizes = sum(widths) + np.arange(tokens.size)
        passes = np.array([2, *widths[1:]]) if widths else np.array([], int)
        rates = tokens / (times.targets(np.maximum(sizes, 1)) + times.drafts(passes).sum() + times.latency.overhead)
        least = 1 if widths else 0  # the last pass must draft something
        if rates.size <= least:
            self.rate, self.count = 0.0, 0
        else:
            self.count = int(np.argmax(rates[least:])) + least
            self.rate = float(rates[self.count])

    def tree(self) -> TokenTree:
        """The fastest of them."""
        chosen = self.order[: self.count]
        found, starts = [-1], [0]
        for level in range(1, len(self.inner) + 1):
            start = len(found)
            expanded = self.inner[level][0] if level < len(self.inner) else np.array([], int)
            mine = np.sort(chosen[self.levels[chosen] == level])
            found += [int(p) + starts[-1] for p in (*expanded, *self.parents[mine])]
            starts.append(start)
        return TokenTree.from_parents(found)
