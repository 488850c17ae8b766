"""Verification of one tree whose tokens are in the sequence."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.runtime.sampling.sampling import Sampling
from sequoia_plan.runtime.sequence import SequenceState
from sequoia_plan.runtime.verify import (
    LOOKUP_VERIFIERS,
    VERIFIERS,
    AcceptedPath,
    DrawnTree,
    TreeIndex,
    greedy,
    verify,
)


def most_probable_tokens(logits: Tensor) -> Tensor:
    """int64 [nodes] from logits [nodes, vocabulary]."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.numpy().argmax(-1))  # ten times as fast as PyTorch's
    return logits.argmax(-1)


class TreeVerifier:
    """Verifies one tree. `d2t` int64 [draft vocabulary]: the target's token for each.

    `observe`, if set, is called with the `DrawnTree` before each verification.
    """

    observe: Callable[[DrawnTree], None] | None = None

    def __init__(self, tree: TokenTree, device: torch.device, d2t: Tensor | None = None) -> None:
        self.index, self.d2t = TreeIndex.of(tree, device), d2t
        self.looks_up = tree.looks_up  # are the spine's tokens looked up, and not drafted?
        self.nodes = torch.arange(tree.size, device=device)
        # the spine is class 0: the root, which is left out here, its first child, that one's, ...
        spine = np.flatnonzero(tree.classes == 0)[1:]
        self.spine = torch.as_tensor(spine, device=device)

    def __call__(
        self,
        sampling: Sampling,
        sequence: SequenceState,
        logits: Tensor,
        drafted: tuple[Tensor, Tensor],
    ) -> AcceptedPath:
        """The accepted path and the bonus token, from the target's logits [size, vocabulary].

        `drafted`: float [drafted parents, draft vocabulary], and int64 [drafted parents,
        branching], the draft's probabilities and what was drawn from them.
        """
        if sampling.greedy:
            tokens = sequence.tokens[sequence.length + self.nodes]
            return greedy(most_probable_tokens(logits), tokens, self.index)

        def target_probs(nodes: Tensor) -> Tensor:
            """int64 [k] -> float [k, vocabulary]: the target's probabilities after these nodes."""
            return sampling.target_probs(logits.index_select(0, nodes))

        looked_up = None
        if self.looks_up:
            looked_up = self.looked_up_children(sequence.lookup_chain, sampling.verifier)
            # parents of looked-up children alone need rows, too, and have none of the draft's
            drafted = self.with_undrafted_rows(*drafted, logits.shape[1])
        tree = DrawnTree(target_probs, *drafted, self.index, self.d2t, looked_up)
        if self.observe:
            self.observe(tree)
        return verify(VERIFIERS[sampling.verifier], tree, sequence.uniforms)

    def looked_up_children(self, chain: Tensor, verifier: str) -> Tensor:
        """int64 [size]: the token of each node's first child if that is looked up, else -1."""
        if verifier not in LOOKUP_VERIFIERS:
            raise SequoiaPlanError(
                f"verifier: found {verifier!r} with a tree whose spine is looked up, expected "
                f"{' or '.join(LOOKUP_VERIFIERS)}"
            )
        none_looked_up = self.nodes.new_full((self.index.size,), -1)
        parents = self.index.parents[self.spine - 1]
        return none_looked_up.index_copy(0, parents, chain[: len(self.spine)])

    def with_undrafted_rows(
        self, draft_probs: Tensor, drawn: Tensor, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """Add rows of zeros for parents that no draft pass covers: their child is looked up."""
        num_parents, branching = self.index.together.has_child.shape
        if draft_probs.ndim == 1:  # nothing is drafted
            width = vocabulary if self.d2t is None else self.d2t.numel()
            draft_probs = draft_probs.new_zeros(0, width, dtype=torch.float32)
            drawn = drawn.new_zeros(0, branching)
        below = (0, 0, 0, num_parents - len(drawn))
        return torch.nn.functional.pad(draft_probs, below), torch.nn.functional.pad(drawn, below)
