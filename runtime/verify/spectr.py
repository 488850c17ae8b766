"""SpecTr's k-sequential selection, K-SEQ (Sun et al., arXiv 2310.15141, Algorithm 2).

Children are drawn independently.
"""

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.accepted_path import (
    Acceptance,
    DrawnTree,
    end_probs_from_root,
    first_accepted_probs,
)

HALVINGS = 24
"""Halvings of the interval that contains rho. Fewer would be as exact: see `acceptance`."""


def acceptance(tree: DrawnTree) -> Acceptance:
    """The acceptance by K-SEQ.

    At every node, with k children:

        p, q = the target's probabilities, the draft's probabilities
        beta(rho) = sum over tokens of min(p / rho, q)
        rho = the solution of 1 - (1 - beta(rho))^k = rho beta(rho) in [1, k]
        for each child s in draw order: accept s with probability min(1, p[s] / (rho q[s]))
        draw the bonus token in proportion to p - min(p / rho, q) (1 - (1 - beta)^k) / beta

    The bonus distribution has no negative entry, and the output is exact, for every rho with
    1 - (1 - beta)^k <= rho beta. Bisection keeps the upper end, which satisfies this from the start
    (rho = k), so fewer halvings cost acceptance and never exactness. A token that is drawn twice
    has a second chance, and the bonus distribution accounts for that.
    """
    order = tree.index.together
    probs = tree.target_probs(order.nodes)
    q = tree.draft_probs.index_select(0, order.draft_rows)
    children = tree.drawn[order.draft_rows]
    p = tree.covered(probs)
    total = probs.sum(-1, keepdim=True)
    q = q * (total / q.sum(-1, keepdim=True))
    k = tree.index.child_count[order.nodes][:, None].to(p.dtype)
    low, high = torch.ones_like(k), k
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        _, gain = _overlap(p, q, middle, total, k)
        is_exact = gain <= middle
        low = torch.where(is_exact, low, middle)
        high = torch.where(is_exact, middle, high)
    overlap, gain = _overlap(p, q, high, total, k)
    q_at_children = q.gather(1, children)
    ratio = (p.gather(1, children) / (high * q_at_children)).clamp(max=1)
    accept_probs = torch.where(q_at_children > 0, ratio, 0.0).where(order.has_child, 0.0)
    child_probs = first_accepted_probs(accept_probs)

    def residual_probs(rows: Tensor) -> Tensor:
        """The bonus token's distribution for rows of `order` (int64 [k])."""
        return (p[rows] - overlap[rows] * gain[rows]).clamp_(min=0)

    return Acceptance(end_probs_from_root(child_probs, tree.index), residual_probs, order)


def _overlap(p: Tensor, q: Tensor, rho: Tensor, total: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """min(p / rho, q), which one test accepts, and how much more often k tests accept than one."""
    overlap = torch.minimum(p / rho, q)
    beta = (overlap.sum(-1, keepdim=True) / total).clamp(torch.finfo(p.dtype).tiny, 1)
    return overlap, -torch.expm1(k * torch.log1p(-beta)) / beta
