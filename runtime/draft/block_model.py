"""Drafts that say a whole block at once: DFlash (arXiv 2602.06036), its first version.

The block is the root's token and masks after it; attention goes both ways within it. What came before is seen through the target's hidden
states: each layer makes keys and values of them, with its own weights, once for each committed token. So the draft keeps these, and nothing
of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from sequoia_plan.runtime.draft.tapped import WINDOWED, TappedDraft
from sequoia_plan.runtime.models.forward import additive


@dataclass(frozen=True)
class Block:
    """What a block is, and where checkpoints differ.

    Args:
        size: tokens in it, the root's included.
        mask: the token that stands for what is to be said.
        from_root: the root's place says the first token after it, too; otherwise the first mask's does.
        causal: kinds of layers in which a token sees those of the block up to itself; in others it sees all of them.
        window_from_root: a windowed layer sees as many positions before the root, whichever token looks; otherwise before that token.
    """

    size: int
    mask: int
    from_root: bool = False
    causal: frozenset[str] = frozenset()
    window_from_root: bool = False

    @property
    def levels(self) -> int:
        """Levels below the root that it gives laws for."""
        return self.size if self.from_root else self.size - 1


class BlockModel(TappedDraft):
    """DFlash's layers, those of Qwen3.

    Args:
        width: the target's hidden size.
        block: what a block is.
        others: as for `TappedDraft`.
    """

    def __init__(self, config: Any, target: Any, taps: tuple[int, ...], covered: Tensor | None, embeds: bool, head: int, width: int, block: Block) -> None:
        super().__init__(config, target, taps, covered, embeds, head)
        self.block = block
        self.fc = nn.Linear(len(taps) * width, config.hidden_size, bias=False)
        self.hidden_norm, self.norm = self.norm_of(config.hidden_size), self.norm_of(config.hidden_size)
        self.layers = nn.ModuleList(self.layer_class(config, number) for number in range(config.num_hidden_layers))

    def remember(self, features: Tensor, positions: Tensor, cache: Cache) -> None:
        """Give a cache the keys and values of committed tokens.

        Args:
            features: the target's hidden states of these tokens [batch, tokens, taps * width].
            positions: int64 [1, tokens].
            cache: a TreeCache set to the slots of these tokens, or one of transformers.
        """
        context = self.hidden_norm(self.fc(features.to(self.dtype)))
        cos, sin = self.rotary_emb(context, positions)
        for number, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            shape = (*context.shape[:-1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
            values = attention.v_proj(context).view(shape).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, cos, sin)[1], values, number)

    def block_masks(self, length: Tensor, extent: int) -> dict[str, Tensor]:
        """By kind of layer: what the tokens of a block see of `extent` slots, the root being in slot `length` (int64 [1])."""
        slots = torch.arange(extent, device=length.device)
        mine = (length + torch.arange(self.block.size, device=length.device))[:, None]
        found = {}
        for kind in dict.fromkeys(self.kinds):
            seen = slots <= mine if kind in self.block.causal else (slots < length + self.block.size).expand(self.block.size, -1)
            if kind == WINDOWED and self.window is not None:
                seen = seen & (slots >= length - self.window if self.block.window_from_root else slots > mine - self.window)
            found[kind] = additive(seen, self.dtype)[None, None]
        return found

    def forward(self, tokens: Tensor, positions: Tensor, masks: Mapping[str, Tensor], cache: Cache | None = None) -> Tensor:
        """One pass over blocks; nothing in it is for inference alone.

        Args:
            tokens: int64 [batch, blocks * size], block after block.
            positions: int64 [batch, blocks * size].
            masks: by kind of layer, additive, [batch, 1, blocks * size, keys].
            cache: has the keys and values of what came before.

        Returns:
            Logits [batch, blocks, levels, draft vocabulary].
        """
        hidden = self.run_layers(self.layers, self.embed(tokens), positions, masks, cache)
        return self.head(self.norm(hidden.unflatten(1, (-1, self.block.size))[:, :, self.block.size - self.block.levels :]))
