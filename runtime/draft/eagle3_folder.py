"""Writes EAGLE-3 drafts as SpecForge does, a layout that vLLM and SGLang load."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig

from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.models.layers.int8 import rows_in_8_bits

UNUSED_SETTINGS = ("dtype", "transformers_version", "layer_types")


def write_eagle3(
    folder: Path,
    config: PreTrainedConfig,
    weights: Mapping[str, Tensor],
    d2t: Tensor,
    norm_before_residual: bool,
    metadata: Mapping[str, object],
    in_8_bits: bool,
) -> None:
    """Write config.json and model.safetensors of an EAGLE-3 draft of one layer.

    `config`: its LlamaConfig; `weights`: by the names of `Eagle3`'s parameters; `d2t` int64 [draft
    vocabulary]; `metadata`: how it was made, for the file's header.

    `in_8_bits`: matrices are int8 with a bfloat16 scale for each 32 inputs, in tensors named as in
    compressed-tensors. Other engines read such a draft once it is exported.

    No layer ids are written, because these two engines count them differently: the draft must read
    `eagle3_default_layers`.
    """
    settings = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name[0] != "_" and name not in UNUSED_SETTINGS
    } | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": d2t.numel(),
        "torch_dtype": str(weights["fc.weight"].dtype).removeprefix("torch."),
        # readers older than `rope_parameters` look here
        "rope_theta": config.rope_parameters["rope_theta"],
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": norm_before_residual,
    }
    t2d = torch.zeros(int(config.vocab_size), dtype=torch.bool)
    t2d[d2t] = True
    tensors = {
        name.replace("layers.0.", "midlayer.", 1): tensor.detach().contiguous()
        for name, tensor in weights.items()
    }
    if in_8_bits:
        for name in [n for n, tensor in tensors.items() if tensor.ndim == 2]:
            matrix = tensors[name]
            integers, scales = rows_in_8_bits(matrix.reshape(-1, 32), torch.bfloat16)
            tensors[name] = integers.view_as(matrix)
            tensors[f"{name}_scale"] = scales.view(len(matrix), -1)
    # files store offsets: a draft token t is the target's token t + d2t[t]
    tensors |= {"d2t": d2t - torch.arange(d2t.numel()), "t2d": t2d}
    header = {"format": "pt", "sequoia_plan": json.dumps(metadata, sort_keys=True)}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.safetensors", save(tensors, header))
    settings_json = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    write_atomically(folder / "config.json", settings_json.encode())
