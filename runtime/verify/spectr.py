"""SpecTr's k-sequential selection, K-SEQ (Sun et al., arXiv 2310.15141, Algorithm 2), on independent draws."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.verdict import Laws, Verdict, one_by_one, top_down

HALVINGS = 24
"""Of the interval that rho is searched in. It stays exact however early the search ends: see `judge`."""


def judge(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None = None) -> Verdict:
    """With p the target's law, q the draft's and k children: beta(rho) = sum min(p / rho, q), rho solves
    1 - (1 - beta)^k = rho beta on [1, k]; each child x is accepted with min(1, p / (rho q)), the bonus token is drawn in
    proportion to p - min(p / rho, q) (1 - (1 - beta)^k) / beta.

    That is a law, and the output exact, for every rho with 1 - (1 - beta)^k <= rho beta. Halving keeps the upper end, which
    has that property from the start (rho = k), so precision costs acceptance and never exactness. A token drawn twice has
    its second chance, as the bonus law reckons with.
    """
    order = index.together
    laws, q, picks = target(order.nodes), draft.index_select(0, order.drawn), drawn[order.drawn]
    p = laws if covered is None else laws.index_select(1, covered)
    total = laws.sum(-1, keepdim=True)
    q = q * (total / q.sum(-1, keepdim=True))
    k = index.child_count[order.nodes][:, None].to(p.dtype)
    low, high = torch.ones_like(k), k
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        _, gain = _overlap(p, q, middle, total, k)
        enough = gain <= middle
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    taken, gain = _overlap(p, q, high, total, k)
    d = q.gather(1, picks)
    accept = torch.where(d > 0, (p.gather(1, picks) / (high * d)).clamp(max=1), 0.0)
    accept = accept.where(order.exists, 0.0)
    return Verdict(top_down(one_by_one(accept), index), lambda places: (p[places] - taken[places] * gain[places]).clamp_(min=0), order)


def _overlap(p: Tensor, q: Tensor, rho: Tensor, total: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """min(p / rho, q), and (1 - (1 - beta)^k) / beta: how much more often k children hit than one."""
    taken = torch.minimum(p / rho, q)
    beta = (taken.sum(-1, keepdim=True) / total).clamp(torch.finfo(p.dtype).tiny, 1)
    return taken, -torch.expm1(k * torch.log1p(-beta)) / beta
