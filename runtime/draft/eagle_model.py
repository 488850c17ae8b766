"""The models of EAGLE-3 (arXiv 2503.01840) and EAGLE-1 (arXiv 2401.15077).

An input row pairs a token with the feature of the token before it. For committed text, features are
made of the target's hidden states (`features_of`); below the root of a tree, a row's feature is the
draft's own output for its parent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sequoia_plan.models.base.cache import TreeCache
from sequoia_plan.models.layers.fused_norm import add_before
from sequoia_plan.runtime.draft.hidden_state_draft import CACHE_ARGUMENT, HiddenStateDraft


@dataclass(frozen=True)
class Eagle3Norms:
    """Where the checkpoints of EAGLE-3 differ."""

    before_residual: bool = False
    output: bool = False
    before_fc: bool = False
    each_before_fc: bool = False


class EagleModel(HiddenStateDraft):
    """What the models have in common. `run` makes each row's output of embedding and feature."""

    run: Callable[..., Tensor]

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        angles: tuple[Tensor, Tensor],
        masks: Mapping[str, Tensor],
        cache: TreeCache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One pass over input rows; training uses it, too. Returns logits, and each row's output.

        `tokens` int64 [batch, rows]; `features` [batch, rows, hidden size]; `angles`, cosines and
        sines, [batch, rows, head_dim].
        """
        output = self.run(self.embed(tokens), features, angles, masks, cache)
        return self.head(output[:, -logits_to_keep:]), output  # [-0:] keeps all rows


class Eagle3(EagleModel):
    """EAGLE-3: one layer that attends to embedding and feature side by side, then plain ones."""

    def __init__(self, norms: Eagle3Norms, **shared: Any) -> None:
        """See `HiddenStateDraft` for the other arguments."""
        super().__init__(**shared)
        self.norms, width = norms, self.config.hidden_size
        self.fc = nn.Linear(self.states_width, width, bias=False)
        self.input_norm = self.new_norm(self.states_width) if norms.before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if norms.each_before_fc:
            widths = [self.target.config.hidden_size] * len(self.aux_hidden_state_layers)
            self.fc_norm = nn.ModuleList(map(self.new_norm, widths))
        self.layers = self.new_layers()
        first = self.layers[0]
        first.hidden_norm = self.new_norm(width)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            wide = nn.Linear(2 * width, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide)
        self.norm = self.new_norm(width)

    def features_of(self, hidden_states: Tensor) -> Tensor:
        """The target's hidden states [..., layers * target's width] -> features [..., width].

        A linear layer makes them; some checkpoints have norms before it.
        """
        hidden_states = hidden_states.to(self.dtype)
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states)
        if self.fc_norm is not None:
            by_layer = zip(self.fc_norm, hidden_states.chunk(len(self.fc_norm), -1), strict=True)
            hidden_states = torch.cat([norm(states) for norm, states in by_layer], -1)
        return self.fc(hidden_states)

    def head(self, hidden_states: Tensor) -> Tensor:
        """The output of rows [..., width] -> logits [..., draft vocabulary]."""
        return super().head(hidden_states if self.norms.output else self.norm(hidden_states))

    def run(
        self, embedded: Tensor, features: Tensor, angles: tuple[Tensor, Tensor],
        masks: Mapping[str, Tensor], cache: TreeCache | None,
    ) -> Tensor:  # fmt: skip
        """The first layer attends to embedding and feature; the residual stream has the feature."""
        first: Any = self.layers[0]  # of transformers, or fused
        normed = first.hidden_norm(features)
        attended, _ = first.self_attn(
            hidden_states=torch.cat([first.input_layernorm(embedded), normed], -1),
            attention_mask=masks[self.layer_types[0]],
            position_embeddings=angles,
            **{CACHE_ARGUMENT: cache},
        )
        residual = normed if self.norms.before_residual else features
        hidden = add_before(first.post_attention_layernorm, residual, attended)
        mlp = first.mlp(first.post_attention_layernorm(hidden))
        # a fused layer adds its output and computes the norm of the next one in one kernel
        hidden = add_before(getattr(first, "next_norm", (None,))[0], hidden, mlp)
        hidden = self.run_layers(hidden, angles, masks, cache, first_layer=1)
        return self.norm(hidden) if self.norms.output else hidden


class Eagle1(EagleModel):
    """EAGLE-1 and EAGLE-2: plain layers over embedding and feature, made one by a linear layer.

    The first layer has no input norm. The feature is the target's last hidden state after its final
    norm, so the output goes through the target's head as it is.
    """

    def __init__(self, bias: bool, **shared: Any) -> None:
        """See `HiddenStateDraft` for the other arguments."""
        super().__init__(**shared)
        width = self.config.hidden_size
        self.fc = nn.Linear(width + self.states_width, width, bias=bias)
        self.layers = self.new_layers()
        self.layers[0].input_layernorm = nn.Identity()

    def run(self, embedded: Tensor, features: Tensor, *inputs: Any) -> Tensor:
        """Each row's output: plain layers over one vector made of embedding and feature."""
        return self.run_layers(self.fc(torch.cat([embedded, features], -1)), *inputs)
