"""Naive sampling: the children are the draft's top k, and the target's own token decides which of them it is."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.verdict import Laws, Verdict, top_down


def judge(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None = None) -> Verdict:
    """Draw y from the target's law and descend while a child holds it: child s is accepted with probability p[s].

    Exact however the children were chosen, if siblings differ; `draft` has no part in it.
    """
    order = index.together
    laws, picks = target(order.nodes), drawn[order.drawn]
    p = laws if covered is None else laws.index_select(1, covered)
    take = p.gather(1, picks).where(order.exists, 0.0) / laws.sum(-1, keepdim=True)

    def left(places: Tensor) -> Tensor:
        drawn_there = torch.zeros_like(p[places]).scatter_add_(1, picks[places], order.exists[places].to(p.dtype))  # adds: ranks that do not exist count 0
        return p[places].masked_fill(drawn_there > 0, 0.0)

    return Verdict(top_down(take, index), left, order)
