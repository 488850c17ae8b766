"""Randomness under tensor parallelism: every process runs the same decoder and must draw the same numbers."""

from __future__ import annotations

from typing import Any

import torch

from sequoia_plan.runtime.models.forward import plain


def shared_seed(model: Any) -> int:
    """A fresh seed; where `model` is split over processes (transformers' `tp_plan`), the first one's."""
    seed = torch.Generator().seed() % (1 << 63)
    if (getattr(plain(model), "_tp_size", None) or 1) > 1:
        seeds = [seed]
        torch.distributed.broadcast_object_list(seeds, group=_group(model), group_src=0)
        seed = seeds[0]
    return seed


def _group(model: Any) -> Any:
    """The processes that share the model's layers; None stands for all."""
    mesh = getattr(plain(model), "_device_mesh", None)
    if mesh is None:
        return None
    return mesh["tp"].get_group() if "tp" in (mesh.mesh_dim_names or ()) else mesh.get_group()
