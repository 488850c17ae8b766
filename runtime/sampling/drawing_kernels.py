"""Drawing without replacement as a Triton kernel; `drawing.without_replacement` is its oracle."""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def race_totals(logits, max_logits, totals, vocabulary, temperature, BLOCK: tl.constexpr):
    """Sums of exp((x - max_logit) / temperature). The programs are [nodes, blocks of tokens].

    `logits` [nodes, vocabulary]; `max_logits` float32 [nodes]; `totals` float32 [nodes, blocks].
    """
    node, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocabulary
    x = tl.load(logits + node * vocabulary + tokens, mask=inside, other=-float("inf"))
    weight = tl.exp((x.to(tl.float32) - tl.load(max_logits + node)) / temperature)
    tl.store(totals + node * tl.num_programs(1) + block, tl.sum(tl.where(inside, weight, 0.0)))


@triton.jit
def race(
    logits, max_logits, totals, bits, probs, best_keys, best_tokens, vocabulary, count,
    temperature, BLOCK: tl.constexpr,
):
    """The draft's probabilities, and who wins each block's part of an exponential race.

    The `count` tokens of a node with the largest keys are drawn; they are among the first `count`
    of their blocks. The programs are [nodes, blocks of tokens]. `totals` float32 [nodes]; `bits`
    int32 [nodes, vocabulary]; `probs` float32 [nodes, vocabulary]; `best_keys` float32 [nodes,
    blocks, count]; `best_tokens` int64 [nodes, blocks, count].
    """
    node, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside, row = tokens < vocabulary, node * vocabulary
    x = tl.load(logits + row + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    q = tl.exp((x - tl.load(max_logits + node)) / temperature) / tl.load(totals + node)
    number = tl.load(bits + row + tokens, mask=inside, other=0).to(tl.float32)
    time = -log1p(-(number + 0.5) / 2147483648.0)  # 2^31
    tl.store(probs + row + tokens, q, mask=inside)
    keys = tl.where(inside, tl.where(q > 0, q / time, -time), -float("inf"))
    first = (node * tl.num_programs(1) + block) * count
    for rank in range(0, count):
        best = tl.max(keys)
        token = tl.min(tl.where(keys == best, tokens, vocabulary - 1))
        tl.store(best_keys + first + rank, best)
        tl.store(best_tokens + first + rank, token.to(tl.int64))
        keys = tl.where(tokens == token, -float("inf"), keys)


@triton.jit
def log1p(x):
    """log(1 + x), exact to the last bits also where x is small (Kahan)."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / (y - 1.0)))
