"""The recursion of the optimum, guided by concave envelopes ("hull"): exact for any acceptance.

It is fast wherever the optimum is nearly concave in size, as it is for measured vectors.

    best[l][c][n] = most expected tokens of a subtree of exactly n nodes
                    whose root lies on level l and is of class c
                  = max over b of T[l][c][b][n]
    T[l][c][b][n] = max over m of T[l][c][b-1][n-m] + p[l][c][b] * best[l+1][c'][m]
    T[l][c][0][1] = 1                            (Sequoia, arXiv 2402.12374, App. F.1)

c' is the class of the child of rank b: on the spine (class 0) if b is 1 and c is on the spine, else
off the spine. Rows without classes have a single class. The first child is alone, so only the
T[l][c][b] of the other children are convolutions, of two almost concave sequences (convolution.py).

Only one level's T is stored at a time. The splits are found again on the way down, where at most
the first node of a level is on the spine.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
from numpy.typing import NDArray

from sequoia_plan.planner.solving.convolution import (
    convolve,
    envelope,
    split_by_remainder,
    stair_width,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def frontier(rows: Floats, size: int) -> list[Floats]:
    """Compute the expected tokens of the best tree of every size and depth.

        for each depth:
            for level = depth - 1 ... 0:
                T[0] = [1]; T[b] is the most expected tokens of a subtree whose root has b children
                T[b] = (max,+) convolution of T[b-1] and p[level][b] * best[level+1], b = 1, 2, ...
                best[level] = max over b of T[b]
            the values of this depth are best[0]

    Each is indexed by the nodes of a subtree whose root lies on the level; classes are left out. A
    depth limit cuts the rows off at the end. So levels that share the last row share one
    recursion, and only the rows above it need a recursion for each depth.

    Args:
        rows: float64 [levels, classes, branching], the probability that a node's child of each
            rank is accepted if the node is, by the node's level and class. Class 0 is the spine
            (the root, its first child, that node's first child, ...), class 1 all other nodes; a
            single class stands for all nodes.
        size: the most nodes of a tree.

    Returns:
        For each depth limit 1, 2, ..., levels + 1: float64, the expected tokens of the best tree of
        exactly 1, 2, ... nodes, up to `size` or the largest tree that the limit allows.
    """
    levels = len(rows)
    first_repeated = levels  # all rows are the same from this level on
    while first_repeated > 0 and np.array_equal(rows[first_repeated - 1], rows[-1]):
        first_repeated -= 1
    # repeated_best[r]: best of r + 1 levels that all have the last row
    repeated_best = _best_by_level(rows[first_repeated:], size)[::-1]
    values_by_depth, table = [], _empty_table(rows, size)
    for num_levels in range(levels + 1):
        best = repeated_best[max(num_levels - first_repeated, 0)]
        for level in range(min(num_levels, first_repeated) - 1, -1, -1):
            best = _best_of_level(rows[level], best, size, table)
        values_by_depth.append(best[0])
    return values_by_depth


def parents(rows: Floats, size: int) -> Ints:
    """Find the best tree of exactly `size` nodes.

        compute best[level] with each level replaced by its concave envelope: upper bounds
        build the tree that splits sizes as these envelopes do
        return this tree if it attains the bound, as is usual with measured vectors
        else compute best[level] itself and split sizes as it does

    best[level] is the most expected tokens of a subtree whose root lies on the level, by its nodes.

    Args:
        rows: float64 [levels, classes, branching], the probability that a node's child of each
            rank is accepted if the node is, by the node's level and class. Class 0 is the spine
            (the root, its first child, that node's first child, ...), class 1 all other nodes; a
            single class stands for all nodes.
        size: number of nodes, the root included.

    Returns:
        int32 [size], the parent of each node; nodes are numbered breadth-first.
    """
    tree_parents, is_optimal = _tree_by_envelopes(rows, size)
    return tree_parents if is_optimal else _tree_by_recursion(rows, size)


def optimal_tokens(rows: Floats, size: int) -> float:
    """Compute the expected tokens of the best tree of exactly `size` nodes, which must exist."""
    spine_root_tokens = _best_by_level(rows, size)[0][0]  # level 0, class 0, by nodes - 1
    return float(spine_root_tokens[size - 1])


def upper_bounds(rows: Floats, size: int) -> Floats:
    """Bound the expected tokens of the trees of 1, 2, ... nodes, up to `size`.

    The recursion of the optimum is run on concave envelopes (the least concave sequences above the
    optima), for which a (max,+) convolution is a merge of slopes.
    """
    return _bounds_by_level(rows, size)[0][0]


def _tree_by_envelopes(rows: Floats, size: int) -> tuple[Ints, bool]:
    """Build the tree that splits sizes as the recursion on envelopes does, level by level.

    `rows` float64 [levels, classes, branching].
    """
    bounds = _bounds_by_level(rows, size)
    levels = [np.array([-1], np.int32)]  # the parents of each level's nodes
    # For the nodes of one level: the size of the subtree, and the probability to be accepted.
    sizes, values = np.array([size], np.int32), np.ones(1)
    level_start, has_spine = 0, True  # the level's first node, and whether it is on the spine
    tokens = 1.0
    for level in range(len(rows)):
        if sizes.max() == 1:
            break
        below = bounds[level + 1]
        children = [
            _split_by_envelopes(
                rows[level, node_class],
                below[node_class],
                below[-1],
                sizes[nodes],
                values[nodes],
                level_start + nodes.start,
            )
            for node_class, nodes in _nodes_by_class(len(sizes), rows.shape[1], has_spine)
        ]
        has_spine &= sizes[0] > 1
        level_start += len(sizes)
        level_parents, sizes, values = map(np.concatenate, zip(*children, strict=True))
        levels.append(level_parents)
        tokens += values.sum()
    return np.concatenate(levels), tokens >= bounds[0][0][size - 1] * (1 - 1e-12)


def _tree_by_recursion(rows: Floats, size: int) -> Ints:
    """Build the best tree by the exact recursion.

    T is computed again for each level on the way down, so no [levels, ranks, size] table is stored.
    T is the most expected tokens of a subtree by its root's children and its nodes. `rows` float64
    [levels, classes, branching]; returns int32 [size].
    """
    # Level 0 is not needed: only best of the level below is looked up.
    best_by_level = [np.empty((0, 0)), *_best_by_level(rows[1:], size)]
    levels = [np.array([-1], np.int32)]  # the parents of each level's nodes
    sizes = np.array([size], np.int32)  # of the subtrees of one level
    level_start, has_spine = 0, True  # the level's first node, and whether it is on the spine
    for level in range(len(rows)):
        max_size = int(sizes.max())
        if max_size == 1:
            break
        below = best_by_level[level + 1]
        table = _empty_table(rows, max_size)
        best = _best_of_level(rows[level], below, max_size, table)
        children = [
            _split(
                rows[level, node_class],
                below[-1],
                best[node_class],
                table[node_class],
                sizes[nodes],
                level_start + nodes.start,
            )
            for node_class, nodes in _nodes_by_class(len(sizes), rows.shape[1], has_spine)
        ]
        has_spine &= sizes[0] > 1
        level_start += len(sizes)
        level_parents, sizes = map(np.concatenate, zip(*children, strict=True))
        levels.append(level_parents)
    return np.concatenate(levels)


def _nodes_by_class(count: int, classes: int, has_spine: bool) -> list[tuple[int, slice]]:
    """Return each class with its nodes among the `count` nodes of a level.

    Class 0 is the spine (the root, its first child, that node's first child, ...), which has at
    most the first node of a level. Class 1 is all other nodes.
    """
    if not has_spine or classes == 1:
        return [(classes - 1, slice(0, count))]
    spine, off_spine = (0, slice(0, 1)), (1, slice(1, count))
    return [spine, off_spine] if count > 1 else [spine]


def _bounds_by_level(rows: Floats, size: int) -> list[Floats]:
    """Bound the expected tokens of the subtrees of each level.

    Returns float64 [classes, sizes].
    """
    return _from_last_level(rows, lambda row, below: _bounds_of_level(row, below, size))


def _best_by_level(rows: Floats, size: int) -> list[Floats]:
    """Compute best, the most expected tokens of the subtrees of each level.

    Returns float64 [classes, sizes].
    """
    table = _empty_table(rows, size)
    return _from_last_level(rows, lambda row, below: _best_of_level(row, below, size, table))


def _from_last_level(
    rows: Floats, values_of_level: Callable[[Floats, Floats], Floats]
) -> list[Floats]:
    """Compute expected tokens (or bounds on them) of the subtrees of all levels, last level first.

    If two adjacent levels have the same rows and the same values, all levels above them with the
    same rows have these values as well, which are then not computed again. `rows` float64 [levels,
    classes, branching]; returns float64 [classes, sizes].
    """
    # The values of the last level first. Its nodes have no children: a subtree of one node.
    values = [np.ones((rows.shape[1], 1))]
    for level in range(len(rows) - 1, -1, -1):
        is_settled = (
            len(values) > 2
            and np.array_equal(values[-1], values[-2])
            and np.array_equal(rows[level], rows[level + 1])
        )
        values.append(values[-1] if is_settled else values_of_level(rows[level], values[-1]))
    return values[::-1]


def _best_of_level(level_rows: Floats, below: Floats, size: int, table: Floats) -> Floats:
    """Compute best, the most expected tokens of a level's subtrees, from best of the level below.

    `level_rows` float64 [classes, ranks]; `below` float64 [classes, sizes]; `table` float64
    [classes, ranks + 1, size]; returns float64 [classes, sizes].
    """
    off_spine = below[-1]  # of every child but the first child of a node on the spine
    whole = split_by_remainder(off_spine, 1)
    parts = split_by_remainder(off_spine, stair_width(off_spine))
    return np.stack(
        [
            _fill_table(row, first_child, off_spine, whole, parts, size, class_table)
            for row, first_child, class_table in zip(level_rows, below, table, strict=True)
        ]
    )


def _empty_table(rows: Floats, size: int) -> Floats:
    """Allocate T of one level, float64 [classes, ranks + 1, size].

    T is the most expected tokens of a subtree, by its root's class and children, and its nodes.
    """
    max_children = min(rows.shape[2], max(size - 1, 0))
    return np.empty((rows.shape[1], max_children + 1, size))


@numba.njit(cache=True)
def _fill_table(row, first_child, below, below_whole, below_parts, size, table):
    """Compute the most expected tokens of the subtrees of one level and class.

    `row` float64 [ranks]; `table` float64 [ranks + 1, size].
    """
    num_sizes = 1
    for _ in range(len(row)):
        num_sizes = min(size, num_sizes + len(below))
    best = np.zeros(num_sizes)
    best[0] = table[0, 0] = 1.0
    num_entries = 1  # of table[rank - 1]
    for rank in range(1, min(len(row), size - 1) + 1):
        next_entries = min(size - rank, num_entries + len(below) - 1)
        if rank == 1:
            for k in range(next_entries):
                table[1, k] = 1.0 + row[0] * first_child[k]
        else:
            convolve(
                table[rank - 1][:num_entries],
                below,
                below_whole,
                below_parts,
                row[rank - 1],
                table[rank][:next_entries],
            )
        for k in range(next_entries):
            best[rank + k] = max(best[rank + k], table[rank, k])
        num_entries = next_entries
    return best


@numba.njit(cache=True)
def _split(row, below, best, table, sizes, start):
    """Split the subtrees of one level and class into the subtrees of their children, exactly.

    `row` float64 [ranks].
    """
    # Subtrees of equal size split alike: shares[first_share[n] :][: num_children[n]] are the
    # nodes of the children's subtrees below a subtree of n nodes.
    first_share = np.full(len(best) + 1, -1, np.int64)
    num_children = np.zeros(len(best) + 1, np.int64)
    shares = np.empty(sizes.sum(), np.int32)
    num_shares = total = 0
    for n in sizes:
        if first_share[n] < 0:
            # The fewest children with which the root's subtree attains best.
            children = 0
            for rank in range(1, min(len(row), n - 1) + 1):
                k = n - 1 - rank
                if k < len(below) * rank - rank + 1 and table[rank, k] >= best[n - 1]:
                    children = rank
                    break
            first_share[n], num_children[n] = num_shares, children
            num_shares += children
            k = n - 1 - children  # nodes for the children's subtrees beyond one for each child
            for rank in range(children, 0, -1):
                num_entries = 1 + (rank - 1) * (len(below) - 1)  # of table[rank - 1]
                max_value, best_share = -1.0, 0
                for j in range(max(0, k - num_entries + 1), min(k, len(below) - 1) + 1):
                    value = table[rank - 1, k - j] + row[rank - 1] * below[j]
                    if value > max_value:
                        max_value, best_share = value, j
                shares[first_share[n] + rank - 1] = best_share + 1
                k -= best_share
        total += num_children[n]
    parents = np.empty(total, np.int32)
    child_sizes = np.empty(total, np.int32)
    position = 0
    for node in range(len(sizes)):
        n = sizes[node]
        for rank in range(num_children[n]):
            parents[position] = start + node
            child_sizes[position] = shares[first_share[n] + rank]
            position += 1
    return parents, child_sizes


@numba.njit(cache=True)
def _merge_slopes(a, b, p, merged, shares):
    """Write max over i + j = k of a[i] + p * b[j] to merged[k], for concave a and b.

    Each k takes one more step along a or b, whichever rises more. `shares` [k].
    """
    i = j = 0
    for k in range(len(merged)):
        if k > 0:
            if j + 1 == len(b) or (i + 1 < len(a) and a[i + 1] - a[i] >= p * (b[j + 1] - b[j])):
                i += 1
            else:
                j += 1
        merged[k], shares[k] = a[i] + p * b[j], j


@numba.njit(cache=True)
def _merge_children(row, first_child, below, size):
    """Compute expected tokens of a level's subtrees by children, from concave bounds for these.

    `row` float64 [ranks].
    """
    max_children = min(len(row), size - 1)
    table = np.empty((max_children + 1, size))
    shares = np.zeros((max_children + 1, size), np.int32)
    num_entries = np.ones(max_children + 1, np.int64)
    table[0, 0] = 1.0
    for b in range(1, max_children + 1):
        num_entries[b] = min(size - b, num_entries[b - 1] + len(below) - 1)
        _merge_slopes(
            table[b - 1][: num_entries[b - 1]],
            first_child if b == 1 else below,
            row[b - 1],
            table[b][: num_entries[b]],
            shares[b][: num_entries[b]],
        )
    return table, shares, num_entries


@numba.njit(cache=True)
def _bounds_of_level(level_rows, below, size):
    """Compute concave bounds on the expected tokens of a level's subtrees of 1, 2, ... nodes.

    `level_rows` float64 [classes, ranks]; `below` float64 [classes, sizes]; returns float64
    [classes, sizes].
    """
    num_sizes = 1
    for b in range(1, min(level_rows.shape[1], size - 1) + 1):
        num_sizes = min(size, max(num_sizes, b + 1 + b * (below.shape[1] - 1)))
    bounds = np.empty((len(level_rows), num_sizes))
    for node_class in range(len(level_rows)):
        table, _, num_entries = _merge_children(
            level_rows[node_class], below[node_class], below[-1], size
        )
        best = np.zeros(num_sizes)
        best[0] = 1.0
        for b in range(1, len(num_entries)):
            for k in range(num_entries[b]):
                best[b + k] = max(best[b + k], table[b, k])
        envelope(best, bounds[node_class])
    return bounds


@numba.njit(cache=True)
def _split_by_envelopes(row, first_child, below, sizes, values, start):
    """Split the subtrees of one level and class as the recursion on envelopes does.

    `row` float64 [ranks].
    """
    max_size = sizes.max()
    table, shares, num_entries = _merge_children(row, first_child, below, max_size)
    num_children = np.zeros(max_size + 1, np.int64)  # of a subtree of n nodes
    total = 0
    for n in sizes:
        if num_children[n] == 0 and n > 1:
            max_value = -1.0
            for b in range(1, min(len(row), n - 1) + 1):
                if n - 1 - b < num_entries[b] and table[b, n - 1 - b] > max_value:
                    max_value, num_children[n] = table[b, n - 1 - b], b
        total += num_children[n]
    parents, child_sizes = np.empty(total, np.int32), np.empty(total, np.int32)
    child_values = np.empty(total)
    position = 0
    for node in range(len(sizes)):
        children = num_children[sizes[node]]
        k = sizes[node] - 1 - children  # nodes for the subtrees beyond one for each child
        for b in range(children, 0, -1):
            parents[position + b - 1] = start + node
            child_sizes[position + b - 1] = 1 + shares[b, k]
            child_values[position + b - 1] = values[node] * row[b - 1]
            k -= shares[b, k]
        position += children
    return parents, child_sizes, child_values
