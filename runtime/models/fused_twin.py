"""Fused layers for models of users, whose own modules stay as they are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from sequoia_plan.runtime.base.weight_stream import stream_of
from sequoia_plan.runtime.models.architecture import model_type
from sequoia_plan.runtime.models.compiled_passes import passes
from sequoia_plan.runtime.models.fuse import fuse, num_fused_layers
from sequoia_plan.runtime.models.fused_layer import FusedLayer, RMSNorm
from sequoia_plan.runtime.models.model_state import Copy, Watch, copied


class FusedTwin(Copy):
    """A model with fused layers in memory that it shares with `model`, whose passes it runs."""

    def __init__(self, model: Any) -> None:
        self.watch = Watch(partial(copied, sampled=False))
        self.model = _with_own_children(model, {})
        self.num_fused = fuse(self.model)
        self.pack(model)

    @torch.no_grad()
    def pack(self, model: Any) -> None:
        """Let the model's weights lie where the fused layers read them, as they are now."""
        twins = dict(self.model.named_modules())
        for name, module in model.named_modules():
            if isinstance(twin := twins.get(name), (FusedLayer, RMSNorm)) and twin is not module:
                views = twin.state_dict()
                for key, parameter in module.named_parameters():
                    if parameter.data_ptr() != views[key].data_ptr():
                        views[key].copy_(parameter)
                        if parameter.dtype == views[key].dtype:
                            parameter.data = views[key]
        self.watch.look(model)

    def why_not(self, model: Any, names: Collection[str]) -> str:
        """See `Copy`."""
        weights = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        return "" if weights.issuperset(names) else "more than its weights"


twins: WeakKeyDictionary[Any, FusedTwin | None] = WeakKeyDictionary()
"""The twin of each model that has been asked for one; None where its own layers run."""


def twin_of(model: Any) -> Any:
    """What runs the passes of a model on a CUDA device: its twin, or the model itself.

    A model that `load_pair` has placed is left alone, and one that is streamed or compiled.
    """
    if model in passes or num_fused_layers(model) or stream_of(model):
        return model
    twin = twins.get(model)
    if twin is None or twin.watch.changes(model):
        twin = FusedTwin(model)
        if not twin.num_fused:
            warnings.warn(
                f"{model_type(model)}: transformers' own layers run, which takes longer: no fused "
                "ones can take their place, or they gave other results",
                stacklevel=5,
            )
        twins[model] = twin
    return twin.model if twin.num_fused else model


def _with_own_children(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """A module with the same weights, whose children can be replaced without changing `module`."""
    if not module._modules:
        return module
    if module not in made:
        twin = made[module] = copy.copy(module)
        twin._modules = {
            name: child and _with_own_children(child, made)
            for name, child in module._modules.items()
        }
    return made[module]
