"""SpecInfer's multi-step speculative sampling (Miao et al., arXiv 2305.09781): Sequoia's rule on independent draws."""

from __future__ import annotations

from torch import Tensor

from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.residual import in_turn
from sequoia_plan.runtime.verify.verdict import Laws, Verdict


def judge(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None = None) -> Verdict:
    """For each child s in draw order accept with min(1, R[s] / D[s]), else R <- norm(max(R - D, 0)); D stays.

    A token drawn a second time was rejected before, so R is 0 there: a duplicate child is never accepted.
    """
    return in_turn(target, draft, drawn, index, covered, removed=False)
