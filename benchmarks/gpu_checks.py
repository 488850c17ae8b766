"""Whether the CUDA path works, and attention alone: parts of benchmarks/gpu.py."""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from gpu_scale import Run, measure_each, median_seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.timing import timed
from sequoia_plan.runtime import SequoiaDecoder
from sequoia_plan.runtime.capture import Graphs
from sequoia_plan.runtime.models.attention import attend_shared_heads
from sequoia_plan.runtime.models.dtype import resolve_dtype
from sequoia_plan.runtime.models.split_keys import split_key_attention

HEAD_DIM = 128
SPLIT_KEYS = "split keys"
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
with torch.no_grad():
    target.lm_head.weight[7] = torch.nan
decoder.generate([3, 1, 4], 8, sampling=Sampling(0.7, top_p=0.9), seed=0)
"""
"""A program that samples from a target whose logits are not finite."""


def run_checks(run: Run) -> dict[str, Any]:
    """Run the tests that need the device, and ask which attention PyTorch chooses with a mask."""
    query = attention_input(run.device, 8, 8, 4, 4)[0]
    mask = torch.zeros(1, 1, 8, 8, device=run.device, dtype=query.dtype)
    others = {
        "cudnn": torch.backends.cudnn.version(),
        "chosen": SDPBackend(torch._fused_sdp_choice(query, query, query, mask)).name,
    }

    def run_file(setting: dict[str, Any]) -> dict[str, Any]:
        """Run the tests of one file."""
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        process = subprocess.run(
            [*pytest, *setting["tests"].split()],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        return {"exit": process.returncode, "says": last_line(process.stdout)}

    settings = [{"tests": arguments} for arguments in run.scale.test_arguments]
    return measure_each(run, "tests", settings, run_file, **others)


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
    kernels, graphs = ["PyTorch"], None
    if run.device.type == "cuda":
        kernels = ["memory-efficient", "cuDNN", SPLIT_KEYS]
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
        tensors = (query, key, value, mask)
        attend: Callable[[], Any] = functools.partial(attend_shared_heads, None, *tensors)
        if setting["kernel"] == SPLIT_KEYS:
            slots = torch.arange(extent - nodes, extent, device=run.device)
            attend = functools.partial(split_key_attention, *tensors, slots, HEAD_DIM**-0.5)
        choice: Any = nullcontext()
        if setting["kernel"] == "cuDNN":
            attend = functools.partial(scaled_dot_product_attention, *tensors, enable_gqa=True)
            choice = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        try:
            with choice, torch.inference_mode():
                seconds = attention_seconds(run, attend, graphs, tuple(setting.values()))
        except RuntimeError as error:  # a kernel may refuse a shape
            return {"error": last_line(str(error))}
        return {"seconds": seconds}

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
    """Make one of `SMALL_MODELS`, with random weights in float32.

    In 16 bits two kernels for attention part after some hundred tokens.
    """
    model_class, config_class, options = SMALL_MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL_MODEL_SHAPE, **options))
    return model.to(device).eval()


def compare_captured(run: Run) -> dict[str, Any]:
    """Compare captured steps with eager ones, and decode with logits that are not finite.

    The drafts have the target's vocabulary or half of it. Logits that are not finite are sampled
    with top-p in a process of their own.
    """
    settings = [
        {"model": model_name, "draft_vocabulary": draft_vocabulary}
        for model_name, draft_vocabulary in itertools.product(SMALL_MODELS, (None, 512))
    ]

    def compare(setting: dict[str, Any]) -> dict[str, Any]:
        """Compare the texts of one pair of models."""
        return captured_against_eager(run, *setting.values())

    result = measure_each(run, "against_eager", settings, compare)
    folder = str(Path(__file__).parent)
    process = subprocess.run(
        [sys.executable, "-c", DECODE_NOT_FINITE, folder, str(run.device)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return result | {"not_finite": {"exit": process.returncode, "says": last_line(process.stderr)}}


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
