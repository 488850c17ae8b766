"""Prompt lookup: what followed the last place where the end of the text stood before.

The match is the longest suffix of the committed tokens that occurs earlier in them; the lookup
chain is what followed its last earlier occurrence (artifacts/lookup.py). Both are found on the
device with fixed shapes, and the host reads no tensor for it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def look_up(
    tokens: Tensor, length: Tensor, max_match: int, chain_length: int
) -> tuple[Tensor, Tensor]:
    """Find the match of a text, and its lookup chain.

        for every earlier position i:
            matched[i] = how many of the last `max_match` tokens agree with those that end at i
        the match ends at the i with the largest matched[i]; of several, at the last
        chain = the tokens after i; where they reach the end of the text, the chain itself goes on

    Args:
        tokens: int64 [capacity], the token in each slot.
        length: int64 [1], the slot of the last committed token.
        max_match: longer matches are not told apart.
        chain_length: number of tokens of the lookup chain.

    Returns:
        int64 [1], the length of the match in tokens, 0 if there is none; int64 [chain_length], the
        lookup chain, which has no meaning without a match.
    """
    slots = torch.arange(tokens.numel(), device=tokens.device)
    agrees = slots < length  # the match ends before the last token
    matched = torch.zeros_like(slots)
    for distance in range(max_match):
        # the token `distance` before each slot against the one `distance` before the last token
        before = slots - distance
        suffix_token = tokens[(length - distance).clamp(min=0)]
        agrees = agrees & (before >= 0) & (tokens[before.clamp(min=0)] == suffix_token)
        matched = matched + agrees
    # the longest match first, and of equal ones the last
    best = torch.where(slots < length, matched * tokens.numel() + slots, -1).argmax(0, keepdim=True)
    period = (length - best).clamp(min=1)  # tokens after the match until the text ends
    offsets = torch.arange(chain_length, device=tokens.device) % period
    return matched[best], tokens[best + 1 + offsets]
