"""SpecInfer's multi-step speculative sampling (Miao et al., arXiv 2305.09781): Sequoia's rule on independent draws."""

from __future__ import annotations

from torch import Tensor

from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.residual import Residual
from sequoia_plan.runtime.verify.verdict import Laws, Verdict, one_by_one, top_down


def judge(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None = None) -> Verdict:
    """For each child s in draw order accept with min(1, R[s] / D[s]), else R <- norm(max(R - D, 0)); D stays.

    A token drawn a second time was rejected before, so R is 0 there: a duplicate child is never accepted.
    """
    rows = index.together
    left = Residual.start(target, draft, drawn, rows, covered)
    accept = draft.new_zeros(drawn.shape)
    for rank, having in enumerate(rows.groups[0]):
        accept[having, rank] = left.ratio(having, rank)[:, 0].clamp(max=1)
        left.reject(having)
    return Verdict(top_down(one_by_one(accept), index), left.r, rows)
