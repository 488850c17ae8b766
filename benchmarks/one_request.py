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

import os
from contextlib import ExitStack

import torch
from reports import new_parser, write_report

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load
from sequoia_plan.engines.llama_server import find_build
from sequoia_plan.engines.llamacpp import LlamaCppPool
from sequoia_plan.engines.plan import Drafting
from sequoia_plan.engines.pool import EnginePool
from sequoia_plan.engines.vllm import VllmPool, speculative_config
from sequoia_plan.engines.workload import RunKind, Workload
from sequoia_plan.profiler.bench import bench
from sequoia_plan.profiler.bench_figures import summary
from sequoia_plan.profiler.decoding_methods import (
    DecodePrompt,
    PromptRun,
    sequoia_method,
    transformers_method,
)
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.models.gguf import embedded_gguf


def engine_method(pool: EnginePool, length: int) -> DecodePrompt:
    """An engine with chains of `length` tokens; 0 is plain decoding.

    It has the prompts itself, and counts its full steps alone.
    """

    def decode(_: list[int], number: int) -> PromptRun:
        run = pool.run(RunKind(Drafting(length)), [number])
        return PromptRun(run.tokens, run.steps, run.seconds, 0, 0.0)

    return decode


def main() -> None:
    """Measure, print and write the figures."""
    parser = new_parser(__doc__)
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
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    pair = load_pair(dtype=options.dtype)
    texts = [prompt.text for prompt in held_out_half(load(BUILT_IN))[: options.limit]]
    prompts = [encode(pair.tokenizer, text) for text in texts]
    workload = Workload(texts, 0, options.tokens)
    methods: dict[str, DecodePrompt] = {
        name: sequoia_method(pair, tree, Sampling(), options.tokens)
        for name, tree in {"plain": TokenTree.chain(1), "tree": load_tree(options.tree)}.items()
    }
    resident = load_pair(dtype=options.dtype, placement="resident")
    methods["transformers generate"] = transformers_method(resident, Sampling(), options.tokens)
    with ExitStack() as stack:
        if options.vllm:
            vllm = VllmPool(
                target=options.target,
                draft=options.draft,
                workload=workload,
                python=options.vllm,
                speculative=speculative_config("eagle3", options.draft, {}),
                options={
                    "dtype": options.dtype,
                    "enforce_eager": True,
                    "max_model_len": 1024,
                    "max_num_seqs": 1,
                },
            )
            stack.enter_context(vllm)
            for length in (0, *(options.length or [4])):
                name = f"vLLM, chain of {length}" if length else "vLLM, plain"
                methods[name] = engine_method(vllm, length)
        if options.llama_server:
            threads = str(options.threads)
            llama = LlamaCppPool(
                target=str(embedded_gguf()),
                draft=None,
                workload=workload,
                build=find_build(options.llama_server),
                arguments=["-t", threads, "-tb", threads],
            )
            methods["llama.cpp, 4 bits"] = engine_method(stack.enter_context(llama), 0)
        runs = bench(methods, prompts, on_prompt=lambda done: print(done, "prompts", flush=True))
    report = {
        "hardware": fingerprint("cpu"),
        "settings": {"dtype": options.dtype, "threads": options.threads, "tokens": options.tokens},
        "contenders": {
            name: figures.to_dict() for name, figures in summary(runs, over=tuple(methods)).items()
        },
    }
    write_report(options.output, report)


if __name__ == "__main__":
    main()
