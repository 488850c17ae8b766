"""Methods of decoding side by side: the same prompts and models, in turn, prompt by prompt."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from sequoia_plan.artifacts import ArgumentError, BenchResult, TokenTree
from sequoia_plan.artifacts.bench_result import BenchSettings, TreeShape
from sequoia_plan.artifacts.prediction import prediction_for
from sequoia_plan.artifacts.profile import takes_chains_only
from sequoia_plan.models.backends import RESIDENT
from sequoia_plan.models.base.dtype import dtype_name
from sequoia_plan.profiler.bench_figures import TITLES, predicted_by_kind, summary
from sequoia_plan.profiler.decoding_methods import (
    DecodePrompt,
    PromptRun,
    sequoia_method,
    transformers_method,
    with_full_vocabulary,
)
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.runtime import Pair, Sampling

TRANSFORMERS_METHODS = {"generate", "assisted", "lookup"}
LOOKUP_TOKENS = 10
"""Tokens that transformers' prompt lookup proposes in a step."""


def check_names(only: Sequence[str]) -> None:
    """Refuse the name of a method that there is not."""
    if unknown := sorted(set(only) - set(TITLES)):
        raise ArgumentError(f"only: found {unknown[0]!r}, expected {', '.join(TITLES)}")


def make_methods(
    pair: Pair,
    transformers_pair: Pair,
    trees: Mapping[str, tuple[TokenTree, str]],
    sampling: Sampling,
    tokens: int,
    only: Sequence[str] = (),
) -> dict[str, DecodePrompt]:
    """The methods of decoding named in `only`, in the order of `TITLES`.

    If `only` is empty, these are all methods that the draft and `trees` (tree and verifier by name)
    allow. If greedy, all verifiers accept alike, so one of those with our tree is then taken.
    """
    redundant = {"traversal"} if sampling.greedy else set()
    chosen, draft = set(only) or TITLES.keys() - redundant, transformers_pair.draft
    options: dict[str, dict[str, Any]] = {
        "generate": {},
        "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    }
    if hasattr(getattr(draft, "module", None), "generate"):
        options["assisted"] = {"assistant_model": with_full_vocabulary(draft.module)}
    elif "assisted" in only:  # the draft reads the target's hidden states
        raise ArgumentError(
            "only: found 'assisted', and transformers cannot use this draft; leave it out, or "
            "name a language model with --draft"
        )
    methods = {
        name: transformers_method(transformers_pair, sampling, tokens, **options[name])
        for name in options.keys() & chosen
    }
    for name in trees.keys() & chosen:
        tree, verifier = trees[name]
        if tree.branching == 1 or not takes_chains_only(pair.metadata):
            methods[name] = sequoia_method(pair, tree, replace(sampling, verifier=verifier), tokens)
    return {name: methods[name] for name in TITLES if name in methods}


def compare(
    pair: Pair,
    load_transformers_pair: Callable[[], Pair],
    tree: TokenTree,
    trees: Mapping[str, tuple[TokenTree, str]],
    sampling: Sampling,
    prompts: Sequence[list[int]],
    tokens: int,
    only: Sequence[str] = (),
    on_prompt: Callable[[int], None] = lambda done: None,
    deadline: float = math.inf,
    journal: Path | None = None,
    kinds: Sequence[str | None] = (),
) -> BenchResult:
    """Run the methods named in `only` (all if empty), with the plan's prediction for each of ours.

    `trees`: tree and verifier of each of ours. Transformers may have a pair with another draft.
    """
    context = sum(map(len, prompts)) // max(len(prompts), 1)
    chosen, models, plan = set(only or TITLES), pair.metadata, tree.for_context(context).plan
    settings = sampling.settings()
    transformers_pair = pair
    if pair.placement != RESIDENT and TRANSFORMERS_METHODS & chosen:
        transformers_pair = load_transformers_pair()
        assistant = transformers_pair.metadata.get("draft", {})
        if "assisted" in chosen and assistant.get("name") != models.get("draft", {}).get("name"):
            models = models | {"assistant": assistant}
    methods = make_methods(pair, transformers_pair, trees, sampling, tokens, only)
    # the trees of the other methods follow from this one
    shapes = [
        [[*t.by_match, *t.by_context], t.parents.tolist(), t.looks_up] for t in tree.all_trees
    ]
    hardware = fingerprint(pair.target.device)
    work = [models, list(prompts), settings, tokens, list(methods), shapes, hardware]
    runs = bench(methods, prompts, on_prompt, deadline, journal=Journal(journal, work))
    figures = summary(runs)
    for name in figures.keys() & trees.keys():
        method_tree, verifier = trees[name]
        prediction = prediction_for(method_tree.for_context(context), verifier, plan, settings)
        figures[name] = structs.replace(figures[name], prediction=prediction)
        if prediction.speedup and method_tree == tree and plan.text_speedups:
            kinds_decoded = list(kinds or [None] * len(prompts))[: len(runs[name])]
            figures[name] = predicted_by_kind(
                figures[name], plan, kinds_decoded, runs[name], runs.get("plain")
            )
    num_prompts = len(next(iter(runs.values())))
    target = pair.metadata["target"]
    dtype = str(target.get("weights") or target.get("dtype") or dtype_name(pair.target.dtype))
    return BenchResult(
        settings=BenchSettings(settings, dtype, num_prompts, tokens),
        models=models,
        hardware=hardware,
        methods=figures,
        tree=TreeShape(tree.size, tree.depth, tuple(tree.level_widths.tolist())),
    )


def bench(
    methods: Mapping[str, DecodePrompt],
    prompts: Sequence[list[int]],
    on_prompt: Callable[[int], None] = lambda done: None,
    deadline: float = math.inf,
    *,
    journal: Journal,
) -> dict[str, list[PromptRun]]:
    """Decode every prompt once with every method.

    All methods decode a prompt before the next prompt begins, so drift of the machine's speed hits
    all alike. Each prompt starts with another method. No prompt begins after the deadline, in
    seconds of `time.perf_counter`.
    """
    if not methods or not prompts:
        raise ArgumentError(
            f"bench: {len(methods)} methods and {len(prompts)} prompts, expected at least one of "
            "each"
        )
    for decode in methods.values():
        decode(prompts[0], 0)  # warms up
    order = deque(methods)
    runs: dict[str, list[PromptRun]] = {name: [] for name in methods}
    for number, prompt in enumerate(prompts):
        if number and time.perf_counter() > deadline:
            break
        in_order = {name: methods[name] for name in order}
        measured = journal.result(str(number), partial(_decode, in_order, prompt, number))
        for name, run in measured.items():
            runs[name].append(PromptRun(**run))
        order.rotate(-1)
        on_prompt(number + 1)
    return runs


def _decode(
    methods: Mapping[str, DecodePrompt], prompt: list[int], seed: int
) -> dict[str, dict[str, Any]]:
    """What each method's run on a prompt gives, as a journal holds it."""
    return {name: asdict(decode(prompt, seed)) for name, decode in methods.items()}
