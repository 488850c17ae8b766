"""Loops over a CPU's rows of logits and probabilities, which read each row as seldom as possible.

Each computes what tensor operations elsewhere do, which are its oracle: `Sampling.target_probs`,
`drawing.in_turn`, `drawing.most_probable` and `Residual`. Rows are float32, and contiguous.
"""

import math

import numpy as np
from numba import njit

COMPILED = {
    "cache": True,
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},  # NaN and infinity keep their meaning
}
EXP2 = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(8))
LOG2_E = np.float32(math.log2(math.e))
ZERO, HALF = np.float32(0), np.float32(0.5)
LOWEST = np.float32(-126)
"""Powers of 2 below count as 0."""
BLOCK = 512
"""Tokens whose sum, or largest number, is known when one among them is looked for."""
FEWER = np.float32(2.0**-10)
LARGEST = np.float32(np.inf)
MOST_TOKENS = 1024
"""More tokens are looked for in another way."""


@njit(inline="always", **COMPILED)
def _exp2(x):
    """2 ** x for x <= 0, to the last bits; a series around the next whole number."""
    # infinity times 0 is NaN
    within = x if x > LOWEST else LOWEST
    whole = np.floor(within + HALF)
    part = within - whole
    series = EXP2[7]
    for n in range(6, -1, -1):
        series = series * part + EXP2[n]
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return ZERO if x < LOWEST else series * power


@njit(**COMPILED)
def _softmax(logits, largest, lowest, temperature, probs):
    """softmax(logits / temperature) of the tokens whose logits are at least `lowest`."""
    if largest == -LARGEST:  # no token is possible
        probs[:] = np.nan
        return
    total, largest, lowest = ZERO, largest / temperature, lowest / temperature
    for token in range(logits.size):
        score = logits[token] / temperature
        weight = _exp2((score - largest) * LOG2_E)
        probs[token] = weight if not score < lowest else ZERO
        total += probs[token]
    factor = np.float32(1) / total
    for token in range(logits.size):
        probs[token] *= factor


@njit(**COMPILED)
def softmax(logits, largest, temperature, probs):
    """softmax(logits / temperature) into `probs`; `largest` [rows], the rows' largest logits."""
    for row in range(len(logits)):
        _softmax(logits[row], largest[row], -LARGEST, temperature, probs[row])


@njit(inline="always", **COMPILED)
def _in_order(bits):
    """Bits of floats as integers in the same order, and back; LLVM takes maxima of these faster."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(**COMPILED)
def _largest(values):
    """The largest of the values."""
    bits = values.view(np.int32)
    largest = np.int32(-(1 << 31))
    for place in range(bits.size):
        largest = max(largest, _in_order(bits[place]))
    return np.int32(_in_order(largest)).view(np.float32)


@njit(**COMPILED)
def _top_tokens(values, tokens, best):
    """The tokens of the largest values in order, of equal ones the first, with their values.

    A block is looked at only if its largest value is among them.
    """
    num_kept = 0
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        if num_kept == tokens.size and not _largest(block) > best[-1]:
            continue
        for place in range(block.size):
            value = block[place]
            if num_kept == tokens.size and not value > best[-1]:
                continue
            num_kept = min(num_kept + 1, tokens.size)
            rank = num_kept - 1
            while rank > 0 and value > best[rank - 1]:
                tokens[rank], best[rank] = tokens[rank - 1], best[rank - 1]
                rank -= 1
            tokens[rank], best[rank] = start + place, value


@njit(**COMPILED)
def top_tokens(values, tokens):
    """The tokens of each row's largest values in order, into `tokens` int64 [rows, count]."""
    best = np.empty(tokens.shape[1], np.float32)
    for row in range(len(values)):
        _top_tokens(values[row], tokens[row], best)


@njit(**COMPILED)
def _mass_from(values, bits, lowest):
    """The sum of the values whose bits are at least `lowest`."""
    total = ZERO
    for place in range(values.size):
        total += values[place] if bits[place] >= lowest else ZERO
    return total


@njit(**COMPILED)
def _mass_cut(probs, mass, memory):
    """The largest of the probabilities down to which they add up to `mass`.

    Bits of positive floats have the order of the floats, so it is found bit by bit; first, those
    that it may be are gathered in `memory`.
    """
    bits, largest = probs.view(np.int32), _largest(probs)
    bound = largest * FEWER
    while bound > 0 and not _mass_from(probs, bits, np.float32(bound).view(np.int32)) >= mass:
        bound *= FEWER
    count = 0
    for token in range(probs.size):
        if probs[token] >= bound:
            memory[count] = probs[token]
            count += 1
    bits = memory[:count].view(np.int32)
    low, high = np.float32(bound).view(np.int32), np.float32(largest).view(np.int32)
    while low < high:
        middle = low + (high - low + np.int32(1)) // np.int32(2)
        if _mass_from(memory[:count], bits, middle) >= mass:
            low = middle
        else:
            high = middle - np.int32(1)
    return np.int32(low).view(np.float32)


@njit(**COMPILED)
def _keep_from(probs, lowest):
    """Remove the probabilities below `lowest`, and let the others add up to 1."""
    total = ZERO
    for token in range(probs.size):
        probs[token] = probs[token] if probs[token] >= lowest else ZERO
        total += probs[token]
    factor = np.float32(1) / total
    for token in range(probs.size):
        probs[token] *= factor


@njit(**COMPILED)
def target_probs(logits, largest, temperature, top_k, top_p, min_p, probs):
    """`Sampling.target_probs` of rows into `probs`; `largest` [rows], the rows' largest logits."""
    memory = np.empty(logits.shape[1], np.float32)
    tokens, best = np.empty(min(top_k, MOST_TOKENS), np.int64), np.empty(top_k, np.float32)
    for row in range(len(logits)):
        lowest = -LARGEST
        if MOST_TOKENS < top_k < logits.shape[1]:
            lowest = np.partition(logits[row], logits.shape[1] - top_k)[-top_k]
        elif 0 < top_k < logits.shape[1]:
            _top_tokens(logits[row], tokens, best)
            lowest = best[-1]
        _softmax(logits[row], largest[row], lowest, temperature, probs[row])
        if top_p < 1:
            _keep_from(probs[row], _mass_cut(probs[row], top_p, memory))
        if min_p > 0:
            _keep_from(probs[row], min_p * _largest(probs[row]))


@njit(**COMPILED)
def _sum_of(values, skipped):
    """The sum of probabilities without those of some tokens."""
    total, first = 0.0, 0
    for last in skipped:
        total += values[first:last].sum()
        first = last + 1
    return total + values[first:].sum()


@njit(**COMPILED)
def _draw(probs, uniforms, sums, tokens):
    """One row of `draw_in_turn`. `sums` [blocks] float64, those of blocks of tokens not drawn."""
    for block in range(sums.size):
        sums[block] = _sum_of(probs[block * BLOCK : (block + 1) * BLOCK], tokens[:0])
    for rank in range(tokens.size):
        drawn = np.sort(tokens[:rank])
        total = sums.sum()
        if not total > 0:  # each token that is left is as likely
            token = min(int(uniforms[rank] * (probs.size - rank)), probs.size - rank - 1)
            for earlier in drawn:
                token += token >= earlier
            tokens[rank] = token
            continue
        left, block, last = uniforms[rank] * total, 0, 0
        for block in range(sums.size):
            last = block if sums[block] > 0 else last
            if left < sums[block]:
                break
            left -= sums[block]
        start, token = last * BLOCK, -1
        for place in range(start, min(start + BLOCK, probs.size)):
            if probs[place] > 0 and not (drawn == place).any():
                token = place
                left -= probs[place]
                if left < 0:
                    break
        tokens[rank] = max(token, 0)
        inside = drawn[(drawn >= start) & (drawn < start + BLOCK)]
        inside = np.sort(np.append(inside, tokens[rank]))
        sums[last] = _sum_of(probs[start : start + BLOCK], inside - start)


@njit(**COMPILED)
def draw_in_turn(probs, uniforms, tokens):
    """Distinct tokens of each row, one after the other, each by inversion of what is left.

    `uniforms` float64 [rows, count] in [0, 1); `tokens` int64 [rows, count] is the result.
    """
    sums = np.empty(-(-probs.shape[1] // BLOCK))
    for row in range(len(probs)):
        _draw(probs[row], uniforms[row], sums, tokens[row])


@njit(**COMPILED)
def residual_masses(p, q, c, e, masses):
    """The sum over tokens of max(p - c q - e, 0) for each row, into `masses` [rows]."""
    for row in range(len(p)):
        total = ZERO
        for token in range(p.shape[1]):
            left = p[row, token] - c[row] * q[row, token] - e[row]
            total += left if left > 0 else ZERO
        masses[row] = total
