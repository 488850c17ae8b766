"""What verification takes for a tree whose spine is looked up (artifacts/lookup.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.verify import LOOKUP_VERIFIERS


def looked_up_children(parents: Tensor, spine: Tensor, chain: Tensor, verifier: str) -> Tensor:
    """int64 [size]: the token of each node's first child if that is looked up, else -1.

    `parents` int64 [size - 1]; `spine` int64 [nodes on the spine below the root].
    """
    if verifier not in LOOKUP_VERIFIERS:
        raise SequoiaPlanError(
            f"verifier: found {verifier!r} with a tree whose spine is looked up, expected "
            f"{' or '.join(LOOKUP_VERIFIERS)}"
        )
    none_looked_up = parents.new_full((len(parents) + 1,), -1)
    return none_looked_up.index_copy(0, parents[spine - 1], chain[: len(spine)])


def with_rows_of_tail(
    draft_probs: Tensor, drawn: Tensor, num_rows: int, branching: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Add the rows of inner nodes below the last draft pass, which have no drafted child.

    `draft_probs` float32 [nodes, draft vocabulary]; `drawn` int64 [nodes, branching].
    """
    if draft_probs.ndim == 1:  # nothing is drafted
        draft_probs = draft_probs.new_zeros(0, vocabulary, dtype=torch.float32)
        drawn = drawn.new_zeros(0, branching)
    zero_probs = draft_probs.new_zeros(1, vocabulary).expand(num_rows, -1)
    no_draws = drawn.new_zeros(num_rows, branching)
    return torch.cat([draft_probs, zero_probs]), torch.cat([drawn, no_draws])
