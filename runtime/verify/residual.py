"""The residual law that rejections leave, shared by the verifiers that reject one child after the other.

R starts as the target's law p and D as the draft's law q. Rejecting a child takes R <- max(R - w D, 0) for some w >= 0, and as
max(max(x - u, 0) - v, 0) = max(x - u - v, 0), after any number of rejections R = max(p - c q - e, 0): c adds up the w of D in units of q, and
e those after q's support is exhausted, when D is uniform. Where a drawn token has left D, R is 0 already, or that child was certain to be
accepted and nothing after it counts. So two numbers a node stand for R, and one wide pass over a node's laws gives its mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.index import Order, TreeIndex
from sequoia_plan.runtime.verify.verdict import Laws, Verdict, one_by_one, top_down


@dataclass
class Residual:
    """R and D of all inner nodes, in an order of judging. Neither is normalised: R stays in the units of the target's law, so that
    what the draft does not cover never changes.

    Args:
        p, q: float [inner, draft vocabulary], the target's law and the draft's.
        outside: float [inner, 1], the target's mass on what the draft does not cover.
        mass: float [inner, 1], that of R with `outside`.
        c, e: float [inner, 1], so far.
        p_drawn, q_drawn: float [inner, branching], p and q at the children.
        scarcity: float [inner, branching], 1 / D at each child just before its turn, D normalised; 0 if D is 0 there.
        of_q, of_all: float [inner, branching], what D is then: q times the one, 1 times the other.
    """

    p: Tensor
    q: Tensor
    outside: Tensor
    mass: Tensor
    c: Tensor
    e: Tensor
    p_drawn: Tensor
    q_drawn: Tensor
    scarcity: Tensor
    of_q: Tensor
    of_all: Tensor

    @classmethod
    def start(cls, target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, order: Order, covered: Tensor | None, *, removed: bool = True) -> Residual:
        """R = the target's law, D = the draft's.

        Args:
            removed: does a rejected token leave D, as when children are drawn without replacement?
        """
        left = _masses(draft, drawn, index.together, removed).index_select(0, index.together.of[order.nodes])
        laws, q, drawn = target(order.nodes), draft.index_select(0, order.drawn), drawn.index_select(0, order.drawn)
        p = laws if covered is None else laws.index_select(1, covered)
        mass = p.sum(-1, keepdim=True)
        outside = torch.zeros_like(mass) if covered is None else (laws.sum(-1, keepdim=True) - mass).clamp_(min=0)
        p_drawn, q_drawn = p.gather(1, drawn), q.gather(1, drawn)
        exhausted, in_q = left <= 0, q_drawn > 0
        undrawn = q.shape[1] - torch.arange(drawn.shape[1], device=q.device, dtype=q.dtype)
        scarcity = torch.where(in_q, left / _positive(q_drawn), 0.0).where(~exhausted, undrawn)
        of_q = torch.where(exhausted, 0.0, 1 / _positive(left))
        zeros = torch.zeros_like(mass)
        return cls(p, q, outside, _positive(mass + outside), zeros, zeros.clone(), p_drawn, q_drawn, scarcity, of_q, exhausted / undrawn)

    def ratio(self, nodes: slice, rank: int) -> Tensor:
        """float [nodes, 1]: R / D at the children of `rank`, both normalised. Where D is 0 no child can be drawn: 0."""
        at = slice(rank, rank + 1)
        r = torch.addcmul(self.p_drawn[nodes, at], self.c[nodes], self.q_drawn[nodes, at], value=-1).sub_(self.e[nodes]).clamp_(min=0)
        return r.div_(self.mass[nodes]).mul_(self.scarcity[nodes, at])

    def reject(self, nodes: slice, rank: int, a: Tensor | float = 1.0) -> Tensor:
        """R <- max(a R - D, 0) for normalised R and D, of the children of `rank`; float [nodes, 1]: its mass in the same units.

        Args:
            a: float [nodes, 1], the probability that a node's subtree is still to be accepted (1 for all but `traversal`).
        """
        c, e, mass, at = self.c[nodes], self.e[nodes], self.mass[nodes], slice(rank, rank + 1)
        w = mass / (_positive(a) if isinstance(a, Tensor) else a)
        c.addcmul_(w, self.of_q[nodes, at]).clamp_(max=torch.finfo(c.dtype).max)  # infinite times 0 is not a number
        e.addcmul_(w, self.of_all[nodes, at])
        share = a / mass
        mass.copy_(self.left(nodes).sum(-1, keepdim=True)).add_(self.outside[nodes]).clamp_(min=torch.finfo(mass.dtype).tiny)
        return share.mul_(mass)

    def left(self, nodes: slice | Tensor) -> Tensor:
        """float [nodes, draft vocabulary]: R."""
        return torch.addcmul(self.p[nodes], self.c[nodes], self.q[nodes], value=-1).sub_(self.e[nodes]).clamp_(min=0)


def in_turn(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None, *, removed: bool) -> Verdict:
    """Accept or reject children one after the other, from the root down.

    Args:
        removed: does a rejected token leave the draft's law, as when children are drawn without replacement?
    """
    order = index.together
    residual = Residual.start(target, draft, drawn, index, order, covered, removed=removed)
    accept = draft.new_zeros(drawn.shape)
    for rank, having in enumerate(order.groups[0]):
        accept[having, rank] = residual.ratio(having, rank)[:, 0].clamp_(max=1)
        residual.reject(having, rank)
    return Verdict(top_down(one_by_one(accept), index), residual.left, order)


def _masses(draft: Tensor, drawn: Tensor, order: Order, removed: bool) -> Tensor:
    """float [inner, branching]: the mass of what is left of the draft's laws just before each child's turn, summed up anew: a difference
    would be all rounding where hardly anything is left."""
    d, drawn = draft.index_select(0, order.drawn), drawn.index_select(0, order.drawn)
    masses = d.sum(-1, keepdim=True).repeat(1, drawn.shape[1])
    for rank, having in enumerate(order.groups[0][1:] if removed else ()):
        d[: having.stop].scatter_(1, drawn[: having.stop, rank : rank + 1], 0.0)
        masses[having, rank + 1] = d[having].sum(-1)
    return masses


def _positive(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny)
