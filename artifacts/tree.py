"""The token tree: the parent of every node, and everything that follows from that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.plan import NO_PLAN, Plan

IntArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A static token tree: node 0 is the root (the last committed token), nodes are numbered breadth-first.

    Args:
        parents: int32 [size], the parent of every node; parents[0] = -1. Breadth-first order with siblings adjacent
            means that parents never decrease. `from_parents` takes any other order.
        plan: what the tree was solved for and from; carried by the file, not part of equality. A mapping is read as `Plan.read` does.

    Raises:
        SequoiaPlanError: if `parents` is not such an array, or `plan` holds what a plan cannot.
    """

    parents: IntArray
    plan: Plan = NO_PLAN

    def __post_init__(self) -> None:
        given = np.asarray(self.parents)
        if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
            raise SequoiaPlanError(f"token tree: parents must be a non-empty list of integers, found {given.dtype} of shape {given.shape}")
        if given[0] != -1:
            raise SequoiaPlanError(f"token tree: parents[0] must be -1 (the root), found {given[0]}")
        wrong = (given[1:] < 0) | (given[1:] >= np.arange(1, given.size)) | (given[1:] < given[:-1])
        if wrong.any():
            node = int(np.flatnonzero(wrong)[0]) + 1
            raise SequoiaPlanError(
                f"token tree: parents[{node}] is {given[node]}, expected a node from {max(given[node - 1], 0)} to {node - 1} "
                "(breadth-first order, siblings adjacent)"
            )
        object.__setattr__(self, "parents", _frozen(given))
        if not isinstance(self.plan, Plan):
            object.__setattr__(self, "plan", Plan.read(self.plan))

    @classmethod
    def from_parents(cls, parents: Iterable[int], plan: Plan | Mapping[str, Any] = NO_PLAN) -> TokenTree:
        """A tree from parents in any order in which a parent precedes its children; siblings keep their order."""
        order = parents if isinstance(parents, np.ndarray) else np.array([int(p) for p in parents], np.int64)
        if not order.size or order[0] != -1:
            raise SequoiaPlanError(f"token tree: parents[0] must be -1 (the root), found {order[0] if order.size else 'no node'}")
        wrong = np.flatnonzero((order[1:] < 0) | (order[1:] >= np.arange(1, order.size)))
        if wrong.size:
            raise SequoiaPlanError(f"token tree: parents[{wrong[0] + 1}] is {order[wrong[0] + 1]}, expected a node from 0 to {wrong[0]}")
        child = np.argsort(order[1:], kind="stable") + 1  # children of a node side by side, in order
        count = np.bincount(order[1:], minlength=order.size)
        first = np.cumsum(count) - count
        renumbered, level, start = [np.array([-1])], np.array([0]), 0
        while (counts := count[level]).any():
            renumbered.append(np.repeat(np.arange(start, start + level.size), counts))
            start += level.size
            level = child[np.repeat(first[level] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())]
        return cls(np.concatenate(renumbered), plan)  # type: ignore[arg-type]

    @classmethod
    def chain(cls, depth: int) -> TokenTree:
        """One child a node: plain speculative decoding of depth - 1 tokens. `chain(1)` does not speculate."""
        return cls(np.arange(-1, depth - 1, dtype=np.int32))

    @classmethod
    def star(cls, children: int) -> TokenTree:
        """One level of `children` nodes: what acceptance is measured with."""
        return cls(np.array([-1] + [0] * children, np.int32))

    @property
    def size(self) -> int:
        """Nodes, the root included."""
        return int(self.parents.size)

    @property
    def depth(self) -> int:
        """Levels, the root's included."""
        return int(self.level_offsets.size) - 1

    @property
    def branching(self) -> int:
        """The most children any node has."""
        return int(self.child_count.max())

    @cached_property
    def position_ids(self) -> IntArray:
        """int32 [size]: how many positions a node lies after the root."""
        return _frozen(np.repeat(np.arange(self.depth), self.level_widths))

    @cached_property
    def level_offsets(self) -> IntArray:
        """int32 [depth + 1]: level l is the nodes level_offsets[l] to level_offsets[l + 1]."""
        offsets, first_child = [0, 1], self.first_child.tolist()
        while offsets[-1] < self.size:  # a level ends where the children of the next level's first node begin
            offsets.append(first_child[offsets[-1]])
        return _frozen(np.array(offsets))

    @property
    def level_widths(self) -> IntArray:
        """int32 [depth]: nodes in each level."""
        return np.diff(self.level_offsets).astype(np.int32)

    @cached_property
    def child_count(self) -> IntArray:
        """int32 [size]: children of each node."""
        return _frozen(np.bincount(self.parents[1:], minlength=self.size))

    @cached_property
    def first_child(self) -> IntArray:
        """int32 [size]: where each node's children begin; where they would, for a node that has none."""
        return _frozen(1 + np.cumsum(self.child_count) - self.child_count)

    @cached_property
    def ranks(self) -> IntArray:
        """int32 [size]: 1-based place among the siblings, in the order drawn; 0 for the root."""
        ranks = np.arange(self.size) - self.first_child[self.parents] + 1
        ranks[0] = 0
        return _frozen(ranks)

    @cached_property
    def classes(self) -> IntArray:
        """int32 [size]: 0 for a node on the spine (the root, its first child, that one's first child, and so on), 1 for one off it."""
        classes, node = np.ones(self.size, int), 0
        classes[0] = 0
        while self.child_count[node]:
            node = int(self.first_child[node])
            classes[node] = 0
        return _frozen(classes)

    @cached_property
    def attention_mask(self) -> NDArray[np.bool_]:
        """bool [size, size]: may node i attend to node j, that is, is j i itself or an ancestor. Lower-triangular."""
        mask = np.eye(self.size, dtype=bool)
        for start, stop in itertools.pairwise(self.level_offsets[1:].tolist()):
            mask[start:stop] |= mask[self.parents[start:stop]]
        mask.flags.writeable = False
        return mask

    def expanded(self, level: int) -> IntArray:
        """The nodes of `level` that have children: the ones a draft pass runs."""
        start, stop = self.level_offsets[level], self.level_offsets[level + 1]
        return (np.flatnonzero(self.child_count[start:stop]) + start).astype(np.int32)

    @property
    def parents_by_level(self) -> list[int]:
        """How many nodes have children on each level but the last, the root's level first."""
        return [len(self.expanded(level)) for level in range(self.depth - 1)]

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTree) and np.array_equal(self.parents, other.parents)

    def __hash__(self) -> int:
        return hash(self.parents.tobytes())

    def __str__(self) -> str:
        return f"{self.size} nodes, depth {self.depth}, level widths {' '.join(map(str, self.level_widths))}"

    def __repr__(self) -> str:
        return f"TokenTree(size={self.size}, depth={self.depth}, level_widths={self.level_widths.tolist()})"


def _frozen(array: NDArray[Any]) -> IntArray:
    result = array.astype(np.int32)
    result.flags.writeable = False
    return result
