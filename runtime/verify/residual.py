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
        outside: float [inner], the target's mass on what the draft does not cover.
        turns: float [branching, 5, inner], for the children of each rank: p and q at the child, 1 / D there just before its turn with D
            normalised (0 if D is 0), and what D is then: q times the one number, 1 times the other.
        state: float [4, inner], c, e, a and a / mass of R. a is the probability that a node's subtree is still to be accepted.
        take: float [branching, inner], what a was for each child, 0 so far.
    """

    p: Tensor
    q: Tensor
    outside: Tensor
    turns: Tensor
    state: Tensor
    take: Tensor

    @classmethod
    def start(cls, target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, order: Order, covered: Tensor | None, *, removed: bool = True) -> Residual:
        """R = the target's law, D = the draft's, a = 1.

        Args:
            removed: does a rejected token leave D, as when children are drawn without replacement?
        """
        laws, q, drawn = target(order.nodes), draft.index_select(0, order.drawn), drawn.index_select(0, order.drawn)
        p = laws if covered is None else laws.index_select(1, covered)
        mass = p.sum(-1)
        outside = torch.zeros_like(mass) if covered is None else (laws.sum(-1) - mass).clamp_(min=0)
        at_child = q.gather(1, drawn)
        if removed:  # what no child has, and what this child and later ones have: a difference would be all rounding where little is left
            nobodys = q.scatter(1, drawn.where(order.exists, drawn[:, :1]), 0.0).sum(-1, keepdim=True)
            masses = nobodys + at_child.where(order.exists, 0.0).flip(1).cumsum(1).flip(1)
        else:
            masses = q.sum(-1, keepdim=True).expand_as(at_child)
        exhausted = masses <= 0
        undrawn = q.shape[1] - torch.arange(drawn.shape[1], device=q.device, dtype=q.dtype)
        scarcity = torch.where(exhausted, undrawn, torch.where(at_child > 0, masses / _positive(at_child), 0.0))
        of_q = torch.where(exhausted, 0.0, 1 / _positive(masses))
        turns = torch.stack([p.gather(1, drawn), at_child, scarcity, of_q, exhausted / undrawn]).permute(2, 0, 1).contiguous()
        zeros, ones = torch.zeros_like(mass), torch.ones_like(mass)
        state = torch.stack([zeros, zeros, ones, 1 / _positive(mass + outside)])
        return cls(p, q, outside, turns, state, torch.zeros_like(turns[:, 0]))

    def begin(self, nodes: slice, a: Tensor) -> None:
        """Let `a` (float [nodes]) be what the nodes there start with."""
        self.state[2, nodes] = a
        self.state[3, nodes] *= a

    def judge(self, group: tuple[slice, ...]) -> None:
        """Take each child of a group's nodes with a(child) = min(1, a R[s] / D[s]), then reject it: r = max(a R - D, 0) for normalised
        R and D, S = sum r, R <- r / S, a <- S / (S + 1 - a), D[s] <- 0. A node whose a is 1 keeps it."""
        tiny, largest = torch.finfo(self.p.dtype).tiny, torch.finfo(self.p.dtype).max
        for rank, having in enumerate(group):
            if rank == 0 or having != group[rank - 1]:
                laws, outside, turns = (self.p[having], self.q[having]), self.outside[having], self.turns[:, :, having].unbind()
                c, e, a, scale = self.state[:, having].unbind()
            p, q, scarcity, of_q, of_all = turns[rank].unbind()
            r = torch.addcmul(p, c, q, value=-1).sub_(e).clamp_(min=0)
            self.take[rank, having] = r.mul_(scale).mul_(scarcity).clamp_(max=1)
            divisor = scale.clamp(min=tiny)
            c.addcdiv_(of_q, divisor).clamp_(max=largest)  # infinite times 0 is not a number
            e.addcdiv_(of_all, divisor)
            mass = _left(*laws, c[:, None], e[:, None]).sum(-1).add_(outside).mul_(scale)
            all_of_it = (1 - a).add_(mass).clamp_(min=tiny)
            a.copy_(mass / all_of_it)
            scale.div_(all_of_it).clamp_(max=largest)

    def left(self, nodes: Tensor) -> Tensor:
        """float [nodes, draft vocabulary]: R."""
        c, e = self.state[:2, nodes].unsqueeze(-1).unbind()
        return _left(self.p[nodes], self.q[nodes], c, e)


def _left(p: Tensor, q: Tensor, c: Tensor, e: Tensor) -> Tensor:
    return torch.addcmul(p, c, q, value=-1).sub_(e).clamp_(min=0)


def in_turn(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None, *, removed: bool) -> Verdict:
    """Accept or reject children one after the other, from the root down.

    Args:
        removed: does a rejected token leave the draft's law, as when children are drawn without replacement?
    """
    order = index.together
    residual = Residual.start(target, draft, drawn, index, order, covered, removed=removed)
    residual.judge(order.groups[0])
    return Verdict(top_down(one_by_one(residual.take.t()), index), residual.left, order)


def _positive(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny)
