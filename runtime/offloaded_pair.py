"""Loading a pair whose target keeps in memory what fits, and streams the other layers."""

from __future__ import annotations

from typing import Any

import torch

from sequoia_plan.runtime.draft.self_draft import (
    INT8,
    copy_bytes,
    copy_can_share,
    share_layers,
    shares_cache,
)
from sequoia_plan.runtime.models.metadata import model_metadata
from sequoia_plan.runtime.offload.memory import (
    MemorySplit,
    as_bytes,
    cache_bytes,
    own_bytes,
    split_memory,
)
from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget
from sequoia_plan.runtime.pair import RESIDENT, Pair, add_draft, context_remarks


def load_offloaded_pair(
    target: str | None,
    draft: str | None,
    device: str,
    dtype: torch.dtype,
    placement: str,
    link: str,
    memory: str | int | None,
) -> Pair:
    """Load the pair; the draft is not placed yet. Arguments: `load_pair`."""
    offloaded = OffloadedTarget(target, device, dtype)
    model, num_layers = offloaded.model, len(offloaded.layers)
    budget = as_bytes(memory, offloaded.device)
    split = _split_with_copy(offloaded, budget) if draft == INT8 else None
    shared_layers = split.resident_layers if split else None
    metadata = {"target": model_metadata(offloaded.name, model, offloaded.weight_samples())}
    remarks = context_remarks(model)
    pair = Pair(model, None, offloaded.tokenizer, metadata, f"streamed from {link}", remarks)
    pair = add_draft(pair, draft, offloaded.layer, shared_layers)
    split = split or _split_beside(offloaded, pair.draft, budget)
    is_fused = placement != RESIDENT
    num_fused = offloaded.place(split, link, is_fused)
    metadata["target"].update(split.to_metadata(link, num_layers))
    if is_fused:
        metadata["target"]["fused_layers"] = num_fused
    share_layers(pair.draft, model, shared_layers or ())
    return pair


def _split_with_copy(offloaded: OffloadedTarget, budget: int) -> MemorySplit | None:
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


def _split_beside(offloaded: OffloadedTarget, draft: Any, budget: int) -> MemorySplit:
    """What fits into `budget` bytes beside a draft, which may be None."""
    target = offloaded.model
    caches, draft_bytes = cache_bytes(target), 0
    if draft is not None:
        draft_bytes = own_bytes(draft, target)
        caches += 0 if shares_cache(draft, target) else cache_bytes(draft)
    return split_memory(
        budget, offloaded.outside_bytes, draft_bytes, caches, offloaded.layer_sizes()
    )
