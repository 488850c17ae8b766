"""Methods of decoding side by side: the same prompts and models, in turn, prompt by prompt."""

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

from sequoia_plan.artifacts import ArgumentError, BenchResult, Plan, TokenTree
from sequoia_plan.artifacts.bench_result import (
    BenchSettings,
    KindResult,
    MethodResult,
    Prediction,
    Ratio,
    Spread,
    TreeShape,
)
from sequoia_plan.artifacts.prediction import prediction_for
from sequoia_plan.profiler.hardware import TIME_KEYS, fingerprint
from sequoia_plan.profiler.journal import Journal
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.models.dtype import dtype_name
from sequoia_plan.runtime.models.vocabulary import vocabulary_size
from sequoia_plan.runtime.pair import MAKE_LINEAR, with_draft

TITLES = {
    "plain": "plain decoding",
    "generate": "Hugging Face generate",
    "assisted": "Hugging Face assisted",
    "lookup": "Hugging Face prompt lookup",
    "chain": "chain",
    "chains": "independent chains, SpecInfer",
    "k-ary": "complete binary tree",
    "top-k": "our tree, top-k",
    "tree": "our tree without lookup",
    "sequoia": "our tree, Sequoia",
    "traversal": "our tree, traversal",
}
"""The title of every method; `sequoia_plan.planner.solving.baselines` has the trees."""
TRANSFORMERS_METHODS = {"generate", "assisted", "lookup"}
LOOKUP_TOKENS = 10
"""Tokens that transformers' prompt lookup proposes in a step."""
RESAMPLES = 2_000
"""Bootstrap resamples of the prompts."""


@dataclass(frozen=True)
class PromptRun:
    """One prompt decoded once."""

    tokens: int
    passes: int | None
    seconds: float
    first_tokens: int
    first_seconds: float


DecodePrompt = Callable[[list[int], int], PromptRun]
"""A method of decoding: (the prompt's token ids, seed) -> PromptRun."""


class _Stopwatch:
    """A streamer that records when the first new tokens come.

    Streamers of transformers get the prompt's tokens first, which do not count.
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_tokens_left, self.started = prompt_length, time.perf_counter()
        self.first_tokens, self.first_seconds = 0, 0.0

    def put(self, tokens: Tensor) -> None:
        """Take the next tokens: the prompt's first, then new ones."""
        count = int(torch.as_tensor(tokens).numel())
        if self.prompt_tokens_left:
            self.prompt_tokens_left -= min(count, self.prompt_tokens_left)
        elif not self.first_tokens:
            self.first_tokens = count
            self.first_seconds = time.perf_counter() - self.started

    def end(self) -> None:
        """Do nothing; streamers have this method."""

    def stop(self, tokens: int, passes: int | None) -> PromptRun:
        """The figures of the run that ends now, with its numbers of new tokens and passes."""
        seconds = time.perf_counter() - self.started
        return PromptRun(tokens, passes, seconds, self.first_tokens, self.first_seconds)


def check_names(only: Sequence[str]) -> None:
    """Raise ArgumentError for the name of a method that there is not."""
    if unknown := sorted(set(only) - set(TITLES)):
        names = ", ".join(TITLES)
        raise ArgumentError(f"only: found {unknown[0]!r}, expected {names}")


def make_methods(
    pair: Pair,
    transformers_pair: Pair,
    trees: Mapping[str, tuple[TokenTree, str]],
    sampling: Sampling,
    tokens: int,
    only: Sequence[str] = (),
) -> dict[str, DecodePrompt]:
    """The methods of decoding named in `only`, in the order of `TITLES`.

    If `only` is empty, these are all methods that the draft and `trees` allow. If greedy, all
    verifiers accept alike, so of those with our tree only `sequoia` is then taken.
    """
    check_names(only)
    make_transformers = partial(transformers_method, transformers_pair, sampling, tokens)
    draft = transformers_pair.draft
    makers: dict[str, Callable[[], DecodePrompt]] = {
        "generate": make_transformers,
        "assisted": lambda: make_transformers(assistant_model=with_full_vocabulary(draft)),
        "lookup": lambda: make_transformers(prompt_lookup_num_tokens=LOOKUP_TOKENS),
    }
    if not hasattr(draft, "generate"):  # the draft reads the target's hidden states
        del makers["assisted"]
        if "assisted" in only:
            raise ArgumentError(
                "only: found 'assisted', and transformers cannot use this draft; name a language "
                "model with --assistant, or leave it out"
            )
    for name, (tree, verifier) in trees.items():
        tree_sampling = replace(sampling, verifier=verifier)
        makers[name] = partial(sequoia_method, pair, tree, tree_sampling, tokens)
    redundant = {"top-k", "traversal"} if sampling.greedy else set()
    chosen = set(only) or TITLES.keys() - redundant
    return {name: makers[name]() for name in TITLES if name in makers and name in chosen}


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
    assistant: str | None = None,
    kinds: Sequence[str | None] = (),
) -> BenchResult:
    """Run the methods of decoding on the prompts, with the plan's prediction for each of ours."""
    chosen, models = set(only or TITLES), pair.metadata
    transformers_pair = pair
    if pair.placement in MAKE_LINEAR and TRANSFORMERS_METHODS & chosen:
        transformers_pair = load_transformers_pair()
    if assistant and "assisted" in chosen:
        transformers_pair = with_draft(transformers_pair, assistant)
        models = models | {"assistant": transformers_pair.metadata["draft"]}
    methods = make_methods(pair, transformers_pair, trees, sampling, tokens, only)
    parents = {
        name: [
            [[length, t.parents.tolist(), t.looks_up] for length, t in other.portfolio.items()],
            verifier,
        ]
        for name, (other, verifier) in trees.items()
    }
    prompt_ids = list(map(list, prompts))
    hardware = fingerprint(pair.target.device)
    machine = {key: hardware[key] for key in TIME_KEYS if key in hardware}
    work = [models, prompt_ids, sampling.settings(), tokens, list(methods), parents, machine]
    with Journal(journal, work) as results:
        runs = bench(methods, prompts, on_prompt, deadline, results)
    figures = summary(runs)
    for name in figures.keys() & trees.keys():
        prediction = prediction_for(*trees[name], tree.plan, sampling.settings())
        method_tree, _ = trees[name]
        # the plan's intervals of the predicted speed-up are those of the tree under test
        if prediction.speedup and tree.size > 1 and method_tree == tree:
            intervals = {
                key: interval.predicted_speedup
                for key in ("interval", "interval_new_kind")
                if (interval := getattr(tree.plan, key))
            }
            prediction = structs.replace(prediction, **intervals)
        figures[name] = structs.replace(figures[name], prediction=prediction)
        if prediction.speedup and method_tree == tree and tree.plan.speedup_by_kind:
            kinds_decoded = list(kinds or [None] * len(prompts))[: len(runs[name])]
            figures[name] = predicted_by_kind(
                figures[name], tree.plan, kinds_decoded, runs[name], runs.get("plain")
            )
    num_prompts = len(next(iter(runs.values())))
    dtype = dtype_name(pair.target.dtype)
    return BenchResult(
        settings=BenchSettings(sampling.settings(), dtype, num_prompts, tokens),
        models=models,
        hardware=hardware,
        methods=figures,
        tree=TreeShape(tree.size, tree.depth, tuple(tree.level_widths.tolist())),
    )


def predicted_by_kind(
    result: MethodResult,
    plan: Plan,
    kinds: Sequence[str | None],
    runs: Sequence[PromptRun],
    plain_runs: Sequence[PromptRun] | None,
) -> MethodResult:
    """A method's result with what the plan predicts for exactly these prompts, and kind by kind."""
    mixture = result.prediction or Prediction()
    by_kind = {}

    def median_speedup(kinds: Sequence[str | None]) -> float:
        """The predicted speed-up of prompts of these kinds."""
        speedups = [
            plan.text_speedups.get(kind or "")
            or (plan.speedup_by_kind.get(kind or "", mixture.speedup or 0.0),)
            for kind in kinds
        ]
        return _median_of_mixture(speedups)

    for kind in dict.fromkeys(kinds):
        if kind not in plan.speedup_by_kind:
            continue
        chosen = [i for i, other in enumerate(kinds) if other == kind]
        kind_runs = [runs[i] for i in chosen]
        by_kind[kind] = KindResult(
            prompts=len(chosen),
            tokens_per_step=_tokens_per_step(kind_runs),
            speedup=_speedup(kind_runs, [plain_runs[i] for i in chosen]) if plain_runs else None,
            prediction=Prediction(plan.tokens_by_kind.get(kind), median_speedup([kind])),
        )
    prediction = structs.replace(mixture, prompts_as_mixture=len(kinds))
    if by_kind:  # the mixture's intervals do not hold for these prompts
        tokens = mixture.tokens_per_step
        if tokens and plan.tokens_by_kind:
            step_tokens = [plan.tokens_by_kind.get(kind or "", tokens) for kind in kinds]
            new_tokens = np.array([run.tokens for run in runs])
            tokens = float(new_tokens.sum() / (new_tokens / step_tokens).sum())
        prediction = Prediction(
            tokens,
            median_speedup(kinds),
            prompts_as_mixture=sum(kind not in by_kind for kind in kinds),
        )
    return structs.replace(result, prediction=prediction, by_kind=by_kind)


def _median_of_mixture(groups: Sequence[Sequence[float]]) -> float:
    """The median of a number of a random group; the mean of the two medians if there are two."""
    values = np.concatenate([np.asarray(group, float) for group in groups])
    weights = np.concatenate([np.full(len(group), 1 / len(group)) for group in groups])
    low = np.quantile(values, 0.5, method="inverted_cdf", weights=weights)
    high = -np.quantile(-values, 0.5, method="inverted_cdf", weights=weights)
    return float(low + high) / 2


def sequoia_method(
    pair: Pair, tree: TokenTree, sampling: Sampling, tokens: int, **options: Any
) -> DecodePrompt:
    """Our decoder with `tree`, as a method of decoding."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, **options)

    def decode(prompt: list[int], seed: int) -> PromptRun:
        """Decode one prompt (token ids), and time it."""
        watch = _Stopwatch(len(prompt))
        result = decoder.generate(
            prompt,
            tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=pair.end_tokens,
            streamer=watch,
        )
        return watch.stop(result.new_tokens, result.steps)

    return decode


def transformers_method(
    pair: Pair, sampling: Sampling, tokens: int, *, counts_passes: bool = True, **options: Any
) -> DecodePrompt:
    """transformers' own `generate`, as a method of decoding."""
    target = pair.target
    # prompt lookup in transformers 5.10 needs an end token: this one is in no text
    end_tokens = pair.end_tokens or [vocabulary_size(target)]
    options |= sampling.for_transformers() | {
        "max_new_tokens": tokens,
        "eos_token_id": end_tokens,
        "pad_token_id": end_tokens[0],
    }

    def decode(prompt: list[int], seed: int) -> PromptRun:
        """Decode one prompt (token ids), and time it."""
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=target.device)
        passes: list[int] = []
        hook = None
        if counts_passes:
            hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
        watch = _Stopwatch(len(prompt))
        try:
            mask = torch.ones_like(ids)
            sequences = target.generate(ids, attention_mask=mask, streamer=watch, **options)
            new_tokens = sequences.shape[1] - len(prompt)
            return watch.stop(new_tokens, len(passes) if counts_passes else None)
        finally:
            if hook:
                hook.remove()

    return decode


def with_full_vocabulary(draft: Any) -> Any:
    """A draft as other decoders expect it, with logits for the target's whole vocabulary.

    Tokens that the draft's own vocabulary lacks get -inf. A draft that lacks none is returned as it
    is.
    """
    d2t = getattr(draft, "d2t", None)  # the target's token for each of the draft's tokens
    if d2t is None:
        return draft
    twin = copy.copy(draft)  # the same weights with another head
    twin._modules = dict(draft._modules)
    twin.lm_head = _FullVocabularyHead(draft.lm_head, d2t, draft.config.vocab_size)
    return twin


class _FullVocabularyHead(nn.Module):
    """A head with a draft's logits for the target's whole vocabulary; -inf for tokens it lacks.

    `head` [..., draft vocabulary]; `d2t` int64 [draft vocabulary].
    """

    def __init__(self, head: nn.Module, d2t: Tensor, vocabulary: int) -> None:
        super().__init__()
        self.head, self.d2t, self.vocabulary = head, d2t, vocabulary

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., width]."""
        logits = self.head(hidden_states)
        full = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        return full.index_copy_(-1, self.d2t, logits)


def bench(
    methods: Mapping[str, DecodePrompt],
    prompts: Sequence[list[int]],
    on_prompt: Callable[[int], None] = lambda done: None,
    deadline: float = math.inf,
    journal: Journal | None = None,
) -> dict[str, list[PromptRun]]:
    """Decode every prompt once with every method.

    All methods decode a prompt before the next prompt begins, so drift of the machine's speed hits
    all alike. Each prompt starts with another method.
    """
    if not methods or not prompts:
        raise ArgumentError(
            f"bench: {len(methods)} methods and {len(prompts)} prompts, expected at least one of "
            "each"
        )
    for decode in methods.values():
        decode(prompts[0], 0)  # warms up
    results = journal or Journal(None, None)
    runs: dict[str, list[PromptRun]] = {name: [] for name in methods}
    for number, prompt in enumerate(prompts):
        if number and time.perf_counter() > deadline:
            break
        first = number % len(methods)
        order = [*methods][first:] + [*methods][:first]

        def run_methods(
            names: list[str] = order, prompt: list[int] = prompt, seed: int = number
        ) -> dict[str, Any]:
            """The run of each method as a dict; the defaults bind the loop's values."""
            return {name: asdict(methods[name](prompt, seed)) for name in names}

        run_of_method = results.get(str(number), run_methods)
        for name in methods:
            runs[name].append(PromptRun(**run_of_method[name]))
        on_prompt(number + 1)
    return runs


def summary(
    runs: Mapping[str, list[PromptRun]],
    over: Sequence[str] = ("plain", "generate", "assisted", "sequoia", "traversal"),
) -> dict[str, MethodResult]:
    """Each method's figures, and its speed-up over each method of `over` that took part."""
    results = {}
    for name, method_runs in runs.items():
        tokens_per_second = [run.tokens / run.seconds for run in method_runs]
        first_seconds = [run.first_seconds for run in method_runs]
        steady = tuple(round(_steady_tokens_per_second(run), 3) for run in method_runs)
        results[name] = MethodResult(
            title=TITLES.get(name, name),
            tokens_per_second=Spread(*_median_and_quartiles(tokens_per_second)),
            first_token_seconds=Spread(*_median_and_quartiles(first_seconds)),
            tokens_per_step=_tokens_per_step(method_runs),
            tokens_per_second_by_prompt=steady,
            speedup={
                baseline: _speedup(method_runs, runs[baseline])
                for baseline in over
                if baseline in runs
            },
        )
    return results


def _tokens_per_step(runs: Sequence[PromptRun]) -> float | None:
    """New tokens a pass of the target, over all prompts; None if passes were not counted."""
    passes = [run.passes for run in runs]
    if None in passes:
        return None
    return round(sum(run.tokens for run in runs) / sum(filter(None, passes)), 4)


def _speedup(runs: Sequence[PromptRun], baseline_runs: Sequence[PromptRun]) -> Ratio:
    """The speed-up of one method over another on the same prompts, with its spread and interval.

    The ratios of all prompts give the median and the quartiles; bootstrap resamples of the prompts
    give the 95 % interval of the median.
    """
    ratios = np.array(
        [
            _steady_tokens_per_second(run) / _steady_tokens_per_second(baseline_run)
            for run, baseline_run in zip(runs, baseline_runs, strict=True)
        ]
    )
    resampled = np.random.default_rng(0).choice(ratios, (RESAMPLES, ratios.size))
    low, high = np.quantile(np.median(resampled, 1), [0.025, 0.975])
    return Ratio(*_median_and_quartiles(ratios), round(float(low), 4), round(float(high), 4))


def _steady_tokens_per_second(run: PromptRun) -> float:
    """Tokens/s after the first tokens came; tokens/s of the whole run if no others followed."""
    if run.tokens > run.first_tokens:
        return (run.tokens - run.first_tokens) / (run.seconds - run.first_seconds)
    return run.tokens / run.seconds


def _median_and_quartiles(numbers: Any) -> tuple[float, float, float]:
    """The median, the first and the third quartile, to four digits."""
    quantiles = np.quantile(np.asarray(numbers, float), [0.5, 0.25, 0.75])
    median, low, high = (round(float(quantile), 4) for quantile in quantiles)
    return median, low, high
