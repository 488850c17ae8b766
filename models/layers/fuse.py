"""Replacing a model's decoder layers by fused ones that are proven to compute the same."""

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer as DecoderLayer

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.models.layers.fused_layer import (
    FUSIBLE_NORMS,
    FusedLayer,
    can_fuse,
    has_gated_mlp,
    is_as_defined,
)
from sequoia_plan.models.layers.fused_norm import fused_norm

MAX_ERROR = 1e-4
"""The relative error, in float32, below which a fused layer takes the place of transformers'."""
TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 3])
"""The tree of the tokens that a layer is tried on; a token attends to its ancestors."""


@torch.no_grad()
def fuse(
    model: nn.Module,
    proven: Mapping[Hashable, bool] | None = None,
    on_replaced: Callable[[nn.Module, nn.Module], None] = lambda module, fused: None,
) -> int:
    """Replace the decoder layers of `model` by fused ones, in place, where that is possible.

    A layer is replaced if it `can_fuse`, and if a fused layer of its kind computes the same:
    `proven` is what `try_kinds` found, which is tried here if not given. Norms outside of layers
    are, too. `on_replaced` gets each module and its fused one. Returns how many layers are fused.
    """
    layer_lists = [module for module in model.modules() if type(module) is nn.ModuleList]
    if proven is None:
        proven = try_kinds(layer for layers in layer_lists for layer in layers)
    for layer_list in layer_lists:
        for number, layer in enumerate(layer_list):
            if can_fuse(layer) and proven.get(_kind(layer)):
                layer_list[number] = _fused(layer)
                on_replaced(layer, layer_list[number])
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in FUSIBLE_NORMS and is_as_defined(child):
                setattr(module, name, fused_norm(child, child.get_parameter("weight")))
                on_replaced(child, getattr(module, name))
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if type(layers) is nn.ModuleList:  # each layer's sum is normed where it is computed
            norms = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
            norms.append(getattr(module, "norm", None))
            for layer, norm in zip(layers, norms, strict=True):
                if isinstance(layer, FusedLayer):
                    layer.next_norm = (norm,)
    return num_fused_layers(model)


def try_kinds(
    layers: Iterable[nn.Module], load: Callable[[int], Mapping[str, Tensor]] | None = None
) -> dict[Hashable, bool]:
    """Try once for each kind of layer (see `_kind`) whether a fused one computes the same.

    `load` returns the weights of the layer with a number, where they are not in memory.
    """
    computes_the_same: dict[Hashable, bool] = {}
    for number, layer in enumerate(layers):
        if can_fuse(layer) and (kind := _kind(layer)) not in computes_the_same:
            error = fused_layer_error(layer, load and partial(load, number))
            computes_the_same[kind] = error < MAX_ERROR
    return computes_the_same


def num_fused_layers(model: nn.Module) -> int:
    """How many layers of `model` are fused."""
    return sum(isinstance(module, FusedLayer) for module in model.modules())


@torch.no_grad()
def fused_layer_error(
    layer: DecoderLayer, load: Callable[[], Mapping[str, Tensor]] | None = None
) -> float:
    """The largest relative error of a fused layer's attention and MLP against those of `layer`.

    Both are in float32, with their norms. `load` returns the weights by name, where they are not in
    memory. Experts are left out: a fused layer keeps them.
    """
    kept_modules = {} if has_gated_mlp(layer) else {id(layer.mlp): nn.Identity()}
    original = copy.deepcopy(layer, kept_modules)
    if load is not None:
        original.load_state_dict(load(), strict=False, assign=True)  # without the experts
    original.float()
    fused = _fused(original)
    width, projection = layer.post_attention_layernorm.weight.numel(), original.self_attn.q_proj
    device, attention_width = projection.weight.device, projection.in_features
    # another thread may have set the default dtype
    generator = torch.Generator().manual_seed(0)
    # small rows show another epsilon in a norm, large ones show values that are clipped
    scale = torch.logspace(-3, 1, TREE.size, dtype=torch.float32)[:, None]
    rows = (
        torch.randn(1, TREE.size, attention_width, generator=generator, dtype=torch.float32) * scale
    )
    angles = torch.rand(
        1, TREE.size, original.self_attn.head_dim // 2, generator=generator, dtype=torch.float32
    )
    angles = torch.cat((angles, angles), -1).to(device) * torch.pi
    position_embeddings = angles.cos(), angles.sin()
    mask = additive_mask(torch.tensor(TREE.attention_mask), torch.float32).to(device)[None, None]

    def added_states(module: DecoderLayer | FusedLayer) -> tuple[Tensor, Tensor]:
        """What attention, and what the MLP, adds to hidden states: [tokens, width] each."""
        hidden_states = rows.to(device)
        if attention_width == width:  # EAGLE-3's first layer reads twice the width
            hidden_states = module.input_layernorm(hidden_states)
        attended = module.self_attn(
            hidden_states=hidden_states,
            attention_mask=mask,
            position_embeddings=position_embeddings,
        )[0]
        normed = module.post_attention_layernorm(rows[..., :width].to(device))
        return attended[0], module.mlp(normed)[0]

    return max(map(_relative_error, added_states(original), added_states(fused)))


def _relative_error(expected: Tensor, computed: Tensor) -> float:
    """The largest |computed - expected| / |expected| of the rows of two matrices."""
    return float(((computed - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _fused(layer: DecoderLayer) -> FusedLayer:
    """The fused layer that takes the place of `layer`, with its weights."""
    return FusedLayer(layer, dict(layer.named_parameters())).eval()


def _kind(layer: DecoderLayer) -> Hashable:
    """A layer's class, shapes of parameters and settings: equal ones compute the same function."""
    shapes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
    settings = tuple(
        (name, value)
        for name, value in sorted(vars(layer.self_attn).items())
        if isinstance(value, (bool, int, float, str)) and name != "layer_idx"
    )
    return type(layer), shapes, settings
