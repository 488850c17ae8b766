"""Children drawn at positions of a text, and how probably each is the accepted one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_plan.runtime import Sampling
from sequoia_plan.runtime.verify import VERIFIERS, DrawnTree, TreeIndex


@dataclass(frozen=True)
class DrawnChildren:
    """Children drawn once at each position, and the probabilities that verify them.

    `target_probs` float [positions, vocabulary], logits if greedy; `draft_probs` float [positions,
    draft vocabulary]; `drawn` int64 [positions, ranks], indices into the draft's vocabulary.
    """

    target_probs: Tensor
    draft_probs: Tensor
    drawn: Tensor
    sampling: Sampling
    d2t: Tensor | None

    @classmethod
    def draw(
        cls,
        target_logits: Tensor,
        draft_logits: Tensor,
        sampling: Sampling,
        ranks: int,
        generator: torch.Generator,
        d2t: Tensor | None,
    ) -> DrawnChildren:
        """Draw `ranks` children at each position.

        `target_logits` [positions, vocabulary]; `draft_logits` [positions, draft vocabulary].
        """
        draft_probs = sampling.draft_probs(draft_logits)
        drawn = sampling.drawing_on(draft_probs.device)(draft_probs, ranks, generator)
        target_probs = target_logits if sampling.greedy else sampling.target_probs(target_logits)
        return cls(target_probs, draft_probs, drawn, sampling, d2t)

    def expected_acceptance(self) -> Tensor:
        """float64 [positions, ranks]: the probability that the child of each rank is accepted.

        It is over the verifier's randomness, given the drawn children.
        """
        if self.sampling.greedy:
            best_tokens = self.target_probs.argmax(-1, keepdim=True)
            return (self._target_tokens(self.drawn) == best_tokens).double()
        return self._verified(self.target_probs, self.draft_probs, self.drawn)

    def looked_up_acceptance(self, positions: Tensor, tokens: Tensor) -> Tensor:
        """As `expected_acceptance`, where a looked-up token comes before the drafted children.

        `positions` int64 [looked-up tokens], of what was drawn; `tokens` int64 [looked-up tokens];
        returns float64 [looked-up tokens, ranks].
        """
        drawn, looked_up = self.drawn[positions], tokens[:, None]
        is_looked_up = self._target_tokens(drawn) == looked_up
        # drop the child that repeats the looked-up token; if none does, the last one
        order = is_looked_up.int().argsort(stable=True, dim=-1)[:, :-1]
        others = drawn.gather(1, order)
        target_probs = self.target_probs[positions]
        if self.sampling.greedy:
            children = torch.cat([looked_up, self._target_tokens(others)], 1)
            return (children == target_probs.argmax(-1, keepdim=True)).double()
        draft_probs = self.draft_probs[positions]
        if self.d2t is None:
            draft_probs = draft_probs.scatter(1, looked_up, 0.0)
        else:
            draft_probs = draft_probs.masked_fill(self.d2t == looked_up, 0.0)
        # the first place is the looked-up child's; what is drawn there is not read
        children = torch.cat([drawn[:, :1], others], 1)
        return self._verified(target_probs, draft_probs, children, tokens)

    def _target_tokens(self, drawn: Tensor) -> Tensor:
        """The target's tokens for indices into the draft's vocabulary."""
        return drawn if self.d2t is None else self.d2t[drawn]

    def _verified(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        drawn: Tensor,
        looked_up: Tensor | None = None,
    ) -> Tensor:
        """float64 [positions, ranks]: the verifier's probability to accept each child."""
        verifier = self.sampling.verifier
        # at a root's children, `traversal` accepts as `sequoia` does
        name = "sequoia" if verifier == "traversal" else verifier
        count, ranks = drawn.shape
        # each position is the root of a one-level tree; the roots come first, then their children
        stars = TreeIndex.stars(count, ranks, target_probs.device)
        if looked_up is not None:
            looked_up = torch.cat([looked_up, torch.full_like(drawn, -1).flatten()])
        tree = DrawnTree(target_probs.__getitem__, draft_probs, drawn, stars, self.d2t, looked_up)
        acceptance = VERIFIERS[name](tree)
        return acceptance.end_probs[count:].reshape(count, ranks)
