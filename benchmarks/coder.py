"""Trees for Qwen2.5-Coder 1.5B beside llama.cpp and transformers, prompt by prompt in one run.

    make coder    # fetches the 1.5B, profiles and solves; tools/fetch_coder.py has the 0.5B, too
    python benchmarks/coder.py TARGET.gguf DRAFT.gguf --tree build/coder/tree.safetensors \
        --llamacpp .llamacpp/bin

A run adds its setting, threads and sampling, to the output. All methods decode a prompt before the
next one begins. Rates are of the tokens after the first one: a prompt's pass is not counted. A
killed run goes on from its journal.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from pages import refill
from reports import spread, write_report
from results import RESULTS, ROOT

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.artifacts.processor import processor_name
from sequoia_plan.artifacts.prompts import Prompt, by_kind, load
from sequoia_plan.engines.llama_server import Server, find_build
from sequoia_plan.engines.plan import NONE, Drafting
from sequoia_plan.engines.spec_types import flags
from sequoia_plan.profiler.bench import LOOKUP_TOKENS, bench
from sequoia_plan.profiler.decoding_methods import (
    DecodePrompt,
    PromptRun,
    sequoia_method,
    transformers_method,
)
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.pair import CODER_DRAFT

PAGE = ROOT / "docs" / "sizes.md"
PROMPTS = ROOT / "benchmarks" / "coder.jsonl"
DRAFTINGS = (
    NONE,
    Drafting(2),
    Drafting(4, 0.6),
    Drafting(lookup_size=12, lookup_length=48),
    Drafting(lookup_size=3, lookup_length=8),
)
"""Of llama.cpp: none, chains of the draft, and lookups, the first of which is its default."""
PLAIN = "plain"


def llamacpp_method(server: Server, tokens: int) -> DecodePrompt:
    """A llama-server's greedy decoding."""

    def decode(prompt: list[int], seed: int) -> PromptRun:
        steps = server.generate(prompt, tokens)
        seconds = sum(step.seconds for step in steps)
        return PromptRun(1 + sum(step.tokens for step in steps), len(steps), seconds, 1, 0.0)

    return decode


def methods_of(options: argparse.Namespace, opened: ExitStack) -> dict[str, DecodePrompt]:
    """All methods by name."""
    tokens = options.tokens
    sampling = Sampling(temperature=options.temperature, top_p=options.top_p)
    pair = load_pair(options.target, "none")
    methods = {PLAIN: sequoia_method(pair, TokenTree.from_parents([-1]), sampling, tokens)}
    sampling = replace(sampling, verifier="traversal" if options.temperature else "sequoia")
    for name, tree, draft in (
        ("EAGLE-3", options.tree, None),
        ("0.5B, head cut", options.draft_tree, options.draft),
    ):
        if tree:
            pair = load_pair(options.target, draft, draft_vocabulary=draft and CODER_DRAFT)
            methods[f"tree, {name}"] = sequoia_method(pair, load_tree(tree), sampling, tokens)
    if options.llamacpp and not options.temperature:
        build = find_build(str(options.llamacpp / "llama-server"), "draft-simple")
        for drafting in DRAFTINGS:
            arguments = ["-m", options.target, "-t", str(options.threads), "-c", "2048", "-np", "1"]
            arguments += flags(drafting, "draft-simple", options.draft)
            server = opened.enter_context(closing(Server.start(build, arguments)))
            server.wait()
            methods[f"llama.cpp, {drafting}"] = llamacpp_method(server, tokens)
    if options.transformers:
        pair = load_pair(options.target, options.draft, placement="resident")
        for name, settings in (
            ("generate", {}),
            ("assisted", {"assistant_model": pair.draft.module}),
            ("lookup", {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
        ):
            methods[f"transformers, {name}"] = transformers_method(
                pair, sampling, tokens, **settings
            )
    return methods


def chosen_prompts(limit: int) -> list[Prompt]:
    """Prompts of all kinds in turn, twice as many of code."""
    kinds = by_kind(load(PROMPTS))
    columns = [kinds["code"][::2], kinds["code"][1::2], kinds["edit"], kinds["chat"]]
    return [prompt for prompts in zip_longest(*columns) for prompt in prompts if prompt][:limit]


def rates(runs: list[PromptRun]) -> Iterator[float]:
    """Tokens a second after the first ones, by prompt."""
    for run in runs:
        yield (run.tokens - run.first_tokens) / (run.seconds - run.first_seconds)


def figures(
    runs: Mapping[str, list[PromptRun]], prompts: list[Prompt], kind: str | None
) -> dict[str, Any]:
    """Each method's rate, tokens a step and ratio to plain decoding on the prompts of a kind."""
    chosen = [n for n in range(len(prompts)) if kind in (None, prompts[n].kind)]
    results = {}
    for name, all_runs in runs.items():
        own, plain = (list(rates([x[n] for n in chosen])) for x in (all_runs, runs[PLAIN]))
        steps = sum(all_runs[n].passes for n in chosen)
        results[name] = {
            "tokens_per_second": spread(own, 2),
            "tokens_per_step": round(sum(all_runs[n].tokens for n in chosen) / steps, 2),
            "over_plain": spread([a / b for a, b in zip(own, plain, strict=True)], 2),
        }
    return results


def main() -> None:
    """Measure all methods and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--tree", help="for our draft")
    parser.add_argument("--draft-tree", help="for the 0.5B")
    parser.add_argument("--llamacpp", type=Path, metavar="FOLDER", help="of llama-server")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "coder.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = chosen_prompts(options.limit)
    tokenizer = load_pair(options.target, "none").tokenizer
    ids = [encode(tokenizer, prompt.text) for prompt in prompts]
    journal = options.output.with_suffix(".journal")
    with ExitStack() as opened:
        methods = methods_of(options, opened)
        work = [ids, list(methods), {n: str(v) for n, v in vars(options).items()}]
        runs = bench(
            methods, ids, lambda done: print(done, flush=True), journal=Journal(journal, work)
        )
    kinds = [None, *dict.fromkeys(prompt.kind for prompt in prompts)]
    setting = f"{processor_name()}, {options.threads} threads, T = {options.temperature:g}"
    setting += f", top-p {options.top_p:g}" * (options.top_p < 1)
    setting += ", ours alone" * (not options.llamacpp and not options.temperature)
    reports = json.loads(options.output.read_text()) if options.output.exists() else {}
    reports[setting] = {
        "prompts": len(prompts),
        "tokens": options.tokens,
        "methods": {kind or "all": figures(runs, prompts, kind) for kind in kinds},
    }
    write_report(options.output, reports)
    refill(PAGE, options.output)
    journal.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
