"""From probabilities to tokens: how a node's children are drawn, and draws by inversion.

The random numbers come in as a tensor (`bits`, 31 random bits each), so that drawing is a function
of tensors and can be captured in a CUDA graph.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK, WARPS = 4096, 16
"""Tokens that a kernel's program reads at once, and its warps."""
LAUNCH = {"num_warps": WARPS, "maxnreg": 65536 // (32 * WARPS)}
"""How such kernels are compiled. A program may take all registers of a multiprocessor: the compiler
would keep numbers in memory instead, so that several programs fit in."""


@dataclass(frozen=True)
class Drawing:
    """A way to draw a node's children, and the random numbers that it takes."""

    draw: Callable[[Tensor, int, Tensor], Tensor]
    bits_per_token: int = 0
    bits_per_child: int = 0

    def columns(self, vocabulary: int, count: int) -> int:
        """How many random numbers drawing `count` children of one node takes."""
        return self.bits_per_token * vocabulary + self.bits_per_child * count

    def __call__(self, probs: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Generate the random numbers, then draw."""
        shape = (probs.shape[0], self.columns(probs.shape[1], count))
        bits = torch.empty(shape, dtype=torch.int32, device=probs.device)
        return self.draw(probs, count, bits.random_(generator=generator))


def without_replacement(probs: Tensor, count: int, bits: Tensor) -> Tensor:
    """int64 [nodes, count]: distinct tokens in draw order, from probs float32 [nodes, vocabulary].

    An exponential race: the same distribution as Gumbel top-k (Kool et al., arXiv 1903.06059).
    Where fewer than `count` tokens have a probability, the rest are drawn uniformly from the
    others. `bits` int32 [nodes, vocabulary].
    """
    # (bits + 0.5) / 2^31 is uniform in (0, 1), so the times are exponential with rate 1; log1p
    # keeps the smallest ones exact, which win
    minus_times = bits.float().add_(0.5).mul_(-(2.0**-31)).log1p_()
    # tokens of probability 0 come last
    keys = torch.where(probs > 0, -probs / minus_times, minus_times)
    return keys.topk(count, -1).indices


def independent(probs: Tensor, count: int, bits: Tensor) -> Tensor:
    """int64 [nodes, count]: tokens drawn with replacement from probs float [nodes, vocabulary].

    `bits` int32 [nodes, 2 * count].
    """
    # two numbers make a uniform in [0, 1) with all 53 bits of a float64
    high, low = bits[:, : 2 * count].double().chunk(2, -1)
    return draw_tokens(probs, (high + low / 2**31) / 2**31)


def most_probable(scores: Tensor, count: int, bits: Tensor | None = None) -> Tensor:
    """int64 [nodes, count]: the top tokens in order, from probs or logits [nodes, vocabulary].

    It needs no random `bits`.
    """
    return scores.topk(count, -1).indices


WITHOUT_REPLACEMENT = Drawing(without_replacement, bits_per_token=1)
INDEPENDENT = Drawing(independent, bits_per_child=2)
MOST_PROBABLE = Drawing(most_probable)

DRAWING_OF_VERIFIER = {
    "sequoia": WITHOUT_REPLACEMENT,
    "traversal": WITHOUT_REPLACEMENT,
    "specinfer": INDEPENDENT,
    "spectr": INDEPENDENT,
    "topk": MOST_PROBABLE,
}
"""The way of drawing that each verifier is exact for; the package `verify` has the verifiers."""


def draw_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [..., k]: tokens from probs [..., vocabulary], not necessarily normalised.

    Inverts the cumulative probabilities at `uniforms` [..., k] in [0, 1). A token of probability 0
    is never drawn.
    """
    cumulative = probs.double().cumsum(-1)
    total = cumulative[..., -1:].contiguous()
    tokens = torch.searchsorted(cumulative, uniforms.double() * total, right=True)
    # rounding may give `uniform * total == total`: the last token with a probability counts then.
    # With NaN there is no such token: any index will do, because the step reports the NaN.
    last = torch.searchsorted(cumulative, total).clamp(max=cumulative.shape[-1] - 1)
    return torch.minimum(tokens, last)


def race_on_device(
    logits: Tensor, temperature: float, count: int, bits: Tensor, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """softmax(logits / temperature) and `without_replacement` from it, by kernels.

    `logits` [nodes, vocabulary]; `bits` int32 [nodes, vocabulary]; returns float32 [nodes,
    vocabulary].
    """
    kernels = importlib.import_module("sequoia_plan.runtime.base.drawing_kernels")
    nodes, vocabulary = logits.shape
    grid = (nodes, -(-vocabulary // block))
    logits, max_logits = logits.contiguous(), logits.amax(-1).float()
    totals = max_logits.new_empty(grid)
    probs, best_keys = max_logits.new_empty(nodes, vocabulary), max_logits.new_empty(*grid, count)
    best_tokens = torch.empty_like(best_keys, dtype=torch.int64)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        kernels.race_totals[grid](
            logits, max_logits, totals, vocabulary, temperature, BLOCK=block, **LAUNCH
        )
        kernels.race[grid](
            logits, max_logits, totals.sum(-1), bits, probs, best_keys, best_tokens, vocabulary,
            count, temperature, BLOCK=block, **LAUNCH,
        )  # fmt: skip
    winners = best_keys.flatten(1).topk(count, -1).indices
    return probs, best_tokens.flatten(1).gather(1, winners)
