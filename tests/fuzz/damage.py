"""Damaged files for every reader, and odd calls of every command.

    python tests/fuzz/damage.py --files 100000 --calls 1000

A damaged file is a good one with bytes changed, cut out, doubled or swapped with those of another
file. An odd call is a command with options and values drawn from good and odd ones. A reader may
answer or refuse; a command may do its work or end with one line. Anything else is printed with the
seed that reproduces it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

from click.testing import CliRunner, Result

from sequoia_plan.artifacts import (
    BenchResult,
    Latency,
    LevelCounts,
    Profile,
    SequoiaPlanError,
    load_tree,
    save_tree,
)
from sequoia_plan.artifacts.interchange import export_tree, import_tree
from sequoia_plan.artifacts.prompts import load
from sequoia_plan.planner import solve
from sequoia_plan.planner.cli import main

DATA = Path(__file__).parent.parent / "data"
NUMBERS = [
    *("0", "1", "2", "7", "64", "-1", "0.5", "1e-5", "1e400", "nan", "inf", "1" + 30 * "0"),
    *("1/2", "0x10", "\u0661", "", " ", "true", "7%"),
]
WORDS = [
    *("speed", "tokens", "paper", "hull", "dp", "best-first", "chain", "chains:3", "k-ary:2"),
    *("random:1", "specinfer:2,2", "medusa", "nxd", "dot", "growmap"),
]
ODD_WORDS = [
    *("a" * 300, "no/such/file", ".", "/dev/null", "é", "\u2028", "--", "-", "-h", "x\ty"),
    "sequoia-example-64x6",
]
COMMANDS = [
    *("solve", "solve", "show", "export", "import", "profile", "generate", "bench", "nothing", ""),
]
OPTIONS = {
    "solve": [
        *("--budget", "--depth", "--branching", "--objective", "--acceptance", "--solver"),
        *("--baseline", "--json"),
    ],
    "show": ["--json"],
    "export": ["--format", "-o", "--json"],
    "import": ["-o", "--json"],
    "profile": ["--merge", "--merge", "-o", "--precision", "--also", "--seed", "--json"],
    "generate": [
        *("--tree", "--temperature", "--top-p", "--seed", "--max-new-tokens", "--chat", "--stop"),
    ],
    "bench": ["--tree", "--prompts", "--limit", "--only", "-o", "--with"],
}
FLAGS = ("--json", "--help")
"""Options without a value."""
READERS = {
    ".yaml": Profile.load,
    ".safetensors": load_tree,
    ".json": import_tree,
    ".pt": import_tree,
    ".jsonl": load,
    ".txt": load,
}


def write_good_files(folder: Path) -> dict[str, Path]:
    """Write a file of each kind; returns them by name."""
    levels = (LevelCounts(600, (300.25, 75.0)), LevelCounts(200, (99.75, 25.0)))
    latency = Latency({1: 0.04, 4: 0.042, 16: 0.05}, {1: 0.003, 16: 0.004}, 0.001, 128)
    profile = Profile((0.5, 0.125), 800, latency, levels=levels)
    profile.save(folder / "profile.yaml")
    tree = solve(profile, 12, 5).tree
    save_tree(tree, folder / "tree.safetensors")
    exports = {
        "m.json": "medusa",
        "n.json": "nxd",
        "g.json": "growmap",
        "g.pt": "growmap",
        "t.dot": "dot",
    }
    for name, format_name in exports.items():
        export_tree(tree, folder / name, format_name)
    bench = (DATA / "bench-before-typed-plans.json").read_bytes()
    (folder / "bench.json").write_bytes(bench)
    (folder / "p.json").write_text("[0.5, 0.2, 0.1]")
    message = '{"role": "user", "content": [{"type": "text", "text": "Hm"}]}'
    (folder / "p.jsonl").write_text(
        f'{{"text": "Why?"}}\n{{"messages": [{message}]}}\n{{"turns": ["a", "b"]}}\n'
    )
    (folder / "p.txt").write_text("One.\n\nTwo.\n")
    return {path.name: path for path in folder.iterdir()}


def damaged(data: bytes, donors: list[bytes], pick: random.Random) -> bytes:
    """`data` with one to four kinds of damage.

    Args:
        donors: contents of files whose bytes may be swapped in.
    """
    for _ in range(pick.randint(1, 4)):
        start, length = pick.randrange(len(data) + 1), pick.choice([1, 1, 2, 8, 64])
        before, cut, after = data[:start], data[start : start + length], data[start + length :]
        damage = pick.randrange(6)
        if damage == 0:
            data = before + bytes(pick.randrange(256) for _ in range(length)) + after
        elif damage == 1:
            data = before + after
        elif damage == 2:
            data = before + cut * pick.choice([2, 3, 50]) + after
        elif damage == 3:
            donor = pick.choice(donors)
            donor_start = pick.randrange(len(donor))
            data = before + donor[donor_start : donor_start + length] + after
        elif damage == 4:
            data = before
        else:
            data = before + pick.choice(NUMBERS).encode() + after
    return data


def is_accepted(path: Path) -> bool:
    """Whether the reader accepts a file. Raises what no reader may raise."""
    reader = BenchResult.load if path.name.startswith("bench") else READERS[path.suffix]
    try:
        reader(path)
    except SequoiaPlanError:
        return False
    return True


def odd_call(names: list[str], pick: random.Random) -> list[str]:
    """A command with arguments.

    Commands that would load models get models that do not exist, so that only their checks run.
    """
    command = pick.choice(COMMANDS)
    values = [*NUMBERS, *WORDS, *ODD_WORDS, *names]
    options = OPTIONS.get(command, ["--help"])
    call = [command, *pick.choices(values, k=pick.randint(0, 2))]
    for option in pick.choices(options, k=pick.randint(0, 4)):
        call += [option] if option in FLAGS else [option, pick.choice(values)]
    if command == "profile" and "--merge" not in call:
        call += ["--merge", pick.choice(values)]
    if command in ("generate", "bench"):
        call += ["--target", "no/such/model", "--draft", "neither"]
    return call


def is_clean(result: Result) -> bool:
    """Whether a command ended with one of its exit codes and without a traceback."""
    if result.exit_code not in (0, 1, 2) or "Traceback" in result.output:
        return False
    return isinstance(result.exception, (SystemExit, type(None)))


def try_files(
    folder: Path, contents: dict[str, bytes], seeds: range, counts: dict[str, int]
) -> None:
    """Read one damaged file for each seed."""
    for seed in seeds:
        pick = random.Random(seed)
        name = pick.choice(sorted(contents))
        path = folder / f"{Path(name).stem}-damaged{Path(name).suffix}"
        path.write_bytes(damaged(contents[name], list(contents.values()), pick))
        counts["files"] += 1
        try:
            counts["accepted"] += is_accepted(path)
        except BaseException:
            counts["failures"] += 1
            print(f"file, seed {seed}, {name}", traceback.format_exc(), sep="\n", file=sys.stderr)


def try_calls(
    folder: Path, contents: dict[str, bytes], seeds: range, counts: dict[str, int]
) -> None:
    """Run one odd call for each seed, on files of which some are damaged."""
    donors = list(contents.values())
    for seed in seeds:
        pick = random.Random(seed)
        for name, content in contents.items():
            is_good = pick.random() < 0.7
            (folder / name).write_bytes(content if is_good else damaged(content, donors, pick))
        call = odd_call(sorted(contents), pick)
        stdin = bytes(pick.randrange(256) for _ in range(8))
        result = CliRunner().invoke(main, call, input=stdin)
        counts["calls"] += 1
        counts["succeeded"] += result.exit_code == 0
        if not is_clean(result):
            counts["failures"] += 1
            summary = (f"call, seed {seed}: {call}", result.output[-300:], result.exception)
            print(*summary, sep="\n", file=sys.stderr)
            if result.exc_info:
                traceback.print_exception(*result.exc_info)


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    counts = {"files": 0, "accepted": 0, "calls": 0, "succeeded": 0, "failures": 0}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        good_files = write_good_files(folder)
        contents = {
            name: path.read_bytes() for name, path in good_files.items() if path.suffix in READERS
        }
        try_files(folder, contents, range(options.seed, options.seed + options.files), counts)
        os.chdir(folder)
        try_calls(folder, contents, range(options.seed, options.seed + options.calls), counts)
    print(json.dumps(counts))
    return int(counts["failures"] > 0)


if __name__ == "__main__":
    sys.exit(run())
