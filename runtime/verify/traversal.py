"""Traversal verification (Weng et al., arXiv 2505.12398).

Nodes are tested from the leaves up, so that the probability that a rejected leaf leaves raises the
acceptance of its later siblings and of its parent.
"""

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.accepted_path import Acceptance, DrawnTree, exclusive_cumprod
from sequoia_plan.runtime.verify.residual import Residual
from sequoia_plan.runtime.verify.tree_index import TreeIndex


def acceptance(tree: DrawnTree) -> Acceptance:
    """The acceptance by traversal verification.

        a(root) = 1
        at every node, from the root down, with a = a(node):
            R, D = the target's probabilities, the draft's probabilities
            for each child s in draw order:
                a(s) = min(1, a R[s] / D[s])
                r = max(a R - D, 0);  S = sum(r)
                R = r / S;  a = S / (S + 1 - a);  D[s] = 0;  D = norm(D)
            the node itself keeps the last a and R
        visit the nodes, children before their parent and in draw order:
            accept each with its own a; the first one accepted ends the path

    A first child that is looked up has D[s] = 1, and D = 0 for all other tokens; the D of the later
    children is the draft's without s.

    Every a depends on the drawn tokens and never on an earlier acceptance. So levels are computed
    one after the other, and the nodes of a level side by side.
    """
    index, order = tree.index, tree.index.by_level
    residual = residual_after_children(tree)
    accept_probs = subtree_probs(residual, index)  # a of every node when it is reached
    accept_probs[order.nodes] = residual.node_probs  # the last a of nodes with children
    ordered = accept_probs.double()[index.post_order]
    ordered_end_probs = ordered * exclusive_cumprod(1 - ordered)
    end_probs = torch.zeros_like(ordered).index_copy(0, index.post_order, ordered_end_probs)
    return Acceptance(end_probs, residual.residual_probs, order)


def residual_after_children(tree: DrawnTree) -> Residual:
    """The residuals of all inner nodes after all of their children are rejected."""
    order = tree.index.by_level
    residual = Residual.start(tree, order, removes_rejected=True)
    for group, group_cells in zip(order.groups, order.group_cells, strict=True):
        if group_cells is not None:  # each starts with the a that it has as a child
            residual.set_node_probs(group[0], residual.accept_probs.flatten()[group_cells])
        residual.reject_children(group)
    return residual


def subtree_probs(residual: Residual, index: TreeIndex) -> Tensor:
    """Probability that the path ends in each node's subtree, if in no subtree visited before.

    This is a(node) before the node's children are rejected, and it is an average over what is drawn
    below the node. It equals that probability because E[a(s)] = a - S for a child s: neither the
    child nor the node is then accepted with probability (1 - a + S) (1 - S / (S + 1 - a)) = 1 - a.
    Returns float [size].
    """
    root_prob = residual.accept_probs.new_ones(1)
    return torch.cat([root_prob, residual.accept_probs.flatten()[index.by_level.cells]])
