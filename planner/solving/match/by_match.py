"""The trees by match of a profile: the fastest ones on its recorded texts."""

from itertools import pairwise
from typing import Any

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.plan import OPTIMALITY_TOLERANCE, MatchPlan
from sequoia_plan.planner.solving.match.acceptance import without_repeats
from sequoia_plan.planner.solving.match.portfolio import fastest_portfolio, step_figures
from sequoia_plan.planner.solving.match.recorded import DecodedAgain, Recording, figures_by_kind
from sequoia_plan.planner.solving.problem import MAX_WORK, proven_bound

MAX_REPLAYS = 10
"""Rounds of solving and of counting the shares of classes anew."""
MIN_REPLAYED_SHARE = 0.01
"""The recorded texts decide about the tree of a class with this share of their steps or more."""


def trees_by_match(
    profile: Profile, recording: Recording, base_tree: TokenTree
) -> tuple[TokenTree, dict[str, Any]]:
    """Find the trees by match for a profile.

        trees = `base_tree` for every class
        repeat until no other trees are faster on the recorded texts:
            shares, catching up = those of the recorded texts, decoded again with these trees
            trees = the fastest portfolio with these

    Args:
        profile: the measurements.
        recording: its recorded texts, and what each match class is solved for.
        base_tree: the fastest single tree without lookup.

    Returns:
        The trees, and what their plan says of them.
    """
    plain_seconds = recording.times.plain_seconds()
    base_trees = (base_tree,) * len(recording.problems)
    decoded, bound = _fastest_on_recorded_texts(recording, recording.decode(base_trees))
    figures = step_figures(decoded.problems, decoded.trees)
    by_match = [
        MatchPlan(
            match_length=problem.match_length,
            share=share,
            acceptance=without_repeats(problem.of(tree).rates),
            expected_tokens=tokens,
            step_seconds=seconds,
        )
        for problem, tree, share, (tokens, seconds) in zip(
            decoded.problems, decoded.trees, decoded.shares.tolist(), figures.tolist(), strict=True
        )
    ]
    lengths = [problem.match_length for problem in recording.problems]
    tree = _with_by_match(dict(zip(lengths, decoded.trees, strict=True)))
    mean_tokens, mean_seconds = (decoded.shares @ figures).tolist()
    speedup = mean_tokens * plain_seconds / mean_seconds
    return tree, {
        "expected_tokens": max(mean_tokens, 1.0),  # shares add up to 1 but for rounding
        "step_seconds": mean_seconds,
        "predicted_speedup": speedup,
        "acceptance": by_match[0].acceptance,
        "speedup_bound": proven_bound(speedup, bound * plain_seconds),
        "by_match": tuple(by_match),
        "tree_speedup": recording.without_lookup().decode(base_trees).speed * plain_seconds,
        **figures_by_kind(profile, decoded.trees, recording),
    }


def _fastest_on_recorded_texts(
    recording: Recording, base: DecodedAgain
) -> tuple[DecodedAgain, float]:
    """The trees by match that decode the recorded texts fastest, and a bound on the speed.

    Shares of classes, catching up and the looked-up tokens that steps come upon depend on the
    trees. So each round solves with what the best trees led to, and the recorded texts decide
    whether the new trees are faster. The bound holds for what the returned trees led to.
    """
    best, trees_so_far = base, set(base.trees)
    for _ in range(MAX_REPLAYS):
        # the texts decide, so a tenth of the usual work is enough here
        portfolio = fastest_portfolio(best.problems, best.shares, best.trees, MAX_WORK // 10)
        decoded = recording.decode(portfolio.trees)
        trees_so_far |= set(decoded.trees)
        if decoded.speed <= best.speed * (1 + OPTIMALITY_TOLERANCE):
            break
        best = decoded
    best = _with_trees_exchanged(recording, best, trees_so_far)
    return best, fastest_portfolio(best.problems, best.shares, best.trees).bound


def _with_trees_exchanged(
    recording: Recording, best: DecodedAgain, trees: set[TokenTree]
) -> DecodedAgain:
    """Trees by match that no exchange of one class's tree makes faster on the recorded texts.

    A tree changes the shares of other classes: after a short lookup chain that was right, the next
    match is a longer one. So trees that are not the fastest with given shares are tried as well.
    """
    looked_up = [problem.looked_up for problem in recording.problems if problem.looked_up]
    longest = max((min(len(p.rates) + 1, p.max_size) for p in looked_up), default=1)
    chains = [TokenTree(TokenTree.chain(n).parents, looks_up=True) for n in range(2, longest + 1)]
    # in an order that does not depend on hashes
    sorted_trees = sorted(trees, key=lambda tree: (tree.looks_up, tree.size, tree.parents.tolist()))
    is_improved = True
    while is_improved:
        is_improved = False
        for match_class, problem in enumerate(recording.problems):
            if best.shares[match_class] < MIN_REPLAYED_SHARE:
                continue
            for tree in (*sorted_trees, *chains):
                present = best.trees[match_class]
                if tree == present or (tree.looks_up and problem.looked_up is None):
                    continue
                trees_tried = list(best.trees)
                trees_tried[match_class] = tree
                decoded = recording.decode(tuple(trees_tried))
                if decoded.speed > best.speed * (1 + OPTIMALITY_TOLERANCE):
                    best, is_improved = decoded, True
    return best


def _with_by_match(trees: dict[int, TokenTree]) -> TokenTree:
    """The tree for no match, with the others in `by_match` unless they equal the one before.

    `trees`: by the shortest match of their class, ascending.
    """
    by_match = {
        length: TokenTree(tree.parents, looks_up=tree.looks_up)
        for (_, before), (length, tree) in pairwise(trees.items())
        if tree != before
    }
    return TokenTree(trees[0].parents, by_match=by_match)
