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
    DrawnTree,
    greedy,
    sample_path,
)
from sequoia_plan.runtime.verify.residual import sequoia, specinfer
from sequoia_plan.runtime.verify.tree_index import TreeIndex

__all__ = [
    "LOOKUP_VERIFIERS",
    "VERIFIERS",
    "Acceptance",
    "AcceptedPath",
    "DrawnTree",
    "TreeIndex",
    "greedy",
    "sample_path",
    "verify",
]

Verifier = Callable[[DrawnTree], Acceptance]
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


def verify(verifier: Verifier, tree: DrawnTree, uniforms: Tensor) -> AcceptedPath:
    """Sample the accepted path and the bonus token from two uniform numbers (float64 [2])."""
    if tree.index.size == 1:  # nothing was drafted
        acceptance = Acceptance(uniforms.new_ones(1), None, tree.index.together)
    else:
        acceptance = verifier(tree)
    return sample_path(acceptance, tree, uniforms)
