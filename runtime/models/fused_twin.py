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
from sequoia_plan.runtime.models.model_state import Copy, Watch, copied


class FusedTwin(Copy):
    """A model with fused layers in memory that it shares with `model`, whose passes it runs."""

    def __init__(self, model: Any) -> None:
        self.watch = Watch(partial(copied, sampled=False))
        self.model = _with_own_children(model, {})
        self.replaced: list[tuple[nn.Module, nn.Module]] = []
        self.num_fused = fuse(self.model, on_replaced=self._share)
        self.watch.look(model)

    def _share(self, module: nn.Module, fused: nn.Module) -> None:
        """Let the weights of a module lie where its fused one reads them."""
        self.replaced.append((module, fused))
        views = fused.state_dict()
        for name, parameter in module.named_parameters():
            if parameter.data_ptr() != views[name].data_ptr():
                views[name].copy_(parameter)
                if parameter.dtype == views[name].dtype:
                    parameter.data = views[name]

    @torch.no_grad()
    def pack(self, model: Any) -> None:
        """Take over the weights as they are now."""
        replaced, self.replaced = self.replaced, []
        for modules in replaced:
            self._share(*modules)
        self.watch.look(model)

    def why_not(self, model: Any, names: Collection[str]) -> str:
        """See `Copy`."""
        weights = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        return "" if weights.issuperset(names) else "more than its weights"


twins: WeakKeyDictionary[Any, FusedTwin] = WeakKeyDictionary()
"""The twin of each model that has been asked for one."""


def twin_of(model: Any) -> Any:
    """What runs the passes of a model on a CUDA device: its twin, or the model itself.

    A model that `load_pair` has placed is left alone, and one that is streamed or compiled.
    """
    if model in passes or num_fused_layers(model) or stream_of(model):
        return model
    twin = twins.get(model)
    changed = twin.watch.changes(model) if twin else ()
    if twin is None or twin.why_not(model, changed):
        twin = FusedTwin(model)
        if not twin.num_fused:
            warnings.warn(
                f"{model_type(model)}: transformers' own layers run, which takes longer: no fused "
                "ones can take their place, or they gave other results",
                stacklevel=5,
            )
        twins[model] = twin
    elif changed:
        twin.pack(model)
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
