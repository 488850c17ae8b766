"""What fits in memory of a target that is streamed, beside its draft."""

from typing import Any

import torch

from sequoia_plan.runtime.draft.self_draft import (
    copy_bytes,
    copy_can_share,
    shares_cache,
)
from sequoia_plan.runtime.offload.memory import (
    SLOTS,
    MemorySplit,
    cache_bytes,
    own_bytes,
    split_memory,
)
from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget


def split_with_copy(offloaded: OffloadedTarget, budget: int) -> MemorySplit | None:
    """What fits into `budget` bytes where the draft has a copy of the streamed layers alone.

    None if a copy cannot share layers, or if nothing has to be streamed.
    """
    target = offloaded.model
    if not copy_can_share(target):
        return None
    # the norm after the last layer and the rotary embeddings
    outside = [
        tensor
        for name, tensor in (*target.named_parameters(), *target.named_buffers())
        if tensor.ndim < 2 and not name.startswith(offloaded.layers_name)
    ]
    split = split_memory(
        budget,
        offloaded.outside_bytes,
        copy_bytes(outside, torch.float32),
        cache_bytes(target),
        offloaded.layer_sizes(),
        max(copy_bytes(layer.parameters(), target.dtype) for layer in offloaded.layers),
    )
    return split if split.streamed_bytes else None


def split_beside(offloaded: OffloadedTarget, draft: Any, budget: int, link: str) -> MemorySplit:
    """What fits into `budget` bytes beside a draft, which may be None."""
    target = offloaded.model
    caches, draft_bytes = cache_bytes(target), 0
    if draft is not None:
        draft_bytes = own_bytes(draft, target)
        caches += 0 if shares_cache(draft, target) else cache_bytes(draft)
    return split_memory(
        budget,
        offloaded.outside_bytes,
        draft_bytes,
        caches,
        offloaded.layer_sizes(),
        slots=1 if offloaded.routed and link == "disk" else SLOTS,
    )
