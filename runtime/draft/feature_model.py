"""Drafts that go on from the target's hidden states token by token: EAGLE-3 (arXiv 2503.01840) and EAGLE-1 (arXiv 2401.15077).

A row stands for a token and the hidden states of the token before it. For the committed text these are the target's, which `fuse` makes as
wide as the draft; below the root of a tree they are what the draft itself put out for the parent's row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sequoia_plan.runtime.cache import TreeCache
from sequoia_plan.runtime.draft.tapped import TappedDraft


@dataclass(frozen=True)
class Norms:
    """Where checkpoints of EAGLE-3 differ.

    Args:
        before_residual: what attention's output is added to is the normed feature, not the feature.
        output: deeper rows take a row's output after the last norm, not before it.
        before_fc: one norm over all hidden states before they are fused.
        each_before_fc: a norm for each of them.
    """

    before_residual: bool = False
    output: bool = False
    before_fc: bool = False
    each_before_fc: bool = False


class FeatureModel(TappedDraft, ABC):
    """A draft that reads tokens and features; see `Eagle3` and `Eagle1`."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """The target's hidden states [..., taps * target's hidden size] -> features [..., hidden size]."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, masks: Mapping[str, Tensor], cache: TreeCache | None = None, last: int = 0
    ) -> tuple[Tensor, Tensor]:
        """One pass over rows; nothing in it is for inference alone.

        Args:
            tokens: int64 [batch, rows].
            features: [batch, rows, hidden size], of the token before each: from `fuse`, or the output of the row before.
            positions: int64 [batch, rows].
            masks: by kind of layer, additive, [batch, 1, rows, keys].
            cache: where keys and values go; None attends to the rows of this pass.
            last: logits of the last so many rows only; 0 for all.

        Returns:
            Logits [batch, rows, draft vocabulary], and the outputs that deeper rows take as features, [batch, rows, hidden size].
        """


class Eagle3(FeatureModel):
    """EAGLE-3: one layer whose attention reads embedding and feature side by side, and plain layers after it, if any.

    Args:
        width: the target's hidden size.
        norms: where checkpoints differ.
        others: as for `TappedDraft`.
    """

    def __init__(self, config: Any, target: Any, taps: tuple[int, ...], covered: Tensor | None, embeds: bool, head: int, width: int, norms: Norms) -> None:
        super().__init__(config, target, taps, covered, embeds, head)
        self.norms, hidden = norms, config.hidden_size
        self.fc = nn.Linear(len(taps) * width, hidden, bias=False)
        self.input_norm = self.norm_of(len(taps) * width) if norms.before_fc else None
        self.fc_norm = nn.ModuleList(self.norm_of(width) for _ in taps) if norms.each_before_fc else None
        self.layers = nn.ModuleList(self.layer_class(config, number) for number in range(config.num_hidden_layers))
        first: Any = self.layers[0]
        first.hidden_norm = self.norm_of(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            setattr(first.self_attn, name, nn.Linear(2 * hidden, narrow.out_features, bias=narrow.bias is not None))
        self.norm = self.norm_of(hidden)

    def fuse(self, features: Tensor) -> Tensor:
        features = features.to(self.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, masks: Mapping[str, Tensor], cache: TreeCache | None = None, last: int = 0
    ) -> tuple[Tensor, Tensor]:
        first: Any = self.layers[0]
        normed = first.hidden_norm(features)
        both = torch.cat([first.input_layernorm(self.embed(tokens)), normed], -1)
        turned = self.rotary_emb(features, positions)
        seen, _ = first.self_attn(hidden_states=both, attention_mask=masks[self.kinds[0]], position_embeddings=turned, past_key_values=cache)
        hidden = (normed if self.norms.before_residual else features) + seen
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        hidden = self.run_layers(self.layers[1:], hidden, positions, masks, cache, first=1)
        output = self.norm(hidden) if self.norms.output else hidden
        return self.logits(output[:, -last:]), output

    def logits(self, output: Tensor) -> Tensor:
        """Outputs of rows [..., hidden size] -> their logits [..., draft vocabulary]."""
        return self.head(output if self.norms.output else self.norm(output))


class Eagle1(FeatureModel):
    """EAGLE-1 and EAGLE-2: plain layers, the first without its first norm, over embedding and feature made one. The feature is the target's
    last hidden state after its final norm, and so the output goes through the target's head as it is."""

    def __init__(self, config: Any, target: Any, taps: tuple[int, ...], covered: Tensor | None, embeds: bool, head: int, bias: bool) -> None:
        super().__init__(config, target, taps, covered, embeds, head)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(self.layer_class(config, number) for number in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.dtype)

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, masks: Mapping[str, Tensor], cache: TreeCache | None = None, last: int = 0
    ) -> tuple[Tensor, Tensor]:
        hidden = self.fc(torch.cat([self.embed(tokens), features], -1))
        hidden = self.run_layers(self.layers, hidden, positions, masks, cache)
        return self.head(hidden[:, -last:]), hidden
