"""Trees that others use, by name, to compare with: none of them knows the acceptance vector."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.files import read_bytes

NAMES = "chain, chains:K, k-ary:K, specinfer:K1,K2,..., random:SEED or parents:FILE"


def baseline(name: str, size: int, depth: int) -> TokenTree:
    """A baseline of at most `size` nodes and `depth` levels, the root's included.

    Args:
        name: "chain" (one sequence), "chains:K" (K independent sequences), "k-ary:K" (complete, filled breadth-first),
            "specinfer:K1,K2,..." (every node of level l has K(l+1) children; SpecInfer, arXiv 2305.09781, section 4.1),
            "random:SEED" (each node's parent drawn uniformly), "parents:FILE" (a JSON list of parents, the root's is -1).

    Raises:
        SequoiaPlanError: for an unknown name or a file that holds no tree, or one beyond the limits.
    """
    kind, _, rest = name.partition(":")
    if kind == "chain" and not rest:
        return TokenTree.chain(min(size, depth))
    if kind == "parents" and rest:
        return _imported(rest, size, depth)
    numbers = [int(n) for n in rest.split(",") if n.strip().isdecimal()]
    if len(numbers) != rest.count(",") + 1 or (kind != "random" and min(numbers) < 1):
        raise ArgumentError(f"baseline: found {name!r}, expected {NAMES}")
    if kind == "chains" and len(numbers) == 1:
        return TokenTree.from_parents([-1, *(max(0, node - numbers[0]) for node in range(1, min(size, 1 + numbers[0] * (depth - 1))))])
    if kind == "k-ary" and len(numbers) == 1:
        return expansion(numbers * (depth - 1), size)
    if kind == "specinfer":
        return expansion(numbers[: depth - 1], size)
    if kind == "random" and len(numbers) == 1:
        return _random(numbers[0], size, depth)
    raise ArgumentError(f"baseline: found {name!r}, expected {NAMES}")


def expansion(children: list[int], size: int) -> TokenTree:
    """Every node of level l has children[l] children, breadth-first until `size` nodes are reached."""
    found, start, stop = [-1], 0, 1
    for count in children:
        found += islice((parent for parent in range(start, stop) for _ in range(count)), size - len(found))
        start, stop = stop, len(found)
        if start == stop or stop >= size:
            break
    return TokenTree.from_parents(found)


def _random(seed: int, size: int, depth: int) -> TokenTree:
    generator = np.random.default_rng(seed)
    found, levels, open_nodes = [-1], [1], [0] if depth > 1 else []
    for node in range(1, size if open_nodes else 1):
        parent = open_nodes[generator.integers(len(open_nodes))]
        found.append(parent)
        levels.append(levels[parent] + 1)
        if levels[node] < depth:
            open_nodes.append(node)
    return TokenTree.from_parents(found)


def _imported(path: str, size: int, depth: int) -> TokenTree:
    try:
        parents = json.loads(read_bytes(path, "a JSON list of parents"))
    except (ValueError, RecursionError) as error:
        raise SequoiaPlanError(f"{path}: not JSON; expected a list of parents, the root's is -1") from error
    if not isinstance(parents, list) or any(isinstance(p, bool) or not isinstance(p, int) for p in parents):
        raise SequoiaPlanError(f"{path}: found {parents!r:.60}, expected a JSON list of parents, the root's is -1")
    try:
        tree = TokenTree.from_parents(parents)
    except SequoiaPlanError as error:
        raise SequoiaPlanError(f"{path}: {error}") from error
    if tree.size > size or tree.depth > depth:
        raise SequoiaPlanError(f"{path}: {tree.size} nodes of depth {tree.depth}, expected at most the budget {size} and the depth {depth}; raise them")
    return tree


Arm = tuple[TokenTree, str]
"""A tree and the verifier that judges it."""


def arms(tree: TokenTree, verifier: str) -> dict[str, Arm]:
    """Our tree, and those of others with no more nodes and levels, by name; `verifier` judges those that come without their own."""
    found: dict[str, Arm] = {"plain": (TokenTree.chain(1), verifier)}
    if tree.size > 1:
        lanes = max(1, (tree.size - 1) // (tree.depth - 1))
        found |= {
            "chain": (baseline("chain", tree.size, tree.depth), verifier),
            "chains": (baseline(f"chains:{lanes}", tree.size, tree.depth), "specinfer"),
            "k-ary": (baseline("k-ary:2", tree.size, tree.depth), verifier),
            "top-k": (tree, "topk"),
            "sequoia": (tree, "sequoia"),
            "traversal": (tree, "traversal"),
        }
    return found
