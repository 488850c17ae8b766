"""How much benchmarks/gpu.py measures, and what its parts share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from random_models import Shape, shape

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.bench_result import Breakdown
from sequoia_plan.profiler.breakdown import breakdown
from sequoia_plan.profiler.timing import timed
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import Pair, Sampling


class Scale(NamedTuple):
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
        test_arguments: pytest's arguments for each file of tests that need the device.
        targets: shapes of the targets with random weights, by name.
        draft: shape of their draft.
        shared_heads_target: shape of a target whose heads share keys and values.
        streamed_layers: how many such layers are streamed from host memory.
    """

    num_profiled_prompts: int = 16
    num_decoded_prompts: int = 10
    tokens: int = 128
    precision: float = 0.05
    latency_seconds: float = 10.0
    rounds: int = 20
    max_size: int = 1024
    copy_bytes: int = 1 << 30
    attention_nodes: tuple[int, ...] = (1, 64, 128, 768)
    attention_extents: tuple[int, ...] = (512, 2560, 8192)
    contexts: tuple[int, ...] = (128, 2048)
    long_contexts: tuple[int, ...] = (512, 8192)
    vocabulary: int = 128_256
    test_arguments: tuple[str, ...] = tuple(
        f"tests/runtime/test_{name}.py"
        for name in ("static_step", "fused", "layer_kernels", "cuda")
    )
    targets: Mapping[str, Shape] = {
        "llama-2-7b": shape(4096, 11008, 32, 32),
        "llama-2-13b": shape(5120, 13824, 40, 40),
    }
    draft: Shape = shape(768, 3072, 2, 12)
    shared_heads_target: Shape = shape(4096, 14336, 32, 32, 128_256) | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 16_384,
    }
    streamed_layers: int = 8

    @property
    def plain_and_tree(self) -> dict[str, TokenTree]:
        """A step of plain decoding and one with a tree."""
        return {"plain": TokenTree.chain(1), "tree": bushy(min(64, self.max_size))}

    def draft_of(self, target: Shape) -> Shape:
        """The draft's shape with the vocabulary of `target`."""
        return self.draft | {"vocab_size": target["vocab_size"]}


FULL = Scale()
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
    test_arguments=("tests/runtime/test_static_step.py -k captured_steps",),
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


def median_seconds(run: Run, function: Callable[[], Any]) -> float:
    """Return the median seconds of `function`, called as often as the scale says."""
    return statistics.median(timed(run.device, function)[1] for _ in range(run.scale.rounds))


def with_peak_memory(device: torch.device, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `measure` returns, and the most bytes that are allocated while it runs."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    figures = measure()
    peak_bytes = torch.cuda.max_memory_allocated(device) if on_cuda else None
    return figures | {"peak_memory_bytes": peak_bytes}


def step_breakdown(
    pair: Pair, tree: TokenTree, sampling: Sampling, rounds: int, **options: Any
) -> dict[str, Any]:
    """Time the parts of a step, and return them with the keys of a bench file.

    Args:
        options: further ones of `breakdown`.
    """
    figures = breakdown(pair, tree, sampling, rounds=rounds, **options)
    return Breakdown(**figures).to_dict()
