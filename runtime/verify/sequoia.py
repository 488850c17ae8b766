"""Sequoia (Chen et al., arXiv 2402.12374, Algorithm 1).

Children are drawn without replacement and accepted or rejected one after the other.
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
    looked_up: Tensor | None = None,
) -> Acceptance:
    """The acceptance by Sequoia's rule; `verify` documents the arguments.

    At every node:

        R, D = the target's probabilities, the draft's probabilities
        for each child s in draw order:
            accept s with probability min(1, R[s] / D[s]); if rejected:
            R = norm(max(R - D, 0));  D[s] = 0;  D = norm(D)
        draw the bonus token from R

    A first child that is looked up has D[s] = 1, and D = 0 for all other tokens; the D of the later
    children is the draft's without s.

    What happens at a node does not depend on how it was reached, so all nodes are computed side by
    side.
    """
    return sequential_acceptance(
        target_probs, draft_probs, drawn, index, d2t, looked_up, removes_rejected=True
    )
