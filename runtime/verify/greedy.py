"""Temperature 0: whatever the verifier, the target's choices decide."""

from __future__ import annotations

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.index import TreeIndex
from sequoia_plan.runtime.verify.verdict import Accepted


def greedy(choices: Tensor, tokens: Tensor, index: TreeIndex) -> Accepted:
    """Follow the child that holds the target's choice while there is one.

    Args:
        choices: int64 [size], the target's most probable token after each node.
        tokens: int64 [size], each node's token; siblings differ.
    """
    chosen = torch.cat([torch.ones_like(tokens[:1], dtype=torch.bool), tokens[1:] == choices[index.parents]])
    reached = chosen[index.paths].all(-1)
    end = (reached * torch.arange(index.size, device=tokens.device)).amax(0, keepdim=True)  # those reached are one path
    return Accepted(index.paths[end][0], index.offsets[end] + 1, choices[end])
