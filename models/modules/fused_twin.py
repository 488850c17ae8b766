"""Fused layers for models of users, whose own modules stay as they are."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import model_type
from sequoia_plan.models.layers.fuse import fuse
from sequoia_plan.models.module_state import Watch, everything


class FusedTwin:
    """A model with fused layers in memory that it shares with `module`, whose passes it runs."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module, self.watch = module, Watch(everything)
        self.model = _with_own_children(module, {})
        self.replaced: list[tuple[nn.Module, nn.Module]] = []
        self.num_fused = fuse(self.model, on_replaced=self._share)
        self.watch.look(module)

    def check(self) -> None:
        """Follow changes of the weights; SequoiaPlanError for any other change."""
        names = self.watch.changes(self.module)
        if others := self._others(names):
            raise SequoiaPlanError(
                f"{model_type(self.module)}: {min(others)} changed after its layers were fused; "
                "make the decoder anew"
            )
        if names:
            self.pack()

    def is_stale(self) -> bool:
        """Has anything changed but the weights?"""
        return bool(self._others(self.watch.changes(self.module)))

    def _others(self, names: Sequence[str]) -> set[str]:
        """Which of these changes are not of weights: fused layers cannot follow them."""
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {*names} - {name for name, _ in tensors} if self.num_fused else set()

    @torch.no_grad()
    def pack(self) -> None:
        """Take over the weights as they are now."""
        replaced, self.replaced = self.replaced, []
        for modules in replaced:
            self._share(*modules)
        self.watch.look(self.module)

    def _share(self, module: nn.Module, fused: nn.Module) -> None:
        """Copy a module's weights to those of its fused one, whose memory it then uses itself."""
        self.replaced.append((module, fused))
        views = fused.state_dict()
        for name, parameter in module.named_parameters():
            if parameter.data_ptr() != views[name].data_ptr():
                views[name].copy_(parameter)
                if parameter.dtype == views[name].dtype:
                    parameter.data = views[name]


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
