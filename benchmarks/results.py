"""Measure every figure of docs/results.md and README.md on this machine, and write them there.

    make results         # about 65 minutes on two idle cores
    make quick-results   # ten minutes: fewer settings and prompts, tables in build/quick
    python benchmarks/results.py --spec-bench question.jsonl   # prompts of Spec-Bench
    python benchmarks/results.py --pages-only

Every part is a few commands, and its last one writes a file into benchmarks/results. A part that is
finished is not measured again; a killed one goes on. All parts are of one machine and of one state
of the code: with files of others there, all is measured anew.
Beside each part stands how much of a processor other programs took meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pages import METHODS, with_tables
from reports import write_report

from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.artifacts.processor import processor_name
from sequoia_plan.artifacts.prompts import BUILT_IN, Prompt, by_kind, load

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CODE = ("artifacts", "planner", "profiler", "models", "runtime", "drafts", "benchmarks/results.py")
RETRIEVAL = ROOT / "benchmarks" / "retrieval.jsonl"
PAGES = ("README.md", "docs/results.md")
PER_KIND = 16
"""Prompts of a kind; profile and bench have half of them each."""
LIMIT = 24
"""Prompts that bench decodes in each setting, taken from all kinds in turn."""
SPEC_BENCH = {
    "translation": "translation",
    "summarization": "summary",
    "qa": "question",
    "math_reasoning": "maths",
    "rag": "retrieval",
}
"""The kind of each category of Spec-Bench; the others are those of MT-Bench's conversations."""
OWN = {
    "translation": "translation",
    "summary": "summary",
    "explain": "question",
    "maths": "maths",
    "retrieval": "retrieval",
    "chat": "conversation",
    "code": "conversation",
    "writing": "conversation",
}
"""The same kinds, of the built-in prompts and benchmarks/retrieval.jsonl."""
COPIES = ("proofread", "quote", "edit-code", "shorten")
"""The built-in prompts whose answers repeat most of them."""


class Setting(NamedTuple):
    """What one profile, one tree and one run of bench are for."""

    weights: str
    dtype: str
    temperature: float = 0.0
    threads: int = 1
    prompts: str = "kinds"

    @property
    def name(self) -> str:
        """The name of its part."""
        numbers = f"t{self.temperature:g}-{self.threads}".replace(".", "")
        return f"bench-{self.weights}-{numbers}-{self.prompts}"


SETTINGS = (
    Setting("bfloat16", "bfloat16"),
    Setting("bits", "auto"),
    Setting("bfloat16", "bfloat16", 0.6),
    Setting("bfloat16", "bfloat16", 1.0),
    Setting("bfloat16", "bfloat16", threads=2),
    Setting("bits", "auto", threads=2),
    Setting("bfloat16", "bfloat16", prompts="copies"),
)


def parts(work: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """The command lines of each part, which writes {results}/PART.json."""
    quick, commands = options.quick, {}
    tokens = 16 if quick else 64
    for setting in SETTINGS[:: 3 if quick else 1]:
        stem, verifier = work / setting.name, "traversal" if setting.temperature else "sequoia"
        models = f"--threads {setting.threads} --dtype {setting.dtype} --tokens {tokens}"
        models += f" --prompts {work / setting.prompts}.jsonl"
        methods = (f"--only {name}" for name in (*METHODS, verifier))
        tree = "{results}/tree" if setting == SETTINGS[0] else stem
        commands[setting.name] = [
            f"sequoia-plan profile {models} --temperature {setting.temperature} "
            f"--precision {50 if quick else 7}% -o {stem}.yaml",
            f"sequoia-plan solve {stem}.yaml --budget 64 -o {tree}.safetensors",
            f"sequoia-plan show {tree}.safetensors --plot {tree}.png",
            f"sequoia-plan bench {models} --tree {tree}.safetensors {' '.join(methods)} "
            f"--limit {6 if quick else LIMIT} -o {{results}}/{setting.name}.json",
        ]
    llama_bench = f"--llama-bench {options.llama_bench}" if options.llama_bench else ""
    passes, contexts = f"--rounds 2 {llama_bench}", ""
    if quick:
        passes, contexts = "--rounds 1 --threads 1 --context 128", "--rounds 1 --dtype bfloat16"
    for name, words in (("passes", passes), ("contexts", contexts)):
        commands[name] = [f"python benchmarks/{name}.py {words} -o {{results}}/{name}.json"]
    return commands


def write_prompts(path: Path, prompts: list[Prompt], names: dict[str, str], default: str) -> None:
    """Write as many prompts of each kind, taken evenly from the first to the last."""
    named = [Prompt(prompt.text, names.get(prompt.kind or "", default)) for prompt in prompts]
    lines = []
    for kind, group in by_kind([prompt for prompt in named if prompt.kind]).items():
        for place in range(min(PER_KIND, len(group))):
            text = group[place * len(group) // PER_KIND].text
            lines.append(json.dumps({"kind": kind, "text": text}) + "\n")
    write_atomically(path, "".join(lines).encode())


def measure(commands: Mapping[str, list[str]], results: Path, common: dict[str, Any]) -> None:
    """Measure the parts that are missing, each with a note of the load beside it."""
    log_file = results / "run.json"
    log = common | {"parts": {}}
    if log_file.exists():
        last = json.loads(log_file.read_text())
        log = last if last.items() >= common.items() else log
    missing = [name for name in commands if name not in log["parts"]]
    for number, name in enumerate(missing, 1):
        print(f"{name}, part {number} of {len(missing)}, each at most ten minutes", flush=True)
        began, before = time.time(), others_seconds()
        for line in commands[name]:
            name_of_program, *words = shlex.split(line.format(results=results))
            program = str(Path(sys.executable).with_name(name_of_program))
            subprocess.run([program, *words], cwd=ROOT, check=True)
        seconds = time.time() - began
        log["parts"][name] = {
            "minutes": round(seconds / 60, 1),
            "other_work": round((others_seconds() - before) / seconds, 3),
        }
        write_report(log_file, log)


def others_seconds() -> float:
    """Processor seconds since the start of the machine that this run did not take."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def stamp(prompts: str) -> dict[str, Any]:
    """What all parts must have in common: the machine, the code and the prompts."""
    code = ["git", "log", "-1", "--format=%h %cs", "--", *CODE]
    commit = subprocess.run(code, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "commit": commit.strip(),
        "prompts": prompts,
    }


def main() -> None:
    """Measure what is missing, and write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few prompts, in build/quick")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--llama-bench", help="llama.cpp's, for the table of passes")
    parser.add_argument("--pages-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    work = ROOT / "build" / ("quick" if options.quick else "results")
    results = work if options.quick else RESULTS
    if not options.pages_only:
        work.mkdir(parents=True, exist_ok=True)
        built_in, copies = load(BUILT_IN), dict(zip(COPIES, COPIES, strict=True))
        write_prompts(work / "copies.jsonl", built_in, copies, "")
        if options.spec_bench:
            prompts = load(options.spec_bench)
            write_prompts(work / "kinds.jsonl", prompts, SPEC_BENCH, "conversation")
        else:
            write_prompts(work / "kinds.jsonl", [*built_in, *load(RETRIEVAL)], OWN, "")
        common = stamp("prompts of Spec-Bench" if options.spec_bench else "prompts of our own")
        measure(parts(work, options), results, common)
    for page in PAGES:
        text = with_tables((ROOT / page).read_text(), results)
        path = work / Path(page).name if options.quick else ROOT / page
        write_atomically(path, text.encode())


if __name__ == "__main__":
    main()
