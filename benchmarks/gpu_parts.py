"""The parts of benchmarks/gpu.py, and the program that measures one of them.

A part is a function that yields its settings, most important first, each with a function that
measures it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import re
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu import KERNELS, UNFINISHED, read
from gpu_models import FULL, QUICK, Scale, likely_tree, random_pair, stream_layers
from reports import write_report

from sequoia_plan.artifacts import Profile, SequoiaPlanError, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.tree_file import CATALOG
from sequoia_plan.models.backends import RESIDENT, loaded_as
from sequoia_plan.models.base import kernel_launch
from sequoia_plan.profiler.bench import compare
from sequoia_plan.profiler.breakdown import breakdown
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.profiler.timing import random_prompt, timed
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.captured_step import CapturedStep

Figures = dict[str, Any]
Row = tuple[dict[str, Any], Callable[[], Figures]]
"""A setting, of JSON values, and a function that measures it."""
NOT_AS_MEANT = ".*cannot be (compiled|captured)"
"""What the warnings say after which something slower runs."""
COPY_BYTES = 1 << 28
"""Of the copies that memory bandwidth is measured with."""
WARM_UP_STEPS = 8
PAIR_SECONDS = 20
"""After so many, the embedded pair begins no other prompt."""


def check_works(scale: Scale, device: torch.device) -> Iterator[Row]:
    """Compare captured steps with eager ones, and decode with logits that are not finite."""
    tree = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
    for name, draft in {"language model": scale.llama_68m, "EAGLE-3": None}.items():
        # in 16 bits two kernels for attention part after some hundred tokens
        pair = random_pair(scale.embedded, draft, device, torch.float32)
        for temperature in (0.0, 0.6):
            compare_tokens = functools.partial(compare_captured, pair, tree, temperature, scale)
            yield {"draft": name, "temperature": temperature}, compare_tokens
    yield {"logits": "not finite"}, functools.partial(decode_not_finite, pair, tree)


def compare_captured(pair: Pair, tree: TokenTree, temperature: float, scale: Scale) -> Figures:
    """Decode with captured and eager steps; an error if a token differs."""

    def decode(captured: bool | None, without: Iterable[str] = ()) -> tuple[list[int], Any]:
        """New tokens, and the graphs that were captured."""
        with without_kernels(*without):
            decoder = SequoiaDecoder(pair.target, pair.draft, tree, captured=captured)
            prompt = random_prompt(pair, 20)
            text = decoder.generate(prompt, scale.tokens, temperature, seed=1).sequences[0]
        return text[len(prompt) :].tolist(), decoder.step.models.graphs

    eager, _ = decode(False)
    tokens, graphs = decode(pair.target.device.type == "cuda" or None)
    by_tensors, _ = decode(False, KERNELS)
    figures = {
        "tokens": len(eager),
        "equal_if_captured": sum(map(operator.eq, eager, tokens)),
        "equal_without_kernels": sum(map(operator.eq, eager, by_tensors)),
        "graphs": len(graphs.graphs) if graphs else 0,
    }
    if tokens != eager:
        raise RuntimeError(f"captured steps give other tokens than eager ones: {figures}")
    return figures


def decode_not_finite(pair: Pair, tree: TokenTree) -> Figures:
    """Decode with a weight that is not a number, which must end in our error, then without it."""
    decoder, prompt = SequoiaDecoder(pair.target, pair.draft, tree), random_prompt(pair, 20)
    weight, sampling = pair.target.module.lm_head.weight.data, Sampling(0.7, top_p=0.9)
    before = weight[7].clone()
    weight[7] = torch.nan
    try:
        decoder.generate(prompt, 8, sampling=sampling, seed=0)
    except SequoiaPlanError as error:
        says = str(error)
    else:
        raise RuntimeError("logits that are not finite gave tokens and no error")
    weight[7] = before
    text = decoder.generate(prompt, 8, sampling=sampling, seed=0).sequences[0]
    return {"says": says, "tokens": len(text) - len(prompt)}


def time_step(scale: Scale, device: torch.device) -> Iterator[Row]:
    """Time the step of an 8B target and an EAGLE-3 draft."""
    pair = random_pair(scale.llama_8b, None, device)
    yield {"models": "8B, EAGLE-3"}, functools.partial(memory_limit, pair)
    measures: dict[str, Callable[..., Figures]] = {
        "parts at 0.6": functools.partial(breakdown, sampling=Sampling(0.6), rounds=scale.rounds),
        "steady": functools.partial(time_steady, tokens=scale.tokens),
        "kernels": list_kernels,
        "parts at 0": functools.partial(breakdown, sampling=Sampling(), rounds=scale.rounds),
    }
    trees = bushy(scale.nodes), TokenTree.chain(1)
    for figure, context, tree in itertools.product(measures, scale.contexts, trees):
        measure = functools.partial(measures[figure], pair, tree, context=context)
        yield {"figure": figure, "context": context, "nodes": tree.size}, measure


def memory_limit(pair: Pair) -> Figures:
    """Measure memory bandwidth by a copy, and count the weights that a pass of the target reads."""
    module, device = pair.target.module, pair.target.device
    source, copy = (torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = median_seconds(device, lambda: copy.copy_(source))
    embeddings = module.get_input_embeddings().weight  # single rows are read
    return {
        "bytes_read_a_pass": sum(x.nbytes for x in module.parameters() if x is not embeddings),
        "copy_bytes_per_second": round(2 * COPY_BYTES / seconds),
    }


def median_seconds(device: torch.device, run: Callable[[], Any], rounds: int = 10) -> float:
    """Median seconds of `run`, after two runs that do not count."""
    return statistics.median([timed(device, run)[1] for _ in range(rounds + 2)][2:])


@torch.inference_mode()
def step_after(
    pair: Pair, tree: TokenTree, context: int
) -> tuple[CapturedStep, Callable[[], list[int]]]:
    """A sampled step after a random prompt of `context` tokens, and a function that runs it."""
    step, sampling = CapturedStep.of(pair.target, pair.draft, tree), Sampling(0.6)
    step.prefill(random_prompt(pair, context), 4 * tree.depth, seed=0)
    step.refill_random_numbers(sampling)
    length, extent = step.sequence.length.clone(), step.extent(context - 1)

    def run() -> list[int]:
        """Run the step; its tokens are taken back."""
        numbers: list[int] = step.run(extent, sampling).tolist()
        step.sequence.length.copy_(length)
        return numbers

    return step, run


@torch.inference_mode()
def list_kernels(pair: Pair, tree: TokenTree, context: int) -> Figures:
    """List the slowest kernels of a step as it is replayed; on the CPU, PyTorch's operations."""
    _, run_step = step_after(pair, tree, context)
    run_step()  # compiles and captures
    on_cuda, activities = pair.target.device.type == "cuda", torch.profiler.ProfilerActivity
    activity = activities.CUDA if on_cuda else activities.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        run_step()
    kernels = [
        {"name": row.key, "calls": row.count, "seconds": microseconds / 1e6}
        for row in profiler.key_averages()
        for microseconds in [row.device_time_total if on_cuda else row.self_cpu_time_total]
    ]
    kernels.sort(key=lambda kernel: -kernel["seconds"])
    return {
        "calls": sum(kernel["calls"] for kernel in kernels),
        "seconds": sum(kernel["seconds"] for kernel in kernels),
        "kernels": kernels[:40],
    }


def time_steady(pair: Pair, tree: TokenTree, context: int, tokens: int) -> Figures:
    """Time a decoder from step to step; what this exceeds a step by, the host takes."""
    decoder, num_steps = SequoiaDecoder(pair.target, pair.draft, tree), WARM_UP_STEPS + tokens
    prompt, times = random_prompt(pair, context), []
    with closing(decoder.steps(prompt, num_steps * tree.depth, Sampling(0.6), seed=0)) as steps:
        for _ in itertools.islice(steps, num_steps):
            times.append(time.perf_counter())
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    return {"seconds": statistics.median(seconds[WARM_UP_STEPS:])}


@contextlib.contextmanager
def without_kernels(*names: str) -> Iterator[None]:
    """A context in which tensor operations take the place of these kernels."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    kernels = set(itertools.product(names, dtypes)) - kernel_launch._failed_kernels
    kernel_launch._failed_kernels |= kernels
    try:
        yield
    finally:
        kernel_launch._failed_kernels -= kernels


def time_kernels(scale: Scale, device: torch.device) -> Iterator[Row]:
    """Time the step of the 8B target without each of our kernels."""
    pair, tree = random_pair(scale.llama_8b, None, device), bushy(scale.nodes)
    yield from without_each_kernel(pair, tree, scale.contexts[-1], scale.rounds)


def without_each_kernel(pair: Pair, tree: TokenTree, context: int, rounds: int) -> Iterator[Row]:
    """Time a captured step with all of our kernels, without each and without all."""
    root_logits: list[torch.Tensor] = []

    @torch.inference_mode()
    def time_without(*names: str) -> Figures:
        """The step's seconds, and how far the root's logits are from those with all kernels."""
        with without_kernels(*names):
            step, run_step = step_after(pair, tree, context)
            figures = {"seconds": median_seconds(pair.target.device, run_step, rounds)}
            logits = step.run_target(step.extent(context - 1))[0].double()
        root_logits.append(logits)
        error = (logits - root_logits[0]).norm() / root_logits[0].norm()
        return figures | {"logits_differ_by": float(error)}

    for names in ((), *zip(KERNELS, strict=True), KERNELS, ()):
        setting = {"without": list(names), "context": context, "nodes": tree.size}
        yield setting, functools.partial(time_without, *names)


def time_llama_2(scale: Scale, device: torch.device) -> Iterator[Row]:
    """Time the steps of a 7B target and a 68M draft, and project their tokens a second."""
    pair = random_pair(scale.llama_7b, scale.llama_68m, device)
    yield {"models": "7B, 68M"}, functools.partial(memory_limit, pair)
    acceptance = Profile.load(CATALOG / "profiles" / "sequoia-example.yaml").acceptance
    context = scale.contexts[0]

    def time_tree(tree: TokenTree, temperature: float) -> Figures:
        """The parts of a step, and the projected tokens of one and of a second."""
        figures = breakdown(pair, tree, Sampling(temperature), context, scale.rounds)
        tokens = expected_tokens(tree, acceptance.rates)
        return {
            **figures,
            "depth": tree.depth,
            "expected_tokens": tokens,
            "projected_tokens_per_second": tokens / figures["step"],
        }

    trees = {size: likely_tree(acceptance, size) for size in scale.sizes}
    for temperature, size in itertools.product((0.6, 0.0), trees):
        measure = functools.partial(time_tree, trees[size], temperature)
        yield {"nodes": size, "temperature": temperature}, measure
    yield from without_each_kernel(pair, trees[scale.sizes[1]], context, scale.rounds)


def time_streamed(scale: Scale, device: torch.device) -> Iterator[Row]:
    """Time a step with layers on the device, then streamed; on the CPU nothing is streamed."""
    shape = scale.llama_8b | {"num_hidden_layers": scale.streamed_layers}
    pair, context = random_pair(shape, scale.llama_68m, device), scale.contexts[0]

    def rows(placement: str) -> Iterator[Row]:
        """A row for each tree."""
        for tree in (TokenTree.chain(1), bushy(scale.nodes)):
            setting = {"layers": placement, "nodes": tree.size}
            yield (
                setting,
                functools.partial(breakdown, pair, tree, Sampling(0.6), context, scale.rounds),
            )

    yield from rows("on the device")
    if device.type == "cuda":
        stream = stream_layers(pair.target.module, device)
        pair = replace(pair, target=loaded_as(pair.target.module, RESIDENT))
        block = stream.blocks[0]
        memory = stream.memory[0][: block.numel()]

        def time_link() -> Figures:
            """Bytes a second of a copy of one layer, and the bytes of all."""
            copy = functools.partial(memory.copy_, block, non_blocking=True)
            seconds = median_seconds(device, copy)
            return {"bytes": stream.bytes, "bytes_per_second": round(block.numel() / seconds)}

        yield {"layers": "link"}, time_link
        yield from rows("streamed")


def bench_embedded_pair(scale: Scale, device: torch.device) -> Iterator[Row]:
    """Decode the embedded pair's own prompts with a tree for its acceptance."""
    load = functools.cache(functools.partial(load_pair, device=str(device)))
    pair = load(placement=scale.placement)

    def bench(temperature: float, name: str) -> Figures:
        """What bench says of each method, and the parts of a step."""
        profile = Profile.load(CATALOG / "profiles" / f"smollm2-135m-epyc-2-cores-{name}.yaml")
        tree, sampling = likely_tree(profile.acceptance, scale.nodes), Sampling(temperature)
        verifier = sampling.verifier
        result = compare(
            pair,
            functools.partial(load, placement=RESIDENT),
            tree,
            {"plain": (TokenTree.chain(1), verifier), verifier: (tree, verifier)},
            sampling,
            held_out(pair.tokenizer, scale.num_prompts),
            scale.tokens,
            ("plain", "generate", verifier),
            deadline=time.perf_counter() + PAIR_SECONDS,
        ).to_dict()
        parts = breakdown(pair, tree, sampling, rounds=scale.rounds)
        return {"methods": result["contenders"], "tree": result["tree"], "parts": parts}

    for temperature, name in ((0.0, "t0"), (0.6, "t06")):
        yield {"temperature": temperature}, functools.partial(bench, temperature, name)


PARTS = {
    "works": check_works,
    "step": time_step,
    "kernels": time_kernels,
    "llama-2": time_llama_2,
    "streamed": time_streamed,
    "pair": bench_embedded_pair,
}


def measure_part(path: Path, number: int) -> None:
    """Measure the part that a report's run of this number names, and write each row to it."""
    report = read(path)
    run = report["runs"][number]
    rows, device = run["rows"], torch.device(run["device"])
    run["hardware"] = fingerprint(device)
    started = time.perf_counter()

    def note(setting: dict[str, Any] | None, figures: Figures) -> None:
        """Put a row at the end, or in the place of one that is not finished; write the report."""
        if rows and rows[-1].get("error") == UNFINISHED:
            rows.pop()
        messages = [str(warning.message) for warning in caught]
        ours = [message for message in messages if re.match(NOT_AS_MEANT, message)]
        caught.clear()
        rows.append({"setting": setting, **figures, **({"warnings": ours} if ours else {})})
        run["seconds"] = round(time.perf_counter() - started, 1)
        write_report(path, report)

    with without_kernels(*run["without"]), warnings.catch_warnings(record=True) as caught:
        # as an error, such a warning has a traceback that says what failed
        warnings.filterwarnings("error" if run["broken"] else "always", message=NOT_AS_MEANT)
        try:
            for setting, measure in PARTS[run["part"]](QUICK if run["quick"] else FULL, device):
                if None in run["settings"] or setting in run["settings"]:
                    note(setting, {"error": UNFINISHED})
                    note(setting, attempt(measure, device))
                note(None, {"error": UNFINISHED})
            rows.pop()
            write_report(path, report)
        except Exception as error:  # the next setting could not be made
            note(None, described(error))


def attempt(measure: Callable[[], Figures], device: torch.device) -> Figures:
    """What `measure` returns, with the most bytes that were allocated, or its error."""
    try:
        if device.type != "cuda":
            return measure()
        torch.cuda.reset_peak_memory_stats(device)
        return measure() | {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}
    except Exception as error:
        return described(error)


def described(error: Exception) -> Figures:
    """An error's message and traceback."""
    message = f"{type(error).__name__}: {str(error).strip()[:500]}"
    return {"error": message, "traceback": "".join(traceback.format_exception(error))[-8000:]}


if __name__ == "__main__":
    measure_part(Path(sys.argv[1]), int(sys.argv[2]))
