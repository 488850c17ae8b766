"""The parts of a step: parts of benchmarks/gpu.py."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from gpu_scale import Run, Scale, measure_each, median_seconds, step_breakdown, with_peak_memory
from random_models import random_pair
from transformers import LlamaConfig

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.profiler.timing import random_prompt
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.backends import RESIDENT, place
from sequoia_plan.runtime.backends.modules.streamed_layers import attach_stream, view_slots
from sequoia_plan.runtime.base.cache import round_up
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.draft.eagle_model import Eagle3, Eagle3Norms
from sequoia_plan.runtime.models.dtype import dtype_name
from sequoia_plan.runtime.models.fuse import fuse
from sequoia_plan.runtime.offload.host_stream import HostStream, pin
from sequoia_plan.runtime.offload.memory import SLOTS
from sequoia_plan.runtime.offload.weight_file import Place, WeightBlock, aligned_memory

CATALOG_TREES = ("llama3-70b-8b-cnn-128x10", "llama3-70b-8b-cnn-768x18")
WARM_UP_STEPS = 8


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
    settings = [
        {
            "tree": title,
            "context": context,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "verifier": None if sampling.greedy else sampling.verifier,
        }
        for title, sampling, context in itertools.product(trees, samplings, contexts)
    ]

    def time_setting(setting: dict[str, Any]) -> dict[str, Any]:
        """Time the parts of a step with one setting."""
        verifier = setting["verifier"] or "sequoia"
        sampling = Sampling(setting["temperature"], setting["top_p"], verifier=verifier)
        return time_steps(run, pair, trees[setting["tree"]], sampling, setting["context"])

    return measure_each(run, "steps", settings, time_setting, models=pair.metadata)


def time_shared_heads(run: Run) -> dict[str, Any]:
    """Time an 8B target whose heads share keys and values, and an EAGLE-3 draft.

    The parts of a step are timed, the kernels of one step counted, and steps timed one after the
    other as a decoder runs them, with and without launching a step before the last one is read.
    """
    scale, sampling = run.scale, Sampling(0.6)
    pair = eagle3_pair(scale, run.device)
    trees = scale.plain_and_tree
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
    run_step = step_after(pair, tree, sampling, context)
    run_step()  # compiles and captures
    on_cuda = run.device.type == "cuda"
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[activities.CUDA if on_cuda else activities.CPU]
    ) as profiler:
        run_step()
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
    if run.device.type == "cuda":
        fuse(pair.target.module)  # as `load_pair` does with a target that is streamed
    trees = scale.plain_and_tree
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
        stream = stream_layers(pair.target.module, run.device)
        pair = replace(pair, target=place(pair.target.module, RESIDENT))
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
        matrices = [(name, p) for name, p in layer.named_parameters() if p.ndim > 1]
        for name, parameter in matrices:  # norms are on the device, as in a target that is streamed
            places[name] = Place(dtype_name(parameter.dtype), tuple(parameter.shape), size)
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
    trees = {f"ternary {size}": bushy(size) for size in (128, 768) if size <= max_size}
    if not trees:
        trees = {"ternary": bushy(max_size)}
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

    @torch.inference_mode()
    def time_first_and_later() -> dict[str, Any]:
        run_step = step_after(pair, tree, sampling, context)
        started = time.perf_counter()
        run_step()  # its passes are captured
        first = time.perf_counter() - started
        later = step_breakdown(pair, tree, sampling, run.scale.rounds, context=context)
        return {"first_step_seconds": first, **later}

    return with_peak_memory(run.device, time_first_and_later)


def step_after(pair: Pair, tree: TokenTree, sampling: Sampling, context: int) -> Callable[[], Any]:
    """A step after a random prompt of `context` tokens, as a function that runs it."""
    step = CapturedStep.of(pair.target, pair.draft, tree)
    step.prefill(random_prompt(pair, context), 4 * tree.depth, seed=0)
    step.refill_random_numbers(sampling)
    return lambda: step.run(step.extent(context - 1), sampling).tolist()
