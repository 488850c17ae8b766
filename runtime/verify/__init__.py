"""Verifiers: they choose which drafted tokens to accept, so that the output follows the target.

Every verifier is exact: whatever the draft proposes, the output has the target's distribution. A
verifier is a function of probabilities and drawn tokens. It returns the probability that the
accepted path ends at each node, and the distribution of the bonus token there (`Acceptance`). Two
uniform numbers then sample the path and the bonus token (`sample_path`). All of it is a fixed
sequence of tensor operations on fixed shapes, and the host decides nothing.
"""

from collections.abc import Callable

from torch import Tensor

from sequoia_plan.runtime.verify import spectr, topk, traversal
from sequoia_plan.runtime.verify.accepted_path import (
    Acceptance,
    AcceptedPath,
    TargetProbs,
    sample_path,
)
from sequoia_plan.runtime.verify.greedy import greedy
from sequoia_plan.runtime.verify.residual import sequoia, specinfer, without_looked_up
from sequoia_plan.runtime.verify.tree_index import TreeIndex

__all__ = [
    "LOOKUP_VERIFIERS",
    "VERIFIERS",
    "Acceptance",
    "AcceptedPath",
    "TargetProbs",
    "TreeIndex",
    "Verifier",
    "greedy",
    "sample_path",
    "verify",
]

Verifier = Callable[..., Acceptance]
"""An acceptance rule: a function of probabilities and drawn tokens."""

LOOKUP_VERIFIERS = ("sequoia", "traversal")
"""Verifiers that are exact for trees whose spine is looked up."""


VERIFIERS: dict[str, Verifier] = {
    "sequoia": sequoia,
    "traversal": traversal.acceptance,
    "specinfer": specinfer,
    "spectr": spectr.acceptance,
    "topk": topk.acceptance,
}
"""`sampling.drawing.DRAWING_OF_VERIFIER` has the way of drawing that each is exact for."""


def verify(
    verifier: Verifier,
    target_probs: TargetProbs,
    draft_probs: Tensor,
    drawn: Tensor,
    index: TreeIndex,
    uniforms: Tensor,
    d2t: Tensor | None = None,
    looked_up: Tensor | None = None,
) -> AcceptedPath:
    """Sample the accepted path and the bonus token.

    A child that is looked up counts as drawn before its siblings, from a distribution that has its
    token alone; the siblings are drawn from the draft's distribution without that token.
    `target_probs` int64 [k]; `draft_probs` float [inner nodes, draft vocabulary]; `drawn` int64
    [inner nodes, branching]; `uniforms` float64 [2]; `d2t` int64 [draft vocabulary]; `looked_up`
    int64 [size].
    """
    inputs = (target_probs, draft_probs, drawn, index, d2t)
    if index.size == 1:  # nothing was drafted
        acceptance = Acceptance(uniforms.new_ones(1), None, index.together)
    elif looked_up is None:
        acceptance = verifier(*inputs)
    else:
        acceptance = verifier(*inputs, looked_up=looked_up)
        # at the end of the path, all children of its last node are rejected
        target_probs = without_looked_up(target_probs, looked_up)
    return sample_path(acceptance, target_probs, index, uniforms, d2t)
