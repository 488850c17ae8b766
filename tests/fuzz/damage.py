"""Damaged files for every reader, and odd calls of every command.

    python tests/fuzz/damage.py --files 100000 --calls 1000 --drafts 2000 --api 500

A damaged file is a good one with bytes changed, cut out, doubled or swapped with those of another
file. A damaged draft has odd values in its config.json. An odd call is a command with options and
values drawn from good and odd ones, or a call of the decoder with arguments of wrong types. A
reader may answer or refuse; a command may do its work or end with one line; a decoder may decode or
raise SequoiaPlanError. Anything else is printed with the seed that reproduces it, and the exit code
is 1.
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

import torch
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent.parent))
from drafts import dflash_parts, eagle1_parts, eagle3_parts, small_target, write
from drafts import load as load_draft

from sequoia_plan.artifacts import (
    BenchResult,
    Latency,
    LevelCounts,
    Profile,
    SequoiaPlanError,
    TokenTree,
    load_tree,
    save_tree,
)
from sequoia_plan.artifacts.engine_plan import EnginePlan
from sequoia_plan.artifacts.interchange import export_tree, import_tree
from sequoia_plan.artifacts.prompts import load
from sequoia_plan.planner import solve
from sequoia_plan.planner.cli import main
from sequoia_plan.planner.engines import counters, sglang
from sequoia_plan.planner.engines.planning import make_plan
from sequoia_plan.runtime import SequoiaDecoder

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
    *("a\udcff", "\x1b[2J", "\u00b2", "1,4096", "4", "t.html", "X.JSONL", "http://127.0.0.1:9"),
    *("a" * 300, "no/such/file", ".", "/dev/null", "é", "\u2028", "--", "-", "-h", "x\ty"),
    "sequoia-example-64x6",
]
COMMANDS = [
    *("solve", "solve", "show", "export", "import", "profile", "generate", "bench", "nothing", ""),
    *("engine vllm", "engine sglang"),
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
        *("--prompt", "--system", "--threads", "--memory"),
    ],
    "bench": ["--tree", "--prompts", "--limit", "--only", "-o", "--with", "--report", "--threads"],
    "engine vllm": [
        *("--metrics", "--metrics", "--metrics-before", "--times", "--batch", "--most", "-o"),
        *("--report", "--prompts", "--json"),
    ],
    "engine sglang": [
        *("--log", "--log", "--responses", "--times", "--batch", "--most", "-o", "--report"),
        "--json",
    ],
}
VALUES = [
    *(None, True, 0, -1, 1.5, 10**30, 2**70, float("nan"), float("inf"), "", "x", "</s>", b"x"),
    *([], [1], [[1], [2]], ["a"], {}, {"a": 1}, {"input_ids": None}, object(), len, range(3)),
    *(torch.zeros(2, 3), torch.ones(1, 4), torch.tensor([[5, 6]]), torch.tensor(3), int),
    {"rope_type": "nope", "rope_theta": 1e4},
]
"""Arguments of any type, and values of configurations."""
JSON_VALUES = [
    value for value in VALUES if isinstance(value, (int, float, str, list, dict, type(None)))
]
FLAGS = ("--json", "--help")
"""Options without a value."""


def read_page(path: Path) -> None:
    """Read a metrics page of vLLM as `engine vllm` does."""
    after, page = counters.fetch(str(path))
    counters.chain_acceptance(after, None, str(path), page)


READERS = {
    ".log": lambda path: sglang.read_log(str(path)),
    ".meta": lambda path: sglang.read_responses(str(path)),
    ".prom": read_page,
    ".plan": EnginePlan.load,
    ".JSONL": load,
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
    (folder / "utf16.txt").write_bytes("One.\n\nTwo.\n".encode("utf-16-le"))
    (folder / "X.JSONL").write_text('{"text": "Why?"}\n')
    (folder / "after.prom").write_bytes((DATA / "vllm" / "counters-0.27.1.txt").read_bytes())
    (folder / "r.meta").write_text(
        '{"meta_info": {"spec_correct_drafts_histogram": [600, 240, 100, 60]}}'
    )
    for name, steps, accepted, rate in (("plain", "None", "", 100.0), ("three", "3", 1.7, 136.0)):
        line = f"Decode batch. #running-req: 4, accept len: {accepted}, ".replace(
            "accept len: , ", ""
        )
        (folder / f"{name}.log").write_text(
            f"speculative_num_steps={steps}, speculative_eagle_topk=1\n"
            + 4 * f"{line}gen throughput (token/s): {rate}, #queue-req: 0,\n"
        )
    steps_of_plan = [
        step
        for name in ("plain", "three")
        for step in sglang.read_log(f"{folder}/{name}.log").steps
    ]
    make_plan(
        sglang.read_responses(f"{folder}/r.meta"),
        steps_of_plan,
        [4],
        3,
        sglang.launch_flags,
        engine="sglang",
    ).save(folder / "engine.plan")
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
    words = command.split() or [command]
    values = [*NUMBERS, *WORDS, *ODD_WORDS, *names]
    options = OPTIONS.get(command, ["--help"])
    call = [*words, *pick.choices(values, k=pick.randint(0, 2))]
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


def try_drafts(folder: Path, seeds: range, counts: dict[str, int]) -> None:
    """Load a draft with one or two odd values in config.json for each seed, and decode with it."""
    target, prompt = small_target(), torch.tensor([[5, 6, 7, 8]])
    makers = [eagle3_parts, dflash_parts, eagle1_parts]
    kinds = [maker(target) for maker in makers]
    for seed in seeds:
        pick = random.Random(seed)
        config, weights = pick.choice(kinds)
        odd = dict(config)
        for _ in range(pick.randint(1, 2)):
            name = pick.choice([*config, "head_dim", "rope_scaling", "layer_types", "eagle_config"])
            odd[name] = pick.choice(JSON_VALUES)
        counts["drafts"] += 1
        try:
            draft = load_draft(write(folder / "draft", odd, weights), target)
            SequoiaDecoder(target, draft, TokenTree.chain(2)).generate(prompt, 3)
            counts["accepted"] += 1
        except SequoiaPlanError:
            pass
        except BaseException:
            counts["failures"] += 1
            changes = {name: value for name, value in odd.items() if config.get(name) != value}
            print(f"draft, seed {seed}, {changes}", traceback.format_exc(), file=sys.stderr)


def try_api(seeds: range, counts: dict[str, int]) -> None:
    """Call the decoder with one to three arguments of wrong types for each seed."""
    target, prompt = small_target(), torch.tensor([[5, 6, 7, 8]])
    good = {"target": target, "draft": small_target(seed=1), "tree": TokenTree.chain(2)}
    names = [
        *("input_ids", "max_new_tokens", "temperature", "top_p", "seed", "eos_token_id"),
        *("streamer", "sampling", "attention_mask", "stop_strings", "stopping_criteria"),
    ]
    for seed in seeds:
        pick = random.Random(seed)
        made, called = dict(good), {"input_ids": prompt, "max_new_tokens": 3}
        for name in pick.choices([*names, *names, *good, "tokenizer"], k=pick.randint(1, 3)):
            (called if name in names else made)[name] = pick.choice(VALUES)
        if isinstance(called["max_new_tokens"], int):
            called["max_new_tokens"] = min(called["max_new_tokens"], 3)
        counts["api"] += 1
        try:
            SequoiaDecoder(**made).generate(**called)
            counts["succeeded"] += 1
        except SequoiaPlanError:
            pass
        except BaseException:
            counts["failures"] += 1
            print(f"api, seed {seed}, {called}", traceback.format_exc(), file=sys.stderr)


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--calls", type=int, default=1_000)
    parser.add_argument("--drafts", type=int, default=2_000)
    parser.add_argument("--api", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    names = ("files", "drafts", "accepted", "calls", "api", "succeeded", "failures")
    counts = dict.fromkeys(names, 0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        good_files = write_good_files(folder)
        contents = {
            name: path.read_bytes() for name, path in good_files.items() if path.suffix in READERS
        }
        try_files(folder, contents, range(options.seed, options.seed + options.files), counts)
        try_drafts(folder, range(options.seed, options.seed + options.drafts), counts)
        try_api(range(options.seed, options.seed + options.api), counts)
        os.chdir(folder)
        try_calls(folder, contents, range(options.seed, options.seed + options.calls), counts)
    print(json.dumps(counts))
    return int(counts["failures"] > 0)


if __name__ == "__main__":
    sys.exit(run())
