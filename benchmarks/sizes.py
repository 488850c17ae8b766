"""What models of the size that people run take to load, in memory and in a pass, beside llama.cpp.

    python benchmarks/sizes.py TARGET.gguf DRAFT.gguf --llamacpp .llamacpp/bin
    python benchmarks/sizes.py TARGET.gguf DRAFT.gguf --quick   # into build/quick
    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma,+f16c \\
        python benchmarks/sizes.py TARGET.gguf DRAFT.gguf --kind --llamacpp build/llamacpp-avx2/bin
    python benchmarks/sizes.py --pages-only

Each load is a process of its own, whose imports are not counted, with a cache folder for these
alone; the files have been read before. A round measures memory, our passes and llama.cpp's one
after the other, so ratios are free of drift. A pass's bytes are the matrices that it multiplies by.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from pages import with_tables
from passes import llamacpp_seconds, timed_pass, timed_prompt
from reports import spread, write_report
from results import RESULTS, ROOT

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.processor import processor_name
from sequoia_plan.models.backends import integer_products
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.models.packed.weights import EMBEDDING, HEAD
from sequoia_plan.runtime import SequoiaDecoder, load_pair

PAGE, KINDS_PAGE = ROOT / "docs" / "sizes.md", ROOT / "docs" / "speed.md"
ROWS, CONTEXT, PROMPT, NEW_TOKENS = (1, 2, 4, 8, 16, 32, 64), 128, 512, 64
READ_BYTES = 1 << 30
"""What the machine's bandwidth is measured over."""
TEXT = "def quicksort(numbers):"


def load_and_decode(target: str, draft: str) -> dict[str, float]:
    """Seconds of loading, and this process's memory in MB at most, when loaded and at the end.

    `anonymous_mb` is what no file backs of it, looked at a hundred times a second.
    """
    import_module("sequoia_plan.models.packed.loading")  # an import that is not counted
    anonymous, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            anonymous.append(status_mb("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        started = time.perf_counter()
        pair = load_pair(target, draft)
        seconds, loaded_mb = time.perf_counter() - started, status_mb("VmHWM")
        tree = TokenTree.chain(5)
        decoder = SequoiaDecoder(pair.target, pair.draft, tree, tokenizer=pair.tokenizer)
        decoder.generate(TEXT, max_new_tokens=NEW_TOKENS)
    finally:
        ended.set()
        watcher.join()
    peak_mb = status_mb("VmHWM")
    sizes = {"loaded_mb": loaded_mb, "peak_mb": peak_mb, "anonymous_mb": max(anonymous)}
    return {"seconds": seconds} | sizes


def status_mb(key: str) -> float:
    """An entry of this process's memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024 / 1e6


def measure_loads(files: list[str], later_loads: int) -> dict[str, Any]:
    """The first load, later ones, and what the cache folder then holds."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        environment = os.environ | {"SEQUOIA_PLAN_CACHE": folder}
        loads = []
        for _ in range(1 + later_loads):
            command = [sys.executable, __file__, *files, "--load"]
            output = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            )
            loads.append(json.loads(output.stdout.splitlines()[-1]))
        cache_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*"))
    later = {key: spread([load[key] for load in loads[1:]]) for key in loads[0]}
    return {"first": loads[0], "later": later, "cache_bytes": cache_bytes}


@njit(nogil=True, cache=True)
def total(words: Any) -> int:
    """The sum of int64 [n]."""
    result = 0
    for word in words:
        result += word
    return result


def timed_read(threads: int) -> Callable[[], float]:
    """A function that reads `READ_BYTES` of memory in huge pages and returns the seconds."""
    memory = mmap.mmap(-1, READ_BYTES)
    memory.madvise(getattr(mmap, "MADV_HUGEPAGE", 14))
    words = np.frombuffer(memory, np.int64)
    words[:] = 1
    parts, pool = np.array_split(words, threads), ThreadPoolExecutor(threads)

    def run() -> float:
        started = time.perf_counter()
        assert sum(pool.map(total, parts)) == len(words)
        return time.perf_counter() - started

    run()
    return run


def pass_bytes(model: LoadedModel) -> int:
    """Bytes of the matrices that a pass multiplies by."""
    places: Any = model.backend.weights.places  # type: ignore[attr-defined]
    unused = EMBEDDING if HEAD in places else ""
    return sum(place.size for name, (_, place) in places.items() if place.format and name != unused)


@torch.inference_mode()
def measure_passes(
    files: list[str], rows: tuple[int, ...], rounds: int, llama_bench: Path | None
) -> dict[str, Any]:
    """The machine's bandwidth, the bytes of passes, their milliseconds, and llama.cpp's."""
    threads, pair = torch.get_num_threads(), load_pair(*files)
    models = {"target": pair.target, "draft": pair.draft}
    sizes = {"target": rows, "draft": (1,)}
    runs = {
        (role, n): timed_pass(model, n, CONTEXT)
        for role, model in models.items()
        for n in sizes[role]
    }
    runs["prompt", PROMPT] = timed_prompt(pair.target, PROMPT, 0)
    read, read_seconds = timed_read(threads), []
    ours: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    theirs: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        read_seconds.append(min(read() for _ in range(3)))
        for key, run in runs.items():
            ours[key].append(run())
        for role, file, n, context in (
            (
                ("target", files[0], rows, CONTEXT),
                ("draft", files[1], (1,), CONTEXT),
                ("prompt", files[0], (PROMPT,), 0),
            )
            if llama_bench
            else ()
        ):
            taken = llamacpp_seconds(str(llama_bench), Path(file), n, threads, context)
            for number, seconds in taken.items():
                theirs[role, number].append(seconds)
    bandwidth = READ_BYTES / np.array(read_seconds)
    figures: dict[str, Any] = {"bandwidth_gb": spread(bandwidth / 1e9, 2), "passes": {}}
    for role, model in models.items():
        share = pass_bytes(model) / np.array(ours[role, 1]) / bandwidth
        figures[role] = {"pass_bytes": pass_bytes(model), "share_of_bandwidth": spread(share)}
    for (role, n), seconds in ours.items():
        times = {"ms": spread(1000 * np.array(seconds))}
        if llama_bench:
            llamacpp = np.array(theirs[role, n])
            times["llamacpp_ms"] = spread(1000 * llamacpp)
            times["times_as_fast"] = spread(llamacpp / np.array(seconds), 2)
        figures["passes"].setdefault(role, {})[str(n)] = times
    return figures


def main() -> None:
    """Measure, and write the file and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="target and draft")
    parser.add_argument("--llamacpp", type=Path, help="the folder of llama.cpp's programs")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one round, few rows")
    parser.add_argument("--kind", action="store_true",
                        help="only passes, as those of this kind of processor")  # fmt: skip
    parser.add_argument("--pages-only", action="store_true", help="measure nothing")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    files: list[str] = options.files
    if len(files) != 2 and not options.pages_only:
        parser.error(f"found {len(files)} files, expected a target and a draft")
    torch.set_num_threads(options.threads)
    if options.load:
        print(json.dumps(load_and_decode(*files)))
        return
    (ROOT / "build").mkdir(exist_ok=True)
    results = ROOT / "build" / "quick" if options.quick else RESULTS
    if not options.pages_only:
        rows, rounds = ((1, 8), 1) if options.quick else (ROWS, options.rounds)
        llama_bench = options.llamacpp and options.llamacpp / "llama-bench"
        report = {
            "processor": processor_name(),
            "instructions": integer_products(),
            "threads": options.threads,
            "files": {Path(file).name: Path(file).stat().st_size for file in files},
        } | measure_passes(files, rows, rounds, llama_bench)
        if options.kind:
            kinds = results / "processors.json"
            others = json.loads(kinds.read_text("utf-8")) if kinds.exists() else {}
            write_report(kinds, others | {report["instructions"]: report})
        else:
            report["loads"] = measure_loads(files, 1 if options.quick else 5)
            write_report(results / "sizes.json", report)
    for path in (PAGE, KINDS_PAGE):
        page = with_tables(path.read_text("utf-8"), results)
        write_atomically(results / path.name if options.quick else path, page.encode())


if __name__ == "__main__":
    main()
