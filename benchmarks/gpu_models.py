"""What the parts of benchmarks/gpu.py measure: models with random weights, and trees.

The time of a step does not depend on the values of the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from sequoia_plan.artifacts import Acceptance, TokenTree, load_tree
from sequoia_plan.artifacts.expected_tokens import node_values
from sequoia_plan.models.backends import FUSED, RESIDENT, loaded_as
from sequoia_plan.models.base.cache import round_up
from sequoia_plan.models.base.dtype import dtype_name, resolve_dtype
from sequoia_plan.models.modules.streamed_layers import attach_stream, view_slots
from sequoia_plan.models.offload.host_stream import HostStream, pin
from sequoia_plan.models.offload.memory import SLOTS
from sequoia_plan.models.offload.weight_file import Place, WeightBlock, aligned_memory
from sequoia_plan.runtime import Pair
from sequoia_plan.runtime.draft.eagle_model import Eagle3, Eagle3Norms

Shape = dict[str, int]


def shape(
    hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, vocabulary: int
) -> Shape:
    """A Llama's dimensions by the keys of transformers' config."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16_384,
    }


class Scale(NamedTuple):
    """How much is measured.

    Args:
        rounds: how often each part of a step is timed.
        tokens: new tokens of each text.
        contexts: tokens in the cache of the 8B target.
        nodes: of its tree.
        sizes: nodes of the trees of llama-2.
        num_prompts: prompts that the embedded pair decodes.
        embedded: shape of the embedded target; of the others by their names.
        streamed_layers: layers of the 8B target that are streamed.
        placement: of the embedded pair.
    """

    rounds: int = 20
    tokens: int = 128
    contexts: tuple[int, ...] = (512, 8192)
    nodes: int = 64
    sizes: tuple[int, ...] = (1, 128, 64, 768, 16, 256)
    num_prompts: int = 10
    embedded: Shape = shape(576, 1536, 30, 9, 3, 49_152)
    llama_8b: Shape = shape(4096, 14_336, 32, 32, 8, 128_256)
    llama_7b: Shape = shape(4096, 11_008, 32, 32, 32, 32_000)
    llama_68m: Shape = shape(768, 3072, 2, 12, 12, 32_000)
    streamed_layers: int = 8
    placement: str = FUSED


TINY = shape(64, 128, 4, 4, 2, 512)
FULL = Scale()
QUICK = Scale(2, 8, (16, 40), 7, (1, 4), 1, TINY, TINY, TINY, TINY, 2, RESIDENT)


def random_pair(
    target: Shape, draft: Shape | None, device: torch.device, dtype: torch.dtype | None = None
) -> Pair:
    """Llamas with random weights on the device, fused; without a `draft`, EAGLE-3 drafts."""
    torch.manual_seed(0)
    dtype = dtype or resolve_dtype("auto", device.type)

    def random_llama(dimensions: Shape) -> Any:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**dimensions), dtype=dtype)
        return loaded_as(model.eval(), FUSED)

    target_model = random_llama(target)
    if draft:
        return Pair(target_model, random_llama(draft | {"vocab_size": target["vocab_size"]}), None)
    layers, head_rows = target["num_hidden_layers"], target["vocab_size"] // 4
    with torch.device(device):
        eagle: Any = Eagle3(
            config=LlamaConfig(**target | {"num_hidden_layers": 1}),
            target=target_model,
            aux_hidden_state_layers=(2, layers // 2, layers - 3),
            d2t=torch.arange(0, 4 * head_rows, 4),
            has_embeddings=False,
            head_rows=head_rows,
            norms=Eagle3Norms(),
        )
    eagle = eagle.to(dtype).eval()
    eagle.run_as(FUSED)
    return Pair(target_model, eagle, None)


def likely_tree(acceptance: Acceptance, size: int) -> TokenTree:
    """The `size` nodes of a large tree that are most likely accepted; solving needs numba."""
    tree = load_tree("sequoia-example-768x18")
    values = node_values(tree, acceptance.rates)
    nodes = np.sort(np.argsort(-values, kind="stable")[:size])
    return TokenTree.from_parents([-1, *np.searchsorted(nodes, tree.parents[nodes[1:]])])


def stream_layers(model: Any, device: torch.device) -> HostStream:
    """Let every layer of `model` take its matrices from pinned host memory in every pass."""
    memories, blocks = [], []
    for layer in model.model.layers:
        places, size = {}, 0
        for name, weight in layer.named_parameters():
            if weight.ndim > 1:  # norms are on the device, as in a target that is streamed
                places[name] = Place(dtype_name(weight.dtype), tuple(weight.shape), size)
                size = round_up(size + weight.nbytes, 512)
        blocks.append(WeightBlock(0, size, 0, places))
        memory = aligned_memory(size)
        for name, view in blocks[-1].views(memory).items():
            view.copy_(layer.get_parameter(name))
        memories.append(pin(memory))
    stream = HostStream(memories, SLOTS, device)
    view_slots(stream, model.model.layers, blocks)
    attach_stream(model, stream, model.model.layers, blocks)
    return stream
