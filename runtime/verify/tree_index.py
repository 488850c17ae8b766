"""The structure of a token tree as tensors, and orders in which its nodes can be verified."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sequoia_plan.artifacts import TokenTree


@dataclass(frozen=True)
class VerificationOrder:
    """The inner nodes (those that have children) in an order in which they can be verified.

    Verifiers have tensors with a row for each inner node, in this order. Rows are in groups, which
    are verified one after the other. Within a group, the nodes with the most children come first:
    those that have a child of some rank are then a slice of rows, which is updated in place.
    `nodes` int64 [inner nodes], the node of each row; `row_of_node` int64 [size]; `draft_rows`
    int64 [inner nodes], the same nodes' rows in `DrawnTree`; `has_child` bool [inner nodes,
    branching]; `cells` int64 [size - 1], where each node below the root is in a flattened tensor
    [branching, inner nodes] of children by rank and parent. Of each group, `groups` has the rows
    with a child of each rank, and `group_cells` the cells of its nodes (None for the root).
    """

    nodes: Tensor
    draft_rows: Tensor
    row_of_node: Tensor
    cells: Tensor
    has_child: Tensor
    groups: tuple[tuple[slice, ...], ...]
    group_cells: tuple[Tensor | None, ...]

    @classmethod
    def of(
        cls, tree: TokenTree, group_of_node: np.ndarray, device: torch.device | str
    ) -> VerificationOrder:
        """The order of the inner nodes of `tree`: by `group_of_node`, int [size], then by children.

        Those with more children come first.
        """
        inner = np.flatnonzero(tree.child_count)
        draft_rows = np.lexsort((-tree.child_count[inner], group_of_node[inner]))
        nodes = inner[draft_rows]
        counts = tree.child_count[nodes]
        row_of_node = np.zeros(tree.size, np.int64)
        row_of_node[nodes] = np.arange(nodes.size)
        cells = (tree.ranks[1:] - 1) * nodes.size + row_of_node[tree.parents[1:]]

        groups: list[tuple[slice, ...]] = []
        group_cells: list[Tensor | None] = []
        for group in np.unique(group_of_node[nodes]):
            rows = np.flatnonzero(group_of_node[nodes] == group)
            start, group_counts = int(rows[0]), counts[rows]
            ends = [
                start + int((group_counts > rank).sum()) for rank in range(int(group_counts[0]))
            ]
            groups.append(tuple(slice(start, end) for end in ends))
            # the first group has the root, which has no cell
            group_cells.append(_tensor(cells[nodes[rows] - 1], device) if start else None)

        return cls(
            nodes=_tensor(nodes, device),
            draft_rows=_tensor(draft_rows, device),
            row_of_node=_tensor(row_of_node, device),
            cells=_tensor(cells, device),
            has_child=torch.as_tensor(np.arange(tree.branching) < counts[:, None], device=device),
            groups=tuple(groups),
            group_cells=tuple(group_cells),
        )


@dataclass(frozen=True)
class TreeIndex:
    """The structure of a token tree as int64 tensors on one device.

    `child_count` [size]; `parents` [size - 1], of the nodes below the root; `levels` [size], the
    root's 0; `paths` [size, depth], the nodes from the root to each, then zeros; `post_order`
    [size], children before their parent. The order `together` has all nodes in one group,
    `by_level` has a group for each level.
    """

    size: int
    child_count: Tensor
    parents: Tensor
    levels: Tensor
    paths: Tensor
    post_order: Tensor
    together: VerificationOrder
    by_level: VerificationOrder

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device | str = "cpu") -> TreeIndex:
        """The structure of `tree` on `device`."""
        paths = np.zeros((tree.size, tree.depth), np.int64)
        for node in np.flatnonzero(tree.position_ids):
            paths[node] = paths[tree.parents[node]]
            paths[node, tree.position_ids[node]] = node
        return cls(
            size=tree.size,
            child_count=_tensor(tree.child_count, device),
            parents=_tensor(tree.parents[1:], device),
            levels=_tensor(tree.position_ids, device),
            paths=_tensor(paths, device),
            post_order=_tensor(_post_order(tree), device),
            together=VerificationOrder.of(tree, np.zeros(tree.size, np.int64), device),
            by_level=VerificationOrder.of(tree, tree.position_ids, device),
        )

    @classmethod
    def stars(cls, roots: int, children: int, device: torch.device | str = "cpu") -> TreeIndex:
        """So many one-level trees side by side, to verify independent nodes at once.

        Nodes 0 to roots - 1 are the roots, then each root's children follow. Only verifiers that
        use the order `together` take several roots. In their `Acceptance.end_probs`, those of each
        root and its children add up to 1.
        """
        # no parent or rank of a root is used: `end_probs` takes the probability to reach it as 1
        each_root, each_child = np.ones(roots, np.int64), np.ones(roots * children, np.int64)
        forest: Any = SimpleNamespace(
            size=roots * (1 + children),
            depth=2,
            branching=children,
            parents=np.append(0 * each_root, np.arange(roots).repeat(children)),
            ranks=np.append(each_root, np.tile(np.arange(1, 1 + children), roots)),
            child_count=np.append(children * each_root, 0 * each_child),
            first_child=np.append(roots + children * np.arange(roots), 0 * each_child),
            position_ids=np.append(0 * each_root, each_child),
        )
        return cls.of(forest, device)


def _post_order(tree: TokenTree) -> list[int]:
    """The nodes, children before their parent and siblings in draw order.

    It is the reverse of a walk that visits parents first and later siblings before earlier ones.
    """
    visited, stack = [], [0]
    while stack:
        node = stack.pop()
        visited.append(node)
        first_child = tree.first_child[node]
        stack.extend(range(first_child, first_child + tree.child_count[node]))
    return visited[::-1]


def _tensor(values: ArrayLike, device: torch.device | str) -> Tensor:
    """The values as int64 on `device`."""
    return torch.as_tensor(np.asarray(values, np.int64), device=device)
