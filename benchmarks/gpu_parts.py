"""What benchmarks/gpu.py measures, part by part."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from random_models import Shape, bytes_read, copy_bandwidth, random_pair, shape
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from sequoia_plan.artifacts import Latency, Profile, TokenTree, load_tree
from sequoia_plan.artifacts.cost import StepTime, expected_tokens
from sequoia_plan.artifacts.tree_file import CATALOG
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving.baselines import arms
from sequoia_plan.profiler.bench import bench, compare, hugging_face, ours, summary
from sequoia_plan.profiler.breakdown import breakdown
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import measure_latency, random_prompt, timed
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.prompts import built_in, held_out
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder, load_pair
from sequoia_plan.runtime.capture import Graphs
from sequoia_plan.runtime.models import attention
from sequoia_plan.runtime.models.load import dtype_name, resolve_dtype
from sequoia_plan.runtime.pair import LANGUAGE_MODEL

VECTORS = ("sequoia-example", "llama3-70b-8b-cnn")
CONTENDERS = ("plain", "generate", "assisted", "traversal")
BUDGET, DEPTH = 768, 20


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        texts, prompts, tokens: prompts profiled, held-out prompts decoded, new tokens of each.
        precision: of the acceptance, see `finished_prompts`.
        latency_seconds, rounds: for repeating latencies and breakdowns.
        largest: nodes of the largest tree that is timed.
        copied: bytes of the copy that memory bandwidth is measured with.
        nodes, extents: of the passes that attention is timed for alone.
        contexts: tokens in the cache where the parts of a step are timed.
        vocabulary: of the models for that.
        checks: what pytest is to run.
        targets, draft: shapes.
    """

    texts: int
    prompts: int
    tokens: int
    precision: float
    latency_seconds: float
    rounds: int
    largest: int
    copied: int
    nodes: tuple[int, ...]
    extents: tuple[int, ...]
    contexts: tuple[int, ...]
    vocabulary: int
    checks: tuple[str, ...]
    targets: dict[str, Shape]
    draft: Shape


FULL = Scale(
    texts=16,
    prompts=10,
    tokens=128,
    precision=0.05,
    latency_seconds=10.0,
    rounds=20,
    largest=1024,
    copied=1 << 30,
    nodes=(2, 13, 128, 768),
    extents=(512, 2560),
    contexts=(128, 2048),
    vocabulary=128_256,
    checks=("tests/test_static_step.py", "tests/test_fused.py", "tests/test_cuda.py"),
    targets={"llama-2-7b": shape(4096, 11008, 32, 32), "llama-2-13b": shape(5120, 13824, 40, 40)},
    draft=shape(768, 3072, 2, 12),
)
QUICK = Scale(
    texts=2,
    prompts=2,
    tokens=8,
    precision=0.0,
    latency_seconds=0.0,
    rounds=3,
    largest=16,
    copied=1 << 24,
    nodes=(2, 5),
    extents=(64,),
    contexts=(16,),
    vocabulary=512,
    checks=("tests/test_static_step.py", "-k", "captured_steps"),
    targets={"llama-2-7b": shape(64, 128, 2, 4, 512), "llama-2-13b": shape(96, 192, 2, 4, 512)},
    draft=shape(32, 64, 1, 2, 512),
)


@dataclass(frozen=True)
class Run:
    """What a part needs to know: the device, how much to measure, and when to come to an end (of `time.perf_counter`)."""

    device: torch.device
    scale: Scale
    deadline: float


def with_peak(device: torch.device, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` finds, with the most memory that was allocated meanwhile."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = run()
    return found | {"peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None}


def checks(run: Run) -> dict[str, Any]:
    """The tests that need the device, and which attention PyTorch would choose for a tree's mask by itself."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *run.scale.checks]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    query = attention_input(run, 8, 8, 4, 4)[0]
    mask = torch.zeros(1, 1, 8, 8, device=run.device, dtype=query.dtype)
    return {
        "tests": {"exit": done.returncode, "says": done.stdout.strip().splitlines()[-1:]},
        "cudnn": torch.backends.cudnn.version(),
        "chosen": SDPBackend(torch._fused_sdp_choice(query, query, query, mask)).name,
    }


def attention_input(run: Run, nodes: int, extent: int, heads: int, shared: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a pass, [1, heads, tokens, head_dim]; as large as those of an 8B model."""
    dtype, width = resolve_dtype("auto", run.device.type), 128

    def random(count: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, count, tokens, width, device=run.device, dtype=dtype)

    return random(heads, nodes), random(shared, extent), random(shared, extent)


def sdpa(run: Run) -> dict[str, Any]:
    """Attention of one layer alone: the first call, a later one and a graph's replay, by each of PyTorch's kernels that takes a mask."""
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION] if run.device.type == "cuda" else [SDPBackend.MATH]
    graphs = Graphs(run.device) if run.device.type == "cuda" else None
    found = []
    for nodes, extent, (heads, shared) in itertools.product(run.scale.nodes, run.scale.extents, ((32, 32), (32, 8))):
        query, key, value = attention_input(run, nodes, extent, heads, shared)
        mask = torch.zeros(1, 1, nodes, extent, device=run.device, dtype=query.dtype)
        module = torch.nn.Module()
        for kernel in kernels:

            def attend(query=query, key=key, value=value, mask=mask, module=module) -> torch.Tensor:
                return attention.shared(module, query, key, value, mask)[0]

            seconds: dict[str, float | None] = {}
            with sdpa_kernel([kernel]), torch.inference_mode():
                seconds["first"] = timed(run.device, attend)[1]
                seconds["later"] = statistics.median(timed(run.device, attend)[1] for _ in range(run.scale.rounds))
                seconds["replayed"] = None
                if graphs:
                    key_of_graph = (kernel.name, nodes, extent, shared)
                    graphs(key_of_graph, attend)
                    seconds["replayed"] = statistics.median(timed(run.device, lambda: graphs(key_of_graph, attend))[1] for _ in range(run.scale.rounds))  # noqa: B023
            found.append({"nodes": nodes, "extent": extent, "heads": heads, "shared_heads": shared, "kernel": kernel.name, "seconds": seconds})
    return {"attention": found}


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "heads that share": (LlamaForCausalLM, LlamaConfig, {}),
    "window": (MistralForCausalLM, MistralConfig, {"sliding_window": 64}),
}
WITHOUT_NUMBERS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import gpu_parts
from sequoia_plan.runtime import Sampling, SequoiaDecoder
target, draft = gpu_parts.small("heads that share", torch.device(sys.argv[2])), gpu_parts.small("heads that share", torch.device(sys.argv[2]))
decoder = SequoiaDecoder(target, draft, gpu_parts.SMALL_TREE)
target.lm_head.weight.data[7] = torch.nan
decoder.generate([3, 1, 4], 8, sampling=Sampling(0.7, top_p=0.9), seed=0)
"""
SMALL_TREE = TokenTree.from_parents([-1, 0, 0, 1, 1, 2, 3])


def small(kind: str, device: torch.device) -> Any:
    """A model of two layers in the device's dtype."""
    model, config, options = KINDS[kind]
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024}
    return model(config(**sizes, **options)).to(device, resolve_dtype("auto", device.type)).eval()


def captured(run: Run) -> dict[str, Any]:
    """Captured steps against eager ones: greedy and sampled in turn, a longer second prompt, a draft that covers a part; and logits that are
    no numbers with top-p, in a process of their own."""
    found: dict[str, Any] = {}
    prompts = [torch.arange(length) % 1000 for length in (20, 20 + 4 * run.scale.tokens)]
    for kind, covered in itertools.product(KINDS, (None, 512)):
        target, draft = small(kind, run.device), small(kind, run.device)
        if covered:
            draft.covered_tokens = torch.arange(0, 2 * covered, 2, device=run.device)
            draft.lm_head = torch.nn.Linear(256, covered, bias=False, device=run.device, dtype=target.dtype)
        eager, other = (SequoiaDecoder(target, draft, SMALL_TREE, captured=choice) for choice in (False, None))
        pairs = []
        for prompt, temperature in itertools.product(prompts, (0.0, 0.7)):
            pairs.append([each.generate(prompt, 8 * run.scale.tokens, temperature, seed=1).sequences[0].tolist() for each in (eager, other)])
        name = f"{kind}, {covered or 'all'} tokens"
        found[name] = {"graphs": len(other.graphs.graphs) if other.graphs else 0, "equal": [a == b for a, b in pairs]}
    command = [sys.executable, "-c", WITHOUT_NUMBERS, str(Path(__file__).parent), str(run.device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return {"against_eager": found, "not_finite": {"exit": done.returncode, "says": done.stderr.strip().splitlines()[-1:]}}


def step_parts(run: Run) -> dict[str, Any]:
    """Where a step's time goes with a 7B target and a vocabulary of 128k: trees, verifiers, settings, lengths of text."""
    scale = run.scale
    name = "llama-2-7b"
    pair = random_pair(name, scale.targets[name] | {"vocab_size": scale.vocabulary}, scale.draft | {"vocab_size": scale.vocabulary}, run.device)
    trees = {f"ternary {size}": bushy(size, 3) for size in (128, 768) if size <= scale.largest} or {"ternary": bushy(scale.largest, 3)}
    trees |= {each: load_tree(each) for each in ("llama3-70b-8b-cnn-128x10", "llama3-70b-8b-cnn-768x18") if load_tree(each).size <= scale.largest}
    samplings = [Sampling(), *(Sampling(0.6, top_p, verifier=verifier) for top_p in (1.0, 0.9) for verifier in ("sequoia", "traversal"))]
    found = []
    for (title, tree), sampling, context in itertools.product(trees.items(), samplings, scale.contexts):
        setting = {"temperature": sampling.temperature, "top_p": sampling.top_p, "verifier": None if sampling.greedy else sampling.verifier}
        found.append({"tree": title, "context": context, **setting, **timed_parts(run, pair, tree, sampling, context)})
    return {"models": pair.facts, "steps": found}


def compiled(run: Run) -> dict[str, Any]:
    """Passes compiled by torch.compile, then captured, against captured alone: plain decoding and a tree, 7B shapes."""
    scale, sampling = run.scale, Sampling(0.6)
    pair = random_pair("llama-2-7b", scale.targets["llama-2-7b"], scale.draft, run.device)
    trees = {"plain": TokenTree.chain(1), "tree": bushy(min(64, scale.largest), 3)}
    found = []
    for (title, tree), choice in itertools.product(trees.items(), (False, True)):
        torch.compiler.reset()
        found.append({"tree": title, "compile": choice, **timed_parts(run, pair, tree, sampling, scale.contexts[0], compile=choice)})
    return {"compiled": found}


def timed_parts(run: Run, pair: Pair, tree: TokenTree, sampling: Sampling, context: int, **options: Any) -> dict[str, Any]:
    """The first step's seconds, the parts of the steps after it, and the peak of memory."""

    def parts() -> dict[str, Any]:
        first = first_step(pair, tree, sampling, context, **options)
        return {"first_step_seconds": first, **breakdown(pair, tree, sampling, context, run.scale.rounds, **options)}

    return with_peak(run.device, parts)


@torch.inference_mode()
def first_step(pair: Pair, tree: TokenTree, sampling: Sampling, context: int, **options: Any) -> float:
    """Seconds of the step that is compiled and captured."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, **options)
    decoder.prefill(random_prompt(pair, context), tree.depth, seed=0)
    decoder.refill_random_numbers(sampling)
    started = time.perf_counter()
    decoder.run(decoder.extent(context - 1), sampling).tolist()
    return time.perf_counter() - started


@functools.cache
def embedded(device: torch.device, placement: str = "auto") -> Pair:
    """The embedded pair, loaded once."""
    return load_pair(device=str(device), placement=placement)


def real_pair(run: Run, sampling: Sampling) -> dict[str, Any]:
    """The embedded pair end to end: profile, solve, decode side by side, the parts of a step."""
    scale, pair = run.scale, embedded(run.device)
    work = {"largest": scale.largest, "precision": scale.precision, "tokens_per_prompt": min(scale.tokens, 64)}
    profile = measure(pair, built_in()[: scale.texts], [sampling], scale.latency_seconds, verifiers=[["sequoia"]], **work)[0]
    solution = solve(profile, BUDGET, DEPTH)
    sampling = replace(sampling, verifier=solution.plan.settings["verifier"])
    trees = arms(solution.tree, sampling.verifier)
    reference = functools.partial(embedded, run.device, placement="resident")
    prompts = longest_first(pair, scale)
    result = compare(pair, reference, solution.tree, trees, sampling, prompts, scale.tokens, CONTENDERS, deadline=run.deadline, assistant=LANGUAGE_MODEL)
    steps = {"plain": TokenTree.chain(1), "tree": solution.tree}
    return result.facts() | {
        "acceptance": profile.acceptance,
        "trials": profile.trials,
        "latency": curves(profile.latency),
        "alternatives": solution.plan.facts().get("alternatives", {}),
        "tree": {"parents": solution.tree.parents.tolist(), "expected_tokens": solution.plan.expected_tokens, "step_seconds": solution.plan.step_seconds},
        "breakdown": {name: with_peak(run.device, functools.partial(breakdown, pair, tree, sampling, rounds=scale.rounds)) for name, tree in steps.items()},
    }


def hugging_face_variants(run: Run) -> dict[str, Any]:
    """transformers beside our plain decoding: its static cache with and without compiling the forward pass, and both caches with and without
    cuDNN's attention, which plans anew for every length."""
    pair, tokens = embedded(run.device), run.scale.tokens
    found = {}
    for sampling, cudnn in itertools.product((Sampling(), Sampling(0.6)), (True, False)):
        static = functools.partial(hugging_face, pair, sampling, tokens, counted=False, cache_implementation="static")
        decoders = {
            "plain": ours(pair, TokenTree.chain(1), sampling, tokens),
            "generate": hugging_face(pair, sampling, tokens),
            "static, compiled": static(),
            "static": static(disable_compile=True),
        }
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        try:
            figures = summary(bench(decoders, longest_first(pair, run.scale), deadline=run.deadline), ["plain"])
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
        found[f"T {sampling.temperature}, {'with' if cudnn else 'without'} cuDNN"] = {name: each.facts() for name, each in figures.items()}
    return {"contenders": found}


def random_weights(run: Run, name: str) -> dict[str, Any]:
    """A target of the paper's with its draft: passes by size, bandwidth, and the step of the best tree for each of the paper's vectors."""
    scale, sampling = run.scale, Sampling(0.6)
    pair = random_pair(name, scale.targets[name], scale.draft, run.device)
    latency = measure_latency(pair, sampling, math.inf, scale.latency_seconds, largest=scale.largest)
    times = StepTime(latency)
    plain = breakdown(pair, TokenTree.chain(1), sampling, rounds=scale.rounds)
    read = bytes_read(pair.target)
    copied = copy_bandwidth(run.device, scale.copied)
    trees = {}
    for vector in VECTORS:
        known = Profile.load(CATALOG / "profiles" / f"{vector}.yaml")
        facts = {"latency": latency, "settings": sampling.settings(), "models": pair.facts, "hardware": fingerprint(run.device)}
        tree = solve(Profile(acceptance=known.acceptance, trials=known.trials, **facts), BUDGET, DEPTH).tree
        trees[vector] = judged(pair, tree, known.acceptance, times, sampling, plain["step"], scale.rounds)
    return {
        "settings": sampling.settings() | {"dtype": dtype_name(pair.target.dtype), "context": latency.context},
        "models": pair.facts,
        "latency": curves(latency),
        "bandwidth": {
            "bytes_read_a_pass": read,
            "copy_bytes_per_second": round(copied),
            "target_bytes_per_second": round(read / latency.target[1]),
            "share_of_copy": round(read / latency.target[1] / copied, 4),
        },
        "plain": plain,
        "trees": trees,
    }


def judged(pair: Pair, tree: TokenTree, acceptance: Sequence[float], times: StepTime, sampling: Sampling, plain_step: float, rounds: int) -> dict[str, Any]:
    """A tree's step against the sum of its passes, each timed alone, and what the vector would make of it."""
    parts = with_peak(pair.target.device if pair else torch.device("cpu"), lambda: breakdown(pair, tree, sampling, rounds=rounds))
    times = replace(times, acceptance=acceptance)
    passes = times.step(tree) - times.latency.overhead - times.verification(tree)
    tokens = expected_tokens(tree, acceptance)
    return {
        "parents": tree.parents.tolist(),
        "size": tree.size,
        "depth": tree.depth,
        "step_seconds": {"measured": parts["step"], "planned": times.step(tree), "sum_of_passes": passes},
        "overhead_share": 1 - passes / parts["step"],
        "breakdown": parts,
        "projected": {
            "expected_tokens": tokens,
            "tokens_per_second": tokens / parts["step"],
            "plain_tokens_per_second": 1 / plain_step,
            "speedup": tokens * plain_step / parts["step"],
        },
    }


def longest_first(pair: Pair, scale: Scale) -> list[list[int]]:
    """Held-out prompts: whatever grows with length has grown once all are warm."""
    return sorted(held_out(pair.tokenizer, scale.prompts), key=len, reverse=True)


def curves(latency: Latency | None) -> dict[str, Any]:
    """Seconds by number of tokens."""
    assert latency is not None
    return {
        "target": latency.target,
        "draft": latency.draft,
        "overhead": latency.overhead,
        "verification": latency.verification.facts() if latency.verification else None,
        "context": latency.context,
        "samples": latency.samples,
        "out_of_memory": latency.out_of_memory,
    }


PARTS: dict[str, tuple[float, Callable[[Run], dict[str, Any]]]] = {
    "checks": (120.0, checks),
    "sdpa": (90.0, sdpa),
    "captured": (150.0, captured),
    "breakdown": (420.0, step_parts),
    "compiled": (180.0, compiled),
    "llama-2-7b": (150.0, lambda run: random_weights(run, "llama-2-7b")),
    "llama-2-13b": (150.0, lambda run: random_weights(run, "llama-2-13b")),
    "pair-t0": (150.0, lambda run: real_pair(run, Sampling())),
    "pair-t06": (150.0, lambda run: real_pair(run, Sampling(0.6))),
    "variants": (240.0, hugging_face_variants),
}
"""The parts in the order they run, and how many seconds each is meant to take."""
