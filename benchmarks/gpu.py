"""Measure the CUDA path on a GPU: whether it works, the parts of a step, and whole texts.

    python benchmarks/gpu.py -o build/gpu
    python benchmarks/gpu.py --device cpu --quick -o build/gpu-quick

The first command needs one 80 GB card; it takes under 28 minutes and runs unattended. With
`--minutes 9` it stops after nine, and the next call goes on. The second command uses tiny settings
on the CPU, to see that everything runs.

checks: the tests that need the device, and the attention that PyTorch would choose for the mask of
    a tree.
captured: whether captured steps give the tokens of eager ones, and whether logits that are not
    finite end in an error and leave the device usable.
shared-heads: an 8B target whose heads share keys and values with an EAGLE-3 draft, at contexts of
    512 and 8192: the parts of a step, the kernels of one step, and the seconds between the steps of
    a decoder with and without launching ahead.
sdpa: attention alone, of one token and of trees, with each of PyTorch's kernels that takes a mask
    and with ours: the first call, a later call, and the replay of a graph.
host-stream: eight layers of that target, streamed from pinned host memory, against the same layers
    on the device and against the link.
breakdown: the parts of a step with a 7B target and a vocabulary of 128k, for several trees,
    verifiers, settings and lengths of text.
llama-2-7b, llama-2-13b: random weights in bfloat16, with a draft of 68M parameters. The time of a
    step does not depend on the values of the weights, so these are measured: target and draft
    passes by size, memory bandwidth, and the step of the best tree for the paper's acceptance
    vectors. Tokens a second follow from a vector that was measured on other models, so they are
    called projected.
pair-t0, pair-t06: the embedded pair at temperature 0 and 0.6. It is profiled, a tree is solved, and
    held-out prompts are decoded with our plain decoding, transformers' `generate` and assisted
    generation, and our tree. The parts of a step are timed, too.
variants: transformers' `generate` and its static cache, with and without compiling, and with and
    without cuDNN's attention.

Each part runs in a process of its own, so that one that loses the device takes no other with it. It
is one file of the output folder, written after every setting that is measured. A part whose file is
finished is not measured again, so a run that was cut off continues where it stopped. A part that
would start too late is left for the next run.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_parts import FULL, PARTS, QUICK, Part, Run
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.profiler.hardware import fingerprint

Result = dict[str, Any]
"""What one part measured, as in its JSON file."""
GRACE_SECONDS = 120
"""How long a part may go on after its time, to finish what it measures."""
TEXT_COLUMNS = ("part", "what", "note")
COLUMNS = ("part", "what", "tokens/s", "tokens/step", "ms/step", "not model", "note")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print their main figures. Returns 1 if a part failed, else 0."""
    options = parse_options(arguments)
    parts = {name: part for name, part in PARTS.items() if not options.only or name in options.only}
    results = run_parts(parts, options)
    show(results, options.device)
    return int(any("error" in result for result in results.values()))


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; None stands for the process's own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument(
        "--minutes",
        type=float,
        default=28.0,
        help="for everything; what would start too late is skipped [default: 28]",
    )
    parser.add_argument(
        "--only", action="append", choices=[*PARTS], help="may be repeated [default: all parts]"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings and shapes, to see that it runs"
    )
    parser.add_argument(
        "--here", action="store_true", help="run the parts in this process, not each in its own"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    return parser.parse_args(arguments)


def run_parts(parts: Mapping[str, Part], options: argparse.Namespace) -> dict[str, Result]:
    """Run the parts that are not finished, and write the file of each.

    Each gets a share of the time in proportion to the seconds that it is meant to take. A part is
    skipped if less than half of its share is left.

    Returns:
        The result of every part, in the order of `parts`.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    files = {name: options.output / f"{name}.json" for name in parts}
    finished = {name: load_finished(file, options.quick) for name, file in files.items()}
    planned_seconds = sum(parts[name][0] for name, result in finished.items() if result is None)

    results: dict[str, Result] = {}
    started = deadline = time.perf_counter()
    end = started + 60 * options.minutes
    for name, (seconds, measure) in parts.items():
        earlier_result = finished[name]
        if earlier_result is not None:
            results[name] = earlier_result
            continue
        share = 60 * options.minutes * seconds / planned_seconds
        deadline += share
        seconds_left = deadline - time.perf_counter()
        if end - time.perf_counter() < share / 2:
            results[name] = {"skipped": "out of time"}
            continue
        print(f"{time.perf_counter() - started:6.0f} s  {name}", file=sys.stderr, flush=True)
        if options.here:
            results[name] = run_part(measure, files[name], options, deadline)
        else:
            results[name] = run_in_own_process(name, files[name], options, seconds_left)
    return results


def run_in_own_process(
    name: str, file: Path, options: argparse.Namespace, seconds: float
) -> Result:
    """Run a part in a process of its own, which writes the part's file.

    Args:
        seconds: when the part should end.
    """
    error = None
    try:
        code = subprocess.run(
            part_command(name, options, seconds),
            stdout=subprocess.DEVNULL,
            timeout=seconds + GRACE_SECONDS,
            check=False,
        ).returncode
        if code not in (0, 1):  # 1: the part has written its error
            error = f"its process ended with code {code}"
    except subprocess.TimeoutExpired:
        error = f"its process was ended {GRACE_SECONDS} s after its time"
    result = load(file)
    if result is None or result["quick"] != options.quick:
        result, error = {"quick": options.quick}, error or "its process wrote no file"
    if error:
        result["error"] = error
        write(file, result)
    return result


def part_command(name: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """The command that runs one part within so many seconds."""
    arguments = ["--here", "--only", name, "--device", options.device, "-o", str(options.output)]
    limits = ["--minutes", str(max(seconds, 1.0) / 60), *(["--quick"] if options.quick else [])]
    return [sys.executable, __file__, *arguments, *limits]


def load(file: Path) -> Result | None:
    """The file of a part; None if there is none."""
    return json.loads(file.read_text()) if file.is_file() else None


def write(file: Path, result: Result) -> None:
    """Write the file of a part."""
    write_atomically(file, (json.dumps(result, indent=1) + "\n").encode())


def load_finished(file: Path, is_quick: bool) -> Result | None:
    """Load a part that an earlier run has finished at this scale and without an error, or None."""
    result = load(file)
    if result is None or result["quick"] != is_quick or result.keys() & {"error", "unfinished"}:
        return None
    return result


def run_part(
    measure: Callable[[Run], Result], file: Path, options: argparse.Namespace, deadline: float
) -> Result:
    """Run a part in this process and write its file, with its time and peak memory.

    An error ends the part and not the run. What was measured until then is in the file, and the
    next run goes on from there.
    """
    device, scale = torch.device(options.device), QUICK if options.quick else FULL
    circumstances = {"quick": options.quick, "hardware": fingerprint(device)}
    earlier = load(file) or {}
    measured = earlier if earlier.get("quick") == options.quick else {}
    started = time.perf_counter()

    def save(result: Result) -> None:
        """Write what is measured so far."""
        nonlocal measured
        measured = result
        write(file, circumstances | result | {"unfinished": True})

    run = Run(device, scale, deadline, measured, save)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        result = measure(run)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).strip()[:500]}"
        result = measured | {"error": message, "unfinished": True}
    result = circumstances | result
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["peak_memory_bytes"] = None
    write(file, result)
    try:  # a device that has failed raises here, too
        if on_cuda:
            result["peak_memory_bytes"] = {
                "allocated": torch.cuda.max_memory_allocated(device),
                "reserved": torch.cuda.max_memory_reserved(device),
            }
            write(file, result)
            gc.collect()
            torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"{file.stem}: {error}", file=sys.stderr)
    return result


def show(results: Mapping[str, Result], device: str) -> None:
    """Print the main figures of each part as a table."""
    table = Table(title="GPU" if device == "cuda" else "CPU, a trial run", box=None)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for part, result in results.items():
        for row in table_rows(part, result):
            table.add_row(part, *row)
    Console(width=150).print(table)


def table_rows(part: str, result: Result) -> Iterator[list[str]]:
    """Yield the rows of one part, without the first column."""
    if note := result.get("skipped") or result.get("error"):
        yield table_row(note=note)
        return
    yield from method_rows(part, result)
    for figures in result.get("steps", []):
        setting = (
            f"{figures['tree']}, context {figures['context']}, T {figures['temperature']}, "
            f"top-p {figures['top_p']}, {figures['verifier'] or 'greedy'}"
        )
        verify_note = f"verify {1000 * figures['verify']:.2f} ms"
        yield table_row(setting, breakdown=figures, note=verify_note)
    for name, breakdown in result.get("breakdown", {}).items():
        yield table_row(f"step: {name}", breakdown=breakdown)
    if "bandwidth" in result:
        bandwidth_note = f"{result['bandwidth']['share_of_copy']:.1%} of copy bandwidth"
        yield table_row("step: plain", breakdown=result["plain"], note=bandwidth_note)
    for name, tree in result.get("trees", {}).items():
        projected = tree["projected"]
        yield table_row(
            f"{tree['size']} nodes, {name}",
            f"{projected['tokens_per_second']:.1f}",
            f"{projected['expected_tokens']:.2f}",
            tree["breakdown"],
            f"projected, {projected['speedup']:.2f} x plain; overhead {tree['overhead_share']:.1%}",
        )


def method_rows(part: str, result: Result) -> Iterator[list[str]]:
    """Yield a row for each method of decoding of one part."""
    groups = {"": result.get("contenders", {})}
    if part == "variants":
        groups = result["contenders"]
    for title, methods in groups.items():
        for figures in methods.values():
            speedup, tokens_per_step = figures["speedup"].get("plain"), figures["tokens_per_step"]
            yield table_row(
                figures["title"],
                f"{figures['tokens_per_second']['median']:.1f}",
                f"{tokens_per_step:.2f}" if tokens_per_step else "",
                note=f"{title} {speedup['median']:.2f} x plain".strip() if speedup else title,
            )


def table_row(
    what: str = "",
    tokens_per_second: str = "",
    tokens_per_step: str = "",
    breakdown: Mapping[str, Any] | None = None,
    note: str = "",
) -> list[str]:
    """Return the cells of a row, without the first column.

    Args:
        breakdown: the parts of a step; None leaves the cells of the step empty.
    """
    step_cells = ["", ""]
    if breakdown:
        step_cells = [f"{1000 * breakdown['step']:.2f}", f"{breakdown['share_not_model']:.1%}"]
    return [what, tokens_per_second, tokens_per_step, *step_cells, note]


if __name__ == "__main__":
    sys.exit(main())
