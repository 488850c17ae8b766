"""Who decodes one request fastest on this processor: ours, vLLM, llama.cpp, transformers.

    sequoia-plan export --format target -o target
    sequoia-plan export --format draft -o eagle3
    python benchmarks/one_request.py --tree tree.safetensors --vllm .venv-engines/bin/python \\
        --target target --draft eagle3 --length 4 -o benchmarks/results/one-request.json

All of them decode the same held-out prompts greedily, prompt by prompt in turn, each in a process
of its own that waits while the others run. Tokens a second are those after the first token, so
reading the prompt does not count. llama.cpp (`--llama-server`) runs the embedded model's own file,
whose weights have 4 bits; the others have `--dtype`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from summary import spread

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load
from sequoia_plan.engines import llamacpp, vllm
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.gguf import embedded_gguf

TokensPerSecond = Callable[[int], float]
"""Decodes the prompt of that number, and returns tokens a second."""


def of_decoder(decoder: SequoiaDecoder, prompts: list[list[int]], tokens: int) -> TokensPerSecond:
    """Ours, plain or with a tree."""

    def run(number: int) -> float:
        prompt = torch.tensor(prompts[number])
        moments, counts = [], []
        for output in decoder.steps(prompt, tokens, Sampling()):
            moments.append(time.perf_counter())
            counts.append(len(output.tokens))
        return sum(counts[1:]) / (moments[-1] - moments[0])

    return run


def of_transformers(model: Any, prompts: list[list[int]], tokens: int) -> TokensPerSecond:
    """transformers' generate, timed by a streamer."""

    class Clock:
        def __init__(self) -> None:
            self.moments: list[float] = []

        def put(self, _: Any) -> None:
            self.moments.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(number: int) -> float:
        ids, clock = torch.tensor([prompts[number]]), Clock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            streamer=clock,
        )
        moments = clock.moments[1:]  # the first call is for the prompt
        return (len(moments) - 1) / (moments[-1] - moments[0])

    return run


def of_vllm(pool: vllm.EnginePool, length: int) -> TokensPerSecond:
    """vLLM with a chain of `length` tokens; 0 is plain decoding."""
    return lambda number: pool.run(length, 1, [number]).throughput


def of_llamacpp(server: llamacpp.Server, prompts: list[list[int]], tokens: int) -> TokensPerSecond:
    """llama.cpp's own decoding, by the server's timings."""

    def run(number: int) -> float:
        steps = server.generate(prompts[number], tokens, 0.0)
        return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)

    return run


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", required=True)
    parser.add_argument("--target", required=True, help="folder for vLLM")
    parser.add_argument("--draft", required=True, help="EAGLE-3 folder for vLLM")
    parser.add_argument("--vllm", help="interpreter that has vLLM")
    parser.add_argument("--length", type=int, action="append", help="of vLLM's chain, repeatable")
    parser.add_argument("--llama-server")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    pair = load_pair(dtype=options.dtype)
    plain_target = load_pair(dtype=options.dtype, placement="resident").target
    texts = [prompt.text for prompt in held_out_half(load(BUILT_IN))[: options.limit]]
    prompts = [encode(pair.tokenizer, text) for text in texts]
    tree = load_tree(options.tree)
    decoders = {"ours, plain": TokenTree.chain(1), "ours, tree": tree}
    methods: dict[str, TokensPerSecond] = {
        name: of_decoder(SequoiaDecoder(pair.target, pair.draft, t), prompts, options.tokens)
        for name, t in decoders.items()
    }
    methods["transformers generate"] = of_transformers(plain_target, prompts, options.tokens)
    with ExitStack() as stack:
        if options.vllm:
            speculative = vllm.speculative_config("eagle3", options.draft, {})
            engine_options = {
                "dtype": options.dtype,
                "enforce_eager": True,
                "max_model_len": 1024,
                "max_num_seqs": 1,
            }
            workload = vllm.Workload(texts, options.tokens)
            pool = stack.enter_context(
                vllm.EnginePool(
                    options.vllm, options.target, workload, speculative, engine_options, 8
                )
            )
            for length in (0, *(options.length or [4])):
                name = f"vLLM, chain of {length}" if length else "vLLM, plain"
                methods[name] = of_vllm(pool, length)
        if options.llama_server:
            build, _ = llamacpp.find_build(options.llama_server, "draft-simple")
            threads = str(options.threads)
            arguments = ["-m", str(embedded_gguf()), "-t", threads, "-tb", threads, "-c", "1024"]
            server = stack.enter_context(llamacpp.Server(build, arguments))
            server.wait()
            methods["llama.cpp, 4 bits"] = of_llamacpp(server, prompts, options.tokens)
        rates: dict[str, list[float]] = {name: [] for name in methods}
        for run in methods.values():
            run(0)
        for number in range(len(prompts)):
            for name, run in methods.items():
                rates[name].append(run(number))
            print(f"{number + 1} of {len(prompts)} prompts", flush=True)
    report = {
        "hardware": fingerprint("cpu"),
        "settings": {"dtype": options.dtype, "threads": options.threads, "tokens": options.tokens},
        "tokens_per_second": {name: spread(np.array(values)) for name, values in rates.items()},
        "tree_over": {
            name: spread(np.array(rates["ours, tree"]) / np.array(values))
            for name, values in rates.items()
        },
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output, json.dumps(report, indent=1).encode() + b"\n")
    table = Table("", "tokens/s", "our tree over it")
    for name in rates:
        speed, ratio = report["tokens_per_second"][name], report["tree_over"][name]
        table.add_row(name, *(f"{q[0]:.2f} ({q[1]:.2f}-{q[2]:.2f})" for q in (speed, ratio)))
    Console().print(table)


if __name__ == "__main__":
    main()
