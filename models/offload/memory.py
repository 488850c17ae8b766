"""What a device's memory holds while a target is streamed: the budget, sizes, and the split."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError
from sequoia_plan.models.base.architecture import Configured, head_size, text_config
from sequoia_plan.models.loaded_model import LoadedModel

SLOTS = 3
"""Slots of the ring, a layer each; two where there is no memory for three. More slots gain nothing
over as many resident layers, which take the same memory and are never read again."""
KV_TOKENS = 2048
"""The budget includes KV caches of so many tokens, or of the model's context if that is shorter."""
MAX_BYTES = 10**18  # more than any machine has
SIZE = re.compile(r"(\d+\.?\d*) *([kmgt]?)(i?)b?")  # a number, and perhaps a unit
CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""The limit and the use of memory of the process's control group, for cgroup versions 2 and 1."""


@dataclass(frozen=True)
class MemorySplit:
    """What the memory holds. Sizes are in bytes."""

    memory: int
    outside_bytes: int
    draft_bytes: int
    cache_bytes: int
    slots: int
    slot_bytes: int
    resident_layers: tuple[int, ...]
    resident_bytes: int
    streamed_bytes: int

    def to_metadata(self, link: str, layers: int) -> dict[str, object]:
        """The placement as profiles and trees record it."""
        return {
            "placement": f"streamed from {link}",
            "memory": self.memory,
            "resident_layers": len(self.resident_layers),
            "layers": layers,
            "resident_bytes": self.outside_bytes + self.resident_bytes,
            "streamed_bytes": self.streamed_bytes,
            "slot_bytes": self.slot_bytes,
            "draft_bytes": self.draft_bytes,
            "cache_bytes": self.cache_bytes,
        }


def split_memory(
    memory: int,
    outside_bytes: int,
    draft_bytes: int,
    cache_bytes: int,
    layer_sizes: list[int],
    slots: int = SLOTS,
) -> MemorySplit:
    """Keep as many layers resident as fit; SequoiaPlanError if `memory` has no room for `slots`.

    Sizes are in bytes. Resident layers are spread evenly, so that reading goes on meanwhile. With
    one slot, nothing is read ahead: experts stay instead of layers, as many as fit.
    """
    num_layers, total_bytes = len(layer_sizes), sum(layer_sizes)
    max_size, slot_bytes, expert_bytes = max(layer_sizes), 0, 0
    fixed_bytes = outside_bytes + draft_bytes + cache_bytes
    num_resident = num_layers
    if fixed_bytes + total_bytes > memory:
        slots -= slots == SLOTS and fixed_bytes + SLOTS * max_size > memory
        slot_bytes = slots * max_size
        needed_bytes = fixed_bytes + slot_bytes
        if needed_bytes > memory:
            raise SequoiaPlanError(
                f"memory: found {format_bytes(memory)}, expected at least "
                f"{format_bytes(needed_bytes)}: {format_bytes(outside_bytes)} for embeddings and "
                f"head, {format_bytes(draft_bytes)} for the draft, "
                f"{format_bytes(cache_bytes)} for KV caches, {format_bytes(slot_bytes)} for "
                f"{slots} layers at a time"
            )
        num_resident -= 1
        if slots == 1:
            num_resident, expert_bytes = 0, memory - needed_bytes
        else:
            num_resident = min((memory - needed_bytes) // max_size, num_resident)
    resident_layers = tuple(int((i + 0.5) * num_layers / num_resident) for i in range(num_resident))
    resident_bytes = expert_bytes + sum(layer_sizes[layer] for layer in resident_layers)
    return MemorySplit(
        memory,
        outside_bytes,
        draft_bytes,
        cache_bytes,
        slots,
        slot_bytes,
        resident_layers,
        resident_bytes,
        total_bytes - resident_bytes,
    )


def as_bytes(memory: str | int | None, device: torch.device) -> int:
    """Bytes from a size as 300MB, 24GB, 1.5GiB or a number of bytes; None for what is free."""
    if memory is None:
        return free_memory(device)
    match, size = SIZE.fullmatch(str(memory).strip().lower()), 0.0
    if match:
        number, unit, is_binary = match.groups()
        size = float(number) * (1024 if is_binary else 1000) ** " kmgt".index(unit or " ")
    if not 0 < size < MAX_BYTES:
        raise ArgumentError(f"memory: found {memory!r:.40}, expected a size, as 300MB or 24GB")
    return int(size)


def format_bytes(size: float) -> str:
    """1500000 -> 1.5 MB"""
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6)):
        if size >= unit_bytes:
            return f"{size / unit_bytes:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def free_memory(device: torch.device) -> int:
    """Free bytes on `device`; of host memory, what the system and the control group leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    free_bytes = psutil.virtual_memory().available
    for files in CGROUP_FILES:
        with suppress(OSError, ValueError):  # no such group, or no limit
            limit, usage = (int(Path("/sys/fs/cgroup", file).read_text()) for file in files)
            free_bytes = min(free_bytes, limit - usage)
    return free_bytes


def cache_bytes(model: Configured) -> int:
    """Bytes of a model's KV cache of `KV_TOKENS` tokens, or of its context if that is shorter."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    tokens = min(KV_TOKENS, getattr(config, "max_position_embeddings", None) or KV_TOKENS)
    # a key and a value for each layer, head and token
    num_elements = 2 * config.num_hidden_layers * heads * head_size(config) * tokens
    return num_elements * model.dtype.itemsize


def own_bytes(draft: Any, target: LoadedModel) -> int:
    """Bytes of a draft's weights, without those that it shares with the target."""
    shared = dict(target.backend.weight_memory())
    own = getattr(draft, "backend", draft).weight_memory()
    return sum(size for address, size in own if address not in shared)
