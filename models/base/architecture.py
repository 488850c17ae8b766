"""What a transformers model is: its text configuration, layers, device, context and windows."""

from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import RopeParameters

from sequoia_plan.artifacts import SequoiaPlanError

CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change once a sequence exceeds the length that the model was first trained
for; keys that are cached by then would be wrong."""
FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""transformers' names of layers that attend to all tokens before, to those of a window that slides,
or to those of one of the chunks that the text is cut into."""
RECURRENT = ("linear_attention", "conv", "hybrid")
"""Those of layers with a recurrent state; beside attention in a layer, hybrid."""
AFTER_FINAL_NORM = -1
"""Hidden states are numbered in one way, whatever a checkpoint does: 0 is the embedding, k is the
output of layer k (counted from 1), so the last layer's is the one before the final norm. This is
the one after it, which the output head reads."""
UNLIMITED = 1 << 30  # stands for a length or a vocabulary that the model does not limit
T = TypeVar("T")


class Configured(Protocol):
    """What has a configuration: a model of transformers, a `LoadedModel`, a draft."""

    config: PreTrainedConfig
    dtype: torch.dtype


def unwrapped(model: T) -> T:
    """The model inside torch.compile's wrapper, or the model itself."""
    return getattr(model, "_orig_mod", model)


def without_adapter_wrapper(model: Any) -> PreTrainedModel:
    """The model that peft wraps: its layers hold the LoRA weights. Others are returned."""
    peft_config = getattr(model, "active_peft_config", None)
    if peft_config is None or not hasattr(model, "get_base_model"):
        return model
    if getattr(peft_config, "is_prompt_learning", False):
        raise SequoiaPlanError(
            f"{type(model).__name__}: adds tokens of its own to each prompt "
            f"({peft_config.peft_type}), expected adapters within layers, as LoRA; decode with "
            "transformers"
        )
    return model.get_base_model()


def model_type(model: Configured) -> str:
    """What error messages call the model: its configuration's `model_type`, else its class."""
    return getattr(model.config, "model_type", type(unwrapped(model)).__name__)


def text_config(model: Configured) -> PreTrainedConfig:
    """The configuration of the language model, also inside a multimodal one."""
    if hasattr(model.config, "get_text_config"):
        return model.config.get_text_config()
    return model.config


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the list of a model's decoder layers: its first list of the right length."""
    count = text_config(model).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise SequoiaPlanError(
        f"{model.config.model_type}: no list of {count} layers found in the model; it cannot be "
        "taken layer by layer"
    )


def execution_device(model: PreTrainedModel) -> torch.device:
    """The device where a model takes its input and computes.

    With accelerate's hooks, weights are on the meta device between passes; the hooks then know.
    """
    modules = [unwrapped(model)]
    if model.device.type == "meta":
        modules.append(model.get_input_embeddings())
    for module in modules:
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return model.device


def context_length(config: PreTrainedConfig) -> int:
    """Tokens that a sequence may have; `UNLIMITED` if the configuration sets no limit."""
    length = getattr(config, "max_position_embeddings", None) or UNLIMITED
    if not rope_changes(config):
        return length
    return min(length, _rope(config).get("original_max_position_embeddings") or length)


def head_size(config: PreTrainedConfig) -> int:
    """The numbers of one head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_changes(config: PreTrainedConfig) -> bool:
    """Do rotary embeddings depend on the length, which every pass then reads on the host?"""
    return _rope(config).get("rope_type") in CHANGING_ROPE


def rope_reason(config: PreTrainedConfig) -> str:
    """Why the context is shorter than the configuration's; "" if it is not."""
    longest, context = getattr(config, "max_position_embeddings", None), context_length(config)
    if not longest or context >= longest:
        return ""
    return (
        f"; {_rope(config)['rope_type']} rotary embeddings change beyond {context} of {longest} "
        "tokens, and the keys in the cache with them"
    )


def attention_window(config: PreTrainedConfig) -> tuple[int | None, bool]:
    """Tokens that attention sees, None for all of them, and whether the layers differ in type.

    Raises SequoiaPlanError for layers of a type that is not known here.
    """
    layer_types = set(getattr(config, "layer_types", None) or ())
    layer_types |= set(getattr(config, "attention_layers", None) or ())
    known_types = {FULL, WINDOWED, CHUNKED, "attention", "global", *RECURRENT, "moe", "mlp"}
    if unknown := sorted(layer_types - known_types):
        raise SequoiaPlanError(
            f"{config.model_type}: layers of kind {', '.join(unknown)} cannot branch into a tree, "
            "expected attention with a KV cache"
        )
    window: int | None = None
    if WINDOWED in layer_types or not layer_types:
        window = getattr(config, "sliding_window", None)
    if CHUNKED in layer_types:
        window = config.attention_chunk_size
    if not getattr(config, "use_sliding_window", True):
        window = None
    return window, len(layer_types) > 1


def _rope(config: PreTrainedConfig) -> RopeParameters:
    """The settings of the rotary embeddings."""
    return getattr(config, "rope_parameters", None) or {}
