"""The residual distribution after rejections, for verifiers that reject one child after the other.

At a node, R starts as the target's probabilities p and D as the draft's probabilities q. The
rejection of a child sets R <- max(R - w D, 0) for some w >= 0. Because
max(max(x - u, 0) - v, 0) = max(x - u - v, 0), after any number of rejections

    R = max(p - c q - e, 0)

c adds up the w of the D that are multiples of q, and e those after the support of q is exhausted,
when D is uniform. Where a drawn token has been removed from D, either R is 0 already, or that child
was certain to be accepted and nothing after it counts. So two numbers per node, c and e, stand for
R, and one pass over the vocabulary gives its mass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sequoia_plan.models.base.kernel_launch import kernel_or_tensors, kernels_available, launch
from sequoia_plan.runtime.sampling.drawing import BLOCK, LAUNCH, loops_for
from sequoia_plan.runtime.verify.accepted_path import (
    Acceptance,
    DrawnTree,
    end_probs_from_root,
    first_accepted_probs,
)
from sequoia_plan.runtime.verify.tree_index import VerificationOrder


@dataclass
class Residual:
    """R and D of all inner nodes, in the rows of a `VerificationOrder`.

    Neither is normalised. R stays in the units of the target's probabilities, so that it never
    changes for tokens that the draft's vocabulary lacks. `p`, `q` float [inner nodes, draft
    vocabulary]; `uncovered_mass` float [inner nodes]; `child_terms` float [branching, 5, inner
    nodes]: p[s], q[s], 1 / D[s], and what the child's rejection adds to c and to e before division
    by a / mass of R; `state` float [5, inner nodes]: c, e, a, a / mass of R, and a kernel's count;
    `accept_probs` float [branching, inner nodes].
    """

    p: Tensor
    q: Tensor
    uncovered_mass: Tensor
    child_terms: Tensor
    state: Tensor
    accept_probs: Tensor

    @classmethod
    def start(
        cls, tree: DrawnTree, order: VerificationOrder, *, removes_rejected: bool
    ) -> Residual:
        """The state before any rejection: R = p, D = q, c = e = 0, a = 1 (see `Residual`).

        The rejection of a child that is looked up removes its token from R and changes nothing
        else. So `p` lacks that token from the start, and the child's own p is among `child_terms`.
        """
        all_probs = tree.target_probs(order.nodes)
        probs = tree.without_looked_up(all_probs, order.nodes)
        q = tree.draft_probs.index_select(0, order.draft_rows)  # [inner nodes, draft vocabulary]
        children = tree.drawn.index_select(0, order.draft_rows)  # [inner nodes, branching]
        num_undrawn = q.shape[1] - torch.arange(children.shape[1], device=q.device, dtype=q.dtype)
        p, has_draw, looked_up = tree.covered(probs), order.has_child, None
        if tree.looked_up is not None:
            looked_up = tree.looked_up[order.nodes]
            has_draw = has_draw.clone()
            has_draw[:, 0] &= looked_up < 0
            # a child that is looked up has no draw: another child's stands in its column
            children[:, 0] = torch.where(
                has_draw[:, 0], children[:, 0], children[:, min(1, children.shape[1] - 1)]
            )
            if tree.d2t is not None:  # it does not count as drawn if the draft lacks it
                is_in_draft = (looked_up[:, None] == tree.d2t).any(-1)
                num_undrawn = num_undrawn + ((looked_up >= 0) & ~is_in_draft)[:, None]
        # D is q over the mass that is left, and uniform once q has no token left
        q_at_children = q.gather(1, children)
        if removes_rejected:
            masses = _undrawn_masses(q, q_at_children, children, has_draw)
        else:
            masses = q.sum(-1, keepdim=True).expand_as(q_at_children)
        is_exhausted = masses <= 0
        inverse_d = torch.where(q_at_children > 0, masses / _positive(q_at_children), 0.0)
        inverse_d = torch.where(is_exhausted, num_undrawn, inverse_d)
        to_c = torch.where(is_exhausted, 0.0, 1 / _positive(masses))  # what a rejection adds
        to_e = is_exhausted / num_undrawn
        terms = [p.gather(1, children), q_at_children, inverse_d, to_c, to_e]
        child_terms = torch.stack(terms).permute(2, 0, 1).contiguous()
        # R is p without the tokens that are looked up, in the units of the target's whole mass
        total_mass = p_mass = p.sum(-1)
        zeros, ones = torch.zeros_like(p_mass), torch.ones_like(p_mass)
        uncovered_mass = zeros
        if tree.d2t is not None:
            uncovered_mass = (probs.sum(-1) - p_mass).clamp_(min=0)
            total_mass = p_mass + uncovered_mass
        if looked_up is not None:
            p_looked_up = all_probs.gather(1, looked_up.clamp(min=0)[:, None])[:, 0]
            looked_up_terms = torch.stack([p_looked_up, zeros, ones, zeros, zeros])
            child_terms[0] = torch.where(looked_up >= 0, looked_up_terms, child_terms[0])
            total_mass = total_mass + torch.where(looked_up >= 0, p_looked_up, 0.0)
        state = torch.stack([zeros, zeros, ones, 1 / _positive(total_mass), zeros])
        return cls(p, q, uncovered_mass, child_terms, state, torch.zeros_like(child_terms[:, 0]))

    @property
    def node_probs(self) -> Tensor:
        """float [inner nodes]: a; after `reject_children`, to accept the node as the end."""
        return self.state[2]

    def set_node_probs(self, rows: slice, probs: Tensor) -> None:
        """Start the nodes of `rows` with a = `probs` (float [nodes])."""
        self.state[2:, rows].mul_(probs)  # a and a / mass of R; both were those of a = 1

    def reject_children(self, group: tuple[slice, ...]) -> None:
        """Compute the acceptance of each child of a group's nodes, then reject it.

        For normalised R and D:

            a(s) = min(1, a R[s] / D[s])
            r = max(a R - D, 0);  S = sum(r)
            R = r / S;  a = S / (S + 1 - a);  D[s] = 0 if rejected tokens leave D;  D = norm(D)

        A node whose a is 1 keeps it.

        Args:
            group: for each rank, the rows of the nodes that have a child of that rank.
        """
        has_kernel = kernels_available(self.p.device)
        for rank, rows in enumerate(group):
            by_tensors = partial(self._reject_by_tensors, rank, rows)
            if has_kernel:
                by_kernel = partial(self._reject_by_kernel, rank, rows)
                kernel_or_tensors(("verification", self.p.dtype), by_kernel, by_tensors)
            else:
                by_tensors()

    def _reject_by_tensors(self, rank: int, rows: slice) -> None:
        """Reject the children of one rank, those of the nodes in `rows`: see `reject_children`."""
        tiny, largest = torch.finfo(self.p.dtype).tiny, torch.finfo(self.p.dtype).max
        p_child, q_child, inverse_d, to_c, to_e = self.child_terms[rank, :, rows].unbind()
        c, e, a, scale = self.state[:4, rows].unbind()  # updated in place; scale = a / mass of R
        r_child = torch.addcmul(p_child, c, q_child, value=-1).sub_(e)
        self.accept_probs[rank, rows] = r_child.mul_(scale).mul_(inverse_d).clamp_(0, 1)
        divisor = scale.clamp(min=tiny)
        c.addcdiv_(to_c, divisor).clamp_(max=largest)  # infinity times 0 is NaN
        e.addcdiv_(to_e, divisor)
        mass = _residual_masses(self.p[rows], self.q[rows], c, e)
        mass.add_(self.uncovered_mass[rows]).mul_(scale)  # S
        total = (1 - a).add_(mass).clamp_(min=tiny)
        a.copy_(mass.div_(total))
        scale.div_(total).clamp_(max=largest)

    def _reject_by_kernel(self, rank: int, rows: slice) -> None:
        """As `_reject_by_tensors`, by a Triton kernel: a program for each node and block of tokens.

        The masses of blocks go to scratch memory.
        """
        num_nodes, vocabulary = self.p.shape
        num_blocks = -(-vocabulary // BLOCK)
        launch(
            "runtime.verify.residual_kernels.reject_child",
            (rows.stop - rows.start, num_blocks), self.p, self.q, self.uncovered_mass,
            self.child_terms, self.state, self.accept_probs, rows.start, rank, num_nodes,
            vocabulary, self.p.new_empty(num_nodes, num_blocks), BLOCK=BLOCK,
            MAX_BLOCKS=1 << (num_blocks - 1).bit_length(), **LAUNCH,
        )  # fmt: skip

    def residual_probs(self, rows: Tensor) -> Tensor:
        """float [k, draft vocabulary]: R of the nodes of `rows` (int64 [k]), not normalised."""
        c, e = self.state[:2, rows].unsqueeze(-1).unbind()
        return _residual(self.p[rows], self.q[rows], c, e)


def sequential_acceptance(tree: DrawnTree, *, removes_rejected: bool) -> Acceptance:
    """The acceptance if a walk from the root down accepts or rejects one child after the other.

    `removes_rejected`: a rejected token is taken out of the draft's distribution as well.
    """
    order = tree.index.together
    residual = Residual.start(tree, order, removes_rejected=removes_rejected)
    residual.reject_children(order.groups[0])  # all inner nodes are in this group
    child_probs = first_accepted_probs(residual.accept_probs.t())
    return Acceptance(end_probs_from_root(child_probs, tree.index), residual.residual_probs, order)


sequoia = partial(sequential_acceptance, removes_rejected=True)
"""Sequoia (Chen et al., arXiv 2402.12374, Algorithm 1), for children drawn without replacement.

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

specinfer = partial(sequential_acceptance, removes_rejected=False)
"""SpecInfer (Miao et al., arXiv 2305.09781): Sequoia's rule on independent draws.

At every node:

    R, D = the target's probabilities, the draft's probabilities
    for each child s in draw order:
        accept s with probability min(1, R[s] / D[s]); if rejected:
        R = norm(max(R - D, 0))
    draw the bonus token from R

If a token is drawn a second time, it was rejected before, so R is 0 there: a duplicate child
is never accepted.
"""


def _undrawn_masses(
    q: Tensor, q_at_children: Tensor, children: Tensor, has_child: Tensor
) -> Tensor:
    """The draft's mass on the tokens that are not drawn before each child, the child's included.

    It is a sum of probabilities and not 1 minus the drawn ones: that difference would be all
    rounding where little mass remains. Returns float [inner nodes, branching].
    """
    first_child_as_padding = children.where(has_child, children[:, :1])
    never_drawn = q.scatter(1, first_child_as_padding, 0.0).sum(-1, keepdim=True)
    from_child_on = q_at_children.where(has_child, 0.0).flip(1).cumsum(1).flip(1)
    return never_drawn + from_child_on


def _residual(p: Tensor, q: Tensor, c: Tensor, e: Tensor) -> Tensor:
    """R = max(p - c q - e, 0), in new memory, from the probabilities p and q of tokens."""
    return torch.addcmul(p, c, q, value=-1).sub_(e).clamp_(min=0)


def _residual_masses(p: Tensor, q: Tensor, c: Tensor, e: Tensor) -> Tensor:
    """The sums of R over tokens, from p and q [nodes, draft vocabulary], c and e [nodes]."""
    if loops := loops_for(p):
        masses = torch.empty_like(c)
        loops.residual_masses(*(x.numpy() for x in (p, q, c, e, masses)))
        return masses
    return _residual(p, q, c[:, None], e[:, None]).sum(-1)


def _positive(x: Tensor) -> Tensor:
    """`x` with a tiny number in place of 0 and less, to divide by."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)
