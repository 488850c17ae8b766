"""Verification at temperature 0: every verifier accepts the target's most probable tokens."""

import torch
from torch import Tensor

from sequoia_plan.runtime.verify.accepted_path import AcceptedPath
from sequoia_plan.runtime.verify.tree_index import TreeIndex


def greedy(choices: Tensor, tokens: Tensor, index: TreeIndex) -> AcceptedPath:
    """Walk from the root down, each time to the child that has the target's most probable token.

    The bonus token is the target's choice after the last node. `choices` int64 [size]; `tokens`
    int64 [size].
    """
    root_is_chosen = torch.ones_like(tokens[:1], dtype=torch.bool)
    is_chosen = torch.cat([root_is_chosen, tokens[1:] == choices[index.parents]])
    is_accepted = is_chosen[index.paths].all(-1)
    # the accepted nodes are one path, which ends at the deepest of them
    end = (is_accepted * index.offsets).argmax(0, keepdim=True)
    return AcceptedPath(index.paths[end][0], index.offsets[end] + 1, choices[end])
