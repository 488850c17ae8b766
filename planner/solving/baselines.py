"""The trees that bench decodes with."""

from sequoia_plan.artifacts import TokenTree

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
    if len(trees) > 1 or tree.by_context:
        trees |= {"sequoia": (tree, "sequoia"), "traversal": (tree, "traversal")}
    return trees
