"""Measure the CUDA path on a GPU: whether it works, the parts of a step, and whole texts.

    python benchmarks/gpu.py -o build/gpu
    python benchmarks/gpu.py --device cpu --quick -o build/gpu-quick

The first command needs one 80 GB card; it takes under 28 minutes and runs unattended. With
`--minutes 9` it stops after nine, and the next call goes on; no part takes longer. The second
command uses tiny settings on the CPU, to see that everything runs. Nothing need be installed but
torch, transformers, msgspec, and for some parts pytest and numba: the code of this clone is used.

checks: the tests that need the device, and the attention that PyTorch would choose for the mask of
    a tree.
captured: whether captured steps give the tokens of eager ones in float32, and whether logits that
    are not finite end in an error and leave the device usable.
shared-heads: an 8B target whose heads share keys and values with an EAGLE-3 draft, at contexts of
    512 and 8192: the parts of a step, the kernels of one step, and the seconds between the steps of
    a decoder with and without launching ahead.
sdpa: attention alone, of one token and of trees, with each of PyTorch's kernels that takes a mask
    and with ours: the first call, a later call, and the replay of a graph.
host-stream: eight layers of that target, streamed from pinned host memory, against the same layers
    on the device and against the link.
breakdown: the parts of a step with a 7B target and a vocabulary of 128k, for several trees,
    verifiers, settings and lengths of text.
llama-2: 7B and 13B, random weights in bfloat16, with a draft of 68M parameters. The time of a step
    does not depend on the values of the weights, so these are measured: target and draft
    passes by size, memory bandwidth, and the step of the best tree for the paper's acceptance
    vectors. Tokens a second follow from a vector that was measured on other models, so they are
    called projected.
pair: the embedded pair at temperature 0 and 0.6. It is profiled, a tree is solved, and
    held-out prompts are decoded with our plain decoding, transformers' `generate` and assisted
    generation, and our tree. The parts of a step are timed, too.

Each part runs in a process of its own, so that one that loses the device takes no other with it. It
is one file of the output folder, written after every setting that is measured. A part whose file is
finished is not measured again, so a run that was cut off continues where it stopped. What would
start too late is left for the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).parents[1] / "typings"
"""A folder in which Python finds this clone's packages by their names, where none is installed."""
if not importlib.util.find_spec("sequoia_plan"):
    sys.path.append(str(PACKAGES))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

import torch  # noqa: E402
from gpu_scale import FULL, QUICK, Run  # noqa: E402
from reports import new_parser, write_report  # noqa: E402

from sequoia_plan.profiler.hardware import fingerprint  # noqa: E402

Result = dict[str, Any]
"""What one part measured, as in its JSON file."""
GRACE_SECONDS = 90
"""How long a part may go on after its time, to finish what it measures."""
PARTS = {
    "checks": (440.0, "gpu_checks", "run_checks"),
    "captured": (120.0, "gpu_checks", "compare_captured"),
    "shared-heads": (240.0, "gpu_steps", "time_shared_heads"),
    "sdpa": (120.0, "gpu_checks", "time_attention"),
    "host-stream": (120.0, "gpu_steps", "time_host_stream"),
    "breakdown": (420.0, "gpu_steps", "time_settings"),
    "llama-2": (300.0, "gpu_texts", "time_random_pairs"),
    "pair": (300.0, "gpu_texts", "bench_embedded_pair"),
}
"""The most seconds of each part, and the module and the function that measure it. Whether it works
comes first, then what matters most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print how they ended. Returns 1 if a part failed, else 0."""
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--minutes", type=float, default=28.0, help="for everything [default: 28]")
    parser.add_argument("--only", action="append", choices=[*PARTS], help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--here", action="store_true", help="run the parts in this process")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    results = {}
    for name in options.only or PARTS:
        file = options.output / f"{name}.json"
        results[name] = load(file, options.quick)
        if results[name] and not results[name].keys() & {"error", "unfinished"}:
            continue
        passed = time.perf_counter() - started
        seconds = min(PARTS[name][0], 60 * options.minutes - passed)
        if seconds <= 0:
            results[name] = {"skipped": "out of time"}
            continue
        print(f"{passed:6.0f} s  {name}", file=sys.stderr, flush=True)
        run = run_part if options.here else run_in_own_process
        results[name] = run(name, file, options, seconds)
    for name, result in results.items():
        outcome = result.get("skipped") or result.get("error") or f"{result.get('seconds')} s"
        print(f"{name}: {outcome}")
    return int(any("error" in result for result in results.values()))


def load(file: Path, is_quick: bool) -> Result:
    """What an earlier run at this scale has measured of a part; empty if there is nothing."""
    result: Result = json.loads(file.read_text()) if file.is_file() else {}
    return result if result.get("quick") == is_quick else {}


def run_in_own_process(
    name: str, file: Path, options: argparse.Namespace, seconds: float
) -> Result:
    """Run a part in a process of its own, which writes the part's file."""
    error = None
    command = part_command(name, options, seconds)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(seconds + GRACE_SECONDS)
        if code not in (0, 1):  # 1: the part has written its error
            error = f"its process ended with code {code}"
    except subprocess.TimeoutExpired:
        error = f"its process was ended {GRACE_SECONDS} s after its time"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing that it started stays on the device
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    result = load(file, options.quick)
    if error or not result:
        result |= {"quick": options.quick, "error": error or "its process wrote no file"}
        write_report(file, result)
    return result


def part_command(name: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """The command that runs one part within so many seconds."""
    arguments = ["--here", "--only", name, "--device", options.device, "-o", str(options.output)]
    limits = ["--minutes", str(seconds / 60), *(["--quick"] if options.quick else [])]
    return [sys.executable, __file__, *arguments, *limits]


def run_part(name: str, file: Path, options: argparse.Namespace, seconds: float) -> Result:
    """Run a part in this process and write its file.

    An error ends the part and not the run. What was measured until then is in the file, and the
    next run goes on from there.
    """
    device, scale = torch.device(options.device), QUICK if options.quick else FULL
    circumstances = {"quick": options.quick, "hardware": fingerprint(device)}
    measured = load(file, options.quick)
    started = time.perf_counter()

    def save(result: Result) -> None:
        """Write what is measured so far."""
        measured.update(result)
        write_report(file, circumstances | result | {"unfinished": True})

    try:
        _, module, function = PARTS[name]
        measure = getattr(importlib.import_module(module), function)
        result = measure(Run(device, scale, started + seconds, dict(measured), save))
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).strip()[:500]}"
        result = measured | {"error": message}
    result = circumstances | result | {"seconds": round(time.perf_counter() - started, 1)}
    write_report(file, result)
    return result


if __name__ == "__main__":
    sys.exit(main())
