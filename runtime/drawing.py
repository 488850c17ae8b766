"""From probabilities to tokens: how the children of a node are drawn, and single draws by inversion.

Randomness comes in as numbers drawn beforehand (`bits`, 31 random bits each), so that drawing is a function of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drawing:
    """A way to draw a node's children.

    Args:
        draw: (probabilities float [nodes, vocabulary], count, bits) -> int64 [nodes, count].
        columns: (vocabulary, count) -> how many random numbers a node needs: bits is int32 [nodes, columns].
    """

    draw: Callable[[Tensor, int, Tensor], Tensor]
    columns: Callable[[int, int], int]

    def __call__(self, probabilities: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Make the random numbers, then draw."""
        shape = (probabilities.shape[0], self.columns(probabilities.shape[1], count))
        return self.draw(probabilities, count, torch.empty(shape, dtype=torch.int32, device=probabilities.device).random_(generator=generator))


def without_replacement(probabilities: Tensor, count: int, bits: Tensor) -> Tensor:
    """int64 [nodes, count]: distinct tokens in draw order, from probabilities float32 [nodes, vocabulary].

    An exponential race, the same law as Gumbel top-k (Kool et al., arXiv 1903.06059). Where fewer than `count` tokens
    have a probability, the rest are drawn uniformly from the others.
    """
    times = -torch.log1p(-(bits.float() + 0.5) / 2**31)  # 31 random bits: the smallest times, which win, stay fine-grained
    keys = torch.where(probabilities > 0, probabilities / times, -times)  # no token of probability 0 beats one that has some
    return keys.topk(count, -1).indices


def independent(probabilities: Tensor, count: int, bits: Tensor) -> Tensor:
    """int64 [nodes, count]: tokens drawn with replacement from probabilities float [nodes, vocabulary]."""
    high, low = bits[:, : 2 * count].double().chunk(2, -1)  # two numbers make one uniform of 53 bits
    return draw(probabilities, (high + low / 2**31) / 2**31)


def most_probable(scores: Tensor, count: int, bits: Tensor | None = None) -> Tensor:
    """int64 [nodes, count]: the top tokens in order, from probabilities or logits [nodes, vocabulary]."""
    return scores.topk(count, -1).indices


WITHOUT_REPLACEMENT = Drawing(without_replacement, lambda vocabulary, count: vocabulary)
INDEPENDENT = Drawing(independent, lambda vocabulary, count: 2 * count)
MOST_PROBABLE = Drawing(most_probable, lambda vocabulary, count: 0)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [..., k]: tokens from probabilities [..., vocabulary], which need not be normalised, by inverting the law at
    uniforms [..., k] in [0, 1). A token of probability 0 is never drawn."""
    cumulative = probabilities.double().cumsum(-1)
    total = cumulative[..., -1:].contiguous()
    tokens = torch.searchsorted(cumulative, uniforms.double() * total, right=True)
    # rounding may leave `uniform * total` at the very end: the last token that has a probability
    last = torch.searchsorted(cumulative, total).clamp(max=cumulative.shape[-1] - 1)  # NaN finds no place: any index, and the step reports it
    return torch.minimum(tokens, last)
