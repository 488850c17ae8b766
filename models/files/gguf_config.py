"""What a GGUF file says of its model, as transformers' configuration; none of it is left out."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import RopeParameters

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import RECURRENT, WINDOWED, head_size
from sequoia_plan.models.files.gguf_file import GgufFile
from sequoia_plan.models.files.stored import decoded_rows

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
"""Of Llama-like models, by llama.cpp's name of the architecture."""

SETTINGS = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_epsilon": (
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_epsilon",
        "norm_eps",
    ),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "feed_forward_length": ("ffn_hidden_size", "intermediate_size", "n_inner"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.state_size": ("linear_key_head_dim",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
    "use_parallel_residual": ("use_parallel_residual",),
    "vocab_size": ("vocab_size",),
}
"""A key of the architecture's metadata -> transformers' names of it, of which a model has one."""
ROPE_SETTINGS = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.type": "rope_type",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""The same for `rope_parameters`."""
ROPE_TYPES = {"none": "default", "linear": "linear", "yarn": "yarn"}
HEAD_SIZES = ("attention.key_length", "attention.value_length")
ROPE_DIMENSIONS = "rope.dimension_count"
WITHOUT_EFFECT = {"rope.scaling.finetuned", "tensor_data_layout", "rope.dimension_sections"}
"""Of the last one, a text's positions are the same in all sections."""
NEUTRAL: dict[float | None, str] = {
    0: "attention.sliding_window attention.max_alibi_bias attention.clamp_kqv expert_count "
    "expert_used_count expert_shared_count attn_logit_softcapping final_logit_softcapping",
    1: "logit_scale residual_scale embedding_scale attention.causal rope.scaling.attn_factor",
}
"""Keys of the metadata that change nothing with a value of 0, or of 1."""
LAYERS_OF_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose attention llama.cpp scales by hidden size over heads; no key says."""
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor that divides the frequencies of rotary embeddings, as Llama 3.1 and later need."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The rule that gives the factors of all published ones."""


def read_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration of a GGUF file's model.

    transformers reads some of the metadata; what it leaves at a default is set here. Raises
    SequoiaPlanError for a key of the metadata that the configuration has no setting for.
    """
    metadata = file.settings
    if "rope.scaling.factor" in metadata:
        metadata = {"rope.scaling.type": "linear"} | metadata  # llama.cpp's default
    if config_class := CONFIGS.get(file.architecture):  # transformers would take longer
        config = _llama_like_config(config_class, file, metadata)
    else:
        config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
    if metadata.get("attention.key_length", head_size(config)) != head_size(config):
        config.head_dim = metadata["attention.key_length"]
    if num_layers := LAYERS_OF_LARGEST_GEMMA.get(file.architecture):
        scale = head_size(config)
        if config.num_hidden_layers == num_layers:  # no key of the metadata says its scale
            scale = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = scale
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # there may be one for each type of layer
    for key, value in metadata.items():
        if key in WITHOUT_EFFECT or _set(config, rope, key, value):
            continue
        raise SequoiaPlanError(
            f"{file.path}: {file.architecture}.{key} is {value!r:.60}, which a "
            f"{type(config).__name__} has no setting for; its logits would be wrong: use the model "
            "as a folder or a hub ID"
        )
    if rope.get("rope_type") == "linear":
        rope.setdefault("factor", 1.0)
    if config.num_hidden_layers > len(file.tensors):
        raise SequoiaPlanError(
            f"{file.path}: {file.architecture}.block_count is {config.num_hidden_layers}, the file "
            f"has {len(file.tensors)} tensors; get it again"
        )
    if factors := file.tensors.get(ROPE_FACTORS):
        values = decoded_rows(factors.format, factors.read()).astype(np.float64).reshape(-1)
        _set_factors(file.path, rope, values)
    return config


def _llama_like_config(
    config_class: type[PreTrainedConfig], file: GgufFile, metadata: dict[str, Any]
) -> PreTrainedConfig:
    """The configuration that transformers makes of the metadata; it reads a file more slowly."""
    defaults, tokens = config_class(), file.metadata.get("tokenizer.ggml.tokens", ())
    settings = {
        name: value
        for key, value in metadata.items()
        for name in SETTINGS.get(key, ())
        if hasattr(defaults, name)
    }
    width, heads = settings["hidden_size"], settings["num_attention_heads"]
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        settings["head_dim"] = metadata.get("attention.key_length", width // heads)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        settings[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config_class(
        **{"vocab_size": len(tokens) or defaults.vocab_size} | settings,
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_parameters=dict(defaults.rope_parameters or {"rope_type": "default"}),
    )


def refuse_unread_tensors(file: GgufFile, model: PreTrainedModel) -> None:
    """Raise SequoiaPlanError if a GGUF file has numbers that are not in its model, or too few."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    weights = model.state_dict()
    sizes = {n: math.prod(t.shape) for n, t in file.tensors.items() if n != ROPE_FACTORS}
    needed = {weight.data_ptr(): weight.numel() for weight in weights.values()}  # tied ones once
    if sum(sizes.values()) == sum(needed.values()):
        return
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(numbers[file.architecture], len(weights))
    read = {names.get_name(name, (".weight", ".bias")) for name in weights}
    unread = [name for name in sizes if name not in read]
    raise SequoiaPlanError(
        f"{file.path}: has {sum(sizes.values())} weights, a {type(model).__name__} of this size "
        f"{sum(needed.values())}, which reads no {' or '.join(unread[:3]) or 'such file'}; its "
        "logits would be wrong: use the model as a folder or a hub ID"
    )


def _set(config: PreTrainedConfig, rope: RopeParameters, key: str, value: Any) -> bool:
    """Set in a configuration, or its rope parameters, what a key of the metadata says.

    False if it has no such setting, or a fixed one of another value.
    """
    names = [name for name in SETTINGS.get(key, ()) if hasattr(config, name)]
    number = value if isinstance(value, (int, float)) else None
    if key in NEUTRAL.get(number, "").split() and (names or not hasattr(config, key)):
        for name in names:
            setattr(config, name, None)
        return True
    if key in HEAD_SIZES:
        return value == head_size(config)
    if key == ROPE_DIMENSIONS:
        if "partial_rotary_factor" in rope:  # else a model always turns all numbers of a head
            rope["partial_rotary_factor"] = value / head_size(config)
        return value == int(head_size(config) * rope.get("partial_rotary_factor", 1))
    if key in ROPE_SETTINGS:
        value = ROPE_TYPES.get(value) if key == "rope.scaling.type" else value
        if value is None or not rope:
            return False
        rope[ROPE_SETTINGS[key]] = value
        return True
    layer_types = getattr(config, "layer_types", None)
    if (is_same := _same_by_layer(config, layer_types or (), key, value)) is not None:
        return is_same
    if key == "attention.sliding_window" and layer_types and WINDOWED not in layer_types:
        return False
    if names and getattr(config, names[0]) != value:
        setattr(config, names[0], value)
    return bool(names)


def _same_by_layer(
    config: PreTrainedConfig, layer_types: Sequence[str], key: str, value: Any
) -> bool | None:
    """Does a configuration agree with a key on recurrent layers? None for other keys."""
    recurrent = [kind in RECURRENT for kind in layer_types]
    if key == "attention.recurrent_layers":
        return value == recurrent
    if key == "full_attention_interval":
        return recurrent == [(number + 1) % value > 0 for number in range(len(recurrent))]
    if key == "attention.head_count_kv" and isinstance(value, list):
        return value == [0 if state else config.num_key_value_heads for state in recurrent]
    if key == "ssm.inner_size" and hasattr(config, "linear_value_head_dim"):
        return value == config.linear_num_value_heads * config.linear_value_head_dim
    return None


def _set_factors(gguf: Path, rope: RopeParameters, factors: NDArray[np.float64]) -> None:
    """Let rotary embeddings have frequencies that are divided by `factors`."""
    frequencies = rope["rope_theta"] ** -(np.arange(len(factors)) / len(factors))
    low, high, length = LLAMA3.values()
    share = np.clip((length * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
    expected = 1 / ((1 - share) / factors.max() + share)
    if rope.get("rope_type", "default") != "default" or not np.allclose(factors, expected, 1e-4):
        raise SequoiaPlanError(
            f"{gguf}: {ROPE_FACTORS} has factors of rotary embeddings that are not those of "
            "Llama 3.1; use the model as a folder or a hub ID"
        )
    rope |= {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
