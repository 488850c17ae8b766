"""One transformers model with its KV cache, run over nodes of a token tree."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError, TokenTree
from sequoia_plan.runtime.cache import Layout, TreeCache

PREFILL_CHUNK = 256
CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change once the sequence is longer than the model was first trained for: cached keys go stale."""


class CachedModel:
    """A causal LM and the KV cache of the sequence at hand.

    `finite` (bool [1]) tells, until the next `reset`, whether every row of logits so far had a finite maximum.

    Args:
        model: a transformers causal LM in eval mode.
        layout: its cache's, if known.
        vocabulary: use only so many logits; None for all.
        covered: int64 [vocabulary], the target's token for each of a draft's; None if they are the same.
    """

    def __init__(self, model: Any, layout: Layout | None = None, vocabulary: int | None = None, covered: Tensor | None = None) -> None:
        self.model = model
        config = text_config(model)
        self.layers: int | Layout = layout or int(config.num_hidden_layers)
        self.cache = TreeCache(0, 0)
        self.vocabulary = vocabulary
        self.context = context_length(config)
        self.window, self.by_kind = attention_window(config)
        self.finite = torch.ones(1, dtype=torch.bool, device=model.device)
        self.lowest = torch.finfo(model.dtype).min
        self.covered = covered
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        self.last_token = int(getattr(embedding, "num_embeddings", 1 << 30)) - 1
        self.keeps_logits = "logits_to_keep" in inspect.signature(plain(model).forward).parameters

    def reset(self, capacity: int) -> None:
        """Room for a new sequence of up to `capacity` slots; memory that is large enough is used again."""
        self.finite.fill_(True)
        if self.cache.capacity < capacity:
            windowed = self.window is not None and self.window < capacity
            positions = torch.arange(capacity, device=self.model.device) if windowed else None
            self.cache = TreeCache(0, 0)  # let the old memory go first
            self.cache = TreeCache(self.layers, capacity, positions)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, mask: Tensor, last: int = 0) -> Tensor:
        """Logits [tokens, vocabulary] of `tokens`, written to `slots`, attending by the additive mask [tokens, extent].

        Args:
            tokens, positions, slots: int64 [tokens]. Positions beyond the model's context are those of nodes that cannot be
                used any more; they only have to be valid.
            last: logits of the last so many tokens only; 0 for all.

        Raises:
            SequoiaPlanError: if the mask looks further than the cache reaches.
        """
        if mask.shape[1] > self.cache.capacity:
            raise SequoiaPlanError(f"KV cache: {mask.shape[1]} slots needed, it has {self.cache.capacity}; prefill with more max_new_tokens")
        positions = positions.clamp(max=self.context - 1)
        output = self.model(
            input_ids=tokens.clamp(max=self.last_token)[None],  # a draft may lack the target's last tokens
            position_ids=positions[None],
            attention_mask=self._attention(mask, positions, slots),
            past_key_values=self.cache.at(slots, mask.shape[1]),
            use_cache=True,
            **({"logits_to_keep": last} if self.keeps_logits else {}),
        )
        logits: Tensor = output.logits[0, -last:, : self.vocabulary]
        self.finite.logical_and_(logits.amax(-1).isfinite().all())
        return logits

    def prefill(self, tokens: Tensor) -> None:
        """Fill the cache with `tokens` (int64 [n]), in chunks so that the mask stays small."""
        for start in range(0, tokens.numel(), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            positions = torch.arange(start, start + chunk.numel(), device=tokens.device)
            columns = torch.arange(start + chunk.numel(), device=tokens.device)
            self(chunk, positions, positions, additive(columns <= positions[:, None], self.model.dtype), last=1)

    def _attention(self, mask: Tensor, positions: Tensor, slots: Tensor) -> Tensor | dict[str, Tensor]:
        """The mask as the model takes it. A window counts positions, which in a tree are not slots."""
        if mask.dtype != self.model.dtype:
            mask = mask.clamp(min=self.lowest).to(self.model.dtype)
        if self.cache.positions is None or self.window is None:
            return mask[None, None]
        self.cache.positions.index_copy_(0, slots, positions)
        near = self.cache.positions[: mask.shape[1]] > positions[:, None] - self.window
        windowed = mask.where(near, self.lowest)[None, None]
        return {"full_attention": mask[None, None], "sliding_attention": windowed} if self.by_kind else windowed


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


def plain(model: Any) -> Any:
    """The model under torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def text_config(model: Any) -> Any:
    """The configuration of the language model, also inside a multimodal one."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def context_length(config: Any) -> int:
    """Tokens a sequence may have; 2^30 where the configuration sets no limit."""
    length: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    if rope_changes(config):
        trained = _rope(config).get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", length)
        return min(length, int(trained or length))
    return length


def rope_changes(config: Any) -> bool:
    """Do rotary embeddings depend on the length of the sequence, which transformers then reads on the host in every pass?"""
    return _rope(config).get("rope_type", _rope(config).get("type")) in CHANGING_ROPE


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def attention_window(config: Any) -> tuple[int | None, bool]:
    """How many positions windowed layers see (None without any), and whether the model asks for masks by kind of layer.

    Raises:
        SequoiaPlanError: if layers attend, or remember, in a way a tree's mask cannot describe.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "attention_layers", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention", "attention", "global"})
    if unknown:
        raise SequoiaPlanError(f"{config.model_type}: layers of kind {', '.join(unknown)} cannot branch into a tree, expected attention with a KV cache")
    window: int | None = getattr(config, "sliding_window", None) if "sliding_attention" in kinds or not kinds else None
    return window if getattr(config, "use_sliding_window", True) else None, len(kinds) > 1
