"""TokenTree: its arrays follow from the parents, and only trees are accepted."""

import numpy as np
import pytest
from hypothesis import given
from refusals import refusal
from strategies import trees

from sequoia_plan.artifacts import LANGUAGE_MODEL, TokenTree


def path(tree, node):
    """The node and its ancestors, by walking."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = int(tree.parents[node])
    return nodes


@given(trees())
def test_mask_is_ancestor_closure(tree):
    for node in range(tree.size):
        assert np.flatnonzero(tree.attention_mask[node]).tolist() == sorted(path(tree, node))
    assert not np.triu(tree.attention_mask, 1).any()


@given(trees())
def test_derived_arrays_agree_with_walking(tree):
    assert tree.position_ids.tolist() == [len(path(tree, node)) - 1 for node in range(tree.size)]
    assert tree.depth == max(tree.position_ids) + 1
    assert sum(tree.level_widths) == tree.size
    for level in range(tree.depth):
        nodes = range(tree.level_offsets[level], tree.level_offsets[level + 1])
        assert all(tree.position_ids[node] == level for node in nodes)
        assert tree.nodes_with_children(level).tolist() == [
            node for node in nodes if node in tree.parents
        ]
    for node in range(tree.size):
        children = np.flatnonzero(tree.parents == node).tolist()
        first = tree.first_child[node]
        assert list(range(first, first + tree.child_count[node])) == children
        assert [tree.ranks[child] for child in children] == list(range(1, len(children) + 1))
    assert tree.branching == max(tree.child_count)


@given(trees())
def test_widths_of_draft_passes(tree):
    widths = LANGUAGE_MODEL.pass_widths(tree.num_parents_by_level)
    assert len(widths) == tree.depth - 1
    assert sum(widths[1:]) + (tree.depth > 1) == np.count_nonzero(tree.child_count)


def test_from_parents_renumbers_and_keeps_sibling_order():
    tree = TokenTree.from_parents([-1, 0, 1, 1, 0, 4])  # depth first
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2]


def test_equality_is_of_shape():
    assert TokenTree.chain(3) == TokenTree(np.array([-1, 0, 1]), {"solver": "dp"})
    assert len({TokenTree.chain(3), TokenTree.chain(3), TokenTree.star(2)}) == 2


def test_immutable():
    with pytest.raises(ValueError, match="read-only"):
        TokenTree.chain(3).parents[1] = 0


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "non-empty list of integers"),
        ([0, 0], r"parents\[0\] must be -1"),
        ([-1, 1], r"parents\[1\] is 1, expected a node from 0 to 0"),
        ([-1, 0, 1, 0], r"parents\[3\] is 0, expected a node from 1 to 2"),
        ([-1, -1], r"parents\[1\] is -1, expected a node from 0 to 0"),
        ([-1.0, 0.0], r"list of integers, found float64 of shape \(2,\)"),
        ([[-1, 0]], r"list of integers, found int64 of shape \(1, 2\)"),
        (
            [-1, 2**40],
            r"parents\[1\] is 1099511627776, expected a node from 0 to 0",
        ),  # and not 0, what is left of it in 32 bits
    ],
)
def test_refuses(parents, message):
    with refusal(message):
        TokenTree(np.array(parents))
