"""Decode with a target that does not fit, side by side with others, under a real memory limit.

    python benchmarks/offload.py --target target.gguf --draft draft.gguf --dtype bfloat16 \\
        --tree streamed.safetensors --memory 800MB --limit 1200000000 \\
        -o benchmarks/results/offload.json

Each part is a process in a control group of `--limit` bytes, page cache, Python and all (as root,
with control groups of version 1). Before it, the models leave the page cache, and the disk's speed
is measured. Parts that the output file has for this dtype are not run again; the last run takes the
figures.

plain, tree: ours, the target streamed.
memory: our tree with both models in memory and no limit: all of ours must have its texts.
accelerate: transformers with all layers on the disk, from `--folder`, where the same weights are as
    transformers saves them.
llama, llama-draft: llama.cpp's server in the folder `--llama`, which maps `--gguf` (the same
    weights), alone and with the draft.

Bytes are those that the process read from the disk (read_bytes of /proc/PID/io).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from reports import new_parser, write_report

Parts = dict[str, Callable[[argparse.Namespace], Any]]
"""Functions that measure, by the names of parts of a report."""
TOKENS = {"plain": 8, "tree": 64, "memory": 64, "accelerate": 3, "llama": 5, "llama-draft": 64}
"""New tokens of each prompt, by part."""
KINDS = {"code": range(10), "chat": range(10, 15)}
"""Prompts by kind."""
LONG_PROMPT = 512
"""Tokens of a prompt, made of all others, whose first token is timed."""
URL = "http://127.0.0.1:8766"
CHUNK, READS = 4 << 20, 2
"""How the disk is read: so many bytes at a time, the whole file so often."""


def bytes_read_so_far(process: int | str = "self") -> int:
    """Bytes that a process has read from the disk."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def bytes_per_second(path: Path) -> float:
    """The speed of two threads that read a packed file as a stream does."""
    from sequoia_plan.models.offload.disk_stream import THREADS
    from sequoia_plan.models.offload.weight_file import WeightFile, aligned_memory, bytes_of

    file = WeightFile(path)
    end = file.blocks[-1].offset // CHUNK * CHUNK
    starts = iter([*range(0, end, CHUNK)] * READS)

    def read() -> None:
        memory = bytes_of(aligned_memory(CHUNK))
        for start in starts:
            file.read(start, memory)

    threads = [threading.Thread(target=read) for _ in range(THREADS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return READS * end / (time.perf_counter() - started)


def run_ours(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Our decoder: a run of each prompt, its text, and what was loaded."""
    import torch

    from sequoia_plan.artifacts import TokenTree, load_tree
    from sequoia_plan.runtime import Sampling, SequoiaDecoder, load_pair

    torch.set_num_threads(options.threads)
    how = {} if part == "memory" else {"offload": "disk", "memory": options.memory}
    how["draft_vocabulary"] = options.draft_vocabulary
    pair = load_pair(options.target, options.draft, dtype=options.dtype, **how)
    tree = TokenTree.chain(1) if part == "plain" else load_tree(options.tree)
    decoder, runs, texts = SequoiaDecoder(pair.target, pair.draft, tree), [], []
    decoder.generate(options.prompts[0], 2)
    for prompt in options.prompts:
        bytes_before, times, text, first = bytes_read_so_far(), [time.perf_counter()], [], 0
        for step in decoder.steps(torch.tensor(prompt), TOKENS[part], Sampling()):
            text += step.tokens
            times.append(time.perf_counter())
            first = first or len(text)
        run = [len(text), len(times) - 1, times[-1] - times[0], first, times[1] - times[0]]
        runs.append([*run, bytes_read_so_far() - bytes_before])
        texts.append(text)
    prompt = torch.tensor([*chain.from_iterable(options.prompts)][:LONG_PROMPT])
    started = time.perf_counter()
    next(decoder.steps(prompt, 1, Sampling()))
    long = time.perf_counter() - started
    return {"runs": runs, "texts": texts, "models": pair.metadata, "long_prompt_seconds": long}


def run_accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """transformers' generate with accelerate's hooks."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=options.folder
    )
    type(model).device = property(lambda self: torch.device("cpu"))  # it would be `meta`
    runs, tokens = [], TOKENS["accelerate"]
    for prompt in options.prompts:
        times, bytes_before = [time.perf_counter()], bytes_read_so_far()
        hook = model.register_forward_hook(lambda *_, t=times: t.append(time.perf_counter()))
        ids = torch.tensor([prompt])
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        hook.remove()
        run = [tokens, tokens, times[-1] - times[0], 1, times[1] - times[0]]
        runs.append([*run, bytes_read_so_far() - bytes_before])
    return {"runs": runs}


def run_llama(options: argparse.Namespace, part: str, join: Callable[[], None]) -> dict[str, Any]:
    """llama.cpp's server, whose own times count."""
    from sequoia_plan.artifacts import SequoiaPlanError
    from sequoia_plan.engines.llama_server import Server, greedy

    command = [f"{options.llama}/llama-server", "-m", options.gguf, "--port", URL[-4:]]
    command += ["-c", "2048", "-np", "1", "-t", str(options.threads), "--no-warmup"]
    if part == "llama-draft":
        command += ["-md", options.draft, *options.llama_draft.split()]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=join
    )
    try:
        server = Server(URL)
        while process.poll() is None:
            try:
                server.version()
                break
            except SequoiaPlanError:
                time.sleep(0.5)
        runs, texts = [], []
        for prompt in options.prompts:
            bytes_before = bytes_read_so_far(process.pid)
            body = greedy(prompt, TOKENS[part]) | {"cache_prompt": False, "return_tokens": True}
            answer = server._ask("/completion", dict[str, Any], body)
            times = answer["timings"]
            first, tokens = times["prompt_ms"] / 1000, times["predicted_n"]
            passes = tokens - times.get("draft_n_accepted", 0)
            run = [tokens, passes, first + times["predicted_ms"] / 1000, 1, first]
            runs.append([*run, bytes_read_so_far(process.pid) - bytes_before])
            texts.append(answer["tokens"])
        return {"runs": runs, "texts": texts}
    finally:
        process.terminate()
        process.wait()


PARTS: Parts = {
    "plain": partial(run_ours, part="plain"),
    "tree": partial(run_ours, part="tree"),
    "accelerate": run_accelerate,
    "llama": partial(run_llama, part="llama"),
    "llama-draft": partial(run_llama, part="llama-draft"),
    "memory": partial(run_ours, part="memory"),
}


def measure(options: argparse.Namespace, name: str) -> Any:
    """Run a part in a control group inside of this process's."""
    from sequoia_plan.models.offload.weight_cache import cache_folder

    packed = list(cache_folder().glob(f"{Path(options.target).stem}-*.packed"))
    models = [options.target, options.draft, options.gguf, *options.folder.iterdir(), *packed]
    for path in models:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    disk = bytes_per_second(max(packed, key=lambda path: path.stat().st_size))
    lines = [line.split(":") for line in Path("/proc/self/cgroup").read_text().split()]
    own = next(path for _, controller, path in lines if controller == "memory")
    group = Path(f"/sys/fs/cgroup/memory{own}") / f"offload-{os.getpid()}"
    group.mkdir()
    if name != "memory":
        (group / "memory.limit_in_bytes").write_text(str(options.limit))

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        if name.startswith("llama"):
            result = run_llama(options, name, join)
        else:  # Python itself counts
            command = [sys.executable, *sys.argv, "--child", name]
            child = subprocess.run(command, check=True, stdout=subprocess.PIPE, preexec_fn=join)
            result = json.loads(child.stdout.splitlines()[-1])
        peak = int((group / "memory.max_usage_in_bytes").read_text())
    finally:
        time.sleep(1)  # until the kernel has let go of what ended
        group.rmdir()
    return result | {"disk_bytes_per_second": disk, "peak_bytes": peak}


def figures_of(options: argparse.Namespace, parts: dict[str, Any]) -> dict[str, Any]:
    """Speeds by kind, what the tree promises, and how many texts are those in memory."""
    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.profiler.bench_figures import summary
    from sequoia_plan.profiler.decoding_methods import PromptRun
    from sequoia_plan.profiler.hardware import fingerprint

    figures: dict[str, Any] = {"hardware": fingerprint("cpu")}
    for kind, numbers in KINDS.items():
        runs = {
            name: [PromptRun(*part["runs"][number][:5]) for number in numbers]
            for name, part in parts.items()
        }
        figures[kind] = {name: one.to_dict() for name, one in summary(runs, over=[*runs]).items()}
    for part in parts.values():
        part["bytes_read_a_step"] = round(np.divide(*np.sum(part["runs"], 0)[[5, 1]]))
    for name in parts.keys() - {"accelerate"}:
        pairs = zip(parts[name]["texts"], parts["memory"]["texts"], strict=True)
        parts[name]["texts_as_in_memory"] = sum(a == b[: len(a)] for a, b in pairs)
    tree = load_tree(options.tree)
    plan = tree.plan.to_dict() if tree.plan else {}
    return figures | {"tree": [tree.size, tree.depth], "plan": plan}


def main(parts: Parts, description: str | None) -> None:
    """Run the parts that the output file lacks."""
    parser = new_parser(description)
    parser.add_argument("--part", action="append", choices=list(parts))
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.part or parts:
        if name not in results:
            results[name] = parts[name](options)
            write_report(options.output, results)


def run_all() -> None:
    """Run the parts that the output file lacks for a dtype, and take the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=json.loads, help="token ids, as JSON")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-draft", default="", help="further options with a draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("build/offload"))
    for name in (
        "target", "draft", "draft-vocabulary", "tree", "memory", "limit", "gguf", "llama"
    ):  # fmt: skip
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(PARTS[options.child](options)))
        return
    from sequoia_plan.artifacts.prompts import BUILT_IN, by_kind, held_out_half, load
    from sequoia_plan.models.files.pretrained import find_model
    from sequoia_plan.profiler.prompts import encode

    tokenizer, prompts = find_model(options.target).tokenizer(), by_kind(load(BUILT_IN))
    options.prompts = [
        encode(tokenizer, prompt.text)
        for kind, numbers in KINDS.items()
        for prompt in held_out_half(prompts[kind])[: len(numbers)]
    ]
    sys.argv += ["--prompts", json.dumps(options.prompts)]
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    result = results.setdefault(options.dtype, {"parts": {}})
    for name in options.part or PARTS:
        if name not in result["parts"]:
            result["parts"][name] = measure(options, name)
            write_report(options.output, results)
    if result["parts"].keys() >= {"plain", "tree", "memory"}:
        result |= figures_of(options, result["parts"])
        write_report(options.output, results)


if __name__ == "__main__":
    run_all()
