"""What verification must know of a token tree, as tensors, and in which order its nodes are judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree


@dataclass(frozen=True)
class Order:
    """The nodes that have children, in an order in which they can be judged. Each has a place in it.

    They come in groups, judged one after the other. Within a group the nodes with most children come first: those with a
    child of some rank are a slice, and work on them is in place.

    Args:
        nodes: int64 [inner], the node at each place.
        drawn: int64 [inner], its index among the draft's laws and draws, which are in the order of the nodes.
        of: int64 [size], each node's place; 0 for a leaf.
        entry: int64 [size - 1], where each node but the root is in a flattened table [inner, branching] of children.
        turn: int64 [size - 1], where it is in a flattened table [branching, inner].
        exists: bool [inner, branching], has the node a child of that rank?
        groups: for each group and each rank, the places of nodes that have a child of that rank.
        above: for each group int64 [nodes], its nodes' entries in such a table; None for the root's.
    """

    nodes: Tensor
    drawn: Tensor
    of: Tensor
    entry: Tensor
    turn: Tensor
    exists: Tensor
    groups: tuple[tuple[slice, ...], ...]
    above: tuple[Tensor | None, ...]

    @classmethod
    def build(cls, tree: TokenTree, group: np.ndarray, device: torch.device | str) -> Order:
        """The order for `tree`, each node in the group (int [size]) given."""
        inner = np.flatnonzero(tree.child_count)
        drawn = np.lexsort((-tree.child_count[inner], group[inner]))
        nodes = inner[drawn]
        counts = tree.child_count[nodes]
        of = np.zeros(tree.size, np.int64)
        of[nodes] = np.arange(nodes.size)
        entry = of[tree.parents[1:]] * tree.branching + tree.ranks[1:] - 1
        turn = (tree.ranks[1:] - 1) * nodes.size + of[tree.parents[1:]]
        groups, above = [], list[Tensor | None]()
        for key in np.unique(group[nodes]):
            start = int(np.searchsorted(group[nodes], key))
            here = counts[group[nodes] == key]
            groups.append(tuple(slice(start, start + int((here > rank).sum())) for rank in range(int(here[0]))))
            above.append(_tensor(turn[nodes[start : start + here.size] - 1], device) if start else None)  # the root's group is the first
        first, second, third, fourth, fifth = (_tensor(a, device) for a in (nodes, drawn, of, entry, turn))
        exists = torch.as_tensor(np.arange(tree.branching) < counts[:, None], device=device)
        return cls(first, second, third, fourth, fifth, exists, tuple(groups), tuple(above))


@dataclass(frozen=True)
class TreeIndex:
    """A token tree's structure as int64 tensors on one device.

    Args:
        size, depth: nodes and levels.
        child_count: [size].
        parents: [size - 1], the parent of every node but the root.
        offsets: [size], how many positions a node lies after the root.
        paths: [size, depth], the nodes from the root to each node, padded with the root.
        post_order: [size], children before their parent, siblings in draw order.
        together: all inner nodes as one group; by_level: one group a level.
    """

    size: int
    depth: int
    child_count: Tensor
    parents: Tensor
    offsets: Tensor
    paths: Tensor
    post_order: Tensor
    together: Order
    by_level: Order

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device | str = "cpu") -> TreeIndex:
        """The structure of `tree` on `device`."""
        paths = np.zeros((tree.size, tree.depth), np.int64)
        for node in range(1, tree.size):
            paths[node] = paths[tree.parents[node]]
            paths[node, tree.position_ids[node]] = node
        # a node comes after its subtree; going back from the end, after every later sibling's subtree too
        order, stack = [], [0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(range(tree.first_child[node], tree.first_child[node] + tree.child_count[node]))
        arrays = (tree.child_count, tree.parents[1:], tree.position_ids, paths, order[::-1])
        together, by_level = (Order.build(tree, group, device) for group in (np.zeros(tree.size, np.int64), tree.position_ids))
        return cls(tree.size, tree.depth, *(_tensor(a, device) for a in arrays), together, by_level)  # type: ignore[call-arg, arg-type]

    @classmethod
    def stars(cls, roots: int, children: int, device: torch.device | str = "cpu") -> TreeIndex:
        """So many one-level trees side by side, to judge independent nodes at once: nodes 0 to roots - 1 are the roots, then
        come each root's children. For verifiers that judge `together`; of a verdict's `ends`, those of a root are its own."""
        child = np.arange(roots * children)
        size = roots + child.size
        inner, below = np.arange(roots), roots + child
        of, entry = np.append(inner, child * 0), np.append(inner[1:] * 0, child)
        nodes, place, child_entry, turn = (_tensor(a, device) for a in (inner, of, entry, child % children * roots + child // children))
        exists = torch.ones(roots, children, dtype=torch.bool, device=device)
        order = Order(nodes, nodes, place, child_entry, turn, exists, ((slice(0, roots),) * children,), (None,))
        count = np.append(np.full(roots, children), child * 0)
        parents, offsets = np.append(inner[1:] * 0, child // children), np.append(inner * 0, child * 0 + 1)
        paths = np.append(inner * 0, below)[:, None]  # node 0 pads: it is certain
        arrays = (count, parents, offsets, paths, np.arange(size))
        return cls(size, 2, *(_tensor(a, device) for a in arrays), order, order)  # type: ignore[call-arg, arg-type]


def _tensor(array: Any, device: torch.device | str) -> Tensor:
    return torch.as_tensor(np.asarray(array, np.int64), device=device)
