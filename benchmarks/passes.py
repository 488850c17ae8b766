"""How long passes of the embedded target take: compiled, as PyTorch runs them, and llama.cpp's.

    python benchmarks/passes.py --llama-bench .llamacpp/bin/llama-bench \\
        -o benchmarks/results/passes.json
    python benchmarks/passes.py --rounds 3 --threads 1 --context 128 -o build/passes.json

A pass reads some rows after a context. The compiled pass runs with the bits of the embedded file,
in bfloat16 and in float32; PyTorch with transformers' layers and with fused ones, in bfloat16.
llama.cpp runs the same file. A round times five passes of each, so ratios are free of drift. With
no context, it times whole prompts: ours in parts, transformers' in one pass, as each does it.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reports import new_parser, spread, write_report

from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.models.base.threads import one_thread_of_torch
from sequoia_plan.models.files.gguf import embedded_gguf
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.runtime import load_pair

ROWS, PROMPTS = (1, 2, 4, 6, 8, 16), (512, 4096)
REPEATS = 5
"""Passes that are timed at once, as llama.cpp's benchmark does it."""
PAUSE = 0.02
"""Seconds before them, in which PyTorch's threads of the pass before stop spinning."""
OWN_BITS, LLAMACPP = "compiled, the file's bits", "llama.cpp, the same file"
MODELS = {
    OWN_BITS: {"dtype": "auto"},
    "compiled, bfloat16": {"dtype": "bfloat16"},
    "compiled, float32": {"dtype": "float32"},
    "PyTorch, fused layers, bfloat16": {"dtype": "bfloat16", "placement": "fused"},
    "PyTorch, transformers' layers, bfloat16": {"dtype": "bfloat16", "placement": "resident"},
}


def timed_pass(model: LoadedModel, rows: int, context: int) -> Callable[[], float]:
    """A function that runs passes one after the other and returns the seconds of one."""
    extent = context + rows
    cache = model.new_cache(extent)
    slots = torch.arange(context, extent)
    tokens = torch.arange(1000, 1000 + rows)
    mask = additive_mask(torch.arange(extent) <= slots[:, None], model.dtype)

    def run() -> float:
        time.sleep(PAUSE)
        with one_thread_of_torch(model.traits.is_compiled):
            model(cache, tokens, slots, slots, mask)  # wakes the threads
            start = time.perf_counter()
            for _ in range(REPEATS):
                model(cache, tokens, slots, slots, mask)
            return (time.perf_counter() - start) / REPEATS

    run()
    return run


def timed_prompt(model: LoadedModel, length: int, context: int) -> Callable[[], float]:
    """A function that reads a prompt and returns the seconds."""
    cache, tokens = model.new_cache(length), torch.arange(1000, 1000 + length)

    def run() -> float:
        start = time.perf_counter()
        if model.traits.is_compiled:
            with one_thread_of_torch(True):
                model.prefill(cache, tokens)
        else:
            model.module(tokens[None], logits_to_keep=1)
        return time.perf_counter() - start

    return run


def llamacpp_seconds(
    program: str, file: Path, sizes: Sequence[int], threads: int, context: int
) -> dict[int, float]:
    """Seconds of llama.cpp's pass over each number of rows, by its own benchmark."""
    options = {"-m": file, "-p": ",".join(map(str, sizes)), "-n": 0, "-d": context}
    options |= {"-t": threads, "-r": REPEATS if context else 1, "-o": "json"}
    command = [program, *(str(word) for option in options.items() for word in option)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return {test["n_prompt"]: test["avg_ns"] / 1e9 for test in json.loads(result.stdout)}


@torch.inference_mode()
def milliseconds(
    models: dict[str, LoadedModel], context: int, threads: int, rounds: int, llama_bench: str | None
) -> dict[str, Any]:
    """By way and number of rows: the pass's milliseconds, and its ratio to ours with one row."""
    passes = {
        (name, rows): (timed_pass if context else timed_prompt)(model, rows, context)
        for name, model in models.items()
        for rows in (ROWS if context else PROMPTS)
    }
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for key, run in passes.items():
            seconds.setdefault(key, []).append(run())
        if llama_bench:
            sizes = ROWS if context else PROMPTS
            taken_by_rows = llamacpp_seconds(llama_bench, embedded_gguf(), sizes, threads, context)
            for rows, taken in taken_by_rows.items():
                seconds.setdefault((LLAMACPP, rows), []).append(taken)
    figures: dict[str, Any] = {}
    for (name, rows), taken in seconds.items():
        ms, ours = 1000 * np.array(taken), 1000 * np.array(seconds[OWN_BITS, rows])
        figures.setdefault(name, {})[str(rows)] = {
            "ms": spread(ms),
            "lowest_ms": float(ms.min()),
            "over_ours": spread(ms / ours),
        }
    return figures


def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
    parser.add_argument("--threads", type=int, action="append", help="repeatable")
    parser.add_argument("--context", type=int, action="append", help="slots, repeatable")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--llama-bench", help="llama.cpp's program (make llamacpp builds it)")
    options = parser.parse_args()
    figures = {}
    for threads in options.threads or [1, 2]:
        torch.set_num_threads(threads)
        models = {}
        for name, settings in MODELS.items():
            models[name] = load_pair(draft="none", **settings).target
            models[name].backend.prepare(())
        for context in options.context or [128, 2048, 0]:
            setting = f"{threads} threads, {context} slots of context"
            figures[setting] = milliseconds(
                models, context, threads, options.rounds, options.llama_bench
            )
            print(setting, json.dumps(figures[setting]), flush=True)
    write_report(options.output, {"hardware": fingerprint("cpu"), "figures": figures})


if __name__ == "__main__":
    main()
