"""Small random drafts in the layouts that people share, as files, and small targets for them."""

from __future__ import annotations

import json

import torch
from paths import DATA
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from sequoia_plan.runtime.draft.checkpoint import find_checkpoint
from sequoia_plan.runtime.draft.from_checkpoint import load_checkpoint

VOCABULARY, HIDDEN, LAYERS = 48, 16, 4


def golden(algorithm):
    """{variant: (config, weights, inputs and logits)} as speculators 0.9.0 wrote and computed them.

    See data/speculators_golden.py.
    """
    variants = {}
    with safe_open(DATA / f"speculators-{algorithm}.safetensors", framework="pt") as file:
        configs = json.loads(file.metadata()["configs"])
        for name, config in configs.items():
            parts = {part: {} for part in ("weights", "golden")}
            for key in file.keys():  # noqa: SIM118
                variant, part, tensor = key.split("/")
                if variant == name:
                    parts[part][tensor] = file.get_tensor(key)
            variants[name] = json.loads(config), parts["weights"], parts["golden"]
    return variants


def write(folder, config, weights):
    """A folder with these files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
    )
    return str(folder)


def load(folder, target):
    """A draft as `load_pair` reads it."""
    return load_checkpoint(find_checkpoint(str(folder)), target, torch.float32)


def small_target(seed=0, vocabulary=VOCABULARY, hidden=HIDDEN, layers=LAYERS, **settings):
    """A Llama with random weights."""
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=256,
        initializer_range=0.3,
        **shape | settings,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def random_weights(shapes, seed):
    """Values that make every part of a draft matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * values if len(shape) == 1 else values / shape[-1] ** 0.5
    return weights


def eagle3_parts(
    target,
    d2t=(0, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47),
    layout="SpecForge",
    seed=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=24,
):
    """(config, weights) of a random EAGLE-3 draft for `target`, whose tokens are `d2t`."""
    config = target.config.get_text_config()
    hidden, vocabulary = config.hidden_size, config.vocab_size
    attention = {
        "q_proj": (heads * head_dim, 2 * hidden),
        "k_proj": (kv_heads * head_dim, 2 * hidden),
        "v_proj": (kv_heads * head_dim, 2 * hidden),
    }
    shapes = {f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()} | {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (intermediate, hidden),
        "midlayer.mlp.up_proj.weight": (intermediate, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, intermediate),
        "norm.weight": (hidden,),
        "lm_head.weight": (len(d2t), hidden),
    }
    d2t = torch.tensor(list(d2t))
    t2d = torch.zeros(vocabulary, dtype=torch.bool)
    t2d[d2t] = True
    weights = random_weights(shapes, seed) | {"d2t": d2t - torch.arange(len(d2t)), "t2d": t2d}
    architectures = {"SpecForge": "LlamaForCausalLMEagle3", "AngelSlim": "Eagle3LlamaForCausalLM"}
    written = {
        "architectures": [architectures[layout]],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "draft_vocab_size": len(d2t),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, config.num_hidden_layers - 2]},
    }
    return written, weights


def eagle1_parts(target, seed=1, heads=4, kv_heads=2, head_dim=8, intermediate=24):
    """(config, weights) of a random EAGLE-1 draft for `target`; its architecture is a Llama's."""
    config = target.config.get_text_config()
    hidden = config.hidden_size
    attention = {
        "q_proj": heads * head_dim,
        "k_proj": kv_heads * head_dim,
        "v_proj": kv_heads * head_dim,
    }
    shapes = {
        f"layers.0.self_attn.{name}.weight": (rows, hidden) for name, rows in attention.items()
    } | {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (intermediate, hidden),
        "layers.0.mlp.up_proj.weight": (intermediate, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, intermediate),
    }
    written, _ = eagle3_parts(
        target, [0], heads=heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=intermediate
    )
    written.pop("draft_vocab_size")
    return written | {"architectures": ["LlamaForCausalLM"]}, random_weights(shapes, seed)


def dflash_parts(
    target,
    block=5,
    mask=1,
    layers=2,
    seed=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=24,
    ids=(0, 2),
):
    """(config, weights) of a random DFlash draft for `target`."""
    config = target.config.get_text_config()
    hidden = config.hidden_size
    shapes = {
        "fc.weight": (hidden, len(ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for number in range(layers):
        attention = {
            "q_proj": (heads * head_dim, hidden),
            "k_proj": (kv_heads * head_dim, hidden),
            "v_proj": (kv_heads * head_dim, hidden),
        }
        attention |= {
            "o_proj": (hidden, heads * head_dim),
            "q_norm": (head_dim,),
            "k_norm": (head_dim,),
        }
        shapes |= {
            f"layers.{number}.self_attn.{name}.weight": shape for name, shape in attention.items()
        }
        shapes |= {
            f"layers.{number}.{name}.weight": (hidden,)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {
            f"layers.{number}.mlp.{name}_proj.weight": (intermediate, hidden)
            for name in ("gate", "up")
        }
        shapes |= {f"layers.{number}.mlp.down_proj.weight": (hidden, intermediate)}
    written = eagle3_parts(
        target, [0], heads=heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=intermediate
    )[0]
    for name in ("draft_vocab_size", "eagle_config"):
        written.pop(name)
    dflash_settings = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "block_size": block,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(ids)},
    }
    return written | dflash_settings, random_weights(shapes, seed)


PARTS = {"EAGLE-3": eagle3_parts, "EAGLE-1": eagle1_parts, "DFlash": dflash_parts}
