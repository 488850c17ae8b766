"""From probabilities to tokens: how the children of a node are drawn, and single draws by inversion."""

from __future__ import annotations

import torch
from torch import Tensor


def without_replacement(probabilities: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """int64 [nodes, count]: distinct tokens in draw order, from probabilities float32 [nodes, vocabulary].

    An exponential race, the same law as Gumbel top-k (Kool et al., arXiv 1903.06059). Where fewer than `count` tokens
    have a probability, the rest are drawn uniformly from the others.
    """
    bits = torch.empty(probabilities.shape, dtype=torch.int32, device=probabilities.device).random_(generator=generator)
    times = -torch.log1p(-(bits.float() + 0.5) / 2**31)  # 31 random bits: the smallest times, which win, stay fine-grained
    keys = torch.where(probabilities > 0, probabilities / times, -times)  # no token of probability 0 beats one that has some
    return keys.topk(count, -1).indices


def independent(probabilities: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """int64 [nodes, count]: tokens drawn with replacement from probabilities float [nodes, vocabulary]."""
    shape = (*probabilities.shape[:-1], count)
    return draw(probabilities, torch.rand(shape, dtype=torch.float64, device=probabilities.device, generator=generator))


def most_probable(scores: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """int64 [nodes, count]: the top tokens in order, from probabilities or logits [nodes, vocabulary]."""
    return scores.topk(count, -1).indices


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [..., k]: tokens from probabilities [..., vocabulary], which need not be normalised, by inverting the law at
    uniforms [..., k] in [0, 1). A token of probability 0 is never drawn."""
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[..., -1:].contiguous()
    tokens = torch.searchsorted(cumulative, uniforms.double() * total, right=True)
    # rounding may leave `uniform * total` at the very end: the last token that has a probability
    return torch.minimum(tokens, torch.searchsorted(cumulative, total))
