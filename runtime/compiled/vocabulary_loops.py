"""Loops over a CPU's rows of logits and probabilities, which read each row as seldom as possible.

Each computes what tensor operations elsewhere do, which are its oracle: `Sampling.target_probs`,
`drawing.in_turn`, `drawing.most_probable` and `Residual`. Rows are float32, and contiguous.
"""

import math

import numpy as np

from sequoia_plan.models.packed.largest import BLOCK, LARGEST, fast, maximum

EXP2 = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(8))
LOG2_E = np.float32(math.log2(math.e))
ZERO, HALF = np.float32(0), np.float32(0.5)
LOWEST = np.float32(-126)
"""Powers of 2 below count as 0."""
FEWER = np.float32(2.0**-10)
MOST_TOKENS = 1024
"""More tokens are looked for in another way."""


@fast
def _exp2(x):
    """2 ** x for x <= 0, to the last bits; a series around the next whole number."""
    # infinity times 0 is NaN
    within = x if x > LOWEST else LOWEST
    whole = np.floor(within + HALF)
    fraction = within - whole
    series = EXP2[7]
    for n in range(6, -1, -1):
        series = series * fraction + EXP2[n]
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return ZERO if x < LOWEST else series * power


@fast
def weigh(scores, largest, lowest, temperature, sums):
    """Replace scores by weights exp((score - largest) / temperature), those below `lowest` by 0.

    Writes the sum of each block of weights to `sums` float64 [blocks]; returns the sum of all.
    """
    if largest == -LARGEST:  # no token is possible
        scores[:] = np.nan
        sums[:] = np.nan
        return np.nan
    largest, lowest = largest / temperature, lowest / temperature
    for block in range(sums.size):
        in_block, total = scores[block * BLOCK : (block + 1) * BLOCK], ZERO
        for offset in range(in_block.size):
            score = in_block[offset] / temperature
            weight = _exp2((score - largest) * LOG2_E)
            in_block[offset] = weight if not score < lowest else ZERO
            total += in_block[offset]
        sums[block] = total
    return sums.sum()


@fast
def top_of_row(values, tokens, best):
    """Write the tokens of the largest values in order to `tokens` [count], the values to `best`.

    Of equal ones the first wins. A block is read only if its largest value is among them.
    """
    num_kept = 0
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        if num_kept == tokens.size and not maximum(block) > best[-1]:
            continue
        for offset in range(block.size):
            value = block[offset]
            if num_kept == tokens.size and not value > best[-1]:
                continue
            num_kept = min(num_kept + 1, tokens.size)
            rank = num_kept - 1
            while rank > 0 and value > best[rank - 1]:
                tokens[rank], best[rank] = tokens[rank - 1], best[rank - 1]
                rank -= 1
            tokens[rank], best[rank] = start + offset, value


@fast
def top_tokens(values, tokens):
    """The tokens of each row's largest values in order, into `tokens` int64 [rows, count]."""
    best = np.empty(tokens.shape[1], np.float32)
    for row in range(len(values)):
        top_of_row(values[row], tokens[row], best)


@fast
def _mass_from(values, bits, lowest):
    """The sum of the values whose bit patterns (`bits` int32) are at least `lowest`."""
    total = ZERO
    for token in range(values.size):
        total += values[token] if bits[token] >= lowest else ZERO
    return total


@fast
def _mass_cut(probs, mass, memory):
    """The highest threshold at or above which the probabilities add up to `mass` or more.

    Positive floats have the order of their bit patterns, so a bisection of these finds it. It reads
    only the probabilities that are large enough, gathered in `memory` (float32 [vocabulary]).
    """
    bits, largest = probs.view(np.int32), maximum(probs)
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


@fast
def _keep_from(probs, lowest):
    """Set the probabilities below `lowest` to 0, and let the others add up to 1."""
    total = ZERO
    for token in range(probs.size):
        probs[token] = probs[token] if probs[token] >= lowest else ZERO
        total += probs[token]
    probs *= np.float32(1) / total


@fast
def probs_of_row(scores, largest_score, temperature, top_k, top_p, min_p, sums, memory):
    """`Sampling.target_probs` of a row, in place; `sums` and `memory` [vocabulary] are scratch."""
    lowest = -LARGEST
    if MOST_TOKENS < top_k < scores.size:
        rank = scores.size - top_k
        lowest = np.partition(scores, rank)[rank]
    elif 0 < top_k < scores.size:
        best = memory[:top_k]
        top_of_row(scores, np.empty(top_k, np.int64), best)
        lowest = best[-1]
    total = weigh(scores, largest_score, lowest, temperature, sums)
    scores *= np.float32(1 / total)
    if top_p < 1:
        _keep_from(scores, _mass_cut(scores, top_p, memory))
    if min_p > 0:
        _keep_from(scores, min_p * maximum(scores))


@fast
def target_probs(rows, largest_scores, temperature, top_k, top_p, min_p):
    """Turn rows of logits, float32 [rows, vocabulary], into `Sampling.target_probs` in place.

    `largest_scores` float32 [rows]: each row's largest logit.
    """
    memory, sums = np.empty(rows.shape[1], np.float32), np.empty(-(-rows.shape[1] // BLOCK))
    for row in range(len(rows)):
        probs_of_row(
            rows[row], largest_scores[row], temperature, top_k, top_p, min_p, sums, memory
        )  # fmt: skip


@fast
def _is_among(token, tokens):
    """Is a token one of these?"""
    is_among = False
    for other in tokens:
        is_among |= other == token
    return is_among


@fast
def _sum_without(values, start, skipped):
    """The sum of a block's values without those of `skipped`, ascending tokens of all blocks.

    `start`: the block's first token.
    """
    total, first = 0.0, 0
    for token in skipped:
        if start <= token < start + values.size:
            total += values[first : token - start].sum()
            first = token - start + 1
    return total + values[first:].sum()


@fast
def sum_blocks(probs, sums):
    """Write the sum of each `BLOCK` probabilities to `sums` (float64 [blocks])."""
    for block in range(sums.size):
        sums[block] = probs[block * BLOCK : (block + 1) * BLOCK].sum()


@fast
def draw_from(probs, uniforms, sums, tokens, masses):
    """One row of `draw_in_turn`. `sums` float64 [blocks] has the sums of blocks of probabilities.

    Drawn tokens are taken off these. `masses` float64 [count] gets what was left before each draw.
    """
    for rank in range(tokens.size):
        masses[rank] = total = sums.sum()
        if not total > 0:  # each token that is left is as likely
            token = min(int(uniforms[rank] * (probs.size - rank)), probs.size - rank - 1)
            for earlier in np.sort(tokens[:rank]):
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
        for candidate in range(start, min(start + BLOCK, probs.size)):
            if probs[candidate] > 0 and not _is_among(candidate, tokens[:rank]):
                token = candidate
                left -= probs[candidate]
                if left < 0:
                    break
        tokens[rank] = max(token, 0)
        drawn = np.sort(tokens[: rank + 1])
        sums[last] = _sum_without(probs[start : start + BLOCK], start, drawn)


@fast
def draw_in_turn(probs, uniforms, tokens):
    """Draw distinct tokens from each row, each by inversion of the probabilities still left.

    `uniforms` float64 [rows, count] in [0, 1); `tokens` int64 [rows, count] gets the result.
    """
    sums, masses = np.empty(-(-probs.shape[1] // BLOCK)), np.empty(tokens.shape[1])
    for row in range(len(probs)):
        sum_blocks(probs[row], sums)
        draw_from(probs[row], uniforms[row], sums, tokens[row], masses)


@fast
def residual_masses(p, q, c, e, masses):
    """Each row's sum over tokens of max(p - c q - e, 0), into `masses` [rows]."""
    for row in range(len(p)):
        total = ZERO
        for token in range(p.shape[1]):
            left = p[row, token] - c[row] * q[row, token] - e[row]
            total += left if left > 0 else ZERO
        masses[row] = total
