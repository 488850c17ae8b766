"""Models of the paper's shapes with random weights: a step's time does not depend on what weights say. And what bounds it, bandwidth."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sequoia_plan.profiler.latency import timed
from sequoia_plan.runtime import Pair
from sequoia_plan.runtime.models.load import dtype_name, resolve_dtype

Shape = dict[str, int]


def shape(hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int = 32000) -> Shape:
    """A Llama's dimensions as transformers' config names them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
    }


def random_pair(name: str, target: Shape, draft: Shape, device: torch.device) -> Pair:
    """Llamas with random weights, made on the device."""
    dtype = resolve_dtype("auto", device.type)

    def model(dimensions: Shape) -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(LlamaConfig(**dimensions), dtype=dtype).eval()

    models = {"target": model(target), "draft": model(draft)}
    names = {"target": name, "draft": "llama-68m"}
    facts = {
        role: {"name": f"{names[role]}, random weights", "dtype": dtype_name(dtype), "parameters": sum(p.numel() for p in each.parameters())}
        for role, each in models.items()
    }
    return Pair(models["target"], models["draft"], None, facts)


def bytes_read(model: Any) -> int:
    """By a pass: all weights but the input embeddings, of which it reads single rows, unless the head shares them."""
    weights, embeddings = list(model.parameters()), model.get_input_embeddings().weight
    shared = embeddings is model.get_output_embeddings().weight
    return sum(each.numel() * each.element_size() for each in weights if shared or each is not embeddings)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second read and written by a large copy, the median of ten."""
    source, to = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = [timed(device, lambda: to.copy_(source))[1] for _ in range(12)]
    return 2 * size / statistics.median(seconds[2:])
