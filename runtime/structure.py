"""A token tree as tensors: which slots its nodes take, what each node sees, and how it is verified."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.models.forward import additive
from sequoia_plan.runtime.verify.index import TreeIndex


@dataclass(frozen=True)
class Structure:
    """A token tree on one device. One numbering holds for tokens, keys, values and masks: node i is in slot length + i, where `length`
    is the root's slot. Committed tokens are in the slots before it, so -1 stands for the token before the root.

    Args:
        nodes: int64 [size], 0, 1, ...
        offsets: int64 [size], how many positions a node is after the root.
        mask: [size, size + 2], what each node sees, as an additive mask. Column 0 stands for all committed tokens, column i + 1 for
            node i, the last one for every slot beyond the tree.
        index: what verification needs.
    """

    nodes: Tensor
    offsets: Tensor
    mask: Tensor
    index: TreeIndex

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device | str, dtype: torch.dtype) -> Structure:
        """The tensors of `tree`; the mask in `dtype`."""
        index = TreeIndex.of(tree, device)
        seen = torch.zeros(tree.size, tree.size + 2, dtype=torch.bool)
        seen[:, 0] = True
        seen[:, 1:-1] = torch.from_numpy(tree.attention_mask.copy())
        return cls(torch.arange(tree.size, device=device), index.offsets, additive(seen.to(device), dtype), index)

    def columns(self, length: Tensor, extent: int) -> Tensor:
        """int64 [extent]: the column of a mask that each slot below `extent` has while the root is in slot `length` (int64 [1])."""
        slots = torch.arange(extent, device=length.device)
        return (slots - (length - 1)).clamp_(0, self.mask.shape[1] - 1)
