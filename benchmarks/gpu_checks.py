"""Whether the CUDA path works, and attention alone: parts of benchmarks/gpu.py."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_scale import Run, measure_each, median_seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.timing import timed
from sequoia_plan.runtime import SequoiaDecoder
from sequoia_plan.runtime.capture import Graphs
from sequoia_plan.runtime.models import attention
from sequoia_plan.runtime.models.dtype import resolve_dtype
from sequoia_plan.runtime.models.split_keys import split_key_attention

HEAD_DIM = 128
SPLIT_KEYS = "SPLIT_KEYS"
"""In the results, the name of our kernel for attention."""
SMALL_TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
SMALL_MODEL_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
SMALL_MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "heads that share": (LlamaForCausalLM, LlamaConfig, {}),
    "window": (MistralForCausalLM, MistralConfig, {"sliding_window": 64}),
}
"""Model class, config class and further config values, by the name in the results."""
DECODE_NOT_FINITE = """
import sys, torch
folder, device = sys.argv[1:]
sys.path.insert(0, folder)
import gpu_checks
from sequoia_plan.runtime import Sampling, SequoiaDecoder
target = gpu_checks.small_model("heads that share", torch.device(device))
draft = gpu_checks.small_model("heads that share", torch.device(device))
decoder = SequoiaDecoder(target, draft, gpu_checks.SMALL_TREE)
target.lm_head.weight.data[7] = torch.nan
decoder.generate([3, 1, 4], 8, sampling=Sampling(0.7, top_p=0.9), seed=0)
"""
"""A program that samples from a target whose logits are not finite."""


def run_checks(run: Run) -> dict[str, Any]:
    """Run the tests that need the device, and ask which attention PyTorch chooses with a mask."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*pytest, *run.scale.test_arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    query = attention_input(run.device, 8, 8, 4, 4)[0]
    mask = torch.zeros(1, 1, 8, 8, device=run.device, dtype=query.dtype)
    return {
        "tests": {"exit": process.returncode, "says": last_line(process.stdout)},
        "cudnn": torch.backends.cudnn.version(),
        "chosen": SDPBackend(torch._fused_sdp_choice(query, query, query, mask)).name,
    }


def last_line(output: str) -> list[str]:
    """Return the last line of a process's output, in a list that is empty if there is no output."""
    return output.strip().splitlines()[-1:]


def attention_input(
    device: torch.device, nodes: int, extent: int, heads: int, shared_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make random queries, keys and values with the head size of an 8B model.

    Args:
        shared_heads: heads of keys and values; several heads of queries share one.

    Returns:
        query [1, heads, nodes, 128], key and value [1, shared_heads, extent, 128], in the device's
        dtype.
    """
    dtype = resolve_dtype("auto", device.type)

    def random(num_heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, num_heads, tokens, HEAD_DIM, device=device, dtype=dtype)

    return random(heads, nodes), random(shared_heads, extent), random(shared_heads, extent)


def time_attention(run: Run) -> dict[str, Any]:
    """Time the attention of one layer with PyTorch's kernels that take a mask, and with ours."""
    kernels, graphs = ["MATH"], None
    if run.device.type == "cuda":
        kernels = ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION", SPLIT_KEYS]
        graphs = Graphs(run.device)
    heads = 32
    sizes = itertools.product(
        run.scale.attention_nodes, run.scale.attention_extents, (heads, heads // 4)
    )
    settings = [
        {
            "nodes": nodes,
            "extent": extent,
            "heads": heads,
            "shared_heads": shared_heads,
            "kernel": kernel,
        }
        for nodes, extent, shared_heads in sizes
        for kernel in kernels
    ]

    def time_kernel(setting: dict[str, Any]) -> dict[str, Any]:
        """Time one kernel with the sizes of `setting`."""
        nodes, extent = setting["nodes"], setting["extent"]
        query, key, value = attention_input(
            run.device, nodes, extent, heads, setting["shared_heads"]
        )
        mask = torch.zeros(1, 1, nodes, extent, device=run.device, dtype=query.dtype)
        graph_key = tuple(setting.values())
        if setting["kernel"] == SPLIT_KEYS:
            slots = torch.arange(extent - nodes, extent, device=run.device)
            tensors = (query, key, value, mask, slots)
            attend = functools.partial(split_key_attention, *tensors, HEAD_DIM**-0.5)
            with torch.inference_mode():
                return {"seconds": attention_seconds(run, attend, graphs, graph_key)}
        module = torch.nn.Module()
        attend = functools.partial(
            attention.attend_shared_heads, module, query, key, value, attention_mask=mask
        )
        with (
            mock.patch.object(attention, "can_split_keys", return_value=False),
            sdpa_kernel([getattr(SDPBackend, setting["kernel"])]),
            torch.inference_mode(),
        ):
            return {"seconds": attention_seconds(run, attend, graphs, graph_key)}

    return measure_each(run, "attention", settings, time_kernel)


def attention_seconds(
    run: Run, attend: Callable[[], Any], graphs: Graphs | None, graph_key: tuple[Any, ...]
) -> dict[str, float | None]:
    """Time the first call of `attend`, later calls, and replays of its graph.

    Returns:
        The seconds of the first call, and medians; "replayed" is None without graphs.
    """
    first = timed(run.device, attend)[1]
    later = median_seconds(run, attend)
    replayed = None
    if graphs:
        replay = functools.partial(graphs, graph_key, attend)
        replay()  # captures
        replayed = median_seconds(run, replay)
    return {"first": first, "later": later, "replayed": replayed}


def small_model(name: str, device: torch.device) -> Any:
    """Make one of `SMALL_MODELS`, with random weights in the device's dtype."""
    model_class, config_class, options = SMALL_MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL_MODEL_SHAPE, **options))
    return model.to(device, resolve_dtype("auto", device.type)).eval()


def compare_captured(run: Run) -> dict[str, Any]:
    """Compare captured steps with eager ones, and decode with logits that are not finite.

    The drafts have the target's vocabulary or half of it. Logits that are not finite are sampled
    with top-p in a process of their own.
    """
    against_eager = {}
    for model_name, draft_vocabulary in itertools.product(SMALL_MODELS, (None, 512)):
        title = f"{model_name}, {draft_vocabulary or 'all'} tokens"
        against_eager[title] = captured_against_eager(run, model_name, draft_vocabulary)
    folder = str(Path(__file__).parent)
    process = subprocess.run(
        [sys.executable, "-c", DECODE_NOT_FINITE, folder, str(run.device)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return {
        "against_eager": against_eager,
        "not_finite": {"exit": process.returncode, "says": last_line(process.stderr)},
    }


def captured_against_eager(
    run: Run, model_name: str, draft_vocabulary: int | None
) -> dict[str, Any]:
    """Decode with a captured and with an eager decoder, and compare their tokens.

    They decode greedily and sampled in turn, first a short prompt and then a longer one.

    Args:
        draft_vocabulary: tokens of the draft, every second one of the target's; None for all.
    """
    target, draft = small_model(model_name, run.device), small_model(model_name, run.device)
    if draft_vocabulary:
        draft.d2t = torch.arange(0, 2 * draft_vocabulary, 2, device=run.device)
        draft.lm_head = torch.nn.Linear(
            SMALL_MODEL_SHAPE["hidden_size"],
            draft_vocabulary,
            bias=False,
            device=run.device,
            dtype=target.dtype,
        )
    eager = SequoiaDecoder(target, draft, SMALL_TREE, captured=False)
    captured = SequoiaDecoder(target, draft, SMALL_TREE)

    def decode(decoder: SequoiaDecoder, prompt: torch.Tensor, temperature: float) -> list[int]:
        generation = decoder.generate(prompt, 8 * run.scale.tokens, temperature, seed=1)
        tokens: list[int] = generation.sequences[0].tolist()
        return tokens

    prompts = [torch.arange(length) % 1000 for length in (20, 20 + 4 * run.scale.tokens)]
    are_equal = [
        decode(eager, prompt, temperature) == decode(captured, prompt, temperature)
        for prompt, temperature in itertools.product(prompts, (0.0, 0.7))
    ]
    graphs = captured.step.models.graphs
    return {"graphs": len(graphs.graphs) if graphs else 0, "equal": are_equal}
