"""Traversal verification (Weng et al., arXiv 2505.12398): bottom-up, so that mass freed by a rejected leaf raises the acceptance of later
siblings and of its parent."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.residual import Residual
from sequoia_plan.runtime.verify.verdict import Laws, Verdict, before


def judge(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None = None) -> Verdict:
    """a(root) = 1. At a node with acceptance a, R = target's law and D = draft's, for each child s in draw order
    a(s) = min(1, a R[s] / D[s]), r = max(a R - D, 0), S = sum r, R <- r / S, a <- S / (S + 1 - a), D[s] <- 0, D <- norm(D).
    What is left in (a, R) is the node's own. Nodes are visited children first, in draw order, and each is accepted with
    its own a; the first one accepted ends the path.

    Every a depends on the tokens drawn and never on a decision: levels are judged one after the other, the nodes of a level
    side by side.
    """
    order = index.by_level
    residual = judged(target, draft, drawn, index, covered)
    accept = of_subtrees(residual, index)
    accept[order.nodes] = residual.state[2]  # of the node itself
    ordered = accept.double()[index.post_order]
    ends = torch.zeros_like(ordered).index_copy(0, index.post_order, ordered * before(1 - ordered))
    return Verdict(ends, residual.left, order)


def judged(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None = None) -> Residual:
    """What is left of every node once its children were judged."""
    order = index.by_level
    residual = Residual.start(target, draft, drawn, index, order, covered)
    for group, above in zip(order.groups, order.above, strict=True):
        if above is not None:
            residual.begin(group[0], residual.take.flatten()[above])
        residual.judge(group)
    return residual


def of_subtrees(residual: Residual, index: TreeIndex) -> Tensor:
    """float [size]: a of each node before its children were judged. That is the probability that its subtree holds the end of the path once
    those visited before do not, on average over what is drawn below it: as E[a(s)] = a - S for a child s, the probability that neither the
    child nor the node is accepted is (1 - a + S) (1 - S / (S + 1 - a)) = 1 - a."""
    return torch.cat([residual.take.new_ones(1), residual.take.flatten()[index.by_level.turn]])
