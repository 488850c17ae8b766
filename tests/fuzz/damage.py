"""Damaged files to every reader and odd calls to every command: `python tests/fuzz/damage.py --files 100000 --calls 1000`.

A file is a good one with bytes changed, cut out, doubled or swapped with those of another; a call is a command with options and values
drawn from good and odd ones. A reader may answer or refuse; a command may do its work or end in one line. Anything else is printed,
with the seed that makes it again, and the exit code is 1.
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

from click.testing import CliRunner

from sequoia_plan.artifacts import BenchResult, Latency, LevelCounts, Profile, SequoiaPlanError, load_tree, save_tree
from sequoia_plan.artifacts.interchange import export_tree, import_tree
from sequoia_plan.planner import solve
from sequoia_plan.planner.cli import main
from sequoia_plan.profiler.prompts import load

DATA = Path(__file__).parent.parent / "data"
NUMBERS = ["0", "1", "2", "7", "64", "-1", "0.5", "1e-5", "1e400", "nan", "inf", "1" + 30 * "0", "1/2", "0x10", "\u0661", "", " ", "true", "7%"]
WORDS = ["speed", "tokens", "paper", "hull", "dp", "best-first", "chain", "chains:3", "k-ary:2", "random:1", "specinfer:2,2", "medusa", "nxd", "dot", "growmap"]
ODD = ["a" * 300, "no/such/file", ".", "/dev/null", "é", "\u2028", "--", "-", "-h", "x\ty", "sequoia-example-64x6"]


def good_files(folder: Path) -> dict[str, Path]:
    """A file of each kind."""
    levels = (LevelCounts(600, (300.25, 75.0)), LevelCounts(200, (99.75, 25.0)))
    profile = Profile((0.5, 0.125), 800, Latency({1: 0.04, 4: 0.042, 16: 0.05}, {1: 0.003, 16: 0.004}, 0.001, 128), levels=levels)
    profile.save(folder / "profile.yaml")
    tree = solve(profile, 12, 5).tree
    save_tree(tree, folder / "tree.safetensors")
    for form, name in (("medusa", "m.json"), ("nxd", "n.json"), ("growmap", "g.json"), ("growmap", "g.pt"), ("dot", "t.dot")):
        export_tree(tree, folder / name, form)
    (folder / "bench.json").write_bytes((DATA / "bench-before-typed-plans.json").read_bytes())
    (folder / "p.json").write_text("[0.5, 0.2, 0.1]")
    (folder / "p.jsonl").write_text('{"text": "Why?"}\n{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hm"}]}]}\n{"turns": ["a", "b"]}\n')
    (folder / "p.txt").write_text("One.\n\nTwo.\n")
    return {path.name: path for path in folder.iterdir()}


def damaged(data: bytes, others: list[bytes], pick: random.Random) -> bytes:
    """`data` with one to four things wrong."""
    for _ in range(pick.randint(1, 4)):
        at, length = pick.randrange(len(data) + 1), pick.choice([1, 1, 2, 8, 64])
        kind = pick.randrange(6)
        if kind == 0:
            data = data[:at] + bytes(pick.randrange(256) for _ in range(length)) + data[at + length :]
        elif kind == 1:
            data = data[:at] + data[at + length :]
        elif kind == 2:
            data = data[:at] + data[at : at + length] * pick.choice([2, 3, 50]) + data[at + length :]
        elif kind == 3:
            other = pick.choice(others)
            start = pick.randrange(len(other))
            data = data[:at] + other[start : start + length] + data[at + length :]
        elif kind == 4:
            data = data[:at]
        else:
            data = data[:at] + pick.choice(NUMBERS).encode() + data[at + length :]
    return data


READERS = {".yaml": Profile.load, ".safetensors": load_tree, ".json": import_tree, ".pt": import_tree, ".jsonl": load, ".txt": load}


def read(path: Path) -> bool:
    """Was the file accepted? Raises what no reader may raise."""
    reader = BenchResult.load if path.name.startswith("bench") else READERS[path.suffix]
    try:
        reader(path)
    except SequoiaPlanError:
        return False
    return True


def some_call(names: list[str], pick: random.Random) -> list[str]:
    """A command with arguments; those that would load models are left out but for what is refused before."""
    command = pick.choice(["solve", "solve", "show", "export", "import", "profile", "generate", "bench", "nothing", ""])
    values = [*NUMBERS, *WORDS, *ODD, *names]
    options = {
        "solve": ["--budget", "--depth", "--branching", "--objective", "--acceptance", "--solver", "--baseline", "--smooth", "--one-vector", "--json"],
        "show": ["--json"],
        "export": ["--format", "-o", "--json"],
        "import": ["-o", "--json"],
        "profile": ["--merge", "--merge", "-o", "--precision", "--also", "--seed", "--json"],
        "generate": ["--tree", "--temperature", "--top-p", "--seed", "--max-new-tokens", "--chat", "--stop"],
        "bench": ["--tree", "--prompts", "--limit", "--only", "-o", "--with"],
    }.get(command, ["--help"])
    call = [command, *pick.choices(values, k=pick.randint(0, 2))]
    for option in pick.choices(options, k=pick.randint(0, 4)):
        call += [option] if option in ("--json", "--smooth", "--one-vector", "--help") else [option, pick.choice(values)]
    if command == "profile" and "--merge" not in call:
        call += ["--merge", pick.choice(values)]
    if command in ("generate", "bench"):
        call += ["--target", "no/such/model", "--draft", "neither"]
    return call


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = {"files": 0, "accepted": 0, "calls": 0, "succeeded": 0, "failures": 0}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        good = good_files(folder)
        contents = {name: path.read_bytes() for name, path in good.items() if path.suffix in READERS}
        for seed in range(options.seed, options.seed + options.files):
            pick = random.Random(seed)
            name = pick.choice(sorted(contents))
            path = folder / f"{Path(name).stem}-damaged{Path(name).suffix}"
            path.write_bytes(damaged(contents[name], list(contents.values()), pick))
            found["files"] += 1
            try:
                found["accepted"] += read(path)
            except BaseException:
                found["failures"] += 1
                print(f"file, seed {seed}, {name}", traceback.format_exc(), sep="\n", file=sys.stderr)
        os.chdir(folder)
        for seed in range(options.seed, options.seed + options.calls):
            pick = random.Random(seed)
            for name, content in contents.items():
                (folder / name).write_bytes(content if pick.random() < 0.7 else damaged(content, list(contents.values()), pick))
            call = some_call(sorted(contents), pick)
            result = CliRunner().invoke(main, call, input=bytes(pick.randrange(256) for _ in range(8)))
            found["calls"] += 1
            found["succeeded"] += result.exit_code == 0
            if result.exit_code not in (0, 1, 2) or "Traceback" in result.output or not isinstance(result.exception, (SystemExit, type(None))):
                found["failures"] += 1
                print(f"call, seed {seed}: {call}", result.output[-300:], result.exception, sep="\n", file=sys.stderr)
                if result.exc_info:
                    traceback.print_exception(*result.exc_info)
    print(json.dumps(found))
    return int(found["failures"] > 0)


if __name__ == "__main__":
    sys.exit(run())
