"""From probabilities to a decision: where the accepted path ends, and the bonus token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_plan.runtime.drawing import draw
from sequoia_plan.runtime.verify.index import Order, TreeIndex

Laws = Callable[[Tensor], Tensor]
"""The target's law after given nodes: int64 [k] -> float [k, vocabulary]. Leaves are only asked for when a path ends there."""


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of a drawn tree; two uniform numbers then decide.

    Args:
        ends: float64 [size], the probability that the accepted path ends at each node, given the tokens drawn.
        left: places in `order`, int64 [k] -> float [k, draft vocabulary], the bonus token's law after the nodes there, not normalised;
            on what the draft does not cover it is the target's law, in the same units. None if there is no inner node.
        order: which place is which node's.
    """

    ends: Tensor
    left: Callable[[Tensor], Tensor] | None
    order: Order

    def bonus_law(self, end: Tensor, target: Laws, index: TreeIndex, covered: Tensor | None = None) -> Tensor:
        """float [1, vocabulary]: the bonus token's law after `end` (int64 [1]), not normalised; the target's at a leaf."""
        law = target(end)
        if self.left is None:
            return law
        left = self.left(self.order.of[end])
        rest = left if covered is None else law.index_copy(1, covered, left)
        # a law of mass 0 can only be met by rounding: a child was certain to be accepted
        return torch.where((index.child_count[end] > 0)[:, None] & (rest.sum(-1, keepdim=True) > 0), rest, law)


@dataclass(frozen=True)
class Accepted:
    """What a step yields, in fixed shapes.

    Args:
        path: int64 [depth], the accepted nodes from the root on, padded with the root.
        count: int64 [1], how many nodes of `path` are accepted, the root included.
        bonus: int64 [1], the token the target adds after the last of them.
    """

    path: Tensor
    count: Tensor
    bonus: Tensor


def decide(verdict: Verdict, target: Laws, index: TreeIndex, uniforms: Tensor, covered: Tensor | None = None) -> Accepted:
    """`uniforms` (float64 [2] in [0, 1)) pick the end of the path and the bonus token.

    Ends are in post-order, so that a walk that gives each child its interval decides alike (`kernels.py`).
    """
    end = index.post_order[draw(verdict.ends[index.post_order], uniforms[:1])]
    bonus = draw(verdict.bonus_law(end, target, index, covered)[0], uniforms[1:])
    return Accepted(index.paths[end][0], index.offsets[end] + 1, bonus)


def top_down(take: Tensor, index: TreeIndex) -> Tensor:
    """`Verdict.ends` of a verifier that walks down from the root.

    Args:
        take: float [inner, branching] in the order of `index.together`, the probability that each child is the one accepted once
            its parent is; 0 where there is none.
    """
    step, stay = take.new_ones(index.size, dtype=torch.float64), take.new_ones(index.size, dtype=torch.float64)
    step[1:] = take.double().flatten()[index.together.entry]
    stay[index.together.nodes] = (1 - take.double().sum(-1)).clamp(min=0)
    return step[index.paths].prod(-1) * stay


def one_by_one(accept: Tensor) -> Tensor:
    """`take` of `top_down` when children are accepted with probability `accept` (float [inner, branching]) one after the other."""
    accept = accept.double()
    return accept * before(1 - accept)


def before(factors: Tensor) -> Tensor:
    """The product of all earlier entries along the last dimension, 1 for the first."""
    return torch.cat([torch.ones_like(factors[..., :1]), factors[..., :-1]], -1).cumprod(-1)
