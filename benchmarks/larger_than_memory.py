"""A 7B shape with random weights, streamed from disk, in a process whose memory is really limited to a quarter of the weights (a control group).

    python benchmarks/larger_than_memory.py -o benchmarks/results/larger-than-memory.json     # root, 28 GB of disk, about ten minutes
    python benchmarks/larger_than_memory.py --quick -o build/quick.json                       # a small shape: to see that it runs

The weights are written once, outside the limit. The limited process gets the budget that `--memory` names, a tenth more, and what Python and
PyTorch took before anything was loaded; the kernel kills it if it takes more. It times passes over 1, 16, 64 and 256 nodes and, in turn with
them, reads of the same blocks past the page cache. What a tree would gain is projected: the acceptance vector is the paper's (Llama3-70B/8B on
CNN, Sequoia, arXiv 2402.12374, App. E) and a draft pass is taken to cost nothing beside a pass of the target.
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
from offload import link_rounds, quartiles
from random_models import shape
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sequoia_plan.artifacts import Latency, Profile, Stream
from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.planner import solve
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.latency import timed
from sequoia_plan.profiler.verification import bushy
from sequoia_plan.runtime import SequoiaDecoder
from sequoia_plan.runtime.models.load import local_folder
from sequoia_plan.runtime.models.memory import cache_bytes, split_memory
from sequoia_plan.runtime.models.offload import Offloaded
from sequoia_plan.runtime.models.stream import Ring, stream_of

SHAPES = {"llama-2-7b": shape(4096, 11008, 32, 32), "small": shape(512, 1376, 12, 8)}
NODES = (1, 16, 64, 256)
VECTOR = "llama3-70b-8b-cnn"
CGROUP = Path("/sys/fs/cgroup/memory/sequoia-plan-benchmark")


def write_model(dimensions: dict[str, int], folder: Path) -> int:
    """A folder as transformers saves one, with random weights; bytes of the weights. One layer's numbers serve all layers."""
    config = LlamaConfig(**dimensions, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(local_folder(None)).save_pretrained(folder)
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    torch.manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    known: dict[str, torch.Tensor] = {}
    for name, like in parameters.items():
        part = name.split("layers.")[1].split(".")[0] if "layers." in name else "rest"
        kind = name.split(f"layers.{part}.")[-1]
        if kind not in known:
            known[kind] = torch.ones(like.shape, dtype=torch.bfloat16) if like.ndim == 1 else torch.empty(like.shape, dtype=torch.bfloat16).normal_(std=0.02)
        files.setdefault(part, {})[name] = known[kind]
    for part, tensors in files.items():
        save_file(tensors, folder / f"model-{part}.safetensors")
    return sum(like.numel() * 2 for like in parameters.values())


@torch.inference_mode()
def limited(folder: str, memory: int, before: int, rounds: int) -> dict[str, Any]:
    """In the process with the limit: load, time passes, and say what was taken."""
    target = Offloaded(folder, "cpu", torch.bfloat16)
    split = split_memory(memory, target.outside, 0, cache_bytes(target.model), target.sizes())
    target.place(split, "disk")
    ring = stream_of(target.model)
    assert isinstance(ring, Ring)
    draft = LlamaForCausalLM(LlamaConfig(**shape(16, 16, 1, 1))).bfloat16().eval()  # there must be one; it is never run
    whole = SequoiaDecoder(target.model, draft, bushy(max(NODES), 3))
    whole.prefill(torch.arange(64), 2 * max(NODES), seed=0)
    decoders = {nodes: whole.with_tree(bushy(nodes, 3)) for nodes in NODES}
    extent = whole.extent(64)
    link = link_rounds(ring, lambda: decoders[1].run_target(extent), rounds, 1)
    times: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    for _ in range(rounds):
        for nodes, decoder in decoders.items():
            ring.fill()
            times[nodes].append(timed(torch.device("cpu"), partial(decoder.run_target, extent))[1])
    peak = resident_bytes("VmHWM")
    return {
        "memory": memory,
        "placement": split.facts("disk", len(target.layers)),
        "link": link,
        "pass_seconds": {nodes: quartiles(samples) if len(samples) > 1 else samples for nodes, samples in times.items()},
        "before_bytes": before,
        "peak_bytes": peak,
        "peak_over_budget": round((peak - before) / memory, 4),
    }


def resident_bytes(name: str) -> int:
    """Of this process: VmRSS now, VmHWM at most so far. (`getrusage` would count what the parent took before it started this one.)"""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024


def projected(found: dict[str, Any]) -> dict[str, Any]:
    """The best tree for these passes with the paper's acceptance vector, and what it would gain."""
    target = {int(nodes): seconds[0] for nodes, seconds in found["pass_seconds"].items()}
    stream = Stream(found["link"]["pass_seconds"][0], found["placement"]["streamed_bytes"])
    free = {1: 1e-6, max(NODES): 1e-6}
    vector = Profile.load(Path(__file__).parents[1] / "artifacts" / "catalog" / "profiles" / f"{VECTOR}.yaml").acceptance
    tree = solve(Profile(vector, latency=Latency(target, free, stream=stream)), max(NODES), 20).tree
    return {"acceptance": VECTOR, "size": tree.size, "depth": tree.depth, "expected_tokens": tree.plan.expected_tokens, "speedup": tree.plan.predicted_speedup}


def main() -> None:
    """Write the model, run the limited process, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--limited", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limited:
        before = resident_bytes("VmRSS")
        limit = int(options.memory * 1.1) + before
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / "memory.limit_in_bytes").write_text(str(limit))
        (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        (CGROUP / "memory.max_usage_in_bytes").write_text("0")
        found = limited(options.limited, options.memory, before, options.rounds)
        found["limit_bytes"] = limit
        found["group_peak_bytes"] = int((CGROUP / "memory.max_usage_in_bytes").read_text())
        write_atomically(options.output, json.dumps(found).encode())
        return
    name = "small" if options.quick else "llama-2-7b"
    with tempfile.TemporaryDirectory(dir=options.output.parent, prefix=".") as folder:
        os.environ["SEQUOIA_PLAN_CACHE"] = f"{folder}/cache"
        weights = write_model(SHAPES[name], Path(folder) / "model")
        Offloaded(f"{folder}/model", "cpu", torch.bfloat16).file.close()  # writes the weights in pass order
        part = Path(folder) / "found.json"
        memory = weights // 4 if not options.quick else weights // 4 + 200_000_000
        command = [sys.executable, __file__, "--limited", f"{folder}/model", "--memory", str(memory), "--rounds", str(options.rounds), "-o", str(part)]
        subprocess.run(command, check=True)
        found = json.loads(part.read_text())
    CGROUP.rmdir()
    found = {"model": f"{name}, random weights", "weights": weights} | found | {"projected": projected(found), "hardware": fingerprint(torch.device("cpu"))}
    write_atomically(options.output, (json.dumps(found, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
