"""One transformers model with its KV cache, run over nodes of a token tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime.cache import TreeCache

PREFILL_CHUNK = 256


class CachedModel:
    """A causal LM and the KV cache of the sequence at hand.

    Args:
        model: a transformers causal LM in eval mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = TreeCache(0, 0)
        self.covered: Tensor | None = getattr(model, "covered_tokens", None)

    def reset(self, capacity: int) -> None:
        """Room for a new sequence of up to `capacity` slots; memory that is large enough is used again."""
        if self.cache.capacity < capacity:
            self.cache = TreeCache(self.model.config.num_hidden_layers, capacity)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, last: int = 0) -> Tensor:
        """Logits [tokens, vocabulary] of `tokens`, written to `slots`, attending by the additive mask [tokens, extent].

        Args:
            tokens, positions, slots: int64 [tokens].
            last: logits of the last so many tokens only; 0 for all.
        """
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=self.cache.at(slots, mask.shape[1]),
            use_cache=True,
            logits_to_keep=last,
        )
        logits: Tensor = output.logits[0]
        return logits

    def prefill(self, tokens: Tensor) -> None:
        """Fill the cache with `tokens` (int64 [n]), in chunks so that the mask stays small."""
        for start in range(0, tokens.numel(), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            positions = torch.arange(start, start + chunk.numel(), device=tokens.device)
            columns = torch.arange(start + chunk.numel(), device=tokens.device)
            self(chunk, positions, positions, additive(columns <= positions[:, None], self.model.dtype), last=1)


class TreeMask:
    """The additive attention mask of a step, from the length tensor alone.

    A node sees every committed token and its ancestors. Relative to the root's slot a column is the past (always seen),
    a node (seen by the tree's mask), or beyond (never): one gather of three kinds of columns makes the whole mask. Row 0
    is the token before the root, which the draft reads again; row i + 1 is node i.
    """

    def __init__(self, tree: TokenTree, device: torch.device | str, dtype: torch.dtype) -> None:
        seen = torch.zeros(tree.size + 1, tree.size + 2, dtype=torch.bool)
        seen[:, 0] = True
        seen[1:, 1:-1] = torch.from_numpy(tree.attention_mask.copy())
        self.columns = additive(seen.to(device), dtype)

    def __call__(self, length: Tensor, extent: int) -> Tensor:
        """[size + 1, extent] for a root in slot `length` (int64 [1])."""
        relative = torch.arange(extent, device=length.device) - length + 1
        return self.columns.index_select(1, relative.clamp(0, self.columns.shape[1] - 1))


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where seen, the most negative number elsewhere: the one mask `sdpa` and `eager` attention both take."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)
