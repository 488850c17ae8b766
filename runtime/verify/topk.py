"""Naive sampling: a token drawn from the target decides which of the draft's top k is accepted."""

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.accepted_path import Acceptance, DrawnTree, end_probs_from_root


def acceptance(tree: DrawnTree) -> Acceptance:
    """The acceptance by the naive rule.

    At every node, a token is drawn from the target's probabilities p, and the walk goes on to the
    child that has it: child s is accepted with probability p[s]. That is exact however the children
    were chosen, if siblings differ; the draft's probabilities are not used.
    """
    order = tree.index.together  # of the inner nodes
    probs = tree.target_probs(order.nodes)  # their sums may not be 1
    children = tree.drawn[order.draft_rows]
    p = tree.covered(probs)  # of the tokens that the draft has
    child_probs = p.gather(1, children).where(order.has_child, 0.0) / probs.sum(-1, keepdim=True)

    def residual_probs(rows: Tensor) -> Tensor:
        """The target's probabilities without the children's, for rows of `order` (int64 [k])."""
        # counts are added, because the padding of `children` may repeat a child's token
        counts = torch.zeros_like(p[rows])
        counts.scatter_add_(1, children[rows], order.has_child[rows].to(p.dtype))
        return p[rows].masked_fill(counts > 0, 0.0)

    return Acceptance(end_probs_from_root(child_probs, tree.index), residual_probs, order)
