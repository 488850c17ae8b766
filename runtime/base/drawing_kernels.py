"""Drawing without replacement as a Triton kernel; `drawing.without_replacement` is its oracle."""

from __future__ import annotations

import triton
import triton.language as tl

# fmt: off
LOWEST = tl.constexpr(-1e30)


@triton.jit
def race(logits, bits, probs, keys, vocabulary, temperature, BLOCK: tl.constexpr):
    """The draft's probabilities and the keys of their exponential races, one program a node.

    The tokens with the largest keys are drawn. A first loop over the vocabulary finds the largest
    logit and the sum of the exponentials, for each of BLOCK lanes; a second one writes the results.

    Args:
        logits: [nodes, vocabulary], the draft's.
        bits: int32 [nodes, vocabulary], random numbers of 31 bits.
        probs, keys: float32 [nodes, vocabulary], the results.
        temperature: divides the logits.
        BLOCK: tokens that the program reads at once.
    """
    row = tl.program_id(0).to(tl.int64) * vocabulary
    high, mass = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocabulary
        x = tl.load(logits + row + tokens, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(high, x)
        mass = mass * tl.exp((high - higher) / temperature) + tl.exp((x - higher) / temperature)
        high = higher
    highest = tl.max(high)
    total = tl.sum(mass * tl.exp((high - highest) / temperature))
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < vocabulary
        x = tl.load(logits + row + tokens, mask=inside, other=-float("inf")).to(tl.float32)
        q = tl.exp((x - highest) / temperature) / total
        number = tl.load(bits + row + tokens, mask=inside, other=0).to(tl.float32)
        time = -log1p(-(number + 0.5) / 2147483648.0)  # 2^31
        tl.store(probs + row + tokens, q, mask=inside)
        tl.store(keys + row + tokens, tl.where(q > 0, q / time, -time), mask=inside)


@triton.jit
def log1p(x):
    """log(1 + x), exact to the last bits also where x is small (Kahan)."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / (y - 1.0)))
