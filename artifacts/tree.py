"""The token tree: the parent of every node, and everything that follows from the parents."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sequoia_plan.artifacts.errors import SequoiaPlanError
from sequoia_plan.artifacts.plan import NO_PLAN, Plan

IntArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A static token tree. Node 0 is the root: the last committed token.

    Nodes are numbered breadth-first, and siblings are adjacent, which means that parents never
    decrease. `from_parents` takes nodes in other orders.

    Args:
        parents: int32 [size], the parent of every node; parents[0] = -1.
        plan: what the tree was solved for and from. A file carries it, and equality ignores it. A
            mapping is read as by `Plan.from_dict`.
        looks_up: whether the tokens of the spine (the root's first child, that node's first child,
            ...) are those of the lookup chain (artifacts/lookup.py) and not the draft's.
        by_match: the trees that take this tree's place where the text repeats itself, by the
            shortest match in tokens that each is for: the one with the largest such number that
            the match of the text reaches.
        by_context: the trees, each with its own plan, that take this tree's place in long texts, by
            the tokens of text from which each is for.

    Raises:
        SequoiaPlanError: if `parents` is not such an array, or `plan` holds what a plan cannot.
    """

    parents: IntArray
    plan: Plan = NO_PLAN
    looks_up: bool = False
    by_match: Mapping[int, TokenTree] = field(default_factory=dict)
    by_context: Mapping[int, TokenTree] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the parents and copy them, and read the plan if it is a mapping."""
        parents = np.asarray(self.parents)
        _check_parents(parents, is_breadth_first=True)
        for name in ("by_match", "by_context"):
            object.__setattr__(self, name, dict(sorted(getattr(self, name).items())))
        object.__setattr__(self, "parents", _read_only_int32(parents))
        if not isinstance(self.plan, Plan):
            object.__setattr__(self, "plan", Plan.from_dict(self.plan, "plan"))

    @classmethod
    def from_parents(cls, parents: Iterable[int]) -> TokenTree:
        """Make a tree from nodes in any order in which a parent precedes its children.

        Nodes are renumbered breadth-first; siblings keep their order.

        Args:
            parents: the parent of each node; the first is -1, for the root.

        Raises:
            SequoiaPlanError: if the first parent is not -1, or a parent does not precede its child.
        """
        if not isinstance(parents, np.ndarray):
            parents = np.array([int(parent) for parent in parents], np.int64)
        _check_parents(parents)
        return cls(_renumber_breadth_first(parents))

    @classmethod
    def chain(cls, depth: int) -> TokenTree:
        """One child for each node: plain speculative decoding of depth - 1 tokens.

        `chain(1)` does not speculate.
        """
        return cls(np.arange(-1, depth - 1, dtype=np.int32))

    @classmethod
    def star(cls, children: int) -> TokenTree:
        """One level of `children` nodes below the root. Acceptance is measured with it."""
        return cls(np.array([-1] + [0] * children, np.int32))

    @property
    def size(self) -> int:
        """Number of nodes, including the root."""
        return int(self.parents.size)

    @property
    def depth(self) -> int:
        """Number of levels, including the root's."""
        return int(self.level_offsets.size) - 1

    @property
    def branching(self) -> int:
        """Largest number of children of a node."""
        return int(self.child_count.max())

    @cached_property
    def position_ids(self) -> IntArray:
        """int32 [size]: number of positions by which each node's token follows the root's."""
        return _read_only_int32(np.repeat(np.arange(self.depth), self.level_widths))

    @cached_property
    def level_offsets(self) -> IntArray:
        """int32 [depth + 1]: the first node of each level, and then the size.

        Level l is the nodes from level_offsets[l] up to, not including, level_offsets[l + 1].
        """
        first_child = self.first_child.tolist()
        offsets = [0, 1]
        while offsets[-1] < self.size:
            # A level ends where the children of the next level's first node begin.
            offsets.append(first_child[offsets[-1]])
        return _read_only_int32(np.array(offsets))

    @property
    def level_widths(self) -> IntArray:
        """int32 [depth]: number of nodes on each level."""
        return np.diff(self.level_offsets).astype(np.int32)

    @cached_property
    def child_count(self) -> IntArray:
        """int32 [size]: number of children of each node."""
        return _read_only_int32(np.bincount(self.parents[1:], minlength=self.size))

    @cached_property
    def first_child(self) -> IntArray:
        """int32 [size]: first child of each node; for a leaf, the number it would have."""
        return _read_only_int32(1 + np.cumsum(self.child_count) - self.child_count)

    @cached_property
    def ranks(self) -> IntArray:
        """int32 [size]: 1-based place among the siblings, in the order drawn; 0 for the root."""
        ranks = np.arange(self.size) - self.first_child[self.parents] + 1
        ranks[0] = 0
        return _read_only_int32(ranks)

    @cached_property
    def classes(self) -> IntArray:
        """int32 [size]: each node's class, by which acceptance is counted: off the spine 1, else 0.

        The spine is the root, its first child, the first child of that node, and so on.
        """
        classes = np.ones(self.size, int)
        spine_node = 0
        classes[spine_node] = 0
        while self.child_count[spine_node]:
            spine_node = int(self.first_child[spine_node])
            classes[spine_node] = 0
        return _read_only_int32(classes)

    @cached_property
    def attention_mask(self) -> NDArray[np.bool_]:
        """bool [size, size]: whether node i attends to node j: j is i or an ancestor of i.

        The mask is lower-triangular.
        """
        mask = np.eye(self.size, dtype=bool)
        # level by level, each node attends to what its parent attends to
        for start, stop in itertools.pairwise(self.level_offsets[1:].tolist()):
            mask[start:stop] |= mask[self.parents[start:stop]]
        mask.flags.writeable = False
        return mask

    @cached_property
    def num_drafted_levels(self) -> int:
        """How many levels, from the root's on, have a draft pass.

        It is every level but the last; if the spine is looked up, those down to the last level that
        has a node with a drafted child.
        """
        if not self.looks_up:
            return self.depth - 1
        # a node on the spine has one child that is looked up; all other children are drafted
        num_drafted_children = self.child_count - ((self.classes == 0) & (self.child_count > 0))
        parents = np.flatnonzero(num_drafted_children)
        return int(self.position_ids[parents[-1]]) + 1 if parents.size else 0

    def nodes_with_children(self, level: int) -> IntArray:
        """The nodes of a level that have children. The level's draft pass, if any, runs these."""
        start, stop = self.level_offsets[level], self.level_offsets[level + 1]
        return (np.flatnonzero(self.child_count[start:stop]) + start).astype(np.int32)

    @property
    def num_parents_by_level(self) -> list[int]:
        """Number of nodes with children on each level with a draft pass, from the root's on."""
        return [len(self.nodes_with_children(level)) for level in range(self.num_drafted_levels)]

    @property
    def portfolio(self) -> dict[int, TokenTree]:
        """The trees by the shortest match that each is for; 0 is this tree itself."""
        return {0: self, **self.by_match}

    @property
    def all_trees(self) -> list[TokenTree]:
        """The trees by match of this tree, and then of each tree by context."""
        trees = (self, *self.by_context.values())
        return [by_match for tree in trees for by_match in tree.portfolio.values()]

    def for_context(self, length: int) -> TokenTree:
        """The tree for a text of so many tokens; it has trees by match of its own."""
        return _last_reached({0: self, **self.by_context}, length)

    def for_match(self, match_length: int) -> TokenTree:
        """The tree for a text whose longest repeated suffix has so many tokens."""
        return _last_reached(self.portfolio, match_length)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TokenTree)
            and np.array_equal(self.parents, other.parents)
            and self.looks_up == other.looks_up
            and self.by_match == other.by_match
            and self.by_context == other.by_context
        )

    def __hash__(self) -> int:
        others = *self.by_match.items(), *self.by_context.items()
        return hash((self.parents.tobytes(), self.looks_up, others))

    def __str__(self) -> str:
        widths = " ".join(map(str, self.level_widths))
        return f"{self.size} nodes, depth {self.depth}, level widths {widths}"

    def __repr__(self) -> str:
        return f"TokenTree({self})"


def children_of(tree: TokenTree) -> list[list[int]]:
    """The children of every node, by its number."""
    siblings = np.split(np.arange(1, tree.size), tree.first_child[1:] - 1)
    return [children.tolist() for children in siblings]


def _last_reached(trees: Mapping[int, TokenTree], number: int) -> TokenTree:
    """The tree with the largest key that is at most `number`."""
    return trees[max(start for start in trees if start <= number)]


def _check_parents(parents: NDArray[Any], is_breadth_first: bool = False) -> None:
    """Refuse an array that is not the parents of a tree, or not in breadth-first order."""
    if parents.ndim != 1 or parents.size == 0 or parents.dtype.kind not in "iu":
        raise SequoiaPlanError(
            "token tree: parents must be a non-empty list of integers, "
            f"found {parents.dtype} of shape {parents.shape}"
        )
    if parents[0] != -1:
        raise SequoiaPlanError(f"token tree: parents[0] must be -1 (the root), found {parents[0]}")
    lowest = np.maximum(parents[:-1] if is_breadth_first else np.zeros_like(parents[1:]), 0)
    is_wrong = (parents[1:] < lowest) | (parents[1:] >= np.arange(1, parents.size))
    if is_wrong.any():
        node = int(is_wrong.argmax()) + 1
        raise SequoiaPlanError(
            f"token tree: parents[{node}] is {parents[node]}, expected a node from "
            f"{lowest[node - 1]} to {node - 1}"
            + is_breadth_first
            * " (breadth-first order, siblings adjacent)"
        )


def _renumber_breadth_first(parents: NDArray[Any]) -> NDArray[Any]:
    """The parents of the same tree with its nodes numbered level by level.

    `parents` int [size]; returns int [size].
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:].tolist(), 1):
        children[parent].append(node)
    order, renumbered = [0], [-1]
    for number, node in enumerate(order):  # the loop appends to the order
        order += children[node]
        renumbered += [number] * len(children[node])
    return np.array(renumbered)


def _read_only_int32(array: NDArray[Any]) -> IntArray:
    """A copy that cannot be written to."""
    copied = array.astype(np.int32)
    copied.flags.writeable = False
    return copied


NO_SPECULATION = TokenTree.chain(1)
"""The tree of plain decoding."""
