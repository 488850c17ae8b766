"""Models of the paper's shapes with random weights, and the memory bandwidth that bounds them.

The time of a step does not depend on the values of the weights.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sequoia_plan.profiler.timing import timed
from sequoia_plan.runtime import Pair
from sequoia_plan.runtime.backends import RESIDENT, place
from sequoia_plan.runtime.models.dtype import dtype_name, resolve_dtype

Shape = dict[str, int]


def shape(
    hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int = 32000
) -> Shape:
    """Return a Llama's dimensions by the keys of transformers' config."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
    }


def random_pair(name: str, target: Shape, draft: Shape, device: torch.device) -> Pair:
    """Make Llamas with random weights on the device.

    Args:
        name: the target's name.
    """
    dtype = resolve_dtype("auto", device.type)

    def random_model(dimensions: Shape) -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(LlamaConfig(**dimensions), dtype=dtype).eval()

    def metadata(model: Any, model_name: str) -> dict[str, Any]:
        return {
            "name": f"{model_name}, random weights",
            "dtype": dtype_name(dtype),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }

    models = random_model(target), random_model(draft)
    models_metadata = {
        "target": metadata(models[0], name),
        "draft": metadata(models[1], "llama-68m"),
    }
    target_model, draft_model = (place(model, RESIDENT) for model in models)
    return Pair(target_model, draft_model, None, models_metadata)


def bytes_read(model: Any) -> int:
    """Count the bytes of weights that a pass reads.

    They are all weights but the input embeddings, of which a pass reads single rows. If the output
    head shares the embeddings, they count as well.
    """
    embeddings = model.get_input_embeddings().weight
    is_shared = embeddings is model.get_output_embeddings().weight
    return sum(
        weight.numel() * weight.element_size()
        for weight in model.parameters()
        if is_shared or weight is not embeddings
    )


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Measure the bytes a second that a large copy reads and writes, the median of ten copies."""
    source, destination = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = [timed(device, lambda: destination.copy_(source))[1] for _ in range(12)]
    return 2 * size / statistics.median(seconds[2:])
