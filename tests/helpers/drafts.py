"""Small random drafts in the layouts that people share, as files, and small targets for them."""

import json
import tempfile
from pathlib import Path

import torch
from mtp import checkpoint
from paths import DATA
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from sequoia_plan.models.backends import loaded
from sequoia_plan.models.base.tree_tensors import TreeTensors
from sequoia_plan.models.files.from_transformers import load_whole
from sequoia_plan.runtime.draft.checkpoint import find_checkpoint
from sequoia_plan.runtime.draft.dflash_model import DFlashModel, DraftBlock
from sequoia_plan.runtime.draft.eagle_model import Eagle1, Eagle3, Eagle3Norms
from sequoia_plan.runtime.draft.from_checkpoint import load_checkpoint
from sequoia_plan.runtime.draft.mtp import load_mtp
from sequoia_plan.runtime.sequence import SequenceState

VOCABULARY, HIDDEN, LAYERS = 48, 16, 4


def golden(algorithm):
    """{variant: (config, weights, inputs and logits)} as speculators 0.9.0 wrote and computed them.

    See tools/speculators_golden.py.
    """
    with safe_open(DATA / f"speculators-{algorithm}.safetensors", framework="pt") as file:
        configs = json.loads(file.metadata()["configs"])
        variants = {name: (json.loads(config), {}, {}) for name, config in configs.items()}
        for key in file.keys():  # noqa: SIM118
            variant, part, name = key.split("/")
            _, weights, results = variants[variant]
            (weights if part == "weights" else results)[name] = file.get_tensor(key)
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
    return load_checkpoint(find_checkpoint(str(folder)), loaded(target), torch.float32)


def built(target, config, weights):
    """A draft as `load_pair` reads it from a folder with these files."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write(Path(folder) / "draft", config, weights), target)


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


def random_weights(draft):
    """Weights for a draft's module by name, whose values make every part of it matter."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, tensor in draft.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        weights[name] = 1 + 0.1 * values if values.ndim == 1 else values / values.shape[-1] ** 0.5
    return weights


def layer_settings(target, head_dim=8, layers=1):
    """A config.json's settings of the draft's layers."""
    config = target.config.get_text_config()
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": config.vocab_size,
    }


def shared_parts(target, settings, states, head_rows=0):
    """The arguments that modules of drafts share."""
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[settings["model_type"]]
    return {
        "config": config_class(**settings),
        "target": loaded(target),
        "aux_hidden_state_layers": tuple(range(states)),
        "d2t": None,
        "has_embeddings": False,
        "head_rows": head_rows,
    }


def eagle3_parts(
    target, d2t=(0, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47), head_dim=8
):
    """(config, weights) of a random EAGLE-3 draft for `target`, whose tokens are `d2t`."""
    settings, d2t = layer_settings(target, head_dim), torch.tensor(list(d2t))
    module = Eagle3(norms=Eagle3Norms(), **shared_parts(target, settings, 3, len(d2t)))
    weights = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in random_weights(module).items()
    }
    t2d = torch.zeros(settings["vocab_size"], dtype=torch.bool)
    t2d[d2t] = True
    last_layer = target.config.get_text_config().num_hidden_layers - 2
    return settings | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(d2t),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, last_layer]},
    }, weights | {"d2t": d2t - torch.arange(len(d2t)), "t2d": t2d}


def eagle1_parts(target):
    """(config, weights) of a random EAGLE-1 draft for `target`; its architecture is a Llama's."""
    settings = layer_settings(target)
    module = Eagle1(bias=True, **shared_parts(target, settings, 1))
    return settings | {"architectures": ["LlamaForCausalLM"]}, random_weights(module)


def dflash_parts(target, mask=1, ids=(0, 2), sizes=None):
    """(config, weights) of a random DFlash draft for `target`; `sizes` are those of DFlash 2."""
    settings = layer_settings(target, layers=2) | {"model_type": "qwen3"}
    block = DraftBlock(5, mask, **sizes or {})
    module = DFlashModel(block=block, **shared_parts(target, settings, len(ids)))
    return settings | {
        "architectures": ["DFlash2DraftModel" if sizes else "DFlashDraftModel"],
        "block_size": block.size,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": list(ids), **(sizes or {})},
    }, random_weights(module)


def dflash2_parts(target, top_k=6):
    """(config, weights) of a random DFlash 2 draft for `target`, as z-lab writes them."""
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return dflash_parts(target, sizes=dict(zip(names, (2, 4, 3, top_k), strict=True)))


def dspark_parts(target):
    """(config, weights) of a random DSpark draft for `target`, as DeepSpec writes them."""
    config, weights = dflash_parts(target, sizes={"markov_rank": 3})
    settings = config | config.pop("dflash_config") | {"markov_head_type": "vanilla"}
    return settings | {"architectures": ["Qwen3DSparkModel"]}, weights


PARTS = {
    "EAGLE-3": eagle3_parts,
    "EAGLE-1": eagle1_parts,
    "DFlash": dflash_parts,
    "DFlash 2": dflash2_parts,
    "DSpark": dspark_parts,
}


KINDS = ["language model", "MTP", *PARTS]


def small_pair(kind, vocabulary=VOCABULARY):
    """(target, draft) with a draft of one of `KINDS`.

    With three tokens, the EAGLE-3 draft has two of them.
    """
    target = small_target(vocabulary=vocabulary)
    if kind == "language model":
        return target, small_target(seed=5, vocabulary=vocabulary)
    few = {"EAGLE-3": {"d2t": [0, 2]}, "DFlash": {"mask": 2}, "DFlash 2": {"top_k": 2}}
    settings = few.get(kind, {}) if vocabulary == 3 else {}
    if kind in PARTS:
        return target, built(target, *PARTS[kind](target, **settings))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder), kind.replace("MTP", "GLM-4-MoE"), vocab_size=vocabulary)
        target = load_whole(Path(folder), torch.float32)
        return target, load_mtp(loaded(target))


def started(drafter_class, draft, text, features, committed):
    """A drafter, and a sequence whose prompt is `text`, read up to `committed` in two chunks.

    The target's hidden states are `features`.
    """
    drafter = drafter_class(draft, draft.vocabulary, draft.d2t)
    sequence = SequenceState(torch.device("cpu"))
    sequence.reserve(max(64, text.numel() + 8), drafter.new_cache, drafter.new_cache)
    sequence.tokens[: text.numel()] = text
    sequence.length.fill_(committed)
    drafter.prefill(sequence.draft, text[:committed], 0)
    for slots in torch.arange(committed).split(committed - 3 if committed > 4 else committed):
        drafter.prefill_hidden_states(sequence, slots, int(slots[-1]) + 1, features[slots])
    return drafter, sequence


def logits_of_tree(drafter, sequence, tree):
    """Logits of each pass of a tree whose tokens are in the sequence."""
    tensors = TreeTensors.of(tree, "cpu", torch.float32)
    columns, logits, output = tensors.columns(sequence.length, 64), [], None
    for draft_pass in drafter.passes(tree, tensors):
        output = drafter.forward(draft_pass, sequence, columns, output)
        logits.append(output.logits)
    return logits


def assert_close(logits, expected):
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
