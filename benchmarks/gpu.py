"""The CUDA path on a GPU: is all in order, what do the parts of a step take, and how fast are whole texts?

    python benchmarks/gpu.py -o build/gpu                             # one 80 GB card, under 28 minutes, unattended
    python benchmarks/gpu.py --device cpu --quick -o build/gpu-quick  # tiny settings on the CPU, to see that it runs

- checks: the tests that need the device; which attention PyTorch would choose for a tree's mask.
- sdpa: attention alone by each kernel that takes a mask: the first call, a later one, a graph's replay.
- captured: captured steps give the tokens of eager ones; logits that are no numbers end in an error and not in a dead device.
- breakdown: the parts of a step with a 7B target and a vocabulary of 128k, for trees, verifiers, settings and lengths of text.
- compiled: passes compiled by torch.compile and then captured, against captured alone.
- llama-2-7b, llama-2-13b: bfloat16, with a draft of 68M parameters. Step times do not depend on what weights say, so these are
  measured: target and draft passes by size, memory bandwidth, the best tree's step for the paper's acceptance vectors. Tokens a
  second follow from a vector that was measured on other models, so they are called projected.
- pair-t0, pair-t06: profile, solve, then decode held-out prompts with our plain decoding, transformers' `generate` and assisted
  generation, and our tree; the parts of a step.
- variants: transformers' `generate` and static cache, with and without compiling and with and without cuDNN's attention.

Each part is a file of the output folder, written when the part is finished. A part whose file is there is not measured again, so a run
that was cut off goes on where it was. A part that would start too late is left for the next run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_parts import FULL, PARTS, QUICK, Run
from rich.console import Console
from rich.table import Table

from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.profiler.hardware import fingerprint


def measured(part: Callable[[Run], dict[str, Any]], run: Run) -> dict[str, Any]:
    """A part's findings with its time and peak memory; an error ends the part, not the run."""
    on_cuda = run.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    started = time.perf_counter()
    try:
        found = part(run)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
    found["seconds"] = round(time.perf_counter() - started, 1)
    found["peak_memory_bytes"] = (
        {"allocated": torch.cuda.max_memory_allocated(run.device), "reserved": torch.cuda.max_memory_reserved(run.device)} if on_cuda else None
    )
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--minutes", type=float, default=28.0, help="for everything; what would start too late is skipped [default: 28]")
    parser.add_argument("--only", action="append", choices=[*PARTS], help="may be repeated [default: all parts]")
    parser.add_argument("--quick", action="store_true", help="tiny settings and shapes, to see that it runs")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    device, scale = torch.device(options.device), QUICK if options.quick else FULL
    about = {"quick": options.quick, "hardware": fingerprint(device)}
    options.output.mkdir(parents=True, exist_ok=True)

    chosen = {name: part for name, part in PARTS.items() if not options.only or name in options.only}
    found = {name: kept(options.output / f"{name}.json", options.quick) for name in chosen}
    started, planned = time.perf_counter(), sum(chosen[name][0] for name in chosen if found[name] is None)
    end, due = started + 60 * options.minutes, started
    for name, (seconds, part) in chosen.items():
        if found[name] is not None:
            continue
        share = 60 * options.minutes * seconds / planned
        due += share
        if end - time.perf_counter() < share / 2:
            found[name] = {"skipped": "out of time"}
            continue
        print(f"{time.perf_counter() - started:6.0f} s  {name}", file=sys.stderr, flush=True)
        found[name] = about | measured(part, Run(device, scale, due))
        write_atomically(options.output / f"{name}.json", (json.dumps(found[name], indent=1) + "\n").encode())
    show({name: part for name, part in found.items() if part is not None}, options.device)
    return int(any("error" in part for part in found.values() if part is not None))


def kept(file: Path, quick: bool) -> dict[str, Any] | None:
    """A part that was measured before, at this scale and without an error."""
    if not file.is_file():
        return None
    part: dict[str, Any] = json.loads(file.read_text())
    return part if part["quick"] == quick and "error" not in part else None


def show(parts_found: dict[str, dict[str, Any]], device: str) -> None:
    """The main figures of each part."""
    table = Table(title="GPU" if device == "cuda" else "CPU, a trial run", box=None)
    for column in ("part", "what", "tokens/s", "tokens/step", "ms/step", "not model", "note"):
        table.add_column(column, justify="left" if column in ("part", "what", "note") else "right")
    for part, found in parts_found.items():
        if note := found.get("skipped") or found.get("error"):
            table.add_row(part, "", "", "", "", "", note)
            continue
        groups = found["contenders"] if part == "variants" else {"": found.get("contenders", {})}
        for title, figures in groups.items():
            for each in figures.values():
                speed, steps = each["speedup"].get("plain"), each["tokens_per_step"]
                note = f"{title} {speed['median']:.2f} x plain".strip() if speed else title
                table.add_row(part, each["title"], f"{each['tokens_per_second']['median']:.1f}", f"{steps:.2f}" if steps else "", "", "", note)
        for each in found.get("steps", []):
            what = f"{each['tree']}, context {each['context']}, T {each['temperature']}, top-p {each['top_p']}, {each['verifier'] or 'greedy'}"
            table.add_row(part, what, "", "", f"{1000 * each['step']:.2f}", f"{each['share_not_model']:.1%}", f"verify {1000 * each['verify']:.2f} ms")
        for each in found.get("compiled", []):
            what = f"{each['tree']}, {'compiled' if each['compile'] else 'as it is'}"
            table.add_row(part, what, "", "", f"{1000 * each['step']:.2f}", f"{each['share_not_model']:.1%}", f"first {each['first_step_seconds']:.1f} s")
        for name, parts in found.get("breakdown", {}).items():
            table.add_row(part, f"step: {name}", "", "", f"{1000 * parts['step']:.2f}", f"{parts['share_not_model']:.1%}", "")
        if "bandwidth" in found:
            share = found["bandwidth"]["share_of_copy"]
            table.add_row(
                part,
                "step: plain",
                "",
                "",
                f"{1000 * found['plain']['step']:.2f}",
                f"{found['plain']['share_not_model']:.1%}",
                f"{share:.1%} of copy bandwidth",
            )
        for name, tree in found.get("trees", {}).items():
            promised, parts = tree["projected"], tree["breakdown"]
            what, note = f"{tree['size']} nodes, {name}", f"projected, {promised['speedup']:.2f} x plain; overhead {tree['overhead_share']:.1%}"
            speeds = f"{promised['tokens_per_second']:.1f}", f"{promised['expected_tokens']:.2f}"
            table.add_row(part, what, *speeds, f"{1000 * parts['step']:.2f}", f"{parts['share_not_model']:.1%}", note)
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
