"""Contenders side by side: the same prompts, the same models, prompt by prompt in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder

PLAIN = "plain decoding"
HUGGING_FACE = "Hugging Face generate"
ASSISTED = "Hugging Face assisted"
LOOKUP = "Hugging Face prompt lookup"
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


def ours(pair: Pair, tree: TokenTree, sampling: Sampling, tokens: int, verifier: str) -> Decode:
    """Our decoder with `tree`."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, verifier=verifier)

    def decode(prompt: list[int], seed: int) -> Run:
        watch = _Stopwatch(len(prompt))
        result = decoder.generate(prompt, tokens, sampling=sampling, seed=seed, eos_token_id=pair.tokenizer.eos_token_id, streamer=watch)
        return watch.run(result.new_tokens, result.steps)

    return decode


def hugging_face(target: Any, tokenizer: Any, sampling: Sampling, tokens: int, draft: Any = None, lookup: int | None = None) -> Decode:
    """transformers' own `generate` with the target as transformers loads it.

    Args:
        draft: decodes with this assistant model; one that covers part of the vocabulary gets a full-width head.
        lookup: decodes with prompt lookup of so many tokens.
    """
    options = sampling.for_transformers() | {"max_new_tokens": tokens, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    if draft is not None:
        options["assistant_model"] = full_width(draft)
    if lookup is not None:
        options["prompt_lookup_num_tokens"] = lookup
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    target.register_forward_pre_hook(count)

    def decode(prompt: list[int], seed: int) -> Run:
        nonlocal passes
        torch.manual_seed(seed)
        passes = 0
        ids = torch.tensor([prompt], device=target.device)
        watch = _Stopwatch(len(prompt))
        made = target.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **options).shape[1] - len(prompt)
        return watch.run(made, passes)

    return decode


def full_width(draft: Any) -> Any:
    """A draft as other decoders expect it: logits for the target's whole vocabulary, -inf for tokens it does not cover."""
    covered = getattr(draft, "covered_tokens", None)
    if covered is not None:
        draft.lm_head = _FullWidth(draft.lm_head, covered, draft.config.vocab_size)
    return draft


class _FullWidth(nn.Module):
    def __init__(self, head: nn.Module, covered: Tensor, vocabulary: int) -> None:
        super().__init__()
        self.head, self.covered, self.vocabulary = head, covered, vocabulary

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf).index_copy_(-1, self.covered, logits)


def bench(
    contenders: Mapping[str, Decode], prompts: Sequence[list[int]], on_prompt: Callable[[int], None] = lambda done: None
) -> dict[str, list[Run]]:
    """Every contender decodes every prompt once, interleaved: who goes first changes from prompt to prompt."""
    for decode in contenders.values():
        decode(prompts[0], 0)  # warm
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for seed, prompt in enumerate(prompts):
        turn = seed % len(contenders)
        for name in [*contenders][turn:] + [*contenders][:turn]:
            runs[name].append(contenders[name](prompt, seed))
        on_prompt(seed + 1)
    return runs


def summary(runs: Mapping[str, list[Run]], over: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Each contender's figures, and its speed-up over each of `over`.

    tokens_per_second and first_token_seconds: median over prompts with quartiles. tokens_per_step: new tokens over the
    target's passes. speedup: tokens/s after the first tokens, ratios taken prompt by prompt so that drift cancels, the median
    with quartiles and with its 95 % bootstrap interval over prompts.
    """
    return {
        name: {
            "tokens_per_second": _spread([run.tokens / run.seconds for run in mine]),
            "first_token_seconds": _spread([run.first_seconds for run in mine]),
            "tokens_per_step": _per_step(mine),
            "speedup": {other: _ratios(mine, runs[other]) for other in over if other in runs},
        }
        for name, mine in runs.items()
    }


def _per_step(runs: Sequence[Run]) -> float | None:
    passes = [run.passes for run in runs]
    return None if None in passes else round(sum(run.tokens for run in runs) / sum(filter(None, passes)), 4)


def _ratios(mine: Sequence[Run], theirs: Sequence[Run]) -> dict[str, float]:
    ratios = np.array([_steady(a) / _steady(b) for a, b in zip(mine, theirs, strict=True)])
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, ratios.size))
    low, high = np.quantile(np.median(draws, 1), [0.025, 0.975])
    return _spread(ratios) | {"interval_low": round(float(low), 4), "interval_high": round(float(high), 4)}


def _steady(run: Run) -> float:
    """Tokens/s once the prompt is read; of all of it if it ended at once."""
    if run.tokens > run.first_tokens:
        return (run.tokens - run.first_tokens) / (run.seconds - run.first_seconds)
    return run.tokens / run.seconds


def _spread(numbers: Any) -> dict[str, float]:
    low, middle, high = np.quantile(np.asarray(numbers, float), [0.25, 0.5, 0.75])
    return {"median": round(float(middle), 4), "low": round(float(low), 4), "high": round(float(high), 4)}
