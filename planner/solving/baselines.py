"""Trees from other work, to compare with. None depends on the acceptance vector."""

import numpy as np

from sequoia_plan.artifacts import TokenTree


def complete(size: int, depth: int, branching: int) -> TokenTree:
    """A complete tree of at most `size` nodes and `depth` levels, filled breadth-first."""
    parents = (np.arange(size) - 1) // branching
    return _first_levels(TokenTree.from_parents(parents), depth)


def chains(size: int, depth: int, count: int) -> TokenTree:
    """So many sequences that share the root alone, and whose lengths differ by one at most."""
    parents = np.r_[-1, np.maximum(np.arange(1, size) - count, 0)]
    return _first_levels(TokenTree.from_parents(parents), depth)


def _first_levels(tree: TokenTree, depth: int) -> TokenTree:
    """A tree without the levels beyond `depth`."""
    return TokenTree(tree.parents[: tree.level_offsets[: depth + 1][-1]])


TreeAndVerifier = tuple[TokenTree, str]
"""A token tree and the name of the verifier that it is decoded with."""


def bench_trees(tree: TokenTree, verifier: str) -> dict[str, TreeAndVerifier]:
    """Return the trees that bench decodes with, by the name of the method.

    They are `tree` itself, plain decoding (a tree of one node), and a chain as deep as `tree`. A
    tree with others by match is also taken without these.
    """
    trees: dict[str, TreeAndVerifier] = {"plain": (TokenTree.chain(1), verifier)}
    if tree.by_match:
        trees["tree"] = TokenTree(tree.parents, tree.plan), verifier
    if tree.size > 1:
        trees["chain"] = TokenTree.chain(tree.depth), verifier
    if len(trees) > 1:
        trees |= {"sequoia": (tree, "sequoia"), "traversal": (tree, "traversal")}
    return trees
