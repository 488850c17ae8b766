"""The parts that benchmarks/gpu.py measures; its docstring says what each one is."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from random_models import Shape, bytes_read, copy_bandwidth, random_pair, shape
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from sequoia_plan.artifacts import Acceptance, Latency, Profile, TokenTree, load_tree
from sequoia_plan.artifacts.bench_result import Breakdown
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.prompts import built_in
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree_file import CATALOG
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving.baselines import bench_trees
from sequoia_plan.profiler.bench import bench, compare
from sequoia_plan.profiler.bench_figures import summary
from sequoia_plan.profiler.breakdown import breakdown
from sequoia_plan.profiler.decoding_methods import sequoia_method, transformers_method
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import LatencyMeter
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.profiler.timing import random_prompt, timed
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.base.cache import round_up
from sequoia_plan.runtime.capture import Graphs
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.eagle_model import Eagle3, Eagle3Norms
from sequoia_plan.runtime.models import attention
from sequoia_plan.runtime.models.dtype import dtype_name, resolve_dtype
from sequoia_plan.runtime.models.split_keys import split_key_attention
from sequoia_plan.runtime.offload.host_stream import HostStream, pin
from sequoia_plan.runtime.offload.memory import SLOTS
from sequoia_plan.runtime.offload.streamed_layers import attach_stream, view_slots
from sequoia_plan.runtime.offload.weight_file import Place, WeightBlock, aligned_memory
from sequoia_plan.runtime.pair import LANGUAGE_MODEL

PAPER_VECTORS = ("sequoia-example", "llama3-70b-8b-cnn")
"""Catalog profiles with the paper's acceptance vectors."""
CATALOG_TREES = ("llama3-70b-8b-cnn-128x10", "llama3-70b-8b-cnn-768x18")
METHODS = ("plain", "generate", "assisted", "traversal")
BUDGET, MAX_DEPTH = 768, 20
HEAD_DIM = 128
WARM_UP_STEPS = 8
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
import gpu_parts
from sequoia_plan.runtime import Sampling, SequoiaDecoder
target = gpu_parts.small_model("heads that share", torch.device(device))
draft = gpu_parts.small_model("heads that share", torch.device(device))
decoder = SequoiaDecoder(target, draft, gpu_parts.SMALL_TREE)
target.lm_head.weight.data[7] = torch.nan
decoder.generate([3, 1, 4], 8, sampling=Sampling(0.7, top_p=0.9), seed=0)
"""
"""A program that samples from a target whose logits are not finite."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        num_profiled_prompts: prompts that the embedded pair's acceptance is measured on.
        num_decoded_prompts: held-out prompts that every method decodes.
        tokens: new tokens of each prompt.
        precision: the precision of the acceptance, see `measure`.
        latency_seconds: seconds of repeated latency measurements.
        rounds: how often each part of a step is timed.
        max_size: nodes of the largest tree that is timed.
        copy_bytes: bytes of the copy that memory bandwidth is measured with.
        attention_nodes, attention_extents: numbers of nodes and of slots in the cache for which
            attention is timed alone.
        contexts: tokens in the cache while the parts of a step are timed.
        long_contexts: the same for the target whose heads share keys and values.
        vocabulary: vocabulary of the models whose step is timed part by part.
        test_arguments: pytest's arguments for the tests that need the device.
        targets: shapes of the targets with random weights, by name.
        draft: shape of their draft.
        shared_heads_target: shape of a target whose heads share keys and values.
        streamed_layers: how many such layers are streamed from host memory.
    """

    num_profiled_prompts: int
    num_decoded_prompts: int
    tokens: int
    precision: float
    latency_seconds: float
    rounds: int
    max_size: int
    copy_bytes: int
    attention_nodes: tuple[int, ...]
    attention_extents: tuple[int, ...]
    contexts: tuple[int, ...]
    long_contexts: tuple[int, ...]
    vocabulary: int
    test_arguments: tuple[str, ...]
    targets: dict[str, Shape]
    draft: Shape
    shared_heads_target: Shape
    streamed_layers: int

    def draft_of(self, target: Shape) -> Shape:
        """The draft's shape with the vocabulary of `target`."""
        return self.draft | {"vocab_size": target["vocab_size"]}


FULL = Scale(
    num_profiled_prompts=16,
    num_decoded_prompts=10,
    tokens=128,
    precision=0.05,
    latency_seconds=10.0,
    rounds=20,
    max_size=1024,
    copy_bytes=1 << 30,
    attention_nodes=(1, 64, 128, 768),
    attention_extents=(512, 2560, 8192),
    contexts=(128, 2048),
    long_contexts=(512, 8192),
    vocabulary=128_256,
    test_arguments=tuple(
        f"tests/runtime/test_{name}.py"
        for name in ("static_step", "fused", "layer_kernels", "cuda")
    ),
    targets={"llama-2-7b": shape(4096, 11008, 32, 32), "llama-2-13b": shape(5120, 13824, 40, 40)},
    draft=shape(768, 3072, 2, 12),
    shared_heads_target=shape(4096, 14336, 32, 32, 128_256)
    | {"num_key_value_heads": 8, "max_position_embeddings": 16_384},
    streamed_layers=8,
)
QUICK = Scale(
    num_profiled_prompts=2,
    num_decoded_prompts=2,
    tokens=8,
    precision=0.0,
    latency_seconds=0.0,
    rounds=3,
    max_size=16,
    copy_bytes=1 << 24,
    attention_nodes=(1, 5),
    attention_extents=(64,),
    contexts=(16,),
    long_contexts=(16, 40),
    vocabulary=512,
    test_arguments=("tests/runtime/test_static_step.py", "-k", "captured_steps"),
    targets={"llama-2-7b": shape(64, 128, 2, 4, 512), "llama-2-13b": shape(96, 192, 2, 4, 512)},
    draft=shape(32, 64, 1, 2, 512),
    shared_heads_target=shape(64, 128, 4, 4, 512) | {"num_key_value_heads": 2},
    streamed_layers=2,
)


@dataclass(frozen=True)
class Run:
    """What a part runs with.

    Args:
        device: the device that is measured.
        scale: how much to measure.
        deadline: when the part should end, in seconds of `time.perf_counter`.
        earlier: what an earlier run that was cut off has measured of this part.
        save: writes what is measured so far, so that a run that is cut off loses little.
    """

    device: torch.device
    scale: Scale
    deadline: float
    earlier: dict[str, Any] = field(default_factory=dict)
    save: Callable[[dict[str, Any]], None] = lambda result: None


Part = tuple[float, Callable[[Run], dict[str, Any]]]
"""How many seconds a part is meant to take, and the function that measures it."""


def measure_each(
    run: Run,
    name: str,
    settings: Iterable[dict[str, Any]],
    measure_setting: Callable[[dict[str, Any]], dict[str, Any]],
    **others: Any,
) -> dict[str, Any]:
    """Measure one setting after the other, and save the figures after each.

    Settings that an earlier run has measured are not measured again, and those that would start
    after the deadline are left for the next run.

    Args:
        name: key of the list of figures in the result.
        settings: dictionaries of JSON values, which become part of the figures.
        others: what else the result holds.

    Returns:
        The result of the part; "unfinished" is in it if settings are left.
    """
    figures = list(run.earlier.get(name, []))
    for setting in settings:
        if any(setting.items() <= finished.items() for finished in figures):
            continue
        if time.perf_counter() > run.deadline:
            return {**others, name: figures, "unfinished": True}
        figures.append(setting | measure_setting(setting))
        run.save({**others, name: figures})
    return {**others, name: figures}


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


def median_seconds(run: Run, function: Callable[[], Any]) -> float:
    """Return the median seconds of `function`, called as often as the scale says."""
    return statistics.median(timed(run.device, function)[1] for _ in range(run.scale.rounds))


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


def time_settings(run: Run) -> dict[str, Any]:
    """Time the parts of a step for several trees, settings and lengths of text."""
    scale, name = run.scale, "llama-2-7b"
    vocabulary = {"vocab_size": scale.vocabulary}
    pair = random_pair(name, scale.targets[name] | vocabulary, scale.draft | vocabulary, run.device)
    sampled = [
        Sampling(0.6, top_p, verifier=verifier)
        for top_p in (1.0, 0.9)
        for verifier in ("sequoia", "traversal")
    ]
    return time_breakdowns(
        run, pair, trees_to_time(scale.max_size), [Sampling(), *sampled], scale.contexts
    )


def time_breakdowns(
    run: Run,
    pair: Pair,
    trees: Mapping[str, TokenTree],
    samplings: Sequence[Sampling],
    contexts: Sequence[int],
) -> dict[str, Any]:
    """Time the parts of a step with every tree, sampling and length of text."""
    settings, sampling_of = [], {}
    for title, sampling, context in itertools.product(trees, samplings, contexts):
        setting = {
            "tree": title,
            "context": context,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "verifier": None if sampling.greedy else sampling.verifier,
        }
        settings.append(setting)
        sampling_of[tuple(setting.values())] = sampling

    def time_setting(setting: dict[str, Any]) -> dict[str, Any]:
        """Time the parts of a step with one setting."""
        sampling = sampling_of[tuple(setting.values())]
        return time_steps(run, pair, trees[setting["tree"]], sampling, setting["context"])

    return measure_each(run, "steps", settings, time_setting, models=pair.metadata)


def time_shared_heads(run: Run) -> dict[str, Any]:
    """Time an 8B target whose heads share keys and values, and an EAGLE-3 draft.

    The parts of a step are timed, the kernels of one step counted, and steps timed one after the
    other as a decoder runs them, with and without launching a step before the last one is read.
    """
    scale, sampling = run.scale, Sampling(0.6)
    pair = eagle3_pair(scale, run.device)
    trees = {"plain": TokenTree.chain(1), "tree": bushy(min(64, scale.max_size), 3)}
    samplings = [Sampling(), sampling, Sampling(0.6, 0.9)]
    result = time_breakdowns(run, pair, trees, samplings, scale.long_contexts)
    if "unfinished" in result:
        return result
    result["kernels"] = {
        title: kernels_of_a_step(run, pair, tree, sampling, scale.long_contexts[0])
        for title, tree in trees.items()
    }
    run.save(result)
    result["steady"] = [
        {
            "tree": title,
            "context": context,
            "launches_ahead": launches_ahead,
            "seconds": steady_seconds(run, pair, tree, sampling, context, launches_ahead),
        }
        for title, tree in trees.items()
        for context in scale.long_contexts
        for launches_ahead in (False, True)
    ]
    return result


def eagle3_pair(scale: Scale, device: torch.device) -> Pair:
    """Make a Llama whose heads share keys and values, and an EAGLE-3 draft, with random weights."""
    shape = scale.shared_heads_target
    pair = random_pair("llama-3.1-8b", shape, scale.draft, device)
    config = LlamaConfig(**shape | {"num_hidden_layers": 1})
    layers = shape["num_hidden_layers"]
    vocabulary = shape["vocab_size"] // 4
    with torch.device(device):
        draft = Eagle3(
            config=config,
            target=pair.target,
            aux_hidden_state_layers=(min(2, layers), layers // 2, max(layers - 3, 1)),
            d2t=torch.arange(0, 4 * vocabulary, 4),
            has_embeddings=False,
            head_rows=vocabulary,
            norms=Eagle3Norms(),
        )
    draft = draft.to(pair.target.dtype).eval()
    size = sum(parameter.numel() for parameter in draft.parameters())
    metadata = {"name": "EAGLE-3, random weights", "parameters": size}
    return Pair(pair.target, draft, None, pair.metadata | {"draft": metadata})


@torch.inference_mode()
def kernels_of_a_step(
    run: Run, pair: Pair, tree: TokenTree, sampling: Sampling, context: int
) -> list[dict[str, Any]]:
    """List the kernels of one step, as a replay runs them, by their seconds in all.

    On the CPU they are PyTorch's operations.
    """
    step = CapturedStep.of(pair.target, pair.draft, tree)
    step.prefill(random_prompt(pair, context), 4 * tree.depth, seed=0)
    extent = step.extent(context - 1)
    step.refill_random_numbers(sampling)
    step.run(extent, sampling).tolist()  # compiles and captures
    on_cuda = run.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else None
    activities = [activity or torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        step.run(extent, sampling).tolist()
    kernels = [
        {
            "name": row.key,
            "calls": row.count,
            "seconds": (row.device_time_total if on_cuda else row.self_cpu_time_total) / 1e6,
        }
        for row in profiler.key_averages()
    ]
    return sorted(kernels, key=lambda kernel: -kernel["seconds"])


@torch.inference_mode()
def steady_seconds(
    run: Run,
    pair: Pair,
    tree: TokenTree,
    sampling: Sampling,
    context: int,
    launches_ahead: bool,
) -> float:
    """Return the median seconds between two steps of a decoder."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    num_steps = WARM_UP_STEPS + run.scale.tokens
    prompt = random_prompt(pair, context)
    times = []
    with (
        mock.patch.object(CapturedStep, "launches_ahead", launches_ahead),
        closing(decoder.steps(prompt, num_steps * tree.depth, sampling, seed=0)) as steps,
    ):
        for _ in itertools.islice(steps, num_steps):
            times.append(time.perf_counter())
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(seconds[WARM_UP_STEPS:])


def time_host_stream(run: Run) -> dict[str, Any]:
    """Time a step whose layers are copied from pinned host memory in every pass.

    The layers have the shapes of an 8B target. The same step is timed with all of them on the
    device, and one copy of as many bytes alone. On the CPU nothing is streamed.
    """
    scale, sampling = run.scale, Sampling(0.6)
    shape = scale.shared_heads_target | {"num_hidden_layers": scale.streamed_layers}
    pair = random_pair("llama-3.1-8b, few layers", shape, scale.draft_of(shape), run.device)
    trees = {"plain": TokenTree.chain(1), "tree": bushy(min(64, scale.max_size), 3)}
    context = scale.contexts[0]

    def time_trees() -> dict[str, Any]:
        """The parts of a step with each tree."""
        return {
            title: step_breakdown(pair, tree, sampling, scale.rounds, context=context)
            for title, tree in trees.items()
        }

    result: dict[str, Any] = {"models": pair.metadata, "breakdown": {}}
    result["breakdown"] |= {f"{title}, resident": times for title, times in time_trees().items()}
    run.save(result)
    if run.device.type == "cuda":
        stream = stream_layers(pair.target, run.device)
        block = stream.blocks[0]
        copy_seconds = median_seconds(
            run, lambda: stream.memory[0][: block.numel()].copy_(block, non_blocking=True)
        )
        result["streamed_bytes"] = stream.bytes
        result["link_bytes_per_second"] = round(block.numel() / copy_seconds)
        result["breakdown"] |= {
            f"{title}, streamed": times for title, times in time_trees().items()
        }
    return result


def stream_layers(model: Any, device: torch.device) -> HostStream:
    """Let every layer of `model` take its weights from pinned host memory in every pass."""
    memories, blocks = [], []
    for layer in model.model.layers:
        places, size = {}, 0
        for name, parameter in layer.named_parameters():
            places[name] = Place(parameter.dtype, tuple(parameter.shape), size)
            size = round_up(size + parameter.numel() * parameter.element_size(), 512)
        blocks.append(WeightBlock(0, size, 0, places))
        memory = aligned_memory(size)
        for name, view in blocks[-1].views(memory).items():
            view.copy_(layer.get_parameter(name))
        memories.append(pin(memory))
    stream = HostStream(memories, SLOTS, device)
    view_slots(stream, model.model.layers, blocks)
    attach_stream(model, stream, model.model.layers, blocks)
    return stream


def trees_to_time(max_size: int) -> dict[str, TokenTree]:
    """Return ternary trees and trees of the catalog, of at most `max_size` nodes, by title."""
    trees = {f"ternary {size}": bushy(size, 3) for size in (128, 768) if size <= max_size}
    if not trees:
        trees = {"ternary": bushy(max_size, 3)}
    for name in CATALOG_TREES:
        tree = load_tree(name)
        if tree.size <= max_size:
            trees[name] = tree
    return trees


def time_steps(
    run: Run, pair: Pair, tree: TokenTree, sampling: Sampling, context: int
) -> dict[str, Any]:
    """Time the first step and the parts of later ones, and add the peak memory.

    Args:
        context: tokens in the KV cache.
    """

    def time_first_and_later() -> dict[str, Any]:
        first = first_step_seconds(pair, tree, sampling, context)
        later = step_breakdown(pair, tree, sampling, run.scale.rounds, context=context)
        return {"first_step_seconds": first, **later}

    return with_peak_memory(run.device, time_first_and_later)


def with_peak_memory(device: torch.device, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `measure` returns, and the most bytes that are allocated while it runs."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    figures = measure()
    peak_bytes = torch.cuda.max_memory_allocated(device) if on_cuda else None
    return figures | {"peak_memory_bytes": peak_bytes}


@torch.inference_mode()
def first_step_seconds(pair: Pair, tree: TokenTree, sampling: Sampling, context: int) -> float:
    """Return the seconds of the first step, in which its passes are captured."""
    step = CapturedStep.of(pair.target, pair.draft, tree)
    step.prefill(random_prompt(pair, context), tree.depth, seed=0)
    step.refill_random_numbers(sampling)
    started = time.perf_counter()
    step.run(step.extent(context - 1), sampling).tolist()
    return time.perf_counter() - started


def step_breakdown(
    pair: Pair, tree: TokenTree, sampling: Sampling, rounds: int, **options: Any
) -> dict[str, Any]:
    """Time the parts of a step, and return them with the keys of a bench file.

    Args:
        options: further ones of `breakdown`.
    """
    figures = breakdown(pair, tree, sampling, rounds=rounds, **options)
    return Breakdown(**figures).to_dict()


@functools.cache
def embedded_pair(device: torch.device, placement: str = "auto") -> Pair:
    """Load the embedded pair, once for each device and placement."""
    return load_pair(device=str(device), placement=placement)


def bench_embedded_pair(run: Run, sampling: Sampling) -> dict[str, Any]:
    """Profile the embedded pair, solve a tree, decode with it and other methods, time its step."""
    scale, pair = run.scale, embedded_pair(run.device)
    profile = measure(
        pair,
        built_in()[: scale.num_profiled_prompts],
        [sampling],
        scale.latency_seconds,
        max_size=scale.max_size,
        precision=scale.precision,
        tokens_per_prompt=min(scale.tokens, 64),
    )[0]
    tree = solve(profile, budget=BUDGET, depth=MAX_DEPTH).tree
    sampling = replace(sampling, verifier=tree.plan.settings["verifier"])
    result = compare(
        pair,
        functools.partial(embedded_pair, run.device, placement="resident"),
        tree,
        bench_trees(tree, sampling.verifier),
        sampling,
        prompts_longest_first(pair, scale),
        scale.tokens,
        METHODS,
        deadline=run.deadline,
        assistant=LANGUAGE_MODEL,
    )
    breakdowns = {}
    for name, timed_tree in {"plain": TokenTree.chain(1), "tree": tree}.items():
        measure_step = functools.partial(step_breakdown, pair, timed_tree, sampling, scale.rounds)
        breakdowns[name] = with_peak_memory(run.device, measure_step)
    return result.to_dict() | {
        "acceptance": profile.acceptance.pooled().tolist(),
        "trials": profile.effective_trials,
        "latency": latency_figures(profile.latency),
        "tree": {
            "parents": tree.parents.tolist(),
            "expected_tokens": tree.plan.expected_tokens,
            "step_seconds": tree.plan.step_seconds,
        },
        "breakdown": breakdowns,
    }


def bench_transformers(run: Run) -> dict[str, Any]:
    """Decode with our plain decoding and with variants of transformers' `generate`.

    The variants are its dynamic cache, and its static cache with and without a compiled forward
    pass, all of them with and without cuDNN's attention, which makes a new plan for every length.
    """
    pair, tokens = embedded_pair(run.device), run.scale.tokens
    prompts = prompts_longest_first(pair, run.scale)
    figures = {}
    for sampling, uses_cudnn in itertools.product((Sampling(), Sampling(0.6)), (True, False)):
        make_static = functools.partial(
            transformers_method,
            pair,
            sampling,
            tokens,
            counts_passes=False,
            cache_implementation="static",
        )
        methods = {
            "plain": sequoia_method(pair, TokenTree.chain(1), sampling, tokens),
            "generate": transformers_method(pair, sampling, tokens),
            "static, compiled": make_static(),
            "static": make_static(disable_compile=True),
        }
        used_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
        try:
            results = summary(bench(methods, prompts, deadline=run.deadline), ["plain"])
        finally:
            torch.backends.cuda.enable_cudnn_sdp(used_cudnn)
        title = f"T {sampling.temperature}, {'with' if uses_cudnn else 'without'} cuDNN"
        figures[title] = {name: result.to_dict() for name, result in results.items()}
    return {"contenders": figures}


def time_random_pair(run: Run, name: str) -> dict[str, Any]:
    """Time a target of the paper's shape, with random weights, and its draft.

    Passes are timed by size, and memory bandwidth by a copy. The best tree for each of the paper's
    acceptance vectors is solved with these times, and its step is timed.
    """
    scale, sampling = run.scale, Sampling(0.6)
    pair = random_pair(name, scale.targets[name], scale.draft, run.device)
    meter = LatencyMeter(pair, [sampling], max_size=scale.max_size)
    meter.begin(math.inf)
    latency = meter.finish(scale.latency_seconds)
    plain = step_breakdown(pair, TokenTree.chain(1), sampling, scale.rounds)
    weight_bytes = bytes_read(pair.target)
    copy_bytes_per_second = copy_bandwidth(run.device, scale.copy_bytes)
    target_bytes_per_second = weight_bytes / latency.target[1]
    trees = {}
    for vector_name in PAPER_VECTORS:
        paper = Profile.load(CATALOG / "profiles" / f"{vector_name}.yaml")
        profile = Profile(
            acceptance=paper.acceptance,
            effective_trials=paper.effective_trials,
            latency=latency,
            settings=sampling.settings(),
            models=pair.metadata,
            hardware=fingerprint(run.device),
        )
        tree = solve(profile, budget=BUDGET, depth=MAX_DEPTH).tree
        trees[vector_name] = compare_with_passes(
            run, pair, tree, sampling, paper.acceptance, latency, plain["step"]
        )
    return {
        "settings": sampling.settings()
        | {"dtype": dtype_name(pair.target.dtype), "context": latency.context},
        "models": pair.metadata,
        "latency": latency_figures(latency),
        "bandwidth": {
            "bytes_read_a_pass": weight_bytes,
            "copy_bytes_per_second": round(copy_bytes_per_second),
            "target_bytes_per_second": round(target_bytes_per_second),
            "share_of_copy": round(target_bytes_per_second / copy_bytes_per_second, 4),
        },
        "plain": plain,
        "trees": trees,
    }


def compare_with_passes(
    run: Run,
    pair: Pair,
    tree: TokenTree,
    sampling: Sampling,
    acceptance: Acceptance,
    latency: Latency,
    plain_seconds: float,
) -> dict[str, Any]:
    """Compare the measured step of a tree with the sum of its passes, and project its speed.

    Args:
        acceptance: the acceptance that the speed is projected with.
        latency: the passes, timed alone.
        plain_seconds: seconds of a step of plain decoding.
    """
    parts = with_peak_memory(
        run.device, lambda: step_breakdown(pair, tree, sampling, run.scale.rounds)
    )
    step_seconds = parts["step"]
    times = StepTime(latency)
    planned_seconds = times.step_seconds(tree)
    pass_seconds = planned_seconds - latency.overhead - times.verification_seconds(tree.size)
    tokens = expected_tokens(tree, acceptance.rates)
    return {
        "parents": tree.parents.tolist(),
        "size": tree.size,
        "depth": tree.depth,
        "step_seconds": {
            "measured": step_seconds,
            "planned": planned_seconds,
            "sum_of_passes": pass_seconds,
        },
        "overhead_share": 1 - pass_seconds / step_seconds,
        "breakdown": parts,
        "projected": {
            "expected_tokens": tokens,
            "tokens_per_second": tokens / step_seconds,
            "plain_tokens_per_second": 1 / plain_seconds,
            "speedup": tokens * plain_seconds / step_seconds,
        },
    }


def prompts_longest_first(pair: Pair, scale: Scale) -> list[list[int]]:
    """Return held-out prompts, the longest first: bench warms up with the first one.

    What grows with the length of a prompt has then grown before anything is timed.
    """
    return sorted(held_out(pair.tokenizer, scale.num_decoded_prompts), key=len, reverse=True)


def latency_figures(latency: Latency | None) -> dict[str, Any]:
    """Return the measured times for a JSON file, without quartiles."""
    assert latency is not None
    return {
        "target": latency.target,
        "draft": latency.draft,
        "overhead": latency.overhead,
        "verification": latency.verification.to_dict() if latency.verification else None,
        "context": latency.context,
        "samples": latency.samples,
        "out_of_memory": latency.out_of_memory,
    }


PARTS: dict[str, Part] = {
    "checks": (240.0, run_checks),
    "captured": (120.0, compare_captured),
    "shared-heads": (240.0, time_shared_heads),
    "sdpa": (90.0, time_attention),
    "host-stream": (120.0, time_host_stream),
    "breakdown": (420.0, time_settings),
    "llama-2-7b": (150.0, lambda run: time_random_pair(run, "llama-2-7b")),
    "llama-2-13b": (150.0, lambda run: time_random_pair(run, "llama-2-13b")),
    "pair-t0": (150.0, lambda run: bench_embedded_pair(run, Sampling())),
    "pair-t06": (150.0, lambda run: bench_embedded_pair(run, Sampling(0.6))),
    "variants": (240.0, bench_transformers),
}
"""The parts, in the order in which they run: whether it works first, then what matters most."""
