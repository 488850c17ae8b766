"""From probabilities to a sampled path: where the accepted path ends, and the bonus token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_plan.runtime.sampling.drawing import draw_tokens
from sequoia_plan.runtime.verify.tree_index import TreeIndex, VerificationOrder

TargetProbs = Callable[[Tensor], Tensor]
"""Maps nodes to the target's probabilities after them: int64 [k] -> float [k, vocabulary].

It is called for a leaf only if the accepted path ends there."""


@dataclass(frozen=True)
class DrawnTree:
    """What a verifier decides from: a tree's drawn tokens, and the probabilities at its nodes.

    A child that is looked up counts as drawn before its siblings, from a distribution that has its
    token alone; the siblings are drawn from the draft's distribution without that token.

    Args:
        target_probs: see `TargetProbs`.
        draft_probs: float [inner nodes, draft vocabulary].
        drawn: int64 [inner nodes, branching], in the draft's vocabulary.
        index: the tree's structure.
        d2t: int64 [draft vocabulary], the target's tokens; None if the vocabularies are the same.
        looked_up: int64 [size], the token of each node's first child if that is looked up, else -1;
            None if no child is.
    """

    target_probs: TargetProbs
    draft_probs: Tensor
    drawn: Tensor
    index: TreeIndex
    d2t: Tensor | None = None
    looked_up: Tensor | None = None

    def covered(self, probs: Tensor) -> Tensor:
        """Probabilities [k, vocabulary] -> [k, draft vocabulary]: those of the draft's tokens."""
        return probs if self.d2t is None else probs.index_select(1, self.d2t)

    def without_looked_up(self, probs: Tensor, nodes: Tensor) -> Tensor:
        """Probabilities [k, vocabulary] after nodes, with 0 for a looked-up child's token."""
        if self.looked_up is None:
            return probs
        tokens = self.looked_up[nodes, None]
        at_token = tokens.clamp(min=0)
        probs_left = torch.where(tokens < 0, probs.gather(1, at_token), 0.0)
        return probs.scatter(1, at_token, probs_left)


@dataclass(frozen=True)
class Acceptance:
    """The probabilities of each path and bonus token, given the drawn tree; `sample_path` samples.

    Args:
        end_probs: float64 [size], the probability that the accepted path ends at each node, given
            the tokens drawn.
        residual_probs: maps rows of `order` (int64 [k]) to the residual distributions of their
            nodes (float [k, draft vocabulary], not normalised): the bonus token's, if the path ends
            there. For tokens that the draft's vocabulary lacks, it is the target's distribution, in
            the same units. None if the tree has no inner node.
        order: the order of the inner nodes that `residual_probs` uses.
    """

    end_probs: Tensor
    residual_probs: Callable[[Tensor], Tensor] | None
    order: VerificationOrder

    def bonus_probs(self, end: Tensor, tree: DrawnTree) -> Tensor:
        """The bonus token's distribution if the path ends at `end`; the target's at a leaf.

        Args:
            end: int64 [1], a node.

        Returns:
            float [1, vocabulary], not normalised.
        """
        # at the end of the path, all children of its last node are rejected
        probs = tree.without_looked_up(tree.target_probs(end), end)
        if self.residual_probs is None:
            return probs
        residual = self.residual_probs(self.order.row_of_node[end])
        if tree.d2t is not None:
            residual = probs.index_copy(1, tree.d2t, residual)
        # only rounding leads to a residual of mass 0: a child was certain to be accepted
        has_mass = residual.sum(-1, keepdim=True) > 0
        return torch.where((tree.index.child_count[end] > 0)[:, None] & has_mass, residual, probs)


@dataclass(frozen=True)
class AcceptedPath:
    """The result of one step of verification, in fixed shapes.

    `path` int64 [depth], nodes from the root on, of which the first `count` (int64 [1]) are
    accepted; `bonus` int64 [1], the token after them.
    """

    path: Tensor
    count: Tensor
    bonus: Tensor


def sample_path(acceptance: Acceptance, tree: DrawnTree, uniforms: Tensor) -> AcceptedPath:
    """Sample the end of the path and the bonus token by inversion of `uniforms` (float64 [2])."""
    index = tree.index
    end = index.post_order[draw_tokens(acceptance.end_probs[index.post_order], uniforms[:1])]
    bonus = draw_tokens(acceptance.bonus_probs(end, tree)[0], uniforms[1:])
    return AcceptedPath(index.paths[end][0], index.levels[end] + 1, bonus)


def greedy(choices: Tensor, tokens: Tensor, index: TreeIndex) -> AcceptedPath:
    """At temperature 0, every verifier accepts the target's most probable tokens.

    A walk goes from the root down, each time to the child that has that token, and the bonus
    token is the target's choice after the last node. `choices`, `tokens` int64 [size].
    """
    root_is_chosen = torch.ones_like(tokens[:1], dtype=torch.bool)
    is_chosen = torch.cat([root_is_chosen, tokens[1:] == choices[index.parents]])
    is_accepted = is_chosen[index.paths].all(-1)
    # the accepted nodes are one path, which ends at the deepest of them
    end = (is_accepted * index.levels).argmax(0, keepdim=True)
    return AcceptedPath(index.paths[end][0], index.levels[end] + 1, choices[end])


def end_probs_from_root(child_probs: Tensor, index: TreeIndex) -> Tensor:
    """float64 [size]: `Acceptance.end_probs` of a verifier that walks from the root down.

    `child_probs` float [inner nodes, branching]: to go on to each child from its parent.
    """
    step_probs = child_probs.new_ones(index.size, dtype=torch.float64)
    step_probs[1:] = child_probs.t().flatten()[index.together.cells]
    stop_probs = child_probs.new_ones(index.size, dtype=torch.float64)
    stop_probs[index.together.nodes] = (1 - child_probs.double().sum(-1)).clamp(min=0)
    return step_probs[index.paths].prod(-1) * stop_probs


def first_accepted_probs(accept_probs: Tensor) -> Tensor:
    """float64 [inner nodes, branching]: the probability that each child is the first accepted one.

    `accept_probs` float [inner nodes, branching]: to accept each once those before are rejected.
    """
    accept_probs = accept_probs.double()
    return accept_probs * exclusive_cumprod(1 - accept_probs)


def exclusive_cumprod(factors: Tensor) -> Tensor:
    """The product of all earlier entries along the last dimension; 1 for the first entry."""
    return torch.cat([torch.ones_like(factors[..., :1]), factors[..., :-1]], -1).cumprod(-1)
