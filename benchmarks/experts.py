"""Decode with a mixture of experts that is larger than the memory, its weights random.

    python benchmarks/experts.py --part make -o benchmarks/results/experts.json
    mkdir /sys/fs/cgroup/memory/experts
    echo 3000000000 > /sys/fs/cgroup/memory/experts/memory.limit_in_bytes
    echo $$ > /sys/fs/cgroup/memory/experts/cgroup.procs
    python benchmarks/experts.py -o benchmarks/results/experts.json

The second run has 3 GB of memory, page cache included (as root, with control groups of version 1).

make: writes the models to build/experts. The target has the layers of a Qwen3-MoE, and routers that
    prefer some experts. Its head follows each token by one of two, and the noise that the layers
    add decides between them; the draft is a table of both.
passes: bytes and seconds of passes by number of nodes, with those experts in memory that were
    chosen most often on other texts, and with as many others.
accelerate: passes over one token of transformers, with as many layers in memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from offload import bytes_read_so_far, main
from reports import spread
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.models.files.pretrained import find_model
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import Sampling, SequoiaDecoder, load_pair

FOLDER = Path("build/experts")
TARGET, DRAFT = FOLDER / "target", FOLDER / "draft"
LAYERS, EXPERTS, WIDTH = 12, 128, 1024
PREFERENCE = 0.5
"""The standard deviation of the logarithm of an expert's scale in its router."""
SIGNAL, SECOND = 0.21, 0.8
"""How large embeddings are beside what the layers add, and how much the head weighs a token's
second successor."""
MEMORY, RESIDENT = "1.5GB", 2
"""The limit with `--memory`; layers that take as much as our slot and the experts beside it."""
ROUNDS = 3
os.environ["SEQUOIA_PLAN_CACHE"] = str(FOLDER)


def random_model(make_config: Callable[..., Any], width: int, layers: int, **sizes: Any) -> Any:
    """A model with random weights."""
    config = make_config(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        head_dim=64,
        **sizes,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def make_models(_: argparse.Namespace) -> dict[str, Any]:
    """Write target and draft."""
    torch.manual_seed(0)
    tokenizer = find_model(None).tokenizer()
    tokens = len(tokenizer)
    target = random_model(
        Qwen3MoeConfig,
        WIDTH,
        LAYERS,
        vocab_size=tokens,
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        initializer_range=WIDTH**-0.5,
    )
    for layer in target.model.layers:
        layer.mlp.gate.weight *= torch.randn(EXPERTS, 1).mul(PREFERENCE).exp()
    draft = random_model(LlamaConfig, 128, 1, vocab_size=tokens, initializer_range=0.0)
    draft.model.embed_tokens.weight.normal_()
    embeddings, outputs = target.model.embed_tokens.weight, []
    target.model.norm.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    target(torch.arange(128)[None])
    embeddings *= SIGNAL * outputs[0].float().std() / embeddings.float().std()
    for folder, model in ((TARGET, target), (DRAFT, draft)):
        model.lm_head.weight.zero_()
        for seed, weight in ((1, 1.0), (2, SECOND)):
            order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
            model.lm_head.weight[order] += weight * model.model.embed_tokens.weight
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return {}


def timed_reads(run: Callable[[], Any]) -> dict[str, Any]:
    """The seconds of a function and the bytes that it reads from the disk, with quartiles."""
    samples, read = [], []
    for _ in range(ROUNDS):
        bytes_before, started = bytes_read_so_far(), time.perf_counter()
        run()
        samples.append(time.perf_counter() - started)
        read.append(bytes_read_so_far() - bytes_before)
    return {"seconds": spread(samples), "bytes_read": spread(read, 0)}


@torch.inference_mode()
def measure_passes(_: argparse.Namespace) -> dict[str, Any]:
    """Passes over drafted chains.

    Each has: whether the most chosen experts were in memory, the nodes, the chosen experts that
    were not in memory, seconds, and bytes.
    """
    pair = load_pair(str(TARGET), str(DRAFT), dtype="bfloat16", offload="disk", memory=MEMORY)
    stream: Any = pair.target.stream
    decoder = SequoiaDecoder(pair.target, pair.draft, TokenTree.chain(2))
    *others, prompt = (torch.tensor(prompt) for prompt in held_out(pair.tokenizer, 3))
    for other in others:
        decoder.generate(other, 8)
    passes = []
    counts = list(map(stream.counts.get, sorted(stream.counts)))
    for most_chosen in (True, False):
        stream.keep_most_chosen(counts if most_chosen else [0] * len(counts))
        for nodes in (1, 2, 4, 8, 16, 32):
            step = decoder.with_tree(TokenTree.chain(nodes)).step
            step.prefill(prompt, 2 * nodes, seed=0)
            extent = step.extent(len(prompt) - 1)
            step.draft(extent, Sampling())
            step.run_target(extent)
            before = Counter(stream.counts)
            figures = timed_reads(partial(step.run_target, extent))
            chosen = (stream.counts - before).keys() - stream.kept.keys()
            passes.append([most_chosen, nodes, len(chosen), figures])
    expert_bytes = stream.blocks[0].size // EXPERTS
    return {"in_memory": len(stream.kept), "expert_bytes": expert_bytes, "passes": passes}


@torch.inference_mode()
def measure_accelerate(_: argparse.Namespace) -> dict[str, Any]:
    """Passes over random tokens, some layers on the disk."""
    device_map = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm"), "cpu")
    device_map["lm_head"] = "cpu"
    for layer in range(LAYERS):
        device_map[f"model.layers.{layer}"] = "cpu" if layer < RESIDENT else "disk"
    target = AutoModelForCausalLM.from_pretrained(
        TARGET,
        dtype=torch.bfloat16,
        device_map=device_map,
        offload_folder=FOLDER / "accelerate",
    )
    return timed_reads(lambda: target(torch.randint(target.vocab_size, (1, 1))))


PARTS = {
    "make": make_models,
    "passes": measure_passes,
    "accelerate": measure_accelerate,
}

if __name__ == "__main__":
    main(PARTS, __doc__)
