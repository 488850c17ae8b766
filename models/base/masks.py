"""Additive attention masks: 0 where a token attends, else the dtype's lowest number."""

import torch
from torch import Tensor

from sequoia_plan.models.base.cache import TreeCache


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible` (bool) is true, else the lowest number of `dtype`.

    Of all forms of masks, transformers' attention by `sdpa` and by `eager` both accept only this.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)


def causal_mask(slots: Tensor, extent: int, dtype: torch.dtype) -> Tensor:
    """[tokens, extent]: the tokens in `slots` (int64 [tokens]) see all slots up to their own."""
    return additive_mask(torch.arange(extent, device=slots.device) <= slots[:, None], dtype)


def mask_as_dtype(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask in another dtype, whose lowest number may be higher."""
    return mask if mask.dtype == dtype else mask.to(dtype).clamp(min=torch.finfo(dtype).min)


def windowed_mask(
    cache: TreeCache, mask: Tensor, positions: Tensor, slots: Tensor, window: int | Tensor
) -> Tensor:
    """An additive mask that also hides what is `window` positions before the token, or more.

    Records the positions of `slots` in the cache first, because slots are not positions in a tree.
    `positions`, `slots` int64 [tokens]; `window` may be int64 [tokens, 1].
    """
    if cache.positions is None:  # the cache holds no more than a window
        return mask
    cache.positions.index_copy_(0, slots, positions)
    inside = cache.positions[: mask.shape[1]] > positions[:, None] - window
    return mask.where(inside, torch.finfo(mask.dtype).min)
