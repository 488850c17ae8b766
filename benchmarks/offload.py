"""Decode with a target that does not fit, side by side with others, under a real memory limit.

    python benchmarks/offload.py --target target.gguf --draft draft.gguf --dtype bfloat16 \\
        --tree streamed.safetensors --memory 760MB --limit 1.2GB -o benchmarks/results/offload.json

Each method is a process of its own in a control group of `--limit` bytes: page cache, Python and
all (as root, with control groups of version 1). Before it, the models leave the page cache. Parts
that the output file already has for this dtype are not run again; it is finished by a last run.

disk: only reads, past the page cache, of what a pass reads.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from reports import new_parser, write_report

from sequoia_plan.profiler.hardware import fingerprint

Parts = dict[str, Callable[[argparse.Namespace], Any]]
"""Functions that measure, by the names of parts of a report."""
TOKENS = {"plain": 10, "tree": 64, "memory": 64, "accelerate": 3, "llama": 6, "llama-draft": 24}
"""New tokens of each prompt."""
PROMPTS = {"code": 10, "chat": 5}
"""Prompts of each kind, of those that no profile is measured on."""
FEW = {"code": 2, "chat": 1}
"""The same for accelerate."""
PORT = 8766


def bytes_read_so_far(process: int | str = "self") -> int:
    """Bytes that a process has read from the disk."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A group of processes with so many bytes of memory, inside of this one's."""
    lines = Path("/proc/self/cgroup").read_text().split()
    [own] = [line.split(":")[2] for line in lines if line.split(":")[1] == "memory"]
    group = Path(f"/sys/fs/cgroup/memory{own}") / f"offload-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        time.sleep(0.5)  # until the kernel has let go of what ended
        group.rmdir()


def leave_page_cache(folders: list[Path]) -> None:
    """Drop what the system keeps of all files."""
    for path in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def load_ours(options: argparse.Namespace, **arguments: Any) -> Any:
    """The pair, with what `load_pair` takes besides."""
    from sequoia_plan.runtime import load_pair

    return load_pair(options.target, options.draft, dtype=options.dtype, **arguments)


def prompts_of(options: argparse.Namespace, counts: dict[str, int]) -> list[tuple[str, list[int]]]:
    """Kind and token ids of the prompts."""
    from sequoia_plan.artifacts.prompts import BUILT_IN, by_kind, held_out_half, load
    from sequoia_plan.profiler.prompts import encode
    from sequoia_plan.runtime.models.pretrained import find_model

    tokenizer, prompts = find_model(options.target).tokenizer(), by_kind(load(BUILT_IN))
    return [
        (kind, encode(tokenizer, prompt.text))
        for kind, count in counts.items()
        for prompt in held_out_half(prompts[kind])[:count]
    ]


def run_ours(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Our decoder: a run of each prompt, its text, and what was loaded."""
    import torch

    from sequoia_plan.artifacts import TokenTree, load_tree
    from sequoia_plan.runtime import Sampling, SequoiaDecoder

    place = {} if part == "memory" else {"offload": "disk", "memory": options.memory}
    pair = load_ours(options, **place)
    tree = TokenTree.chain(1) if part == "plain" else load_tree(options.tree)
    decoder = SequoiaDecoder(pair.target, pair.draft, tree)
    prompts, runs, texts = prompts_of(options, PROMPTS), [], []
    decoder.generate(torch.tensor(prompts[0][1]), 2)
    for _, prompt in prompts:
        bytes_before, times, text, first = bytes_read_so_far(), [time.perf_counter()], [0], 0
        for step in decoder.steps(torch.tensor(prompt), TOKENS[part], Sampling()):
            text += step.tokens
            times.append(time.perf_counter())
            first = first or len(step.tokens)
        seconds = [end - times[0] for end in (times[-1], times[1])]
        run = [len(text) - 1, len(times) - 1, seconds[0], first, seconds[1]]
        runs.append([*run, bytes_read_so_far() - bytes_before])
        texts.append(text[1:])
    return {"runs": runs, "texts": texts, "models": pair.metadata}


def run_accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """transformers' generate with accelerate's hooks."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=options.folder
    )
    type(model).device = property(lambda self: torch.device("cpu"))  # it would be `meta`
    runs = []
    for _, prompt in prompts_of(options, FEW):
        times, bytes_before = [time.perf_counter()], bytes_read_so_far()
        hook = model.register_forward_hook(
            lambda *_, times=times: times.append(time.perf_counter())
        )
        tokens = TOKENS["accelerate"]
        ids = torch.tensor([prompt])
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        hook.remove()
        first, last = times[1] - times[0], times[-1] - times[0]
        runs.append([tokens, tokens, last, 1, first, bytes_read_so_far() - bytes_before])
    return {"runs": runs}


def run_llama(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """llama.cpp's server, whose own times count."""
    prompts = prompts_of(options, PROMPTS)
    command = [f"{options.llama}/llama-server", "-m", options.gguf, "--port", str(PORT)]
    command += ["-c", "2048", "-np", "1", "-t", str(options.threads), "--no-warmup"]
    if part == "llama-draft":
        command += ["-md", options.draft, "--draft-max", str(options.draft_max)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{PORT}{path}"
        request = Request(url, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=900) as answer:
            return json.load(answer)

    try:
        for _ in range(600):
            try:
                ask("/health")
                break
            except OSError:
                time.sleep(0.5)
        runs, texts = [], []
        for _, prompt in prompts:
            bytes_before = bytes_read_so_far(server.pid)
            body = {"prompt": prompt, "n_predict": TOKENS[part], "temperature": 0}
            answer = ask("/completion", body | {"cache_prompt": False, "return_tokens": True})
            times = answer["timings"]
            accepted, tokens = times.get("draft_n_accepted", 0), times["predicted_n"]
            first = times["prompt_ms"] / 1000
            run = [tokens, tokens - accepted, first + times["predicted_ms"] / 1000, 1, first]
            runs.append([*run, bytes_read_so_far(server.pid) - bytes_before])
            texts.append(answer["tokens"])
        return {"runs": runs, "texts": texts}
    finally:
        server.terminate()
        server.wait()


def run_disk(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes a second of reads, by as many threads and in such parts as a stream has."""
    from sequoia_plan.runtime.offload.disk_stream import THREADS
    from sequoia_plan.runtime.offload.weight_file import CHUNK_BYTES, aligned_memory, bytes_of

    stream = load_ours(options, offload="disk", memory=options.memory).target.stream
    stream.wait_until_full()
    speeds = []
    for _ in range(8):
        chunks = iter(
            [
                (block.offset + start, min(CHUNK_BYTES, block.size - start))
                for block in stream.blocks
                for start in range(0, block.size, CHUNK_BYTES)
            ]
        )

        def read(chunks: Iterator[tuple[int, int]] = chunks) -> None:
            buffer = bytes_of(aligned_memory(CHUNK_BYTES))
            for offset, size in chunks:
                stream.file.read(offset, buffer[:size])

        threads = [threading.Thread(target=read) for _ in range(THREADS)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        speeds.append(sum(b.size for b in stream.blocks) / (time.perf_counter() - started))
    return {"bytes_per_second": speeds}


PARTS: Parts = {
    "disk": run_disk,
    "plain": partial(run_ours, part="plain"),
    "tree": partial(run_ours, part="tree"),
    "accelerate": run_accelerate,
    "llama": partial(run_llama, part="llama"),
    "llama-draft": partial(run_llama, part="llama-draft"),
    "memory": partial(run_ours, part="memory"),
}


def figures_of(options: argparse.Namespace, parts: dict[str, Any]) -> dict[str, Any]:
    """Speeds and speed-ups by kind, and what the tree promises."""
    from sequoia_plan.artifacts import load_tree
    from sequoia_plan.artifacts.prediction import prediction_for
    from sequoia_plan.profiler.bench_figures import summary
    from sequoia_plan.profiler.decoding_methods import PromptRun
    from sequoia_plan.runtime import Sampling

    figures: dict[str, Any] = {}
    starts = {"code": 0, "chat": PROMPTS["code"]}
    for kind, start in starts.items():
        runs = {}
        for name, measured in parts.items():
            counts = FEW if name == "accelerate" else PROMPTS
            first = FEW["code"] * (kind == "chat") if name == "accelerate" else start
            if "runs" in measured and name != "memory":
                kind_runs = measured["runs"][first : first + counts[kind]]
                runs[name] = [PromptRun(*run[:5]) for run in kind_runs]
        figures[kind] = {name: one.to_dict() for name, one in summary(runs, over=()).items()}
    for measured in parts.values():
        if "runs" in measured:
            passes = sum((run[1] or 1) + 1 for run in measured["runs"])
            measured["bytes_read_a_pass"] = round(sum(run[5] for run in measured["runs"]) / passes)
    tree = load_tree(options.tree)
    sampling = Sampling()
    prediction = prediction_for(tree, sampling.verifier, tree.plan, sampling.settings())
    expected = parts["memory"]["texts"]
    same = {
        name: [
            sum(a == b[: len(a)] for a, b in zip(parts[name]["texts"], expected, strict=True)),
            len(expected),
        ]
        for name in ("plain", "tree", "llama", "llama-draft")
        if name in parts
    }
    return {
        "figures": figures,
        "texts_as_in_memory": same,
        "tree": {"size": tree.size, "depth": tree.depth, "step_seconds": tree.plan.step_seconds},
        "predicted": {"tokens_per_step": prediction.tokens_per_step, "speedup": prediction.speedup},
    }


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


def measure_in_group(options: argparse.Namespace, name: str) -> Any:
    """Run a part as a process of its own, in a control group unless it is `memory`."""
    from sequoia_plan.runtime.offload.memory import as_bytes
    from sequoia_plan.runtime.offload.weight_cache import cache_folder

    leave_page_cache([cache_folder(), options.folder, *(Path(p).parent for p in (options.gguf,))])
    command = [sys.executable, *sys.argv, "--child", name]
    limit = 10**12 if name == "memory" else as_bytes(options.limit, None)
    with control_group(limit) as group:

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, preexec_fn=join)
        peak = int((group / "memory.max_usage_in_bytes").read_text())
    return json.loads(done.stdout.splitlines()[-1]) | {"peak_bytes": peak}


def run_all() -> None:
    """Run the parts that the output file lacks for a dtype, and take the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--child", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--draft-max", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("build/offload"))
    for name in ("target", "draft", "tree", "memory", "limit", "gguf", "llama"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    if options.child:
        import torch

        torch.set_num_threads(options.threads)
        print(json.dumps(PARTS[options.child](options)))
        return
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    result = results.setdefault(options.dtype, {"parts": {}})
    result["settings"] = {name: str(value) for name, value in vars(options).items()}
    for name in options.part or PARTS:
        if name not in result["parts"]:
            result["parts"][name] = measure_in_group(options, name)
            write_report(options.output, results)
    if "memory" in result["parts"]:
        result |= figures_of(options, result["parts"]) | {"hardware": fingerprint("cpu")}
    write_report(options.output, results)


if __name__ == "__main__":
    run_all()
