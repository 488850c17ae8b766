"""Decode with the embedded target streamed from disk.

It measures what a tree gains over plain decoding.

    python benchmarks/offload.py -o benchmarks/results/offload.json
    python benchmarks/offload.py --prompts 2 --tokens 8 --latency-seconds 0 -o few.json

Parts that the output file already has are not run again.

decode, decode-0.6: held-out prompts at temperature 0 and 0.6, every method in turn. All targets are
    streamed. Each tree is solved from a profile that is measured in this run. `plain + N` is plain
    decoding with N more layers in memory, which take at least the bytes of a draft and its KV
    cache. accelerate's `disk_offload` reads through the page cache, which is dropped before each
    pass; it decodes a quarter of the tokens. A disk may give more after a rest, so the file is read
    before each text until the disk gives what it gives for long.

Bytes are those that the process read from the disk (read_bytes of /proc/self/io).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import disk_offload
from reports import new_parser, write_report

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.prediction import prediction_for
from sequoia_plan.artifacts.prompts import built_in
from sequoia_plan.planner import solve
from sequoia_plan.profiler import measure
from sequoia_plan.profiler.bench import bench
from sequoia_plan.profiler.bench_figures import summary
from sequoia_plan.profiler.decoding_methods import (
    DecodePrompt,
    PromptRun,
    sequoia_method,
    transformers_method,
)
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.backends import place
from sequoia_plan.runtime.backends.modules.offloaded_target import OffloadedTarget
from sequoia_plan.runtime.backends.modules.self_draft import INT8, copy_bytes
from sequoia_plan.runtime.models.pretrained import find_model
from sequoia_plan.runtime.offload.disk_stream import CHUNK_BYTES, THREADS
from sequoia_plan.runtime.offload.memory import SLOTS, cache_bytes
from sequoia_plan.runtime.offload.weight_file import aligned_memory, bytes_of

CPU = torch.device("cpu")
DTYPE = "bfloat16"
RESIDENT = 6
"""Layers of thirty that stay in memory: a fifth."""
DRAFTS = ["smollm2-135m-eagle3", "smollm2-135m-draft", INT8]
PRECISION = 0.08
"""Of a profile's expected tokens."""
BUDGET, DEPTH = 768, 40
"""Limits of the trees: nodes and levels."""
WARM_UP_READS, PASSES = 40, 4
"""Reads until the disk is as slow as it will be, of so many passes each."""
Parts = dict[str, Callable[[argparse.Namespace], dict[str, Any]]]
"""Functions that measure, by the names of parts of a report."""


def bytes_read_so_far() -> int:
    """Bytes that this process has read from the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def streamed_pair(draft: str | None, layers: int) -> Pair:
    """The embedded pair with so many layers of the target in memory."""
    load = partial(load_pair, draft=draft, dtype=DTYPE, offload="disk")
    if draft == INT8:  # it has a copy of the streamed layers, and of what is outside of the layers
        target = OffloadedTarget(find_model(None), "cpu", torch.bfloat16)
        layer_bytes, num_layers = max(target.layer_sizes()), len(target.layers)
        copy_size = max(
            copy_bytes(layer.parameters(), target.model.dtype) for layer in target.layers
        )
        memory = target.outside_bytes + (layers + SLOTS) * layer_bytes + layer_bytes // 4
        memory += (num_layers - layers) * copy_size + cache_bytes(target.model)
    else:
        whole = load(memory="1TB")
        sizes, metadata = whole.target.backend.layer_sizes(), whole.metadata["target"]
        memory = metadata["resident_bytes"] + metadata["draft_bytes"] + metadata["cache_bytes"]
        memory -= (len(sizes) - SLOTS - layers) * max(sizes)
    pair = load(memory=memory)
    assert pair.metadata["target"]["resident_layers"] == layers
    return pair


def read_seconds(stream: Any, buffers: list[memoryview]) -> float:
    """Mean seconds to only read what a pass reads, by a thread for each buffer."""
    chunks = iter(
        [
            (block.offset + start, min(CHUNK_BYTES, block.size - start))
            for block in stream.blocks * PASSES
            for start in range(0, block.size, CHUNK_BYTES)
        ]
    )

    def read_chunks(buffer: memoryview) -> None:
        for offset, size in chunks:
            stream.file.read(offset, buffer[:size])

    threads = [threading.Thread(target=read_chunks, args=(buffer,)) for buffer in buffers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started) / PASSES


def measure_decoding(options: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """Every method of decoding, prompt by prompt in turn."""
    sampling, tokens = Sampling(temperature), options.tokens
    drafts = options.draft or DRAFTS
    pairs = {draft: streamed_pair(draft, RESIDENT) for draft in drafts}
    stream = pairs[drafts[0]].target.stream
    # the system gives memory when it is first written
    buffers = [bytes_of(aligned_memory(CHUNK_BYTES).fill_(1)) for _ in range(THREADS)]
    speeds = [1 / read_seconds(stream, buffers) for _ in range(WARM_UP_READS)]
    lasting_speed = statistics.median(speeds[-WARM_UP_READS // 3 :])
    methods: dict[str, DecodePrompt] = {}
    bytes_read: dict[tuple[str, int], int] = {}
    trees: dict[str, TokenTree] = {}

    def wear_down() -> None:
        """Read until the disk gives no more than it gives for long."""
        for _ in range(WARM_UP_READS):
            if 1 / read_seconds(stream, buffers) <= 1.1 * lasting_speed:
                return

    def add(name: str, decode: DecodePrompt) -> None:
        """Add a method that starts on a disk that has not rested, and whose reads are counted."""

        def counted(prompt: list[int], seed: int) -> PromptRun:
            wear_down()
            bytes_before = bytes_read_so_far()
            run = decode(prompt, seed)
            bytes_read[name, seed] = bytes_read_so_far() - bytes_before
            return run

        methods[name] = counted

    def add_plain(name: str, pair: Pair) -> None:
        add(name, sequoia_method(pair, TokenTree.chain(1), sampling, tokens))

    add_plain("plain", pairs[drafts[0]])
    for draft, pair in pairs.items():
        wear_down()
        profile = measure(pair, built_in(), sampling, options.latency_seconds, precision=PRECISION)
        trees[draft] = solve(profile, budget=BUDGET, depth=DEPTH).tree
        add(draft, sequoia_method(pair, trees[draft], sampling, tokens))
        metadata = pair.metadata["target"]
        draft_bytes = metadata["draft_bytes"] + metadata["cache_bytes"] - cache_bytes(pair.target)
        more_layers = -(-draft_bytes // (metadata["slot_bytes"] // SLOTS))
        add_plain(f"plain + {more_layers}", streamed_pair(None, RESIDENT + more_layers))
    with tempfile.TemporaryDirectory() as folder:
        add("disk_offload", accelerate_method(sampling, max(tokens // 4, 2), folder))
        prompts = prompts_with_long_texts(sampling, options.prompts, tokens)
        runs = bench(methods, prompts, on_prompt=lambda done: print(done, "prompts", flush=True))
    figures = {
        name: result.to_dict() for name, result in summary(runs, over=tuple(methods)).items()
    }
    for name, method_runs in runs.items():
        all_bytes = sum(bytes_read[name, seed] for seed in range(len(method_runs)))
        passes = sum(run.passes or 1 for run in method_runs)
        figures[name]["bytes_read_a_pass"] = round(all_bytes / passes)
    for draft, tree in trees.items():
        prediction = prediction_for(tree, sampling.verifier, tree.plan, sampling.settings())
        figures[draft] |= {
            "tree": {"size": tree.size, "depth": tree.depth},
            "predicted": {
                "tokens_per_step": prediction.tokens_per_step,
                "speedup": prediction.speedup,
            },
            "step_seconds": tree.plan.step_seconds,
        }
    settings = {"sampling": sampling.settings(), "prompts": len(prompts), "tokens": tokens}
    models = {draft: pair.metadata for draft, pair in pairs.items()}
    return {"settings": settings, "models": models, "contenders": figures}


def prompts_with_long_texts(sampling: Sampling, num_prompts: int, tokens: int) -> list[list[int]]:
    """The first held-out prompts that are continued by at least `tokens` tokens.

    A step yields a dozen tokens, and a short text would have only one or two steps.
    """
    resident = load_pair(dtype=DTYPE)
    decoder = SequoiaDecoder(resident.target, None, TokenTree.chain(1))
    prompts: list[list[int]] = []
    for prompt in held_out(resident.tokenizer, 80):
        if len(prompts) < num_prompts:
            result = decoder.generate(prompt, tokens, sampling=sampling, seed=len(prompts))
            prompts += [prompt] * (result.new_tokens == tokens)
    return prompts


def accelerate_method(sampling: Sampling, tokens: int, folder: str) -> DecodePrompt:
    """transformers' generate with accelerate's `disk_offload`, without the page cache."""
    pair = load_pair(dtype=DTYPE, placement="resident")
    target: Any = disk_offload(pair.target.module, folder, CPU)
    gc.collect()

    def drop_page_cache(*_: Any) -> None:
        for file in Path(folder).rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.fsync(fd)  # what is not yet written cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    target.register_forward_pre_hook(drop_page_cache)
    # transformers sends its input to the device of the model, which is `meta` for an offloaded one
    type(target).device = property(lambda self: CPU)
    return transformers_method(replace(pair, target=place(target, "resident")), sampling, tokens)


PARTS: Parts = {
    "decode": lambda options: measure_decoding(options, 0.0),
    "decode-0.6": lambda options: measure_decoding(options, 0.6),
}


def main(parts: Parts, description: str | None) -> None:
    """Run the parts that the output file lacks."""
    parser = new_parser(description)
    parser.add_argument("--part", action="append", choices=list(parts))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--latency-seconds", type=float, default=45.0)
    parser.add_argument("--draft", action="append", choices=DRAFTS, help="[default: all]")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.part or parts:
        if name not in results:
            results[name] = parts[name](options) | {"hardware": fingerprint(CPU)}
            write_report(options.output, results)


if __name__ == "__main__":
    main(PARTS, __doc__)
