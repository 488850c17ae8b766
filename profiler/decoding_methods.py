"""Methods of decoding, ours and transformers', each as a function of a prompt that is timed."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Pair, Sampling, SequoiaDecoder
from sequoia_plan.runtime.sampling.sampling import not_followed


@dataclass(frozen=True)
class PromptRun:
    """One prompt decoded once: new tokens, passes of the target, and times from the start."""

    tokens: int
    passes: int
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

    def stop(self, tokens: int, passes: int) -> PromptRun:
        """The figures of the run that ends now."""
        seconds = time.perf_counter() - self.started
        return PromptRun(tokens, passes, seconds, self.first_tokens, self.first_seconds)


def sequoia_method(
    pair: Pair, tree: TokenTree, sampling: Sampling, tokens: int, **options: Any
) -> DecodePrompt:
    """Our decoder with `tree`."""
    decoder = SequoiaDecoder(pair.target, pair.draft, tree, **options)

    def decode(prompt: list[int], seed: int) -> PromptRun:
        watch = _Stopwatch(len(prompt))
        result = decoder.generate(
            prompt,
            tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=pair.end_tokens,
            streamer=watch,
            timed=True,
        )
        return watch.stop(result.new_tokens, result.steps)

    return decode


def transformers_method(
    pair: Pair, sampling: Sampling, tokens: int, **options: Any
) -> DecodePrompt:
    """transformers' own `generate`, with further `options`."""
    target = pair.target.module
    # prompt lookup needs an end token: this one is in no text
    end_tokens = pair.end_tokens or [pair.target.vocabulary]
    options = (
        not_followed(target.generation_config)
        | options
        | sampling.for_transformers()
        | {"max_new_tokens": tokens, "eos_token_id": end_tokens, "pad_token_id": end_tokens[0]}
    )

    def decode(prompt: list[int], seed: int) -> PromptRun:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=target.device)
        passes: list[int] = []
        hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
        watch = _Stopwatch(len(prompt))
        try:
            mask = torch.ones_like(ids)
            sequences = target.generate(ids, attention_mask=mask, streamer=watch, **options)
            return watch.stop(sequences.shape[1] - len(prompt), len(passes))
        finally:
            hook.remove()

    return decode


def with_full_vocabulary(draft: Any) -> Any:
    """A draft as other decoders expect it, with logits for the target's whole vocabulary."""
    d2t = getattr(draft, "d2t", None)  # the target's token for each of the draft's tokens
    if d2t is None:
        return draft
    modules = {name: module for name, module in draft._modules.items() if name != "lm_head"}
    twin = copy.copy(draft)  # the same weights with another head
    twin._modules = modules

    def logits_of_all_tokens(hidden_states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., width]; -inf for tokens it lacks."""
        logits = draft.lm_head(hidden_states)
        full = logits.new_full((*logits.shape[:-1], draft.config.vocab_size), -torch.inf)
        return full.index_copy_(-1, d2t, logits)

    twin.lm_head = logits_of_all_tokens
    return twin
