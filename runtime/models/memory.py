"""What a device's memory holds while a target is streamed: budgets, sizes and how they are split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.runtime.models.forward import text_config

SLOTS = 3
"""Layers in the ring. More of them gain nothing over as many resident layers, which take the same memory and are never read again."""
KV_TOKENS = 2048
"""The memory budget holds KV caches of so many tokens, or of the model's context if that is shorter."""


@dataclass(frozen=True)
class Split:
    """What the memory holds, in bytes.

    Args:
        memory: the budget.
        outside: embeddings, head, and whatever else is not in a layer.
        draft: the draft's own weights.
        cache: both models' KV caches of `KV_TOKENS` tokens.
        slots: the ring.
        resident: the layers that stay, by number; the others are streamed.
        resident_bytes, streamed_bytes: of their weights.
    """

    memory: int
    outside: int
    draft: int
    cache: int
    slots: int
    resident: tuple[int, ...]
    resident_bytes: int
    streamed_bytes: int

    def facts(self, link: str, layers: int) -> dict[str, Any]:
        """As profiles and trees record it."""
        return {
            "placement": f"streamed from {link}",
            "memory": self.memory,
            "resident_layers": len(self.resident),
            "layers": layers,
            "resident_bytes": self.outside + self.resident_bytes,
            "streamed_bytes": self.streamed_bytes,
            "slot_bytes": self.slots,
            "draft_bytes": self.draft,
            "cache_bytes": self.cache,
        }


def split_memory(memory: int, outside: int, draft: int, cache: int, layers: list[int]) -> Split:
    """As many resident layers as fit, spread evenly, so that reading goes on while they compute.

    Args:
        layers: each layer's bytes.

    Raises:
        SequoiaPlanError: if not even the ring fits.
    """
    largest = max(layers)
    fixed = outside + draft + cache
    if fixed + sum(layers) <= memory:
        return Split(memory, outside, draft, cache, 0, tuple(range(len(layers))), sum(layers), 0)
    slots = SLOTS * largest
    room = memory - fixed - slots
    if room < 0:
        raise SequoiaPlanError(
            f"memory: found {shown(memory)}, expected at least {shown(fixed + slots)}: {shown(outside)} for embeddings and head, {shown(draft)} for the draft, "
            f"{shown(cache)} for KV caches, {shown(slots)} for {SLOTS} layers at a time"
        )
    count = min(room // largest, len(layers) - 1)
    resident = tuple(int((place + 0.5) * len(layers) / count) for place in range(count))
    kept = sum(layers[layer] for layer in resident)
    return Split(memory, outside, draft, cache, slots, resident, kept, sum(layers) - kept)


def as_bytes(memory: str | int | None, device: torch.device) -> int:
    """300MB, 24GB, 1.5GiB or a number of bytes; None for what is free.

    Raises:
        ArgumentError: for anything else.
    """
    if memory is None:
        return free_memory(device)
    text = str(memory).strip().lower().removesuffix("b")
    units = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
    unit = next((unit for unit in sorted(units, key=len, reverse=True) if text.endswith(unit)), "")
    try:
        size = float(text.removesuffix(unit)) * units.get(unit, 1)
    except ValueError:
        size = -1
    if not 0 < size < 1 << 60:
        raise ArgumentError(f"memory: found {memory!r:.40}, expected a size, as 300MB or 24GB")
    return int(size)


def shown(size: float) -> str:
    """1500000 -> 1.5 MB"""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on `device`: of the host's memory, what the system and the process's control group leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            free = min(free, int(Path("/sys/fs/cgroup", limit).read_text()) - int(Path("/sys/fs/cgroup", used).read_text()))
        except (OSError, ValueError):  # no such group, or no limit
            continue
    return free


def cache_bytes(model: Any) -> int:
    """A KV cache of `KV_TOKENS` tokens, or of the model's context."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = min(KV_TOKENS, getattr(config, "max_position_embeddings", None) or KV_TOKENS)
    return int(2 * config.num_hidden_layers * heads * width * tokens * model.dtype.itemsize)


def own_bytes(model: Any, other: Any) -> int:
    """Of a model's weights, those that it does not share with another one."""
    shared = {tensor.data_ptr() for tensor in other.parameters()}
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors if tensor.data_ptr() not in shared)
