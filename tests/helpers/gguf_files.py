"""GGUF files of tiny models, written as llama.cpp's converter does."""

import gguf
import numpy as np
import torch

from sequoia_plan.models.base.masks import causal_mask
from sequoia_plan.models.files.gguf_config import read_config
from sequoia_plan.models.files.gguf_file import read_gguf

SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=32, num_hidden_layers=2, vocab_size=300)
IDS = torch.arange(24)[None]
SPLIT = "split.count"


def logits_of(pair, positions=IDS[0]):
    """What the target's pass gives for IDS, float [24, vocabulary]; a step has a target, too."""
    target, slots = pair.target, IDS[0].to(pair.target.device)
    mask = causal_mask(slots, len(slots), target.dtype)
    with torch.inference_mode():
        return target(target.new_cache(160), slots, positions.to(slots), slots, mask).logits


def is_right(pair, model):
    """Whether the target computes what transformers' model does."""
    return torch.allclose(logits_of(pair), model(IDS).logits[0], atol=1e-3)


def write_gguf(path, model, kind="F32", metadata=(), tensors=(), without=()):
    """Write a Llama, Qwen2 or Qwen3 as llama.cpp's converter does, with matrices in `kind`."""
    config, architecture = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, architecture, settings_of(config) | dict(metadata))
    quantised, written = gguf.GGMLQuantizationType[kind], {}
    for name, parameter in model.named_parameters():
        weight, heads = parameter.detach().float().numpy(), config.num_attention_heads
        heads = {"q_proj": heads, "k_proj": config.num_key_value_heads}.get(name[-13:-7])
        if heads and architecture == "llama":
            weight = by_neighbours(weight, heads)
        written[names_of(architecture).get_name(name, (".weight", ".bias"))] = weight
    for name, weight in (written | dict(tensors)).items():
        is_matrix = weight.ndim == 2 and kind != "F32"
        raw = gguf.quants.quantize(weight, quantised) if is_matrix else np.ascontiguousarray(weight)
        if name not in without:
            writer.add_tensor(name, raw, raw_dtype=quantised if is_matrix else None)
    write(writer)
    return str(path)


def names_of(architecture):
    """The names of an architecture's tensors, of up to nine layers."""
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 9)


def by_neighbours(weight, heads):
    """Rows in another order: llama.cpp rotates neighbours, transformers halves of a head."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def settings_of(config):
    """What a file says of a Llama-like model."""
    return {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }


def adders(writer):
    """What adds a value of each type."""
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    return add | {bool: writer.add_bool, list: writer.add_array}


def add_metadata(writer, architecture, settings):
    """These settings, and a tokenizer."""
    for key, value in settings.items():
        name = key if key == SPLIT else f"{architecture}.{key}"
        adders(writer)[type(value)](name, value)
    tokens = [chr(256 + number) for number in range(settings["vocab_size"])]
    tokens[2] = tokens[0] + tokens[1]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])


def metadata_writer(path, architecture, settings=(), layers=2):
    """A writer of metadata, and of a tensor for each layer."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"vocab_size": 300, "block_count": layers, "embedding_length": 64}
    add_metadata(writer, architecture, sizes | {"attention.head_count": 4} | dict(settings))
    for layer in range(layers):
        writer.add_tensor(str(layer), np.ones(1, np.float32))
    return writer


def write_tokenizer(path, **keys):
    """A Llama's metadata and a tokenizer's; lists are written as texts, "__" is two spaces."""
    writer, lists = metadata_writer(path, "llama"), {"scores": float, "token_type": int}
    for name, value in keys.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        writer.kv_data[0].pop(key, None)
        if name in ("tokens", "merges", *lists):
            words = value.split("," if name == "merges" else None)
            value = [lists.get(name, str)(word.replace("__", "  ")) for word in words]
        adders(writer)[type(value)](key, value)
    write(writer)
    return str(path)


def config_of(path, *metadata):
    """What is read of such a file."""
    write(metadata_writer(path, *metadata))
    return read_config(read_gguf(path))


def write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
