"""Sequoia (Chen et al., arXiv 2402.12374, Algorithm 1): children drawn without replacement, rejected one after the other."""

from __future__ import annotations

from torch import Tensor

from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.residual import in_turn
from sequoia_plan.runtime.verify.verdict import Laws, Verdict


def judge(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None = None) -> Verdict:
    """At every node R = target's law, D = draft's; for each child s in draw order accept with min(1, R[s] / D[s]), else
    R <- norm(max(R - D, 0)), D[s] <- 0, D <- norm(D). The bonus token is drawn from what is left of R.

    What happens at a node does not depend on how it was reached, so all nodes are judged side by side.
    """
    return in_turn(target, draft, drawn, index, covered, removed=True)
