"""Checkpoints of small random targets that have a multi-token-prediction head, as published."""

import json

import torch
from architectures import tiny
from safetensors.torch import load_file, save_file

QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
    "": "mtp.layers.0.",
}
FAMILIES = {
    "GLM-4-MoE": {},
    "GLM-4-MoE, three heads": {},
    "DeepSeek-V3": {},
    "Mellum": QWEN_NAMES,
    "Qwen3-Next": QWEN_NAMES,
    "Qwen3.5": QWEN_NAMES,
}
"""What stands in a name in place of the layer behind the last, and of the parts of a head there."""
LAYERS = 2


def checkpoint(folder, family, **changes):
    """Writes a target with heads: its last layers, and what a head has beside a layer."""
    family, several, _ = family.partition(", three heads")
    count = 3 if several else 1
    if family.startswith("Qwen"):
        changes |= {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    model = tiny(family, num_hidden_layers=LAYERS + count, **changes)
    model.lm_head.weight.data.mul_(0.2)  # logits of about 1
    model.save_pretrained(folder)
    weights, config = (folder / name for name in ("model.safetensors", "config.json"))
    settings, tensors = json.loads(config.read_text()), load_file(weights)
    width = settings["hidden_size"]
    for head in range(count):
        behind = f"model.layers.{LAYERS + head}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{behind}{name}.weight"] = 1 + 0.3 * torch.randn(width)
        tensors[f"{behind}eh_proj.weight"] = torch.randn(width, 2 * width) / width**0.5
    for old, new in FAMILIES[family].items():
        tensors = {name.replace(behind + old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, weights, {"format": "pt"})
    for name in ("layer_types", "mlp_layer_types"):
        if name in settings:
            settings[name] = settings[name][:LAYERS]
    settings |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": count}
    config.write_text(json.dumps(settings))
