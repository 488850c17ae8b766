"""Contenders side by side: the same prompts, the same models, prompt by prompt in turn."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn

from sequoia_plan.artifacts import ArgumentError, BenchResult, TokenTree
from sequoia_plan.artifacts.bench_result import BenchSettings, Contender, Ratio, Shape, Spread
from sequoia_plan.artifacts.cost import predicted
from sequoia_plan.profiler.hardware import fingerprint
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.models.load import dtype_name
from sequoia_plan.runtime.pair import with_draft

TITLES = {
    "plain": "plain decoding",
    "generate": "Hugging Face generate",
    "assisted": "Hugging Face assisted",
    "lookup": "Hugging Face prompt lookup",
    "chain": "chain",
    "chains": "independent chains, SpecInfer",
    "k-ary": "complete binary tree",
    "top-k": "our tree, top-k",
    "sequoia": "our tree, Sequoia",
    "traversal": "our tree, traversal",
}
"""Every contender, by name; `sequoia_plan.planner.solving.baselines` has the trees."""
TRANSFORMERS = {"generate", "assisted", "lookup"}
"""Those that are transformers' own."""
LOOKUP_TOKENS = 10
RESAMPLES = 2_000


@dataclass(frozen=True)
class Run:
    """One prompt decoded once.

    Args:
        tokens: new tokens.
        passes: of the target; None where the contender does not say.
        seconds: wall time, the prompt's prefill included.
        first_tokens, first_seconds: what came first, and when.
    """

    tokens: int
    passes: int | None
    seconds: float
    first_tokens: int
    first_seconds: float


Decode = Callable[[list[int], int], Run]
"""(prompt, seed) -> Run."""


class _Stopwatch:
    """A streamer that notes when the first new tokens came; transformers puts the prompt first."""

    def __init__(self, prompt: int) -> None:
        self.prompt, self.started = prompt, time.perf_counter()
        self.first_tokens, self.first_seconds = 0, 0.0

    def put(self, tokens: Tensor) -> None:
        count = int(torch.as_tensor(tokens).numel())
        if self.prompt:
            self.prompt -= min(count, self.prompt)
        elif not self.first_tokens:
            self.first_tokens, self.first_seconds = count, time.perf_counter() - self.started

    def end(self) -> None:
        pass

    def run(self, tokens: int, passes: int | None) -> Run:
        return Run(tokens, passes, time.perf_counter() - self.started, self.first_tokens, self.first_seconds)


def contenders(
    pair: Pair, reference: Pair, trees: Mapping[str, tuple[TokenTree, str]], sampling: Sampling, tokens: int, only: Sequence[str] = ()
) -> dict[str, Decode]:
    """The contenders named in `only` (all if empty), in the order of `TITLES`. Where greedy makes verifiers equal, one is enough.

    Args:
        reference: target and draft for transformers' own decoders, as transformers loads them.
        trees: tree and verifier of those that are ours.

    Raises:
        ArgumentError: for a name that is none.
    """
    if unknown := sorted(set(only) - set(TITLES)):
        raise ArgumentError(f"only: found {unknown[0]!r}, expected {', '.join(TITLES)}")
    made: dict[str, Callable[[], Decode]] = {
        "generate": lambda: hugging_face(reference, sampling, tokens),
        "assisted": lambda: hugging_face(reference, sampling, tokens, assistant_model=full_width(reference.draft)),
        "lookup": lambda: hugging_face(reference, sampling, tokens, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    }
    if not hasattr(reference.draft, "generate"):  # it reads the target's hidden states, and transformers gives it none
        del made["assisted"]
        if "assisted" in only:
            raise ArgumentError("only: found 'assisted', and transformers cannot use this draft; name a language model with --assistant, or leave it out")
    for name, (tree, verifier) in trees.items():
        made[name] = partial(ours, pair, tree, replace(sampling, verifier=verifier), tokens)
    same = {"top-k", "traversal"} if sampling.greedy else set()
    return {name: made[name]() for name in TITLES if name in made and (name in only or not (only or name in same))}


def compare(
    pair: Pair,
    reference: Callable[[], Pair],
    tree: TokenTree,
    trees: Mapping[str, tuple[TokenTree, str]],
    sampling: Sampling,
    prompts: Sequence[list[int]],
    tokens: int,
    only: Sequence[str] = (),
    on_prompt: Callable[[int], None] = lambda done: None,
    deadline: float = math.inf,
    journal: Path | None = None,
    assistant: str | None = None,
) -> BenchResult:
    """`contenders`, `bench` and `summary` in one, with what the tree's plan promises of each.

    Args:
        tree: the tree under test.
        trees: tree and verifier of each contender that is ours.
        journal: a file that keeps finished prompts until all is done.
        reference: loads the models as transformers does; called if ours were repacked and transformers' decoders take part.
        assistant: the draft of transformers' assisted generation, named as for `load_pair`; None for the pair's.
    """
    wanted, models = set(only or TITLES), pair.facts
    theirs = reference() if pair.placement == "repacked" and TRANSFORMERS & wanted else pair
    if assistant and "assisted" in wanted:
        theirs = with_draft(theirs, assistant)
        models = models | {"assistant": theirs.facts["draft"]}
    decoders = contenders(pair, theirs, trees, sampling, tokens, only)
    shapes = {name: [each.parents.tolist(), verifier] for name, (each, verifier) in trees.items()}
    with Journal(journal, [models, list(map(list, prompts)), sampling.settings(), tokens, list(decoders), shapes]) as kept:
        runs = bench(decoders, prompts, on_prompt, deadline, kept)
    figures = summary(runs)
    for name in figures.keys() & trees.keys():
        promise = predicted(*trees[name], tree.plan, sampling.settings())
        if promise.speedup and tree.size > 1 and trees[name][0] == tree:
            both = {key: known.predicted_speedup for key in ("interval", "interval_new_kind") if (known := getattr(tree.plan, key))}
            promise = structs.replace(promise, **both)
        figures[name] = structs.replace(figures[name], predicted=promise)
    return BenchResult(
        settings=BenchSettings(sampling.settings(), dtype_name(pair.target.dtype), len(next(iter(runs.values()))), tokens),
        models=models,
        hardware=fingerprint(pair.target.device),
        contenders=figures,
        tree=Shape(tree.size, tree.depth, tuple(tree.level_widths.tolist())),
    )


def ours(pair: Pair, tree: TokenTree, sampling: Sampling, tokens: int, **options: Any) -> Decode:
    """Our decoder with `tree`; `options` are those of `SequoiaDecoder`."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, **options)

    def decode(prompt: list[int], seed: int) -> Run:
        watch = _Stopwatch(len(prompt))
        result = decoder.generate(prompt, tokens, sampling=sampling, seed=seed, eos_token_id=pair.end_tokens, streamer=watch)
        return watch.run(result.new_tokens, result.steps)

    return decode


def hugging_face(reference: Pair, sampling: Sampling, tokens: int, *, counted: bool = True, **options: Any) -> Decode:
    """transformers' own `generate`; `options` choose how it decodes. `counted`: count the target's passes, which a compiled forward must do without."""
    target, ends = reference.target, reference.end_tokens
    options |= sampling.for_transformers() | {"max_new_tokens": tokens, "eos_token_id": ends or None, "pad_token_id": ends[0] if ends else None}

    def decode(prompt: list[int], seed: int) -> Run:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=target.device)
        passes: list[int] = []
        counting = target.register_forward_pre_hook(lambda *_: passes.append(1)) if counted else None
        watch = _Stopwatch(len(prompt))
        try:
            made = target.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **options).shape[1] - len(prompt)
            return watch.run(made, len(passes) if counted else None)
        finally:
            if counting:
                counting.remove()

    return decode


def full_width(draft: Any) -> Any:
    """A draft as other decoders expect it: logits for the target's whole vocabulary, -inf for tokens it does not cover."""
    covered = getattr(draft, "covered_tokens", None)
    if covered is None:
        return draft
    twin = copy.copy(draft)  # the same weights under another head
    twin._modules = dict(draft._modules)
    twin.lm_head = _FullWidth(draft.lm_head, covered, draft.config.vocab_size)
    return twin


class _FullWidth(nn.Module):
    def __init__(self, head: nn.Module, covered: Tensor, vocabulary: int) -> None:
        super().__init__()
        self.head, self.covered, self.vocabulary = head, covered, vocabulary

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf).index_copy_(-1, self.covered, logits)


def bench(
    contenders: Mapping[str, Decode],
    prompts: Sequence[list[int]],
    on_prompt: Callable[[int], None] = lambda done: None,
    deadline: float = math.inf,
    journal: Journal | None = None,
) -> dict[str, list[Run]]:
    """Every contender decodes every prompt once, interleaved: who goes first changes from prompt to prompt.

    Args:
        journal: keeps finished prompts, so that an interrupted run goes on where it was.
        deadline: of `time.perf_counter`; once it has passed, no further prompt is begun.
    """
    if not contenders or not prompts:
        raise ArgumentError(f"bench: {len(contenders)} contenders and {len(prompts)} prompts, expected at least one of each")
    for decode in contenders.values():
        decode(prompts[0], 0)  # warm
    kept = journal or Journal(None, None)
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for seed, prompt in enumerate(prompts):
        if seed and time.perf_counter() > deadline:
            break
        turn = seed % len(contenders)
        order = [*contenders][turn:] + [*contenders][:turn]
        found = kept.get(str(seed), lambda: {name: asdict(contenders[name](prompt, seed)) for name in order})  # noqa: B023
        for name in contenders:
            runs[name].append(Run(**found[name]))
        on_prompt(seed + 1)
    return runs


def summary(runs: Mapping[str, list[Run]], over: Sequence[str] = ("plain", "generate", "assisted", "sequoia", "traversal")) -> dict[str, Contender]:
    """Each contender's figures, and its speed-up over each of `over` that took part.

    tokens_per_second and first_token_seconds: median over prompts with quartiles. tokens_per_step: new tokens over the
    target's passes. each_prompt: tokens/s after the first tokens, which every other comparison can be made from. speedup: its
    ratios, taken prompt by prompt so that drift cancels, the median with quartiles and its 95 % bootstrap interval over prompts.
    """
    return {
        name: Contender(
            title=TITLES.get(name, name),
            tokens_per_second=Spread(*_quartiles([run.tokens / run.seconds for run in mine])),
            first_token_seconds=Spread(*_quartiles([run.first_seconds for run in mine])),
            tokens_per_step=_per_step(mine),
            each_prompt=tuple(round(_steady(run), 3) for run in mine),
            speedup={other: _ratio(mine, runs[other]) for other in over if other in runs},
        )
        for name, mine in runs.items()
    }


def _per_step(runs: Sequence[Run]) -> float | None:
    passes = [run.passes for run in runs]
    return None if None in passes else round(sum(run.tokens for run in runs) / sum(filter(None, passes)), 4)


def _ratio(mine: Sequence[Run], theirs: Sequence[Run]) -> Ratio:
    ratios = np.array([_steady(a) / _steady(b) for a, b in zip(mine, theirs, strict=True)])
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, ratios.size))
    low, high = np.quantile(np.median(draws, 1), [0.025, 0.975])
    return Ratio(*_quartiles(ratios), round(float(low), 4), round(float(high), 4))


def _steady(run: Run) -> float:
    """Tokens/s once the prompt is read; of all of it if it ended at once."""
    if run.tokens > run.first_tokens:
        return (run.tokens - run.first_tokens) / (run.seconds - run.first_seconds)
    return run.tokens / run.seconds


def _quartiles(numbers: Any) -> tuple[float, float, float]:
    """The median, the first and the third quartile, to four digits."""
    middle, low, high = (round(float(quantile), 4) for quantile in np.quantile(np.asarray(numbers, float), [0.5, 0.25, 0.75]))
    return middle, low, high
