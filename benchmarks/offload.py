"""Decode with the embedded target streamed from disk.

It measures how much of the disk's speed a pass reaches, and what a tree gains over plain decoding.

    python benchmarks/offload.py -o benchmarks/results/offload.json
    python benchmarks/offload.py --part link -o build/link.json
    python benchmarks/offload.py --quick -o build/quick.json    # few prompts: to see that it runs

Parts that the output file already has are not run again.

link: plain passes one after the other, and reads of the same blocks of the same file with as many
    threads and as large chunks, in turn. Reads go past the page cache.
decode: held-out prompts, every method of decoding in turn. All targets are streamed. Each tree is
    solved from a profile of its own models that is measured in this run. `plain + N` is plain
    decoding with N more layers in memory, which take at least the bytes of a draft and its KV
    cache. accelerate's
    `disk_offload` reads through the page cache, which is dropped before each pass; it decodes a
    quarter of the tokens. A disk may give more after a rest, so the file is read before each text
    until the disk gives what it gives for long. With `--deepspeed PYTHON`, DeepSpeed's ZeRO takes
    part as well (by_deepspeed.py), in a process of its own.

Bytes are those that the process read from the disk (read_bytes of /proc/self/io): nothing comes
from the page cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import disk_offload

from sequoia_plan.artifacts import Acceptance, Profile, TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prediction import prediction_for
from sequoia_plan.artifacts.prompts import built_in
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.bench import bench
from sequoia_plan.profiler.bench_figures import summary
from sequoia_plan.profiler.decoding_methods import (
    DecodePrompt,
    PromptRun,
    sequoia_method,
    transformers_method,
)
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, LatencyMeter
from sequoia_plan.profiler.measure import max_tokens_of_any_tree
from sequoia_plan.profiler.prompts import encode, held_out
from sequoia_plan.profiler.timing import random_prompt
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.base.weight_stream import stream_of
from sequoia_plan.runtime.draft.self_draft import INT8, copy_bytes, self_draft
from sequoia_plan.runtime.models.architecture import decoder_layers
from sequoia_plan.runtime.models.dtype import resolve_dtype
from sequoia_plan.runtime.offload.disk_stream import CHUNK_BYTES, THREADS, DiskStream
from sequoia_plan.runtime.offload.memory import SLOTS, cache_bytes
from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget
from sequoia_plan.runtime.offload.weight_file import aligned_memory, bytes_of
from sequoia_plan.runtime.pair import EMBEDDED_DRAFTS, FUSED, NO_DRAFT
from sequoia_plan.runtime.pair import RESIDENT as RESIDENT_LAYERS

CPU = torch.device("cpu")
RESIDENT = 6
"""Layers of thirty that stay in memory: a fifth."""
DRAFTS = [*EMBEDDED_DRAFTS, INT8]
PRECISION = 0.08
"""Of a profile's expected tokens."""
BUDGET, DEPTH = 768, 40
"""Limits of the trees: nodes and levels."""
WARM_UP_READS = 40
"""About twenty seconds of reading."""
PASSES = 4
"""Passes, or reads of the streamed weights, one after the other."""
NODES = (1, 16, 64)
"""Of the passes with transformers' layers and with fused ones."""


def read_bytes(process: int | str = "self") -> int:
    """Bytes that a process has read from the disk so far."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def streamed_pair(draft: str | None, layers: int, dtype: str, placement: str = "auto") -> Pair:
    """The pair with so many layers of the target in memory; `placement` as for `load_pair`."""
    load = partial(load_pair, draft=draft, dtype=dtype, offload="disk", placement=placement)
    if draft == INT8:  # it has a copy of the streamed layers
        pair = load(memory=bytes_with_copy(layers, dtype))
    else:
        metadata = load(memory="1TB").metadata["target"]
        all_bytes = metadata["resident_bytes"] + metadata["draft_bytes"] + metadata["cache_bytes"]
        streamed_layers = metadata["layers"] - SLOTS - layers
        pair = load(memory=all_bytes - streamed_layers * layer_bytes(dtype))
    assert pair.metadata["target"]["resident_layers"] == layers
    return pair


def bytes_with_copy(layers: int, dtype: str) -> int:
    """The memory that holds so many layers of the embedded target, and a copy of the others."""
    target = OffloadedTarget(None, "cpu", resolve_dtype(dtype, "cpu"))
    copy_size = max(copy_bytes(layer.parameters(), target.model.dtype) for layer in target.layers)
    copies = (len(target.layers) - layers) * copy_size
    one_layer = max(target.layer_sizes())
    # a quarter of a layer for the copy of what is outside of the layers
    weights = target.outside_bytes + (layers + SLOTS) * one_layer + one_layer // 4
    return weights + copies + cache_bytes(target.model)


def layer_bytes(dtype: str) -> int:
    """Bytes of one layer of the embedded target; all layers have the same size."""
    return max(OffloadedTarget(None, "cpu", resolve_dtype(dtype, "cpu")).layer_sizes())


def disk_stream_of(pair: Pair) -> DiskStream:
    """The stream of a pair's target."""
    stream = stream_of(pair.target)
    assert isinstance(stream, DiskStream)
    return stream


class Disk:
    """A disk that gives more for some seconds after a rest, as those of virtual machines do.

    Everything is measured at the speed that it gives for long.

    Args:
        stream: its blocks are read.

    Attributes:
        lasting_speed: bytes a second that the disk gives for long.
    """

    def __init__(self, stream: DiskStream) -> None:
        self.stream, self.buffers = stream, read_buffers()
        speeds = [self.speed() for _ in range(WARM_UP_READS)]
        self.lasting_speed = statistics.median(speeds[-WARM_UP_READS // 3 :])

    def speed(self) -> float:
        """Bytes a second now, over about half a second."""
        return self.stream.bytes / read_seconds(self.stream, self.buffers, PASSES)

    def wear_down(self) -> None:
        """Read until the disk gives no more than it gives for long."""
        for _ in range(WARM_UP_READS):
            if self.speed() <= self.lasting_speed * 1.1:
                return


def read_buffers() -> list[memoryview]:
    """A buffer for each thread. The system gives memory when it is first written."""
    return [bytes_of(aligned_memory(CHUNK_BYTES).fill_(1)) for _ in range(THREADS)]


def read_seconds(stream: DiskStream, buffers: list[memoryview], passes: int) -> float:
    """Mean seconds to only read what a pass reads, by a thread for each buffer.

    Args:
        passes: reads of all blocks, without a pause between them.
    """
    chunks = iter(
        [
            (block.offset + start, min(CHUNK_BYTES, block.size - start))
            for block in stream.blocks * passes
            for start in range(0, block.size, CHUNK_BYTES)
        ]
    )
    lock = threading.Lock()

    def read_chunks(buffer: memoryview) -> None:
        while True:
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            offset, size = chunk
            stream.file.read(offset, buffer[:size])

    threads = [threading.Thread(target=read_chunks, args=(buffer,)) for buffer in buffers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started) / passes


@torch.inference_mode()
def measure_link(dtype: str, rounds: int) -> dict[str, Any]:
    """The share of the disk's speed that passes one after the other reach."""
    pair = streamed_pair(None, RESIDENT, dtype)
    step = SequoiaDecoder(pair.target, None, TokenTree.chain(1)).step
    step.prefill(random_prompt(pair, CONTEXT), 64, seed=0)
    extent = step.extent(CONTEXT)
    figures = compare_with_reads(
        disk_stream_of(pair), lambda: step.run_target(extent), rounds, PASSES
    )
    return figures | {"models": pair.metadata}


@torch.inference_mode()
def measure_layers(dtype: str, rounds: int) -> dict[str, Any]:
    """Streamed passes with transformers' layers and with fused ones, in turn.

    Returns:
        By number of nodes, seconds of a pass that begins with full slots (`pass`) and of one of
        several after each other (`stream`), by layers; and transformers' over fused (`ratio`).
    """
    pairs = {
        placement: streamed_pair(None, RESIDENT, dtype, placement)
        for placement in (RESIDENT_LAYERS, FUSED)
    }
    run_pass = {
        (placement, nodes): target_pass(pair, nodes)
        for placement, pair in pairs.items()
        for nodes in NODES
    }
    samples: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(rounds):
        for (placement, nodes), run in run_pass.items():
            for name, passes in (("pass", 1), ("stream", PASSES)):
                for pair in pairs.values():
                    disk_stream_of(pair).wait_until_full()
                started = time.perf_counter()
                for _ in range(passes):
                    run()
                if passes > 1:  # as much was read as was computed with
                    disk_stream_of(pairs[placement]).wait_until_full()
                seconds = (time.perf_counter() - started) / passes
                samples.setdefault((name, nodes, placement), []).append(seconds)
    figures: dict[str, Any] = {"pass": {}, "stream": {}}
    for name, by_nodes in figures.items():
        for nodes in NODES:
            old, new = (samples[name, nodes, placement] for placement in pairs)
            ratios = [before / after for before, after in zip(old, new, strict=True)]
            by_nodes[nodes] = {"transformers": quartiles(old), "fused": quartiles(new)}
            by_nodes[nodes]["ratio"] = quartiles(ratios)
    models = {placement: pair.metadata for placement, pair in pairs.items()}
    return figures | {"threads": torch.get_num_threads(), "rounds": rounds, "models": models}


def target_pass(pair: Pair, nodes: int) -> Callable[[], Any]:
    """A function that runs the target over so many nodes after a random prompt."""
    step = SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(nodes)).step
    step.prefill(random_prompt(pair, CONTEXT), 2 * max(NODES), seed=0)
    return partial(step.run_target, step.extent(CONTEXT))


def compare_with_reads(
    stream: DiskStream, run_pass: Callable[[], Any], rounds: int, passes: int
) -> dict[str, Any]:
    """Passes of a streamed target, and reads of what they stream, in turn.

    Args:
        run_pass: runs one pass.
        rounds: how often passes and reads are timed.
        passes: passes in a round, one after the other.
    """
    run_pass()
    buffers = read_buffers()
    read_samples, pass_samples, byte_samples = [], [], []
    for _ in range(rounds):
        stream.wait_until_full()  # the stream's own threads rest
        read_samples.append(read_seconds(stream, buffers, passes))
        bytes_before, started = read_bytes(), time.perf_counter()
        for _ in range(passes):
            run_pass()
        # the slots are as full as before: as much was read as was computed with
        stream.wait_until_full()
        pass_samples.append((time.perf_counter() - started) / passes)
        byte_samples.append((read_bytes() - bytes_before) / passes)
    shares = [
        reading / computing for reading, computing in zip(read_samples, pass_samples, strict=True)
    ]
    return {
        "bytes_a_pass": stream.bytes,
        "bytes_read_a_pass": round(statistics.median(byte_samples)),
        "threads": THREADS,
        "piece": CHUNK_BYTES,
        "read_seconds": quartiles(read_samples),
        "pass_seconds": quartiles(pass_samples),
        "share_of_bandwidth": quartiles(shares),
        "rounds": rounds,
    }


def quartiles(values: list[float]) -> list[float]:
    """Median, first and third quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(x, 5) for x in (middle, low, high)]


class DecodeBenchmark:
    """Every method of decoding, prompt by prompt in turn.

    Args:
        options: of the command line.
        temperature: of all methods.

    Attributes:
        pairs: the pair of each draft, by the draft's name.
        trees: the tree of each draft.
        methods: the methods by name; the first is plain decoding.
        bytes_read: bytes that a method read from the disk, by its name and the seed.
    """

    def __init__(self, options: argparse.Namespace, temperature: float) -> None:
        self.options, self.dtype, self.tokens = options, options.dtype, options.tokens
        self.sampling = Sampling(temperature)
        self.pairs = {
            draft: streamed_pair(draft, RESIDENT, self.dtype) for draft in options.draft or DRAFTS
        }
        self.first_pair = next(iter(self.pairs.values()))
        self.disk = Disk(disk_stream_of(self.first_pair))
        self.trees: dict[str, TokenTree] = {}
        self.methods: dict[str, DecodePrompt] = {}
        self.bytes_read: dict[tuple[str, int], int] = {}

    def run(self) -> dict[str, Any]:
        """Measure all methods, and return the part of the output file."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            self.add_plain("plain", self.first_pair)
            for draft in self.pairs:
                self.add_draft(draft)
            self.add_transformers(folder, stack)
            prompts = prompts_with_long_texts(
                self.dtype, self.sampling, self.options.prompts, self.tokens
            )

            def report_progress(done: int) -> None:
                print(f"{done} of {len(prompts)} prompts", flush=True)

            runs = bench(self.methods, prompts, on_prompt=report_progress)
        settings = {
            "sampling": self.sampling.settings(),
            "dtype": self.dtype,
            "prompts": len(prompts),
            "tokens": self.tokens,
            "resident_layers": RESIDENT,
            "bytes_a_second": round(self.disk.lasting_speed),
        }
        models = {draft: pair.metadata for draft, pair in self.pairs.items()}
        return {"settings": settings, "models": models, "contenders": self.figures(runs)}

    def add(self, name: str, decode: DecodePrompt, process: int | str = "self") -> None:
        """Add a method that starts on a disk that has not rested, and whose reads are counted.

        Args:
            process: the process that decodes.
        """

        def counted(prompt: list[int], seed: int) -> PromptRun:
            self.disk.wear_down()
            bytes_before = read_bytes(process)
            run = decode(prompt, seed)
            self.bytes_read[name, seed] = read_bytes(process) - bytes_before
            return run

        self.methods[name] = counted

    def add_plain(self, name: str, pair: Pair) -> None:
        """Add plain decoding with a streamed target."""
        chain = TokenTree.chain(1)
        self.add(name, sequoia_method(pair, chain, self.sampling, self.tokens))

    def add_draft(self, draft: str) -> None:
        """Add decoding with a draft and its tree, and plain decoding that uses as much memory."""
        pair = self.pairs[draft]
        self.disk.wear_down()
        seconds = self.options.latency_seconds
        profile = measure_profile(pair, draft, self.dtype, self.sampling, seconds)
        self.trees[draft] = solve(profile, budget=BUDGET, depth=DEPTH).tree
        tree_method = sequoia_method(pair, self.trees[draft], self.sampling, self.tokens)
        self.add(draft, tree_method)
        metadata = pair.metadata["target"]
        drafts_cache_bytes = metadata["cache_bytes"] - cache_bytes(pair.target)
        more_layers = -(-(metadata["draft_bytes"] + drafts_cache_bytes) // layer_bytes(self.dtype))
        larger_pair = streamed_pair(None, RESIDENT + more_layers, self.dtype)
        self.add_plain(f"plain + {more_layers}", larger_pair)

    def add_transformers(self, folder: str, stack: ExitStack) -> None:
        """Add transformers' generate with accelerate's offloading and with DeepSpeed's."""
        tokens = max(self.tokens // 4, 2)
        self.add("disk_offload", accelerate_method(self.dtype, self.sampling, tokens, folder))
        if self.options.deepspeed:
            process = DeepSpeedProcess(
                self.options.deepspeed, self.dtype, self.sampling.temperature, tokens, folder
            )
            stack.enter_context(process)
            self.add("deepspeed", process.decode, process.process.pid)

    def figures(self, runs: dict[str, list[PromptRun]]) -> dict[str, Any]:
        """The figures of each method, as the output file has them."""
        results = summary(runs, over=tuple(self.methods))
        figures = {name: result.to_dict() for name, result in results.items()}
        for name, method_runs in runs.items():
            bytes_read = sum(self.bytes_read[name, seed] for seed in range(len(method_runs)))
            passes = sum(run.passes or 1 for run in method_runs)
            figures[name]["bytes_read_a_pass"] = round(bytes_read / passes)
        for draft in self.trees:
            figures[draft] |= self.tree_figures(draft)
        return figures

    def tree_figures(self, draft: str) -> dict[str, Any]:
        """The shape of a draft's tree, what its plan predicts, and what it was solved from."""
        tree = self.trees[draft]
        plan, latency = tree.plan, tree.plan.latency
        assert latency is not None
        prediction = prediction_for(tree, self.sampling.verifier, plan, self.sampling.settings())
        return {
            "tree": {
                "size": tree.size,
                "depth": tree.depth,
                "level_widths": tree.level_widths.tolist(),
            },
            "predicted": {
                "tokens_per_step": prediction.tokens_per_step,
                "speedup": prediction.speedup,
            },
            "step_seconds": plan.step_seconds,
            "proven_gap": plan.gap,
            "acceptance": plan.acceptance,
            "latency": {
                "target": latency.target,
                "draft": latency.draft,
                "stream": latency.stream and latency.stream.seconds,
            },
            "draft_bytes": self.pairs[draft].metadata["target"]["draft_bytes"],
        }


def measure_profile(
    pair: Pair, draft: str, dtype: str, sampling: Sampling, seconds: float
) -> Profile:
    """A profile of a streamed pair.

    Acceptance is measured with the same models in memory, where it is the same and takes less time.
    """
    resident = pair_in_memory(pair, draft, dtype)
    prompts = [encode(resident.tokenizer, prompt.text) for prompt in built_in()]
    (observed,) = measure_acceptance(resident, prompts, [sampling], precision=PRECISION)
    meter = LatencyMeter(pair, [sampling])
    meter.begin(max_tokens_of_any_tree(observed))
    return Profile(
        acceptance=Acceptance.counted(observed.totals()),
        effective_trials=observed.effective_trials(),
        latency=meter.finish(seconds),
        settings=sampling.settings(),
        models=pair.metadata,
        hardware=fingerprint(CPU),
    )


def pair_in_memory(pair: Pair, draft: str, dtype: str) -> Pair:
    """The models of a streamed pair in memory; an int8 draft shares the same layers there."""
    if draft != INT8:
        return load_pair(draft=draft, dtype=dtype)
    (_, draft_layers), (_, target_layers) = decoder_layers(pair.draft), decoder_layers(pair.target)
    shared_layers = [
        number for number, layer in enumerate(draft_layers) if layer is target_layers[number]
    ]
    resident = load_pair(draft=NO_DRAFT, dtype=dtype, placement=RESIDENT_LAYERS)
    return replace(resident, draft=self_draft(resident.target, shared_layers=shared_layers))


def prompts_with_long_texts(
    dtype: str, sampling: Sampling, num_prompts: int, tokens: int
) -> list[list[int]]:
    """The first held-out prompts that are continued by at least `tokens` tokens.

    A step yields a dozen tokens, and a short text would have only one or two steps.
    """
    resident = load_pair(dtype=dtype)
    decoder = SequoiaDecoder(resident.target, None, TokenTree.chain(1))
    prompts: list[list[int]] = []
    for prompt in held_out(resident.tokenizer, 80):
        if len(prompts) == num_prompts:
            break
        result = decoder.generate(prompt, tokens, sampling=sampling, seed=len(prompts))
        if result.new_tokens == tokens:
            prompts.append(prompt)
    return prompts


class DeepSpeedProcess:
    """A child process that decodes with DeepSpeed's ZeRO; see by_deepspeed.py.

    Args:
        python: an interpreter that has deepspeed.
        folder: where its weights are written.
    """

    def __init__(
        self, python: str, dtype: str, temperature: float, tokens: int, folder: str
    ) -> None:
        command = [python, str(Path(__file__).with_name("by_deepspeed.py"))]
        command += ["--dtype", dtype, "--temperature", str(temperature)]
        command += ["--tokens", str(tokens), "--folder", folder]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> DeepSpeedProcess:
        print(self._answer(), flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def decode(self, prompt: list[int], seed: int) -> PromptRun:
        """Decode one prompt."""
        assert self.process.stdin is not None
        print(json.dumps([prompt, seed]), file=self.process.stdin, flush=True)
        return PromptRun(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"--deepspeed: the process ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def accelerate_method(dtype: str, sampling: Sampling, tokens: int, folder: str) -> DecodePrompt:
    """transformers' generate with accelerate's `disk_offload`.

    The page cache is dropped before each pass.

    Args:
        folder: where the weights are written.
    """
    pair = load_pair(dtype=dtype, placement="resident")
    target: Any = disk_offload(pair.target, folder, CPU)
    gc.collect()
    for file in files_in(folder):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    target.register_forward_pre_hook(lambda *_: drop_page_cache(folder))
    # transformers sends its input to the device of the model, which is `meta` for an offloaded one
    type(target).device = property(lambda self: CPU)
    return transformers_method(replace(pair, target=target), sampling, tokens)


def files_in(folder: str) -> list[Path]:
    """All files in a folder and its subfolders."""
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def drop_page_cache(folder: str) -> None:
    """Take the folder's files out of the page cache."""
    for file in files_in(folder):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    """Run the parts that the output file lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", choices=["link", "layers", "decode", "decode-0.6"]
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--latency-seconds", type=float, default=45.0)
    parser.add_argument("--draft", action="append", choices=DRAFTS, help="[default: all]")
    parser.add_argument(
        "--deepspeed",
        metavar="PYTHON",
        help="an interpreter that has deepspeed and sequoia-plan",
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens = 2, 8
        options.rounds, options.latency_seconds = 3, 0.0
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "link": lambda: measure_link(options.dtype, options.rounds),
        "layers": lambda: measure_layers(options.dtype, options.rounds),
        "decode": lambda: DecodeBenchmark(options, 0.0).run(),
        "decode-0.6": lambda: DecodeBenchmark(options, 0.6).run(),
    }
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.part or parts:
        if name in results:
            continue
        results[name] = parts[name]() | {"hardware": fingerprint(CPU)}
        write_atomically(options.output, (json.dumps(results, indent=1) + "\n").encode())
        shown_keys = ("share_of_bandwidth", "contenders", "pass", "stream")
        shown = {key: value for key, value in results[name].items() if key in shown_keys}
        print(json.dumps(shown, indent=1)[:4000], flush=True)


if __name__ == "__main__":
    main()
