"""Small random targets whose checkpoints have a multi-token-prediction head, as published."""

import json

import torch
import transformers as hf
from architectures import EXPERTS, NO_SPECIAL
from safetensors.torch import load_file, save_file

LAYERS = 2
SIZES = {**EXPERTS, **NO_SPECIAL, "moe_intermediate_size": 24, "num_hidden_layers": LAYERS + 1}
DEEPSEEK = dict(
    SIZES,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
BEHIND = f"model.layers.{LAYERS}."
"""Where DeepSeek-V3 and GLM-4-MoE have their head."""
QWEN_NAMES = {
    BEHIND + "enorm": "mtp.pre_fc_norm_embedding",
    BEHIND + "hnorm": "mtp.pre_fc_norm_hidden",
    BEHIND + "eh_proj": "mtp.fc",
    BEHIND + "shared_head.norm": "mtp.norm",
    BEHIND: "mtp.layers.0.",
}
FAMILIES = {
    "GLM-4-MoE": (hf.Glm4MoeForCausalLM, DEEPSEEK, {}),
    "DeepSeek-V3": (
        hf.DeepseekV3ForCausalLM,
        dict(DEEPSEEK, **LATENT, num_key_value_heads=4, head_dim=8),
        {},
    ),
    "Mellum": (
        hf.MellumForCausalLM,
        dict(
            SIZES,
            num_experts=4,
            sliding_window=6,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
        QWEN_NAMES,
    ),
}
"""By family: the class, its settings with one layer more, and the names of its head's tensors."""


def checkpoint(folder, family, tokenizer=None, **changes):
    """The folder of a target of this family. transformers writes a layer more, for the head."""
    model_class, settings, names = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings | changes))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    weights, width = load_file(folder / "model.safetensors"), settings["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{BEHIND}{name}.weight"] = 1 + 0.2 * torch.randn(width)
    weights[f"{BEHIND}eh_proj.weight"] = torch.randn(width, 2 * width) / width**0.5
    for old, new in names.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"], config["num_nextn_predict_layers"] = LAYERS, 1
    for name in ("layer_types", "mlp_layer_types"):
        if name in config:
            config[name] = config[name][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        tokenizer.save_pretrained(folder)
    return str(folder)
