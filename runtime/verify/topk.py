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
    rows = index.together
    laws, picks = target(rows.nodes), drawn[rows.drawn]
    p = laws.clone() if covered is None else laws[:, covered]
    exists = torch.arange(picks.shape[1], device=picks.device) < index.child_count[rows.nodes][:, None]
    take = torch.where(exists, p.gather(1, picks), 0.0) / laws.sum(-1, keepdim=True)
    for rank, having in enumerate(rows.groups[0]):
        p[having] = p[having].scatter(1, picks[having, rank : rank + 1], 0.0)
    return Verdict(top_down(take, index), p, rows)
