"""Trees by match against the tree alone and prompt lookup, kind of prompts by kind.

    sequoia-plan profile -o build/profile.yaml
    sequoia-plan solve build/profile.yaml --budget 64 --depth 20 -o build/tree.safetensors
    python benchmarks/lookup.py --tree build/tree.safetensors -o build/lookup.json

With `--plot FILE.png` the speeds are drawn. With `--offload disk --memory 350MB`, the target is
streamed, and transformers' prompt lookup, which cannot do that, is left out.

`--edges` decodes prompts that lookup could be slow on, not those of a file: one whose answer stands
once in a long text, one of a single word many times, and one without any token twice. Only trees by
match and the tree alone decode them. What a search for a match takes is measured in any case, by
the slots of the sequence.

All methods decode a prompt before the next prompt begins. The prompts are the half of each kind
that no profile is measured on; with `--profiled`, they are the other half. The promise for a kind
is that of the plan (`speedup_by_kind`): all its profiled prompts together, as in the column "in
total". The other columns are medians over prompts. `--only plain --only sequoia` compares the two
in a few minutes.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from reports import new_parser, write_report

from sequoia_plan.artifacts import TokenTree, load_tree
from sequoia_plan.artifacts.lookup import MAX_MATCH
from sequoia_plan.artifacts.prompts import BUILT_IN, held_out_half, load, measuring_half
from sequoia_plan.planner.report.panels import AMBER, BLUE, GREEN, RED, style
from sequoia_plan.planner.report.plot import PNG_DPI
from sequoia_plan.planner.solving.baselines import bench_trees
from sequoia_plan.profiler.bench import bench, make_methods
from sequoia_plan.profiler.bench_figures import summary
from sequoia_plan.profiler.decoding_methods import PromptRun, sequoia_method
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.prompts import encode
from sequoia_plan.runtime import Sampling, load_pair
from sequoia_plan.runtime.base.lookup import look_up
from sequoia_plan.runtime.models.architecture import context_length, text_config
from sequoia_plan.runtime.models.dtype import dtype_name

COPYING_KINDS = ("proofread", "quote", "edit-code", "shorten")
"""The built-in kinds whose answers repeat text of the prompt."""


NGRAM = TokenTree(
    TokenTree.chain(1).parents,
    by_match={2: TokenTree(TokenTree.chain(6).parents, looks_up=True)},
)
"""Lookup alone as vLLM's `ngram` does it by its documentation: from matches of two tokens on, five
tokens. vLLM takes the first of the longest matches of up to four tokens, and this takes the last of
those of up to 16."""


def edge_prompts(tokenizer: Any, context: int) -> dict[str, list[list[int]]]:
    """By kind, token ids of prompts that lookup could be slow on.

    Args:
        context: the target's context length, in tokens.
    """
    texts = [prompt.text for prompt in load(BUILT_IN) if isinstance(prompt.text, str)]
    rng = np.random.default_rng(0)
    kinds: dict[str, list[list[int]]] = {"needle": [], "one word": [], "nothing twice": []}
    for number, word in enumerate(("yes", "seven", "the")):
        haystack: list[str] = []
        while len(tokenizer("\n".join(haystack))["input_ids"]) < context // 2:
            haystack += [texts[i] for i in rng.permutation(len(texts))[:8]]
        needle = f"The number on the red door is {rng.integers(1000, 9999)}."
        haystack.insert(len(haystack) * (number + 1) // 4, needle)
        question = "What is the number on the red door? Explain how you found it."
        kinds["needle"].append(encode(tokenizer, "\n".join([*haystack, question])))
        kinds["one word"].append(encode(tokenizer, f"{word} " * 300))
        distinct = tokenizer.decode(rng.permutation(len(tokenizer))[:300].tolist())
        kinds["nothing twice"].append(encode(tokenizer, distinct))
    return kinds


def match_milliseconds() -> dict[int, float]:
    """Median milliseconds of a search for a match and its lookup chain, by slots."""
    milliseconds = {}
    for slots in (512, 2048, 8192, 32768):
        tokens = torch.randint(0, 50000, (slots,), generator=torch.Generator().manual_seed(0))
        length, seconds = torch.tensor([slots - 32]), []
        for _ in range(30):
            started = time.perf_counter()
            look_up(tokens, length, MAX_MATCH, 24)
            seconds.append(time.perf_counter() - started)
        milliseconds[slots] = round(1000 * float(np.median(seconds)), 3)
    return milliseconds


def total_speedup(runs: dict[str, list[PromptRun]], method: str) -> float:
    """Tokens a second of a method over those of plain decoding, of all prompts together.

    The plan promises this for the prompts of a kind that were profiled. It is after the first
    tokens of each prompt, as everywhere in `bench`.
    """
    speeds = [
        sum(run.tokens - run.first_tokens for run in runs[name])
        / sum(run.seconds - run.first_seconds for run in runs[name])
        for name in (method, "plain")
    ]
    return speeds[0] / speeds[1]


def draw(result: dict[str, Any], path: str) -> None:
    """Draw the speed over plain decoding by kind: lookup alone, the tree alone, trees by match."""
    methods = {"lookup": "prompt lookup", "tree": "tree alone", result["method"]: "trees by match"}
    parts = {kind: p["methods"] for kind, p in result["kinds"].items() if "all" not in kind}
    with matplotlib.rc_context(style("#22302a", "#e4e9e6", "sequoia-plan") | {"font.size": 11}):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        axes = figure.subplots()
        for number, (name, title) in enumerate(methods.items()):
            ratios = [part[name]["speedup"]["plain"] for part in parts.values()]
            rows = [(ratio["median"], ratio["low"], ratio["high"]) for ratio in ratios]
            medians, lows, highs = np.array(rows).T
            axes.bar(
                np.arange(len(parts)) + 0.27 * (number - 1),
                medians,
                width=0.25,
                color=(BLUE, AMBER, GREEN)[number],
                label=title,
                yerr=np.maximum([medians - lows, highs - medians], 0),
                error_kw={"elinewidth": 1.0, "ecolor": "#22302a"},
            )
        axes.axhline(1.0, color=RED, linewidth=1.2, linestyle=":")
        axes.set_xticks(np.arange(len(parts)), list(parts), rotation=20)
        axes.set_ylabel("speed over plain decoding")
        axes.legend(loc="upper left")
        figure.savefig(path, dpi=PNG_DPI)


def main() -> None:
    """Decode, and report by kind."""
    parser = new_parser(__doc__)
    parser.add_argument("--tree", required=True)
    parser.add_argument("--prompts", default=BUILT_IN)
    parser.add_argument("--edges", action="store_true", help="prompts that lookup could be slow on")
    parser.add_argument("--profiled", action="store_true", help="prompts that profiles measure on")
    parser.add_argument("--limit", type=int, default=100, help="prompts of each kind, at most")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--offload", choices=["disk"])
    parser.add_argument("--memory", help="with --offload: as for `sequoia-plan profile`")
    parser.add_argument("--only", action="append", help="only this method (repeatable)")
    parser.add_argument("--plot", help="draw the speed by kind into this .png")
    options = parser.parse_args()
    tree = load_tree(options.tree)
    verifier = str(tree.plan.settings.get("verifier") or "sequoia")
    sampling = Sampling(options.temperature, verifier=verifier)
    method = "sequoia" if sampling.greedy else verifier
    names = ["plain", "lookup", "tree", method, "ngram"]
    if options.offload:
        names.remove("lookup")  # transformers cannot run a streamed target
    names = options.only or (["tree", method] if options.edges else names)
    pair = load_pair(offload=options.offload, memory=options.memory)
    transformers_pair = pair if options.offload else load_pair(placement="resident")
    by_kind: dict[str, list[list[int]]] = {}
    half = measuring_half if options.profiled else held_out_half
    for prompt in half(load(options.prompts)):
        kind = prompt.kind or "all"
        by_kind.setdefault(kind, []).append(encode(pair.tokenizer, prompt.text))
    if options.edges:
        by_kind = edge_prompts(pair.tokenizer, context_length(text_config(pair.target)))
    kinds, token_ids = [], []
    for kind, prompts in by_kind.items():
        token_ids += prompts[: options.limit]
        kinds += [kind] * (len(token_ids) - len(kinds))
    methods = make_methods(
        pair,
        transformers_pair,
        bench_trees(tree, verifier),
        sampling,
        options.tokens,
        [name for name in names if name != "ngram"],
    )
    if "ngram" in names:
        methods["ngram"] = sequoia_method(pair, NGRAM, sampling, options.tokens)
    runs = bench(methods, token_ids, lambda done: print(done, end=" ", flush=True))
    print()
    groups: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        group = "all copying" if kind in COPYING_KINDS else "all others"
        for name in (kind, group):
            groups.setdefault(name, []).append(number)
    by_group = {
        group: {name: [method_runs[i] for i in chosen] for name, method_runs in runs.items()}
        for group, chosen in groups.items()
    }
    result = {
        "hardware": fingerprint(pair.target.device),
        "models": pair.metadata,
        "dtype": dtype_name(pair.target.dtype),
        "temperature": options.temperature,
        "tokens": options.tokens,
        "offload": options.offload,
        "memory": options.memory,
        "method": method,
        "promised": tree.plan.speedup_by_kind,
        "match_milliseconds": match_milliseconds(),
        "kinds": {
            group: {
                "prompts": len(groups[group]),
                "methods": {
                    name: figures.to_dict() for name, figures in summary(part, names).items()
                },
                "over_plain_in_total": total_speedup(part, method) if "plain" in part else None,
            }
            for group, part in by_group.items()
        },
        "kind_of_prompt": kinds,
        "runs": {name: [asdict(run) for run in method_runs] for name, method_runs in runs.items()},
    }
    write_report(options.output, result)
    if options.plot:
        draw(result, options.plot)


if __name__ == "__main__":
    main()
