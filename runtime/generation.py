"""What goes into a generation and what comes out: prompts, endings, results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError

Criterion = Callable[..., Any]


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Args:
        sequences: int64 [1, prompt + new], as transformers' generate returns.
        new_tokens: tokens added.
        steps: target passes that made them.
        seconds: wall time, the prompt's prefill included.
        finish_reason: "eos", "stop" (a stop string or stopping criterion), "length", or "context" when the model's context is full.
        text: the new tokens as text, special tokens left out; None if the decoder has no tokenizer.
    """

    sequences: Tensor
    new_tokens: int
    steps: int
    seconds: float
    finish_reason: str
    text: str | None = None

    @property
    def tokens_per_step(self) -> float:
        """New tokens for each pass of the target."""
        return self.new_tokens / max(self.steps, 1)


class Ending:
    """Where a generation ends: at an end-of-sequence token, at a stopping criterion, or when nothing more may or can be added.

    Args:
        sequence: the prompt's tokens.
        most: tokens that may be added.
        room: tokens that fit the context.
        criteria: transformers' stopping criteria, asked about every token in turn: a step may add several.
    """

    def __init__(self, sequence: Sequence[int], most: int, room: int, eos: set[int], criteria: Sequence[Criterion]) -> None:
        self.sequence, self.eos, self.criteria = list(sequence), eos, criteria
        self.last, self.reason = len(sequence) + min(most, room), "length" if most <= room else "context"

    def take(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """As many of a step's `tokens` as belong to the text, and why it ends; "" if it goes on."""
        for count, token in enumerate(tokens, 1):
            self.sequence.append(token)
            reason = self._reason(token)
            if reason:
                return list(tokens[:count]), reason
        return list(tokens), ""

    def _reason(self, token: int) -> str:
        if token in self.eos:
            return "eos"
        if self.criteria:
            so_far = torch.tensor([self.sequence])
            if any(bool(torch.as_tensor(criterion(so_far, None)).all()) for criterion in self.criteria):
                return "stop"
        return self.reason if len(self.sequence) >= self.last else ""


def end_tokens(given: int | Iterable[int] | None, model: Any, tokenizer: Any = None) -> set[int]:
    """The tokens that end a text: as given, else those of the model's generation config, else the tokenizer's."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None) if given is None else given
    found = getattr(tokenizer, "eos_token_id", None) if found is None else found
    return set() if found is None else set(torch.as_tensor([found] if isinstance(found, int) else found).flatten().tolist())


def read_prompt(prompt: Any, tokenizer: Any, attention_mask: Tensor | None = None) -> Tensor:
    """int64 [n] from text, token ids [n] or [1, n], or what a tokenizer returns.

    Raises:
        SequoiaPlanError: for a batch, padding, an empty prompt, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ArgumentError("prompt: text, but the decoder has no tokenizer; give it one (SequoiaDecoder(..., tokenizer=...)) or token ids")
        prompt = tokenizer(prompt)["input_ids"]
    elif hasattr(prompt, "keys"):
        attention_mask, prompt = prompt.get("attention_mask"), prompt["input_ids"]
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], (str, list, tuple, Tensor)) and len(prompt) > 1:
        raise SequoiaPlanError(f"input_ids: {len(prompt)} prompts, expected one sequence; generate_each takes several, one after the other")
    ids = torch.as_tensor(prompt, dtype=torch.long)
    if ids.ndim > 1 and ids.shape[0] != 1:
        raise SequoiaPlanError(f"input_ids: a batch of {ids.shape[0]}, expected one sequence; generate_each takes several, one after the other")
    if ids.numel() == 0:
        raise SequoiaPlanError("prompt: empty, expected at least one token")
    if attention_mask is not None and not bool(torch.as_tensor(attention_mask).all()):
        raise SequoiaPlanError("attention_mask: hides tokens of the prompt, expected none hidden; leave padding out")
    return ids.reshape(-1)


def stop_criteria(stop_strings: str | Sequence[str] | None, tokenizer: Any) -> list[Criterion]:
    """transformers' own criterion for stop strings, which sees them wherever tokens split them.

    Raises:
        ArgumentError: without a tokenizer, for an empty string, or for one the tokenizer's tokens cannot spell.
    """
    if not stop_strings:
        return []
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if tokenizer is None:
        raise ArgumentError("stop_strings: the decoder has no tokenizer to read text with; give it one: SequoiaDecoder(..., tokenizer=...)")
    if not all(strings):
        raise ArgumentError("stop_strings: found an empty string, expected text")
    from transformers.generation.stopping_criteria import StopStringCriteria

    try:
        return [StopStringCriteria(tokenizer, strings)]
    except ValueError as error:  # a string that no tokens can spell
        raise ArgumentError(f"stop_strings: {error}") from error
