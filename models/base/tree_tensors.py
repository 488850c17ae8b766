"""A token tree as tensors: its nodes' slots, positions and attention mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base.masks import additive_mask


@dataclass(frozen=True)
class TreeTensors:
    """A token tree on one device.

    One numbering holds for tokens, keys, values and masks: with the root in slot `length`, node i
    is in slot length + i. Committed tokens are in the slots before it, so -1 stands for the
    committed token before the root. `nodes` int64 [size]; `offsets` int64 [size]: of positions
    from the root's, so a node's is its level; `mask` [size, size + 2].
    """

    nodes: Tensor
    offsets: Tensor
    mask: Tensor

    @classmethod
    def of(cls, tree: TokenTree, device: torch.device | str, dtype: torch.dtype) -> TreeTensors:
        """The tensors of `tree`; the mask in `dtype`."""
        # one column for committed tokens before the nodes' columns, one for other slots after them
        visible = torch.zeros(tree.size, tree.size + 2, dtype=torch.bool)
        visible[:, 0] = True
        visible[:, 1:-1] = torch.from_numpy(tree.attention_mask.copy())
        nodes = torch.arange(tree.size, device=device)
        offsets = torch.as_tensor(tree.position_ids.astype("int64"), device=device)
        return cls(nodes, offsets, additive_mask(visible.to(device), dtype))

    def columns(self, length: Tensor, extent: int) -> Tensor:
        """int64 [extent]: the column of `mask` that stands for each slot below `extent`.

        `length` int64 [1].
        """
        slots = torch.arange(extent, device=length.device)
        return (slots - (length - 1)).clamp_(0, self.mask.shape[1] - 1)
