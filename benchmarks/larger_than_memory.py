"""A 7B shape with random weights, streamed from disk by a process with little memory.

A control group limits the process to a quarter of the weights.

    python benchmarks/larger_than_memory.py -o benchmarks/results/larger-than-memory.json

It needs root, 28 GB of disk and about ten minutes.

The weights are written once, outside the limit. The limited process gets the budget that `--memory`
names, a tenth more, and what Python and PyTorch took before anything was loaded. The kernel kills
it if it takes more. It times passes over 1, 16, 64 and 256 nodes and, in turn with them, reads of
the same blocks past the page cache. What a tree would gain is projected: the acceptance vector is
the paper's (Llama3-70B/8B on CNN, Sequoia, arXiv 2402.12374, App. E), and a draft pass is taken to
cost nothing beside a pass of the target.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from offload import compare_with_reads
from random_models import shape
from reports import new_parser, spread, write_report
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sequoia_plan.artifacts import Latency, Profile, StreamCost
from sequoia_plan.planner import solve
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.timing import timed
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import SequoiaDecoder
from sequoia_plan.runtime.base.weight_stream import stream_of
from sequoia_plan.runtime.models.pretrained import local_folder
from sequoia_plan.runtime.offload.disk_stream import DiskStream
from sequoia_plan.runtime.offload.memory import cache_bytes, split_memory
from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget

CPU = torch.device("cpu")
SHAPE = shape(4096, 11008, 32, 32)
"""Llama-2-7B's."""
NODES = (1, 16, 64, 256)
PROMPT_TOKENS = 64
ACCEPTANCE = "llama3-70b-8b-cnn"
PROFILES = Path(__file__).parents[1] / "artifacts" / "catalog" / "profiles"
CGROUP = Path("/sys/fs/cgroup/memory/sequoia-plan-benchmark")


def write_model(folder: Path) -> int:
    """Write a model with random weights as transformers saves one. Returns bytes of the weights.

    One layer's numbers serve all layers.
    """
    config = LlamaConfig(**SHAPE, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(local_folder(None, torch.bfloat16)).save_pretrained(folder)
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    torch.manual_seed(0)
    tensors_of_file: dict[str, dict[str, torch.Tensor]] = {}
    values_of_role: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        layer = name.split("layers.")[1].split(".")[0] if "layers." in name else "rest"
        role = name.split(f"layers.{layer}.")[-1]  # the parameter's name in its layer
        if role not in values_of_role:
            values_of_role[role] = random_values(parameter.shape)
        tensors_of_file.setdefault(layer, {})[name] = values_of_role[role]
    for layer, tensors in tensors_of_file.items():
        save_file(tensors, folder / f"model-{layer}.safetensors")
    return sum(parameter.numel() * 2 for parameter in parameters.values())


def random_values(size: torch.Size) -> torch.Tensor:
    """bfloat16: ones for a norm, normal numbers for a matrix."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return torch.empty(size, dtype=torch.bfloat16).normal_(std=0.02)


@torch.inference_mode()
def measure(folder: str, memory: int, bytes_before: int, rounds: int) -> dict[str, Any]:
    """Load the model, time passes, and return the figures; runs in the limited process.

    Args:
        memory: the budget in bytes.
        bytes_before: the process's memory before anything was loaded.
    """
    target = OffloadedTarget(folder, "cpu", torch.bfloat16)
    split = split_memory(
        memory, target.outside_bytes, 0, cache_bytes(target.model), target.layer_sizes()
    )
    target.place(split, "disk")
    stream = stream_of(target.model)
    assert isinstance(stream, DiskStream)
    # the decoder needs a draft, which is never run
    draft = LlamaForCausalLM(LlamaConfig(**shape(16, 16, 1, 1))).bfloat16().eval()
    largest_step = SequoiaDecoder(target.model, draft, bushy(max(NODES), 3)).step
    largest_step.prefill(torch.arange(PROMPT_TOKENS), 2 * max(NODES), seed=0)
    extent = largest_step.extent(PROMPT_TOKENS)
    run_pass = {
        nodes: partial(largest_step.with_tree(bushy(nodes, 3)).run_target, extent)
        for nodes in NODES
    }
    link = compare_with_reads(stream, run_pass[1], rounds, 1)
    samples: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    for _ in range(rounds):
        for nodes in NODES:
            stream.wait_until_full()
            samples[nodes].append(timed(CPU, run_pass[nodes])[1])
    peak_bytes = process_bytes("VmHWM")
    return {
        "memory": memory,
        "placement": split.to_metadata("disk", len(target.layers)),
        "link": link,
        "pass_seconds": {nodes: spread(seconds, 5) for nodes, seconds in samples.items()},
        "before_bytes": bytes_before,
        "peak_bytes": peak_bytes,
        "peak_over_budget": round((peak_bytes - bytes_before) / memory, 4),
    }


def process_bytes(field: str) -> int:
    """Resident bytes of this process: VmRSS now, VmHWM at most so far.

    `getrusage` would count what the parent process took before it started this one.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[field].split()[0]) * 1024


def measure_with_limit(options: argparse.Namespace) -> None:
    """Put this process into a control group with a limit, measure, and write the figures."""
    bytes_before = process_bytes("VmRSS")
    limit = int(options.memory * 1.1) + bytes_before
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "memory.limit_in_bytes").write_text(str(limit))
    (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
    (CGROUP / "memory.max_usage_in_bytes").write_text("0")
    figures = measure(options.limited, options.memory, bytes_before, options.rounds)
    figures["limit_bytes"] = limit
    figures["group_peak_bytes"] = int((CGROUP / "memory.max_usage_in_bytes").read_text())
    write_report(options.output, figures)


def project(figures: dict[str, Any]) -> dict[str, Any]:
    """The best tree for the measured passes and the paper's acceptance, and what it would gain."""
    target = {int(nodes): seconds[0] for nodes, seconds in figures["pass_seconds"].items()}
    pass_seconds = figures["link"]["pass_seconds"][0]
    stream = StreamCost(pass_seconds, figures["placement"]["streamed_bytes"])
    free_draft = {1: 1e-6, max(NODES): 1e-6}
    latency = Latency(target, free_draft, stream=stream)
    acceptance = Profile.load(PROFILES / f"{ACCEPTANCE}.yaml").acceptance
    tree = solve(Profile(acceptance, latency=latency), budget=max(NODES), depth=20).tree
    return {
        "acceptance": ACCEPTANCE,
        "size": tree.size,
        "depth": tree.depth,
        "expected_tokens": tree.plan.expected_tokens,
        "speedup": tree.plan.predicted_speedup,
    }


def run_limited_process(options: argparse.Namespace) -> dict[str, Any]:
    """Write the model, measure it in the limited process, and return the figures."""
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=".") as folder:
        os.environ["SEQUOIA_PLAN_CACHE"] = f"{folder}/cache"
        weight_bytes = write_model(Path(folder) / "model")
        # this writes the weights in pass order
        OffloadedTarget(f"{folder}/model", "cpu", torch.bfloat16).file.close()
        memory = weight_bytes // 4
        output = Path(folder) / "figures.json"
        command = [sys.executable, __file__, "--limited", f"{folder}/model"]
        command += ["--memory", str(memory), "--rounds", str(options.rounds), "-o", str(output)]
        subprocess.run(command, check=True)
        figures = json.loads(output.read_text())
    return {"model": "llama-2-7b, random weights", "weights": weight_bytes} | figures


def main() -> None:
    """Write the model, run the limited process, report."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limited", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limited:
        measure_with_limit(options)
        return
    figures = run_limited_process(options)
    CGROUP.rmdir()
    figures |= {"projected": project(figures), "hardware": fingerprint(CPU)}
    write_report(options.output, figures)


if __name__ == "__main__":
    main()
