"""SpecInfer's multi-step speculative sampling (Miao et al., arXiv 2305.09781).

It is Sequoia's rule on independent draws.
"""

from __future__ import annotations

from torch import Tensor

from sequoia_plan.runtime.verify.acceptance import Acceptance, TargetProbs
from sequoia_plan.runtime.verify.residual import sequential_acceptance
from sequoia_plan.runtime.verify.tree_index import TreeIndex


def acceptance(
    target_probs: TargetProbs,
    draft_probs: Tensor,
    drawn: Tensor,
    index: TreeIndex,
    d2t: Tensor | None = None,
) -> Acceptance:
    """The acceptance by SpecInfer's rule; `verify` documents the arguments.

    At every node:

        R, D = the target's probabilities, the draft's probabilities
        for each child s in draw order:
            accept s with probability min(1, R[s] / D[s]); if rejected:
            R = norm(max(R - D, 0))
        draw the bonus token from R

    If a token is drawn a second time, it was rejected before, so R is 0 there: a duplicate child
    is never accepted.
    """
    return sequential_acceptance(
        target_probs, draft_probs, drawn, index, d2t, removes_rejected=False
    )
