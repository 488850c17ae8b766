"""Which drafted tokens to accept, so that the output follows the target's law exactly.

A verifier is a function of probabilities and drawn tokens alone. It says with which probability the accepted path ends at
each node, and from which law the bonus token is then drawn (`Verdict`); two uniform numbers decide (`decide`). All of it is
a fixed sequence of tensor operations on fixed shapes, with no decision on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sequoia_plan.runtime.drawing import INDEPENDENT, MOST_PROBABLE, WITHOUT_REPLACEMENT, Drawing
from sequoia_plan.runtime.verify import sequoia, specinfer, spectr, topk, traversal
from sequoia_plan.runtime.verify.greedy import greedy
from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.verdict import Accepted, Laws, Verdict, decide

__all__ = ["DEFAULT", "VERIFIERS", "Accepted", "Laws", "TreeIndex", "Verdict", "Verifier", "decide", "greedy", "verify"]


@dataclass(frozen=True)
class Verifier:
    """A rule of acceptance and the drawing of children it is exact for.

    Args:
        judge: (target, draft, drawn, index, covered) -> Verdict, see `verify`.
        drawing: how a node's children are drawn.
    """

    judge: Callable[[Laws, Tensor, Tensor, TreeIndex, Tensor | None], Verdict]
    drawing: Drawing


VERIFIERS = {
    "sequoia": Verifier(sequoia.judge, WITHOUT_REPLACEMENT),
    "traversal": Verifier(traversal.judge, WITHOUT_REPLACEMENT),
    "specinfer": Verifier(specinfer.judge, INDEPENDENT),
    "spectr": Verifier(spectr.judge, INDEPENDENT),
    "topk": Verifier(topk.judge, MOST_PROBABLE),
}
DEFAULT = "traversal"
"""Its expected tokens are never below those of `sequoia` (tests/test_verify.py); benchmarks/verifiers.py has measured both."""


def verify(verifier: Verifier, target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, uniforms: Tensor, covered: Tensor | None = None) -> Accepted:
    """The accepted path and the bonus token.

    Args:
        target: the target's law after given nodes: int64 [k] -> float [k, vocabulary].
        draft: float [inner, draft vocabulary], the law each inner node's children were drawn from, in the order of the nodes.
        drawn: int64 [inner, branching], the children's tokens as indices into the draft's vocabulary, in draw order.
        uniforms: float64 [2] in [0, 1): for the end of the path and for the bonus token.
        covered: int64 [draft vocabulary], the target's token for each of the draft's; None if they are the same.
    """
    if index.size == 1:  # nothing was drafted
        verdict = Verdict(uniforms.new_ones(1), None, index.together)
    else:
        verdict = verifier.judge(target, draft, drawn, index, covered)
    return decide(verdict, target, index, uniforms, covered)
