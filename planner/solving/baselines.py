"""Trees from other work, by name, to compare with. None depends on the acceptance vector."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.files import read_bytes

BASELINE_NAMES = "chain, chains:K, k-ary:K, specinfer:K1,K2,..., random:SEED or parents:FILE"


def baseline(name: str, size: int, depth: int) -> TokenTree:
    """Build a baseline tree of at most `size` nodes and `depth` levels, the root's included.

    Args:
        name: one of
            "chain": one sequence;
            "chains:K": K independent sequences;
            "k-ary:K": a complete tree, filled breadth-first;
            "specinfer:K1,K2,...": every node of level l has K(l+1) children (SpecInfer,
            arXiv 2305.09781, section 4.1);
            "random:SEED": the parent of each node is drawn uniformly;
            "parents:FILE": a JSON list of parents, in which the root's parent is -1.

    Raises:
        SequoiaPlanError: for an unknown name, for a file that holds no tree, or for a tree beyond
            the limits.
    """
    shape, _, argument = name.partition(":")
    if shape == "parents" and argument:
        return _tree_from_file(argument, size, depth)
    try:
        numbers = [int(number) for number in argument.split(",")] if argument else []
    except ValueError:
        numbers = [-1]
    smallest = 0 if shape == "random" else 1
    if min(numbers, default=smallest) >= smallest:
        match shape, numbers:
            case "chain", []:
                return TokenTree.chain(min(size, depth))
            case "chains", [num_chains]:
                return _chains(num_chains, size, depth)
            case "k-ary", [_]:
                return _expand(numbers * (depth - 1), size)
            case "specinfer", [_, *_]:
                return _expand(numbers[: depth - 1], size)
            case "random", [seed]:
                return _random_tree(seed, size, depth)
    raise ArgumentError(f"baseline: found {name!r}, expected {BASELINE_NAMES}")


def _chains(num_chains: int, size: int, depth: int) -> TokenTree:
    """Build independent sequences below the root, whose lengths differ by one node at most."""
    num_nodes = min(size, 1 + num_chains * (depth - 1))
    # Nodes 1 ... num_chains are children of the root; any other node continues the sequence of the
    # node num_chains before it.
    return TokenTree.from_parents(
        [-1, *(max(0, node - num_chains) for node in range(1, num_nodes))]
    )


def _expand(children_per_level: list[int], size: int) -> TokenTree:
    """Give every node of level l children_per_level[l] children, breadth-first."""
    parents = [-1]
    level_start, level_end = 0, 1
    for num_children in children_per_level:
        next_level = (
            parent for parent in range(level_start, level_end) for _ in range(num_children)
        )
        parents += islice(next_level, size - len(parents))
        level_start, level_end = level_end, len(parents)
        if level_start == level_end or level_end >= size:
            break
    return TokenTree.from_parents(parents)


def _random_tree(seed: int, size: int, depth: int) -> TokenTree:
    """Draw the parent of each node uniformly from the earlier nodes above level `depth`."""
    if depth <= 1:
        return TokenTree.chain(1)
    generator = np.random.default_rng(seed)
    parents, node_depths, possible_parents = [-1], [1], [0]
    for node in range(1, size):
        parent = possible_parents[generator.integers(len(possible_parents))]
        parents.append(parent)
        node_depths.append(node_depths[parent] + 1)
        if node_depths[node] < depth:
            possible_parents.append(node)
    return TokenTree.from_parents(parents)


def _tree_from_file(path: str, size: int, depth: int) -> TokenTree:
    """Read a tree from a JSON list of each node's parent, where the root's is -1."""
    try:
        tree = TokenTree.from_parents(json.loads(read_bytes(path, "a JSON list of parents")))
    except (ValueError, TypeError, SequoiaPlanError) as error:
        raise SequoiaPlanError(
            f"{path}: expected a JSON list of parents, the root's is -1 ({error})"
        ) from error
    if tree.size > size or tree.depth > depth:
        raise SequoiaPlanError(
            f"{path}: {tree.size} nodes of depth {tree.depth}, "
            f"expected at most the budget {size} and the depth {depth}; raise them"
        )
    return tree


TreeAndVerifier = tuple[TokenTree, str]
"""A token tree and the name of the verifier that it is decoded with."""


def bench_trees(tree: TokenTree, verifier: str) -> dict[str, TreeAndVerifier]:
    """Return the trees that bench decodes with, by the name of the method.

    They are `tree` itself, plain decoding (a tree of one node), and baselines with no more nodes
    and levels than `tree`. A tree with others by match is also taken without these.
    """
    trees: dict[str, TreeAndVerifier] = {"plain": (TokenTree.chain(1), verifier)}
    alone = TokenTree(tree.parents, tree.plan)
    if tree.by_match:
        trees |= {"tree": (alone, verifier), "sequoia": (tree, "sequoia")}
        trees |= {"traversal": (tree, "traversal")}
    if tree.size > 1:
        num_chains = max(1, (tree.size - 1) // (tree.depth - 1))
        trees |= {
            "chain": (baseline("chain", tree.size, tree.depth), verifier),
            "chains": (baseline(f"chains:{num_chains}", tree.size, tree.depth), "specinfer"),
            "k-ary": (baseline("k-ary:2", tree.size, tree.depth), verifier),
            "top-k": (alone, "topk"),
            "sequoia": (tree, "sequoia"),
            "traversal": (tree, "traversal"),
        }
    return trees
