"""A target streamed from disk, with the embedded pair: how much of the disk's speed a pass reaches, and what a tree gains over plain decoding.

    python benchmarks/offload.py -o benchmarks/results/offload.json                # every part; parts that the file has are not run again
    python benchmarks/offload.py --part link -o build/link.json
    python benchmarks/offload.py --quick -o build/quick.json                       # few prompts: to see that it runs

link: plain passes one after the other, and reads of the same blocks of the same file with as many threads and as large pieces (past the page
    cache), in turn.
decode: held-out prompts, every way of decoding in turn. All targets are streamed; each tree is solved from a profile of its own models, measured
    in this run. `plain + N` is plain decoding that keeps N further layers in memory: about the bytes that a draft takes. accelerate's
    `disk_offload` reads through the page cache, which is dropped before each pass; it writes a quarter of the tokens. A disk may give more after
    it rested, so the file is read before each text until it gives what it does for long. With `--deepspeed PYTHON` DeepSpeed's ZeRO takes part
    as well (by_deepspeed.py), in a process of its own.

Bytes are those that the process had read from the disk (read_bytes of /proc/self/io): nothing comes out of the page cache.
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
from pathlib import Path
from typing import Any

import torch
from accelerate import disk_offload

from sequoia_plan.artifacts import Profile, TokenTree
from sequoia_plan.artifacts.cost import predicted
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.merge import pooled
from sequoia_plan.planner import solve
from sequoia_plan.profiler.acceptance import measure_acceptance
from sequoia_plan.profiler.bench import Decode, Run, bench, ours, summary
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import CONTEXT, measure_latency, random_prompt
from sequoia_plan.profiler.measure import most_tokens
from sequoia_plan.profiler.prompts import built_in, encode, held_out
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.draft.self_draft import INT8
from sequoia_plan.runtime.models import stream
from sequoia_plan.runtime.models.load import resolve_dtype
from sequoia_plan.runtime.models.memory import SLOTS
from sequoia_plan.runtime.models.offload import Offloaded
from sequoia_plan.runtime.models.stream import Ring, stream_of
from sequoia_plan.runtime.models.weight_file import aligned_memory, bytes_of
from sequoia_plan.runtime.pair import EMBEDDED

RESIDENT = 6
"""Layers of thirty that stay in memory: a fifth."""
DRAFTS = [*EMBEDDED, INT8]
PRECISION = 0.08
"""Of a profile's expected tokens."""
FIRST_READS = 40
"""About twenty seconds of reading."""
PASSES = 4
"""That follow one another, through the ring and without it."""


def read_bytes(process: int | str = "self") -> int:
    """What a process has had read from the disk so far."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
    return int(fields["read_bytes"])


def streamed(draft: str | None, layers: int, dtype: str) -> Pair:
    """The pair with so many layers of the target in memory."""
    facts = load_pair(draft=draft, dtype=dtype, offload="disk", memory="1TB").facts["target"]
    everything = facts["resident_bytes"] + facts["draft_bytes"] + facts["cache_bytes"]
    pair = load_pair(draft=draft, dtype=dtype, offload="disk", memory=everything - (facts["layers"] - SLOTS - layers) * layer_bytes(dtype))
    assert pair.facts["target"]["resident_layers"] == layers
    return pair


def layer_bytes(dtype: str) -> int:
    """Of one layer of the embedded target; all are alike."""
    return max(Offloaded(None, "cpu", resolve_dtype(dtype, "cpu")).sizes())


class Disk:
    """A disk that gives more for some seconds after it rested, as those of virtual machines do. Everything is measured at what it gives for long.

    Args:
        ring: whose blocks are read.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring, self.buffers = ring, [bytes_of(aligned_memory(stream.CHUNK).fill_(1)) for _ in range(stream.THREADS)]
        rates = [self.rate() for _ in range(FIRST_READS)]
        self.lasting = statistics.median(rates[-FIRST_READS // 3 :])

    def rate(self) -> float:
        """Bytes a second, over about half a second."""
        return self.ring.bytes / raw_read(self.ring, self.buffers, PASSES)

    def rest(self) -> None:
        """Read until the disk gives no more than it does for long."""
        for _ in range(FIRST_READS):
            if self.rate() <= self.lasting * 1.1:
                return


def raw_read(ring: Ring, buffers: list[memoryview], passes: int) -> float:
    """Seconds to read what a pass reads, by a thread for each buffer, and do nothing with it; the mean of `passes` without a pause."""
    pieces = iter([(block, start) for block in ring.blocks * passes for start in range(0, block.size, stream.CHUNK)])
    lock = threading.Lock()

    def work(memory: memoryview) -> None:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            block, start = piece
            ring.file.read(block.offset + start, memory[: min(stream.CHUNK, block.size - start)])

    threads = [threading.Thread(target=work, args=(memory,)) for memory in buffers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started) / passes


@torch.inference_mode()
def link(dtype: str, rounds: int) -> dict[str, Any]:
    """The share of the disk's speed that passes one after the other reach."""
    pair = streamed(None, RESIDENT, dtype)
    ring = stream_of(pair.target)
    assert isinstance(ring, Ring)
    decoder = SequoiaDecoder(pair.target, None, TokenTree.chain(1))
    decoder.prefill(random_prompt(pair, CONTEXT), 64, seed=0)
    extent = decoder.extent(CONTEXT)
    return link_rounds(ring, lambda: decoder.run_target(extent), rounds, PASSES) | {"models": pair.facts}


def link_rounds(ring: Ring, run: Callable[[], Any], rounds: int, passes: int) -> dict[str, Any]:
    """Passes, `run` one after the other, and reads of what they stream, in turn; how much of the speed of reading the passes reach."""
    run()
    buffers = [bytes_of(aligned_memory(stream.CHUNK).fill_(1)) for _ in range(stream.THREADS)]  # the system gives memory when it is first written
    reads, computed, moved = [], [], []
    for _ in range(rounds):
        ring.fill()  # the ring's own threads rest
        reads.append(raw_read(ring, buffers, passes))
        before, started = read_bytes(), time.perf_counter()
        for _ in range(passes):
            run()
        ring.fill()  # the slots are as full as before: as much was read as was computed with
        computed.append((time.perf_counter() - started) / passes)
        moved.append((read_bytes() - before) / passes)
    shares = [read / one for read, one in zip(reads, computed, strict=True)]
    return {
        "bytes_a_pass": ring.bytes,
        "bytes_read_a_pass": round(statistics.median(moved)),
        "threads": stream.THREADS,
        "piece": stream.CHUNK,
        "read_seconds": quartiles(reads),
        "pass_seconds": quartiles(computed),
        "share_of_bandwidth": quartiles(shares),
        "rounds": rounds,
    }


def quartiles(values: list[float]) -> list[float]:
    """Median, first and third quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(x, 5) for x in (middle, low, high)]


def decode(options: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """Every way of decoding, prompt by prompt in turn."""
    sampling, dtype, prompts, tokens = Sampling(temperature), options.dtype, options.prompts, options.tokens
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        drafts = options.draft or DRAFTS
        pairs = {name: streamed(name, RESIDENT, dtype) for name in drafts}
        first = next(iter(pairs.values()))
        ring = stream_of(first.target)
        assert isinstance(ring, Ring)
        disk = Disk(ring)
        counted: dict[tuple[str, int], int] = {}
        arms: dict[str, Decode] = {"plain": proven("plain", ours(first, TokenTree.chain(1), sampling, tokens), counted, disk)}
        trees: dict[str, TokenTree] = {}
        for name, pair in pairs.items():
            disk.rest()
            profile = measured(pair, name, dtype, sampling, options.latency_seconds)
            trees[name] = solve(profile, 768, 40).tree
            arms[name] = proven(name, ours(pair, trees[name], sampling, tokens), counted, disk)
            more = -(-pair.facts["target"]["draft_bytes"] // layer_bytes(dtype))
            fair = streamed(None, RESIDENT + more, dtype)
            arms[f"plain + {more}"] = proven(f"plain + {more}", ours(fair, TokenTree.chain(1), sampling, tokens), counted, disk)
        arms["disk_offload"] = proven("disk_offload", by_accelerate(dtype, sampling, max(tokens // 4, 2), folder), counted, disk)
        if options.deepspeed:
            child = stack.enter_context(DeepSpeed(options.deepspeed, dtype, temperature, max(tokens // 4, 2), folder))
            arms["deepspeed"] = proven("deepspeed", child.decode, counted, disk, child.process.pid)
        ids = long_texts(dtype, sampling, prompts, tokens)
        runs = bench(arms, ids, on_prompt=lambda done: print(f"{done} of {len(ids)} prompts", flush=True))
    figures = {name: each.facts() for name, each in summary(runs, over=tuple(arms)).items()}
    for name, each in figures.items():
        each["bytes_read_a_pass"] = round(sum(counted[name, seed] for seed in range(len(ids))) / sum(run.passes or 1 for run in runs[name]))
    for name, tree in trees.items():
        plan = tree.plan
        promise = predicted(tree, sampling.verifier, plan, sampling.settings())
        assert plan.latency is not None
        figures[name] |= {
            "tree": {"size": tree.size, "depth": tree.depth, "level_widths": tree.level_widths.tolist()},
            "predicted": {"tokens_per_step": promise.tokens_per_step, "speedup": promise.speedup},
            "step_seconds": plan.step_seconds,
            "proven_gap": plan.gap,
            "acceptance": plan.acceptance,
            "latency": {"target": plan.latency.target, "draft": plan.latency.draft, "stream": plan.latency.stream and plan.latency.stream.seconds},
            "draft_bytes": pairs[name].facts["target"]["draft_bytes"],
        }
    settings = {"sampling": sampling.settings(), "dtype": dtype, "prompts": len(ids), "tokens": tokens, "resident_layers": RESIDENT}
    settings["bytes_a_second"] = round(disk.lasting)
    return {"settings": settings, "models": {name: pair.facts for name, pair in pairs.items()}, "contenders": figures}


def measured(pair: Pair, draft: str | None, dtype: str, sampling: Sampling, seconds: float) -> Profile:
    """Acceptance of the same models in memory, where it is the same and measured sooner; latency through the ring."""
    resident = load_pair(draft=draft, dtype=dtype)
    texts = [encode(resident.tokenizer, prompt.text) for prompt in built_in()]
    found = measure_acceptance(resident, texts, [sampling], precision=PRECISION)[0]
    latency = measure_latency(pair, sampling, most_tokens(found), seconds)
    levels = found.levels()
    return Profile(pooled(levels), found.effective_trials(), latency, sampling.settings(), pair.facts, fingerprint(torch.device("cpu")), levels)


def long_texts(dtype: str, sampling: Sampling, prompts: int, tokens: int) -> list[list[int]]:
    """The first held-out prompts whose texts have `tokens` tokens: a step brings a dozen, and a short text has only one or two steps."""
    resident = load_pair(dtype=dtype)
    decoder, found = SequoiaDecoder(resident.target, None, TokenTree.chain(1)), list[list[int]]()
    for prompt in held_out(resident.tokenizer, 80):
        if len(found) < prompts and decoder.generate(prompt, tokens, sampling=sampling, seed=len(found)).new_tokens == tokens:
            found.append(prompt)
    return found


def proven(name: str, run: Decode, counted: dict[tuple[str, int], int], disk: Disk, process: int | str = "self") -> Decode:
    """`run` on a disk that has not rested, and what its process had read from the disk, by name and seed."""

    def decode(prompt: list[int], seed: int) -> Run:
        disk.rest()
        before = read_bytes(process)
        found = run(prompt, seed)
        counted[name, seed] = read_bytes(process) - before
        return found

    return decode


class DeepSpeed:
    """A child process that decodes with DeepSpeed's ZeRO; see by_deepspeed.py.

    Args:
        python: an interpreter that has deepspeed.
        folder: where its weights are written.
    """

    def __init__(self, python: str, dtype: str, temperature: float, tokens: int, folder: str) -> None:
        script = str(Path(__file__).with_name("by_deepspeed.py"))
        command = [python, script, "--dtype", dtype, "--temperature", str(temperature), "--tokens", str(tokens), "--folder", folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> DeepSpeed:
        print(self._answer(), flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def decode(self, prompt: list[int], seed: int) -> Run:
        """One text."""
        assert self.process.stdin is not None
        print(json.dumps([prompt, seed]), file=self.process.stdin, flush=True)
        return Run(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"--deepspeed: the process ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def by_accelerate(dtype: str, sampling: Sampling, tokens: int, folder: str) -> Decode:
    """transformers' generate with accelerate's disk_offload, the page cache dropped before each pass."""
    pair = load_pair(dtype=dtype, placement="resident")
    target: Any = disk_offload(pair.target, folder, torch.device("cpu"))
    gc.collect()
    for file in Path(folder).rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    target.register_forward_pre_hook(lambda *_: drop_cache(folder))
    from sequoia_plan.profiler.bench import hugging_face

    return hugging_face(replace(pair, target=on_the_cpu(target)), sampling, tokens)


def on_the_cpu(target: Any) -> Any:
    """transformers asks an offloaded model for its device, which is `meta`; its input goes to the CPU."""
    type(target).device = property(lambda self: torch.device("cpu"))
    return target


def drop_cache(folder: str) -> None:
    """Take the folder's files out of the page cache."""
    for file in Path(folder).rglob("*"):
        if file.is_file():
            opened = os.open(file, os.O_RDONLY)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)


def main() -> None:
    """Run the parts that the output lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=["link", "decode", "decode-0.6"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--latency-seconds", type=float, default=45.0)
    parser.add_argument("--draft", action="append", choices=DRAFTS, help="[default: all]")
    parser.add_argument("--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed and sequoia-plan")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.rounds, options.latency_seconds = 2, 8, 3, 0.0
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "link": lambda: link(options.dtype, options.rounds),
        "decode": lambda: decode(options, 0.0),
        "decode-0.6": lambda: decode(options, 0.6),
    }
    found = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.part or parts:
        if name not in found:
            found[name] = parts[name]() | {"hardware": fingerprint(torch.device("cpu"))}
            write_atomically(options.output, (json.dumps(found, indent=1) + "\n").encode())
            print(json.dumps({key: found[name][key] for key in found[name] if key in ("share_of_bandwidth", "contenders")}, indent=1)[:4000], flush=True)


if __name__ == "__main__":
    main()
