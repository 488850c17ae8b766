"""Trees from other work, by name, to compare with. None depends on the acceptance vector."""

from collections.abc import Iterable
from itertools import islice, repeat

from sequoia_plan.artifacts import ArgumentError, TokenTree


def baseline(name: str, size: int, depth: int) -> TokenTree:
    """Build a baseline tree of at most `size` nodes and `depth` levels, the root's included.

    Args:
        name: one of
            "chain": one sequence;
            "chains:K": K independent sequences, whose lengths differ by one node at most;
            "k-ary:K": a complete tree, filled breadth-first;
            "specinfer:K1,K2,...": every node of level l has K(l+1) children (SpecInfer,
            arXiv 2305.09781, section 4.1).

    Raises:
        ArgumentError: for an unknown name.
    """
    shape, _, argument = name.partition(":")
    try:
        numbers = [int(number) for number in argument.split(",")] if argument else []
    except ValueError:
        numbers = [-1]
    if min(numbers, default=1) > 0:
        match shape, numbers:
            case "chain", []:
                return _expand(repeat(1, depth - 1), size)
            case "chains", [num_chains]:
                return _expand([num_chains, *repeat(1, depth - 2)][: depth - 1], size)
            case "k-ary", [num_children]:
                return _expand(repeat(num_children, depth - 1), size)
            case "specinfer", [_, *_]:
                return _expand(numbers[: depth - 1], size)
    raise ArgumentError(
        f"baseline: found {name!r}, expected chain, chains:K, k-ary:K or specinfer:K1,K2,..."
    )


def _expand(children_per_level: Iterable[int], size: int) -> TokenTree:
    """Give every node of each level so many children, breadth-first up to `size` nodes."""
    parents, level = [-1], range(1)
    for num_children in children_per_level:
        children = (parent for parent in level for _ in range(num_children))
        parents += islice(children, size - len(parents))
        level = range(level.stop, len(parents))
    return TokenTree.from_parents(parents)


TreeAndVerifier = tuple[TokenTree, str]
"""A token tree and the name of the verifier that it is decoded with."""


def bench_trees(tree: TokenTree, verifier: str) -> dict[str, TreeAndVerifier]:
    """Return the trees that bench decodes with, by the name of the method.

    They are `tree` itself, plain decoding (a tree of one node), and baselines with no more nodes
    and levels than `tree`. A tree with others by match is also taken without these.
    """
    trees: dict[str, TreeAndVerifier] = {"plain": (TokenTree.chain(1), verifier)}
    alone = TokenTree(tree.parents, tree.plan)
    ours = {"sequoia": (tree, "sequoia"), "traversal": (tree, "traversal")}
    if tree.by_match:
        trees |= {"tree": (alone, verifier), **ours}
    if tree.size > 1:
        num_chains = max(1, (tree.size - 1) // (tree.depth - 1))
        trees |= {
            "chain": (baseline("chain", tree.size, tree.depth), verifier),
            "chains": (baseline(f"chains:{num_chains}", tree.size, tree.depth), "specinfer"),
            "k-ary": (baseline("k-ary:2", tree.size, tree.depth), verifier),
            "top-k": (alone, "topk"),
            **ours,
        }
    return trees
