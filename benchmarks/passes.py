"""How long the passes of the embedded target and of its drafts take, by the layers that run.

    python benchmarks/passes.py --threads 2 --threads 1 -o benchmarks/results/passes.json
    python benchmarks/passes.py --rounds 2 --draft smollm2-135m-eagle3 -o build/passes.json

Passes run with transformers' layers, with transformers' layers whose linear layers are prepacked
(as before fused layers came), and with fused layers. The matrix products of the fused target are
also timed alone. A round times each of them once, so ratios of times are free of drift. On Linux,
the peak memory of a process that loads both models and runs passes is measured once for each.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reports import new_parser, spread, write_report

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.size_timer import SizeTimer
from sequoia_plan.profiler.timing import CONTEXT, random_prompt
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.captured_step import CapturedStep
from sequoia_plan.runtime.models.fuse import fuse, replace_linear_layers
from sequoia_plan.runtime.models.prepacked import PrepackedLinear
from sequoia_plan.runtime.pair import EMBEDDED_DRAFTS

NODES = (1, 6, 16, 64)
LAYERS = ("transformers", "prepacked", "fused")
PARTS = ("target", "draft")


def with_layers(target: Any, draft: Any, layers: str) -> tuple[Any, Any]:
    """Copies of both models with one of `LAYERS`."""
    target = copy.deepcopy(target)
    draft = copy.deepcopy(draft)
    if hasattr(draft, "_target"):  # a draft that reads the target's hidden states
        draft._target = (target,)
    replace_layers((target, draft), layers)
    return target, draft


def replace_layers(models: Iterable[Any], layers: str) -> None:
    """Give the models, which have transformers' layers, one of `LAYERS`."""
    for model in models:
        if layers == "prepacked":
            replace_linear_layers(model, PrepackedLinear)
        elif layers == "fused":
            fuse(model, PrepackedLinear)


@torch.inference_mode()
def milliseconds(draft_name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Times of passes, and their ratios to those with fused layers.

    Returns:
        By part ("target", "draft"), each of `LAYERS` and number of nodes in `NODES`: median, first
        and third quartile in milliseconds; and the same three of the ratio to the fused pass of
        the same round. Under "products", the same of the fused target's products alone.
    """
    pair = load_pair(draft=draft_name, dtype=dtype, placement="resident")
    prompt = random_prompt(pair, CONTEXT)
    timers: dict[tuple[str, int], SizeTimer] = {}
    for layers in LAYERS:
        step = CapturedStep.of(*with_layers(pair.target, pair.draft, layers), TokenTree.chain(2))
        for nodes in NODES:
            timers[layers, nodes] = SizeTimer(step, nodes, Sampling(), prompt)
            timers[layers, nodes].run()  # warms up
    target = timers["fused", 1].step.target.model
    products: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for nodes in NODES:
            for layers in LAYERS:
                for (part, _), sample in timers[layers, nodes].run().items():
                    seconds[layers, part, nodes].append(sample)
            products[nodes].append(seconds_of_products(target, nodes))
    figures: dict[str, Any] = {part: {} for part in PARTS}
    for part in PARTS:
        for layers in LAYERS:
            samples = {n: 1000 * np.array(seconds[layers, part, n]) for n in NODES}
            fused = {n: 1000 * np.array(seconds["fused", part, n]) for n in NODES}
            figures[part][layers] = {
                str(n): {"ms": spread(samples[n]), "over_fused": spread(samples[n] / fused[n])}
                for n in NODES
            }
    for nodes in NODES:
        fused_ms = 1000 * np.array(seconds["fused", "target", nodes])
        products_ms = 1000 * np.array(products[nodes])
        figures["target"].setdefault("products", {})[str(nodes)] = {
            "ms": spread(products_ms),
            "over_fused": spread(products_ms / fused_ms),
        }
    return figures


def seconds_of_products(model: Any, nodes: int) -> float:
    """How long all prepacked products of `model` take, one after the other."""
    layers = [module for module in model.modules() if isinstance(module, PrepackedLinear)]
    inputs = {
        width: torch.randn(1, nodes, width, dtype=model.dtype)
        for width in {layer.in_features for layer in layers}
    }
    start = time.perf_counter()
    for layer in layers:
        layer(inputs[layer.in_features])
    return time.perf_counter() - start


@torch.inference_mode()
def peak_megabytes(layers: str, draft_name: str, dtype: str) -> float:
    """The peak memory of this process once it has loaded the pair and run passes."""
    pair = load_pair(draft=draft_name, dtype=dtype, placement="resident")
    replace_layers((pair.target, pair.draft), layers)
    step = CapturedStep.of(pair.target, pair.draft, TokenTree.chain(2))
    SizeTimer(step, max(NODES), Sampling(), random_prompt(pair, CONTEXT)).run()
    status = Path("/proc/self/status").read_text()  # getrusage counts the parent process, too
    return int(status.split("VmHWM:")[1].split()[0]) / 1000


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function in a process of its own, started anew."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--threads", type=int, action="append", help="of PyTorch, repeatable")
    parser.add_argument("--draft", action="append", choices=EMBEDDED_DRAFTS, help="repeatable")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    drafts = options.draft or EMBEDDED_DRAFTS
    figures = {}
    for threads in options.threads or [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for draft in drafts:
            setting = f"{threads} threads, {draft}"
            figures[setting] = milliseconds(draft, options.dtype, options.rounds)
            print(setting, json.dumps(figures[setting]), flush=True)
    peaks = {
        draft: {
            layers: in_new_process(peak_megabytes, layers, draft, options.dtype)
            for layers in LAYERS
        }
        for draft in drafts
    }
    report = {
        "hardware": fingerprint("cpu"),
        "dtype": options.dtype,
        "figures": figures,
        "peak_mb": peaks,
    }
    write_report(options.output, report)


if __name__ == "__main__":
    main()
