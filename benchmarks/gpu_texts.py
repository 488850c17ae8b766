"""Whole texts, and the trees of the paper's acceptance: parts of benchmarks/gpu.py."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from gpu_scale import Run, Scale, measure_each, step_breakdown, with_peak_memory
from random_models import bytes_read, copy_bandwidth, random_pair

from sequoia_plan.artifacts import Acceptance, Latency, Profile, TokenTree
from sequoia_plan.artifacts.expected_tokens import expected_tokens
from sequoia_plan.artifacts.prompts import built_in
from sequoia_plan.artifacts.step_time import StepTime
from sequoia_plan.artifacts.tree_file import CATALOG
from sequoia_plan.planner import solve
from sequoia_plan.planner.solving.baselines import bench_trees
from sequoia_plan.profiler.bench import compare
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import LatencyMeter
from sequoia_plan.profiler.measure import measure
from sequoia_plan.profiler.prompts import held_out
from sequoia_plan.runtime import Pair, Sampling, load_pair
from sequoia_plan.runtime.models.dtype import dtype_name
from sequoia_plan.runtime.pair import LANGUAGE_MODEL

PAPER_VECTORS = ("sequoia-example", "llama3-70b-8b-cnn")
"""Catalog profiles with the paper's acceptance vectors."""
METHODS = ("plain", "generate", "assisted", "traversal")
BUDGET, MAX_DEPTH = 768, 20


@functools.cache
def embedded_pair(device: torch.device, placement: str = "auto") -> Pair:
    """Load the embedded pair, once for each device and placement."""
    return load_pair(device=str(device), placement=placement)


def bench_embedded_pair(run: Run) -> dict[str, Any]:
    """Bench the embedded pair at two temperatures."""
    settings = [{"temperature": temperature} for temperature in (0.0, 0.6)]
    return measure_each(run, "pairs", settings, lambda each: bench_at(run, Sampling(**each)))


def bench_at(run: Run, sampling: Sampling) -> dict[str, Any]:
    """Profile the embedded pair, solve a tree, decode with it and other methods, time its step."""
    scale, pair = run.scale, embedded_pair(run.device)
    profile = measure(
        pair,
        built_in()[: scale.num_profiled_prompts],
        sampling,
        scale.latency_seconds,
        max_size=scale.max_size,
        precision=scale.precision,
        tokens_per_prompt=min(scale.tokens, 64),
    )
    tree = solve(profile, budget=BUDGET, depth=MAX_DEPTH).tree
    sampling = replace(sampling, verifier=tree.plan.settings["verifier"])
    result = compare(
        pair,
        functools.partial(embedded_pair, run.device, placement="resident"),
        tree,
        bench_trees(tree, sampling.verifier),
        sampling,
        prompts_longest_first(pair, scale),
        scale.tokens,
        METHODS,
        deadline=run.deadline,
        assistant=LANGUAGE_MODEL,
    )
    breakdowns = {}
    for name, timed_tree in {"plain": TokenTree.chain(1), "tree": tree}.items():
        measure_step = functools.partial(step_breakdown, pair, timed_tree, sampling, scale.rounds)
        breakdowns[name] = with_peak_memory(run.device, measure_step)
    return result.to_dict() | {
        "acceptance": profile.acceptance.pooled().tolist(),
        "prompts": {kind: len(part) for kind, part in profile.prompts.items()},
        "latency": profile.latency.to_dict(),
        "tree": {
            "parents": tree.parents.tolist(),
            "expected_tokens": tree.plan.expected_tokens,
            "step_seconds": tree.plan.step_seconds,
        },
        "breakdown": breakdowns,
    }


def time_random_pairs(run: Run) -> dict[str, Any]:
    """Time each target of the paper's shapes, with random weights, and its draft."""
    settings = [{"name": name} for name in run.scale.targets]
    return measure_each(run, "pairs", settings, lambda each: time_random_pair(run, each["name"]))


def time_random_pair(run: Run, name: str) -> dict[str, Any]:
    """Time a target of the paper's shape, with random weights, and its draft.

    Passes are timed by size, and memory bandwidth by a copy. The best tree for each of the paper's
    acceptance vectors is solved with these times, and its step is timed.
    """
    scale, sampling = run.scale, Sampling(0.6)
    pair = random_pair(name, scale.targets[name], scale.draft, run.device)
    meter = LatencyMeter(pair, sampling, max_size=scale.max_size)
    meter.begin(math.inf)
    latency = meter.finish(scale.latency_seconds)
    plain = step_breakdown(pair, TokenTree.chain(1), sampling, scale.rounds)
    weight_bytes = bytes_read(pair.target.module)
    copy_bytes_per_second = copy_bandwidth(run.device, scale.copy_bytes)
    target_bytes_per_second = weight_bytes / latency.target[1]
    trees = {}
    for vector_name in PAPER_VECTORS:
        paper = Profile.load(CATALOG / "profiles" / f"{vector_name}.yaml")
        profile = Profile(
            acceptance=paper.acceptance,
            latency=latency,
            settings=sampling.settings(),
            models=pair.metadata,
            hardware=fingerprint(run.device),
        )
        tree = solve(profile, budget=BUDGET, depth=MAX_DEPTH).tree
        trees[vector_name] = compare_with_passes(
            run, pair, tree, sampling, paper.acceptance, latency, plain["step"]
        )
    return {
        "settings": sampling.settings()
        | {"dtype": dtype_name(pair.target.dtype), "context": latency.context},
        "models": pair.metadata,
        "latency": latency.to_dict(),
        "bandwidth": {
            "bytes_read_a_pass": weight_bytes,
            "copy_bytes_per_second": round(copy_bytes_per_second),
            "target_bytes_per_second": round(target_bytes_per_second),
            "share_of_copy": round(target_bytes_per_second / copy_bytes_per_second, 4),
        },
        "plain": plain,
        "trees": trees,
    }


def compare_with_passes(
    run: Run,
    pair: Pair,
    tree: TokenTree,
    sampling: Sampling,
    acceptance: Acceptance,
    latency: Latency,
    plain_seconds: float,
) -> dict[str, Any]:
    """Compare the measured step of a tree with the sum of its passes, and project its speed.

    Args:
        acceptance: the acceptance that the speed is projected with.
        latency: the passes, timed alone.
        plain_seconds: seconds of a step of plain decoding.
    """
    parts = with_peak_memory(
        run.device, lambda: step_breakdown(pair, tree, sampling, run.scale.rounds)
    )
    step_seconds = parts["step"]
    times = StepTime(latency)
    planned_seconds = times.step_seconds(tree)
    pass_seconds = planned_seconds - latency.overhead - times.verification_seconds(tree.size)
    tokens = expected_tokens(tree, acceptance.rates)
    return {
        "parents": tree.parents.tolist(),
        "size": tree.size,
        "depth": tree.depth,
        "step_seconds": {
            "measured": step_seconds,
            "planned": planned_seconds,
            "sum_of_passes": pass_seconds,
        },
        "overhead_share": 1 - pass_seconds / step_seconds,
        "breakdown": parts,
        "projected": {
            "expected_tokens": tokens,
            "tokens_per_second": tokens / step_seconds,
            "plain_tokens_per_second": 1 / plain_seconds,
            "speedup": tokens * plain_seconds / step_seconds,
        },
    }


def prompts_longest_first(pair: Pair, scale: Scale) -> list[list[int]]:
    """Return held-out prompts, the longest first: bench warms up with the first one.

    What grows with the length of a prompt has then grown before anything is timed.
    """
    return sorted(held_out(pair.tokenizer, scale.num_decoded_prompts), key=len, reverse=True)
