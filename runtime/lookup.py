"""Prompt lookup: what followed the last place where the end of the text stood before.

The match is the longest suffix of the committed tokens that occurs earlier in them; the lookup
chain is what followed its last earlier occurrence (artifacts/lookup.py). Both are found on the
device with fixed shapes, and the host reads no tensor for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.artifacts.lookup import MAX_MATCH


class Lookup(NamedTuple):
    """The longest match that is told from longer ones, and the longest lookup chain of a tree."""

    max_match: int
    chain_length: int

    @classmethod
    def of(cls, tree: TokenTree) -> Lookup | None:
        """What lookup needs for `tree` and its trees by match and context; None without any."""
        matches = [length for t in (tree, *tree.by_context.values()) for length in t.by_match]
        if not matches:
            return None
        spines = [int((t.classes == 0).sum()) - 1 for t in tree.all_trees if t.looks_up]
        return cls(max([MAX_MATCH, *matches]), max([1, *spines]))


def look_up(
    tokens: Tensor, length: Tensor, max_match: int, chain_length: int
) -> tuple[Tensor, Tensor]:
    """Find a text's longest suffix that occurs earlier in it, and what followed it last.

    `tokens` int64 [capacity]; `length` int64 [1], the slot of the last token. Returns the suffix's
    length, int64 [1], and int64 [chain_length], repeated where the text ends.
    """
    capacity = tokens.numel()
    slots = torch.arange(capacity, device=tokens.device)
    distances = torch.arange(max_match, device=tokens.device)
    # the last tokens, the last one first; nothing equals what is before the text
    suffix = tokens[(length - distances).clamp(min=0)].masked_fill(distances > length, -2)
    padded = torch.nn.functional.pad(tokens, (max_match - 1, 0), value=-1)
    is_earlier = agrees = slots < length
    matched = torch.zeros_like(slots)
    for distance in range(max_match):
        start = max_match - 1 - distance  # of the tokens that are `distance` before each slot
        agrees = agrees & (padded[start : start + capacity] == suffix[distance])
        matched += agrees
    # the longest match first, and of equal ones the last
    best = torch.where(is_earlier, matched * capacity + slots, -1).argmax(0, keepdim=True)
    offsets = torch.arange(chain_length, device=tokens.device) % (length - best).clamp(min=1)
    return matched[best], tokens[best + 1 + offsets]
