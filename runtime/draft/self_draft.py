"""A draft out of the target itself: a copy of it in 8 bits (SubSpec, arXiv 2509.18344)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.models.forward import decoder_layers, text_config
from sequoia_plan.runtime.models.int8 import Int8Linear
from sequoia_plan.runtime.models.lean import LeanLayer, can_be_lean
from sequoia_plan.runtime.models.repack import RepackedLinear

INT8 = "int8"
"""What --draft is called for a draft out of the target."""


@torch.no_grad()
def self_draft(target: Any, layers: Iterable[Mapping[str, Tensor]] | None = None) -> Any:
    """A copy of `target` whose linear layers are in 8 bits. It shares the target's embeddings; the target is not changed.

    On the CPU it computes in bfloat16, the dtype that PyTorch's 8-bit kernel is fast in; elsewhere in the target's dtype.

    Args:
        target: a transformers causal LM. What is outside of its decoder layers is in memory; the layers may be on the meta device.
        layers: the weights of each decoder layer in order, by their names in it. They are taken one at a time, and nothing of one
            is kept once it is copied. They may be on another device. None for those that the target has.

    Raises:
        SequoiaPlanError: if the target has weights that are not those of linear layers, as mixtures of experts have, or was repacked.
    """
    if any(isinstance(module, RepackedLinear) for module in target.modules()):
        raise SequoiaPlanError(f"draft {INT8}: the target's linear layers are repacked for this processor; make the draft before, or load it as resident")
    dtype = torch.bfloat16 if target.device.type == "cpu" else target.dtype
    _, own = decoder_layers(target)
    given = (dict(layer.named_parameters()) for layer in own) if layers is None else iter(layers)
    copies = nn.ModuleList(_layer(target, layer, next(given), dtype) for layer in own)  # no name holds a layer's weights while the next is read
    replaced: dict[nn.Module, nn.Module] = {module: _shared(module, dtype) for module in target.modules() if isinstance(module, nn.Embedding)}
    return _copy(target, target, _parameters(target), dtype, replaced | {own: copies}).eval()


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(remove_duplicate=False))  # a tied head has a name of its own


def _layer(model: Any, layer: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    here = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    return LeanLayer(layer, here, dtype) if can_be_lean(model, layer) else _copy(model, layer, here, dtype, {})


def _copy(model: Any, module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, replaced: Mapping[nn.Module, nn.Module]) -> Any:
    """A copy of `module` with `tensors` as its parameters, linear layers in 8 bits, and `replaced` in place of what it names."""
    memo: dict[int, Any] = {id(config): config for config in (model.config, text_config(model))}
    memo |= {id(module): other for module, other in replaced.items()}
    for path, child in module.named_modules(memo=set(replaced)):
        prefix = f"{path}." if path else ""
        if type(child) in (nn.Linear, Conv1D):
            weight = tensors[f"{prefix}weight"]
            memo[id(child)] = Int8Linear(weight.T if isinstance(child, Conv1D) else weight, tensors.get(f"{prefix}bias"), dtype)
            continue
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.ndim > 1:
                raise SequoiaPlanError(
                    f"draft {INT8}: {model.config.model_type} has weights that are not those of linear layers ({prefix}{name}); name another draft"
                )
            memo[id(parameter)] = nn.Parameter(tensors[prefix + name].detach().to(dtype, copy=True), requires_grad=False)
    return copy.deepcopy(module, memo)


def _shared(embedding: nn.Embedding, dtype: torch.dtype) -> nn.Module:
    return embedding if embedding.weight.dtype == dtype else _Cast(embedding, dtype)


class _Cast(nn.Module):
    """The target's embeddings, looked up in another dtype. They stay the target's: they are not among the draft's parameters."""

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self._dtype, self._embedding = dtype, (embedding,)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._embedding[0](*args, **kwargs).to(self._dtype)
