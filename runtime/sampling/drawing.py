"""From probabilities to tokens: how a node's children are drawn, and draws by inversion.

The random numbers come in as a tensor (`bits`, 31 random bits each), so that drawing is a function
of tensors and can be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from sequoia_plan.models.base.kernel_launch import HAS_NUMBA, launch

KERNELS = "runtime.sampling.drawing_kernels"
BLOCK, WARPS = 4096, 16
"""Tokens that a kernel's program reads at once, and its warps."""
LAUNCH = {"num_warps": WARPS, "maxnreg": 65536 // (32 * WARPS)}
"""How such kernels are compiled. A program may take all registers of a multiprocessor: the compiler
would keep numbers in memory instead, so that several programs fit in."""


def loops_for(rows: Tensor) -> ModuleType | None:
    """The compiled loops (a module) if `rows` are a CPU's float32 and numba is there, else None."""
    if not HAS_NUMBA or rows.device.type != "cpu" or rows.dtype != torch.float32:
        return None
    return importlib.import_module("sequoia_plan.runtime.compiled.vocabulary_loops")


@dataclass(frozen=True)
class Drawing:
    """A way to draw a node's children, and the random numbers that it takes.

    `draw` maps probabilities [nodes, vocabulary], a count and random numbers int32 [nodes, numbers]
    to tokens int64 [nodes, count]. A node takes so many random numbers for each token of the
    vocabulary, and for each child. `on_cpu` draws from the same distribution, faster on a CPU.
    """

    draw: Callable[[Tensor, int, Tensor], Tensor]
    bits_per_token: int = 0
    bits_per_child: int = 0
    on_cpu: Drawing | None = None

    def on(self, device: torch.device) -> Drawing:
        """What draws on a device: this, or its variant for a CPU."""
        return self.on_cpu if self.on_cpu and device.type == "cpu" else self

    def columns(self, vocabulary: int, count: int) -> int:
        """How many random numbers drawing `count` children of one node takes."""
        return self.bits_per_token * vocabulary + self.bits_per_child * count

    def __call__(self, probs: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Generate the random numbers, then draw: int64 [nodes, count]."""
        drawing = self.on(probs.device)
        shape = (probs.shape[0], drawing.columns(probs.shape[1], count))
        bits = torch.empty(shape, dtype=torch.int32, device=probs.device)
        return drawing.draw(probs, count, bits.random_(generator=generator))


def without_replacement(probs: Tensor, count: int, bits: Tensor) -> Tensor:
    """int64 [nodes, count]: distinct tokens in draw order, from probs float32 [nodes, vocabulary].

    An exponential race: each token takes an exponential time, of its probability as the rate, and
    the first ones are drawn. It has the distribution of Gumbel top-k (Kool et al., arXiv
    1903.06059). Where fewer than `count` tokens have a probability, the rest are drawn uniformly
    from the others. `bits` int32 [nodes, vocabulary].
    """
    # (bits + 0.5) / 2^31 is uniform in (0, 1), so the times are exponential with rate 1; log1p
    # keeps the smallest ones exact, which win
    minus_times = bits.float().add_(0.5).mul_(-(2.0**-31)).log1p_()
    # tokens of probability 0 come last
    return torch.where(probs > 0, -probs / minus_times, minus_times).topk(count, -1).indices


def in_turn(probs: Tensor, count: int, bits: Tensor) -> Tensor:
    """int64 [nodes, count]: as `without_replacement`, one token after the other by inversion.

    `bits` int32 [nodes, 2 * count].
    """
    uniforms = _uniforms(bits, count)
    if loops := loops_for(probs):
        tokens = torch.empty(len(probs), count, dtype=torch.long)
        loops.draw_in_turn(probs.contiguous().numpy(), uniforms.numpy(), tokens.numpy())
        return tokens
    return in_turn_by_tensors(probs, uniforms)


def in_turn_by_tensors(probs: Tensor, uniforms: Tensor) -> Tensor:
    """`in_turn` by tensor operations, from `uniforms` float64 [nodes, count] in [0, 1)."""
    probs_left, is_left = probs.double(), torch.ones_like(probs, dtype=torch.float64)
    tokens = []
    for uniform in uniforms.split(1, 1):
        has_mass = probs_left.sum(-1, keepdim=True) > 0
        tokens.append(draw_tokens(probs_left.where(has_mass, is_left), uniform))
        probs_left = probs_left.scatter(1, tokens[-1], 0.0)
        is_left = is_left.scatter(1, tokens[-1], 0.0)
    return torch.cat(tokens, 1)


def independent(probs: Tensor, count: int, bits: Tensor) -> Tensor:
    """int64 [nodes, count]: tokens drawn with replacement from probs float [nodes, vocabulary].

    `bits` int32 [nodes, 2 * count].
    """
    return draw_tokens(probs, _uniforms(bits, count))


def _uniforms(bits: Tensor, count: int) -> Tensor:
    """float64 [nodes, count] in [0, 1), with all 53 bits: two random numbers make one."""
    high, low = bits[:, : 2 * count].double().chunk(2, -1)
    return (high + low / 2**31) / 2**31


def most_probable(scores: Tensor, count: int, bits: Tensor | None = None) -> Tensor:
    """int64 [nodes, count]: the top tokens in order, from probs or logits; it needs no `bits`."""
    loops = loops_for(scores)
    if loops and count:
        tokens = torch.empty(len(scores), count, dtype=torch.long)
        loops.top_tokens(scores.contiguous().numpy(), tokens.numpy())
        return tokens
    return scores.topk(count, -1).indices


IN_TURN = Drawing(in_turn, bits_per_child=2)
WITHOUT_REPLACEMENT = Drawing(without_replacement, bits_per_token=1, on_cpu=IN_TURN)
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
    """softmax(logits / temperature) and `without_replacement` from it, by Triton kernels.

    `logits` [nodes, vocabulary]; `bits` int32 [nodes, vocabulary]. Returns the probabilities,
    float32 [nodes, vocabulary], and the tokens, int64 [nodes, count].
    """
    nodes, vocabulary = logits.shape
    grid = (nodes, -(-vocabulary // block))
    logits, max_logits = logits.contiguous(), logits.amax(-1).float()
    totals = max_logits.new_empty(grid)
    probs, best_keys = max_logits.new_empty(nodes, vocabulary), max_logits.new_empty(*grid, count)
    best_tokens = torch.empty_like(best_keys, dtype=torch.int64)
    launch(
        f"{KERNELS}.race_totals", grid, logits, max_logits, totals, vocabulary, temperature,
        BLOCK=block, **LAUNCH,
    )  # fmt: skip
    launch(
        f"{KERNELS}.race", grid, logits, max_logits, totals.sum(-1), bits, probs, best_keys,
        best_tokens, vocabulary, count, temperature, BLOCK=block, **LAUNCH,
    )  # fmt: skip
    return probs, best_tokens.flatten(1).gather(1, best_keys.flatten(1).topk(count, -1).indices)
