"""From logits to probabilities, and from probabilities to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError

OUTSIDE_SUPPORT = -250.0
"""Gumbel key of a token of probability 0: below every token float32 can give a probability to (log 1e-45 = -103)."""


@dataclass(frozen=True)
class Sampling:
    """How the target samples; the draft uses the same temperature and no filter.

    Args:
        temperature: 0 is greedy.
        top_p: nucleus of the target's distribution, after the temperature, as in transformers.

    Raises:
        ArgumentError: for a negative temperature or a top_p outside (0, 1].
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError(f"temperature: found {self.temperature}, expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ArgumentError(f"top_p: found {self.top_p}, expected more than 0 and at most 1")

    @classmethod
    def from_generation_config(cls, config: Any) -> Sampling:
        """The same sampling as transformers would do with `config` (a GenerationConfig)."""
        if not config.do_sample:
            return cls(0.0)
        if config.top_k:
            raise ArgumentError(f"top_k: found {config.top_k}, expected 0")
        return cls(1.0 if config.temperature is None else config.temperature, 1.0 if config.top_p is None else config.top_p)

    @property
    def greedy(self) -> bool:
        """Is the target's distribution a single token?"""
        return self.temperature == 0

    def target(self, logits: Tensor) -> Tensor:
        """float32 [nodes, vocabulary]: the target's probabilities."""
        probabilities = torch.softmax(logits.float() / self.temperature, -1)
        return probabilities if self.top_p == 1 else nucleus(probabilities, self.top_p)

    def draft(self, logits: Tensor) -> Tensor:
        """float32 [nodes, draft vocabulary]: what children are drawn from and verified against."""
        if self.greedy:
            return logits.float()  # only the order matters
        return torch.softmax(logits.float() / self.temperature, -1)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The smallest set of most probable tokens with mass >= top_p, renormalised (Holtzman et al., arXiv 1904.09751)."""
    ordered, index = probabilities.sort(dim=-1, descending=True)
    outside = ordered.cumsum(-1) - ordered >= top_p
    kept = torch.zeros_like(probabilities).scatter(-1, index, ordered.masked_fill(outside, 0.0))
    return kept / kept.sum(-1, keepdim=True)


def draw_without_replacement(probabilities: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """int64 [nodes, count]: distinct tokens in draw order, by Gumbel top-k (Kool et al., arXiv 1903.06059).

    Where fewer than `count` tokens have a probability, the rest are drawn uniformly from the others.
    """
    gumbel = -torch.empty_like(probabilities).exponential_(generator=generator).log()
    keys = torch.where(probabilities > 0, probabilities.log(), OUTSIDE_SUPPORT) + gumbel
    return keys.topk(count, -1).indices


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """int64 []: one token from probabilities [vocabulary], which need not be normalised, by inverting the law at `uniform`."""
    cumulative = probabilities.double().cumsum(-1)
    token = torch.searchsorted(cumulative, uniform.double() * cumulative[-1], right=True)
    # rounding may leave `uniform * total` at the very end: the last token that has a probability
    return torch.minimum(token, torch.searchsorted(cumulative, cumulative[-1]))
