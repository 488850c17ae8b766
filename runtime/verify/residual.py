"""The residual law that rejections leave, shared by the verifiers that reject one child after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.index import Rows, TreeIndex
from sequoia_plan.runtime.verify.verdict import Laws, Verdict, one_by_one, top_down


@dataclass
class Residual:
    """R, the target's law less what rejections took, and D, the draft's law, at all inner nodes. Worked on in place.

    Neither is normalised: R stays in the units of the target's law, so that what the draft does not cover never changes.

    Args:
        r, d: float [inner, draft vocabulary].
        outside: float [inner, 1], the target's mass on what the draft does not cover.
        r_mass, d_mass: float [inner, 1], the whole mass of R (with `outside`) and of D.
        undrawn: float [inner, draft vocabulary], 1 for tokens not removed yet.
        drawn: int64 [inner, branching], the children's tokens.
    """

    r: Tensor
    d: Tensor
    outside: Tensor
    r_mass: Tensor
    d_mass: Tensor
    undrawn: Tensor
    drawn: Tensor

    @classmethod
    def start(cls, target: Laws, draft: Tensor, drawn: Tensor, rows: Rows, covered: Tensor | None) -> Residual:
        """R = the target's law, D = the draft's, in the order of `rows`."""
        laws, d = target(rows.nodes), draft[rows.drawn]
        r = laws.clone() if covered is None else laws[:, covered]
        mass = r.sum(-1, keepdim=True)
        outside = torch.zeros_like(mass) if covered is None else (laws.sum(-1, keepdim=True) - mass).clamp(min=0)
        return cls(r, d, outside, mass + outside, d.sum(-1, keepdim=True), torch.ones_like(d), drawn[rows.drawn])

    def ratio(self, rows: slice, rank: int) -> Tensor:
        """float [rows, 1]: R[s] / D[s], both normalised, of the children of `rank`. D[s] = 0 cannot be drawn: then 0."""
        child = self.drawn[rows, rank : rank + 1]
        d = self.d[rows].gather(1, child)
        ratio = self.r[rows].gather(1, child) / _positive(self.r_mass[rows]) * (self.d_mass[rows] / _positive(d))  # at most 1 times finite
        return torch.where(d > 0, ratio, 0.0)

    def reject(self, rows: slice, a: Tensor | float = 1.0) -> Tensor:
        """R <- max(a R - D, 0); float [rows, 1]: its mass in the units of a normalised R and D.

        Args:
            a: float [rows, 1], the probability that a node's subtree is still to be accepted (1 for all but `traversal`).
        """
        r, whole = self.r[rows], _positive(self.r_mass[rows])
        share = whole / _positive(self.d_mass[rows]) / (_positive(a) if isinstance(a, Tensor) else a)
        r.addcmul_(self.d[rows], share.clamp(max=torch.finfo(r.dtype).max), value=-1).clamp_(min=0)
        self.r_mass[rows] = r.sum(-1, keepdim=True) + self.outside[rows]
        return a * self.r_mass[rows] / whole

    def remove(self, rows: slice, rank: int) -> None:
        """D[s] <- 0 for the children of `rank`; once the draft's support is exhausted D is uniform over the undrawn tokens."""
        child = self.drawn[rows, rank : rank + 1]
        d, undrawn = self.d[rows], self.undrawn[rows]
        d.scatter_(1, child, 0.0)
        undrawn.scatter_(1, child, 0.0)
        mass = d.sum(-1, keepdim=True)
        d.copy_(torch.where(mass > 0, d, undrawn))
        self.d_mass[rows] = torch.where(mass > 0, mass, undrawn.sum(-1, keepdim=True))


def in_turn(target: Laws, draft: Tensor, drawn: Tensor, index: TreeIndex, covered: Tensor | None, *, removed: bool) -> Verdict:
    """Accept or reject children one after the other, from the root down.

    Args:
        removed: does a rejected token leave the draft's law, as when children are drawn without replacement?
    """
    rows = index.together
    left = Residual.start(target, draft, drawn, rows, covered)
    accept = draft.new_zeros(drawn.shape)
    for rank, having in enumerate(rows.groups[0]):
        accept[having, rank] = left.ratio(having, rank)[:, 0].clamp(max=1)
        left.reject(having)
        if removed:
            left.remove(having, rank)
    return Verdict(top_down(one_by_one(accept), index), left.r, rows)


def _positive(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny)
