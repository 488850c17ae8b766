"""Measure the CUDA path on a GPU: whether it works, the parts of a step, and whole texts.

    python benchmarks/gpu.py -o build/gpu
    python benchmarks/gpu.py --device cpu --quick -o build/gpu-quick

The first command needs one 80 GB card; it takes under 28 minutes and runs unattended. The second
one uses tiny settings on the CPU, to see that everything runs.

checks: the tests that need the device, and the attention that PyTorch would choose for the mask of
    a tree.
sdpa: attention alone, with each of PyTorch's kernels that takes a mask: the first call, a later
    call, and the replay of a graph.
captured: whether captured steps give the tokens of eager ones, and whether logits that are not
    finite end in an error and leave the device usable.
breakdown: the parts of a step with a 7B target and a vocabulary of 128k, for several trees,
    verifiers, settings and lengths of text.
compiled: passes that torch.compile compiles and that are then captured, against captured ones.
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

Each part is one file of the output folder, written when the part is finished. A part whose file
exists is not measured again, so a run that was cut off continues where it stopped. A part that
would start too late is left for the next run.
"""

from __future__ import annotations

import argparse
import gc
import json
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
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    return parser.parse_args(arguments)


def run_parts(parts: Mapping[str, Part], options: argparse.Namespace) -> dict[str, Result]:
    """Run the parts that are not finished, and write the file of each.

    Each gets a share of the time in proportion to the seconds that it is meant to take. A part is
    skipped if less than half of its share is left.

    Returns:
        The result of every part, in the order of `parts`.
    """
    device, scale = torch.device(options.device), QUICK if options.quick else FULL
    circumstances = {"quick": options.quick, "hardware": fingerprint(device)}
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
        if end - time.perf_counter() < share / 2:
            results[name] = {"skipped": "out of time"}
            continue
        print(f"{time.perf_counter() - started:6.0f} s  {name}", file=sys.stderr, flush=True)
        result = circumstances | run_part(measure, Run(device, scale, deadline))
        write_atomically(files[name], (json.dumps(result, indent=1) + "\n").encode())
        results[name] = result
    return results


def load_finished(file: Path, is_quick: bool) -> Result | None:
    """Load a part that an earlier run has measured at this scale and without an error, or None."""
    if not file.is_file():
        return None
    result: Result = json.loads(file.read_text())
    return result if result["quick"] == is_quick and "error" not in result else None


def run_part(measure: Callable[[Run], Result], run: Run) -> Result:
    """Run a part, and add its time and peak memory. An error ends the part and not the run."""
    on_cuda = run.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    started = time.perf_counter()
    try:
        result = measure(run)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["peak_memory_bytes"] = None
    if on_cuda:
        result["peak_memory_bytes"] = {
            "allocated": torch.cuda.max_memory_allocated(run.device),
            "reserved": torch.cuda.max_memory_reserved(run.device),
        }
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
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
    for figures in result.get("compiled", []):
        what = f"{figures['tree']}, {'compiled' if figures['compile'] else 'as it is'}"
        first_step_note = f"first {figures['first_step_seconds']:.1f} s"
        yield table_row(what, breakdown=figures, note=first_step_note)
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
