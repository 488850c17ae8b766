"""The fastest tree whose spine is looked up.

The spine of a tree is the root, its first child, the first child of that node, and so on. If it is
looked up, its tokens are those of the lookup chain (artifacts/lookup.py), which cost no draft pass.
All other nodes are drafted. A level has a draft pass if it or a deeper one has a node with a
drafted child. So for each number J of draft passes a tree has any nodes on its first J + 1 levels,
and beyond them the tail of its spine alone.

The tail has no draft pass, so the search of fastest.py can take its nodes for further children of
the spine's node on level J - 1: they cost as much, and their values (the probabilities that they
are accepted) are known. What is left is a search among trees of J + 1 levels.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.counts import Floats, Ints
from sequoia_plan.planner.solving.problem import FastestTree, SpeedProblem, proven_bound
from sequoia_plan.planner.solving.speed.fastest import by_speed, search


@dataclass(frozen=True)
class FoldedTail:
    """Trees of J + 1 levels, some of which stand for trees with a longer spine.

    Folding a tree makes the nodes of its tail, which is the spine's nodes on level J and deeper,
    children of the spine's node on level J - 1. `rates` float64 [J, 2, ranks], the acceptance with
    these children. If that node has n of them, `tail_length[n]` stand for nodes of the tail and
    `num_drafted[n]` for drafted children; both int64 [children + 1].
    """

    rates: Floats
    tail_length: Ints
    num_drafted: Ints
    branching: int

    def unfold(self, tree: TokenTree) -> TokenTree:
        """The tree with a looked-up spine that a tree of the search stands for.

        The rates have as many ranks as the spine's node on level J - 1 has children, which may be
        more than other nodes can have. Their children of higher ranks have the value 0, so a tree
        with any is no faster than one of fewer nodes; no speculation stands for it.
        """
        num_levels, child_counts = len(self.rates), tree.child_count.tolist()
        has_tail = tree.depth > num_levels
        if has_tail:
            # the spine's nodes are the first of their levels
            last_parent, level_start = tree.level_offsets[num_levels - 1 :][:2].tolist()
            count = child_counts.pop(last_parent)
        if max(child_counts) > self.branching:
            return TokenTree.chain(1)
        if not has_tail:
            return TokenTree(tree.parents, looks_up=True)
        tail_length = int(self.tail_length[count])
        num_children = min(tail_length, 1) + int(self.num_drafted[count])
        others = tree.parents[level_start + count :]
        tail_start = level_start + num_children + len(others)
        tail_parents = [level_start, *range(tail_start, tail_start + tail_length - 2)]
        parents = np.concatenate(
            [
                tree.parents[:level_start],
                np.full(num_children, last_parent, np.int32),
                others,
                np.array(tail_parents[: max(tail_length - 1, 0)], np.int32),
            ]
        )
        return TokenTree(parents, looks_up=True)


def fold_tail(rates: Floats, num_passes: int, tail_charges: Floats) -> FoldedTail:
    """Fold the tails of trees with J = `num_passes` draft passes.

    Of n children of the spine's node on level J - 1, k stand for the first k nodes of the tail, and
    n - k for drafted children: the k >= 1 is taken that gives them the most value. In the folded
    rates, that of rank n is what the n-th child adds to this value. `rates` float64 [levels, 2,
    branching]; `tail_charges` float64 [tail nodes]: expected tokens that catching up costs after a
    tail of 1, 2, ... nodes, more than after one.
    """
    branching = rates.shape[2]
    last_level = num_passes - 1
    on_spine = rates[:, 0, 0]  # of the looked-up child
    tail = np.cumprod(on_spine[last_level : last_level + len(tail_charges)])
    # Rates are relative to the value of the node on level J - 1; one of value 0 needs no tail.
    parent_value = max(float(np.prod(on_spine[:last_level])), 1e-300)
    tail_sums = np.cumsum(tail) - tail_charges / parent_value  # of 1, 2, ... nodes of the tail
    drafted_sums = np.append(0.0, np.cumsum(rates[last_level, 0, 1:]))  # of 0, 1, ... children
    totals = tail_sums[:, None] + drafted_sums  # [tail nodes - 1, drafted children]
    # for n = 0, 1, ...: the most value, and the nodes of the tail and drafted children that have it
    choices = [(0.0, 0, 0)]  # values never fall: a further child may stand for nothing
    for count in range(1, len(tail) + branching):
        possible_drafted = np.arange(max(0, count - len(tail)), min(branching, count))
        sums = totals[count - possible_drafted - 1, possible_drafted]
        best = int(np.argmax(sums))
        num_drafted = int(possible_drafted[best])
        choice = float(sums[best]), count - num_drafted, num_drafted
        choices.append(max(choices[-1], choice, key=lambda choice: choice[0]))
    best_sums, tail_lengths, nums_drafted = map(np.array, zip(*choices, strict=True))
    folded = np.zeros((num_passes, 2, max(branching, len(choices) - 1)))
    folded[:, :, :branching] = rates[:num_passes]
    folded[last_level, 0] = 0.0
    folded[last_level, 0, : len(choices) - 1] = np.diff(best_sums)
    return FoldedTail(folded, tail_lengths, nums_drafted, branching)


def fastest_looked_up_tree(problem: SpeedProblem, start: FastestTree) -> FastestTree:
    """Find the fastest tree whose spine is looked up, if it is faster than `start`.

        best = the faster one of `start` and the fastest chain
        for each number J of draft passes, the most promising first:
            best = max(best, branch and bound over all trees with at most J draft passes)

    Args:
        problem: acceptance, limits and step times. Rank 1 of a node on the spine is the looked-up
            token.
        start: a tree with its speed; it is returned if no tree is faster.

    Returns:
        The fastest tree, with a bound on the speed of `start` and of all trees with a looked-up
        spine.
    """
    times, max_levels, max_size = problem.times, len(problem.rates), problem.max_size
    best = start
    for depth in range(2, min(max_levels + 1, max_size) + 1):
        chain = TokenTree(TokenTree.chain(depth).parents, looks_up=True)
        best = max(best, problem.evaluate(chain), key=by_speed)
    candidates = []
    for num_passes in _numbers_of_passes(problem):
        max_tail = min(max_levels - num_passes + 1, max_size - num_passes)
        unread = [  # tokens that the draft must catch up with after a tail of n nodes
            times.drafting.num_unread(num_passes + n, num_passes) for n in range(1, max_tail + 1)
        ]
        catch_up = np.array(problem.catch_up)[np.minimum(unread, len(problem.catch_up) - 1)]
        # Where one pass serves all levels, a search has trees of fewer levels that matter as well.
        least_depth = num_passes + 1 if times.drafting.drafts_by_level else 2
        # A tree faster than `start` is charged at least this much for its tail.
        folded = fold_tail(problem.rates, num_passes, start.speed * (catch_up - catch_up[0]))
        folded_problem = replace(
            problem,
            rates=folded.rates,
            other_seconds=problem.other_seconds + float(catch_up[0]),  # after a tail of one node
            catch_up=(0.0,),  # what longer tails take beyond that is charged in `rates`
        )
        candidates.append((folded_problem.quick_bound(least_depth), folded, folded_problem))
    bound = best.speed
    for quick_bound, folded, folded_problem in sorted(candidates, key=lambda item: -item[0]):
        if quick_bound <= best.speed:
            bound = max(bound, best.speed)  # of a tree of fewer passes, whose search is left out
            break
        evaluate = partial(_evaluate_unfolded, problem, folded)
        best, searched_bound = search(folded_problem, best, evaluate)
        bound = max(bound, min(searched_bound, quick_bound))
    return best._replace(bound=proven_bound(best.speed, bound))


def _evaluate_unfolded(problem: SpeedProblem, folded: FoldedTail, tree: TokenTree) -> FastestTree:
    """The speed of the tree with a looked-up spine that a tree of a search stands for."""
    return problem.evaluate(folded.unfold(tree))


def _numbers_of_passes(problem: SpeedProblem) -> list[int]:
    """The numbers J of draft passes for each of which trees are searched, ascending."""
    # J passes draft the levels 1 to J: trees of J + 1 levels
    pass_seconds = {depth - 1: time for depth, time in problem.first_pass_seconds().items()}
    if problem.times.drafting.drafts_by_level:
        return list(pass_seconds)
    # One pass serves all levels: of equally long ones, that for the most levels is enough.
    return sorted({time: J for J, time in pass_seconds.items()}.values())
