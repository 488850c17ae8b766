"""A draft that is made from the target: a copy of it in 8 bits (SubSpec, arXiv 2509.18344)."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.backends.modules.backend import ModuleBackend
from sequoia_plan.runtime.models.architecture import decoder_layers, text_config
from sequoia_plan.runtime.models.fuse import num_fused_layers
from sequoia_plan.runtime.models.fused_layer import FusedLayer, can_fuse, has_gated_mlp
from sequoia_plan.runtime.models.int8 import Int8Linear
from sequoia_plan.runtime.models.loaded_model import LoadedModel

INT8 = "int8"
"""The value of --draft that asks for such a draft."""


def draft_dtype(target: Any) -> torch.dtype:
    """What a copy computes in: on the CPU bfloat16, which PyTorch's 8-bit kernel is fast in."""
    return torch.bfloat16 if target.device.type == "cpu" else target.dtype


@torch.no_grad()
def self_draft(
    model: LoadedModel,
    load_layer: Callable[[int], Mapping[str, Tensor]] | None = None,
) -> LoadedModel:
    """A copy of a model's module whose linear layers are in 8 bits; the module is not changed.

    The copy shares the module's embeddings, and computes in `draft_dtype`. `load_layer` returns the
    weights of a layer that is not in memory.
    """
    target = model.module
    dtype = draft_dtype(target)
    _, target_layers = decoder_layers(target)
    # no variable may hold one layer's weights while the next layer's are read
    layer_copies = nn.ModuleList(
        _layer_copy(
            target,
            layer,
            load_layer(number) if load_layer else dict(layer.named_parameters()),
            dtype,
        )
        for number, layer in enumerate(target_layers)
    )
    replacements: dict[nn.Module, nn.Module] = {
        module: _shared_embedding(module, dtype)
        for module in target.modules()
        if isinstance(module, nn.Embedding)
    }
    replacements[target_layers] = layer_copies
    # a tied head has a name of its own
    tensors = dict(target.named_parameters(remove_duplicate=False))
    module = _copy_in_8_bits(target, target, tensors, dtype, replacements).eval()
    recorded: dict[str, Any] = {"placement": "resident"}
    if num_fused := num_fused_layers(module):
        recorded["fused_layers"] = num_fused
    draft = LoadedModel(
        ModuleBackend(module, recorded), text_config(module), name=f"{model.name} {INT8}"
    )
    if module.dtype == target.dtype:
        draft.copy_of = model
    return draft


def _layer_copy(
    model: Any, layer: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> nn.Module:
    """One decoder layer of `model` in 8 bits, computed with fewer operations where it can be."""
    tensors = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    if can_fuse(layer) and has_gated_mlp(layer):
        return FusedLayer(layer, tensors, dtype, partial(Int8Linear, dtype=dtype))
    return _copy_in_8_bits(model, layer, tensors, dtype, {})


def _copy_in_8_bits(
    model: Any,
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    replacements: Mapping[nn.Module, nn.Module],
) -> Any:
    """A copy of `module` with linear layers in 8 bits, and everything else in `dtype`."""
    # `deepcopy` takes what is in the memo in place of a copy
    memo: dict[int, Any] = {id(config): config for config in (model.config, text_config(model))}
    memo |= {id(original): substitute for original, substitute in replacements.items()}
    for path, child in module.named_modules(memo=set(replacements)):
        prefix = f"{path}." if path else ""
        if type(child) in (nn.Linear, Conv1D):
            weight = tensors[f"{prefix}weight"]
            if isinstance(child, Conv1D):
                weight = weight.T
            memo[id(child)] = Int8Linear(weight, tensors.get(f"{prefix}bias"), dtype)
            continue
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.ndim > 1:
                raise SequoiaPlanError(
                    f"draft {INT8}: {model.config.model_type} has weights that are not those of "
                    f"linear layers ({prefix}{name}); name another draft"
                )
            tensor = tensors[prefix + name].detach().to(dtype, copy=True)
            memo[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
    return copy.deepcopy(module, memo)


def _shared_embedding(embedding: nn.Embedding, dtype: torch.dtype) -> nn.Module:
    """The target's embeddings as a module that returns `dtype`; the weights are not copied."""
    return embedding if embedding.weight.dtype == dtype else _CastEmbedding(embedding, dtype)


class _CastEmbedding(nn.Module):
    """The target's embeddings, looked up in another dtype.

    They are in a tuple, so that they are not among the draft's parameters.
    """

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self._dtype, self._embedding = dtype, (embedding,)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look tokens up with the target's module, and cast the result."""
        return self._embedding[0](*args, **kwargs).to(self._dtype)
