"""What drafts that read the target's hidden states have in common: weights of their own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from sequoia_plan.artifacts import EAGLE_DRAFT, Drafting
from sequoia_plan.runtime.base.cache import CacheLayout, TreeCache, cache_argument
from sequoia_plan.runtime.base.masks import mask_as_dtype, windowed_mask
from sequoia_plan.runtime.models.architecture import FULL, WINDOWED, rope_changes
from sequoia_plan.runtime.models.loaded_model import LoadedModel
from sequoia_plan.runtime.models.metadata import module_metadata
from sequoia_plan.runtime.models.module_state import Watch, check_mode, weight_memory, weights
from sequoia_plan.runtime.models.parallel import is_on_one_cuda_device

CACHE_ARGUMENT = cache_argument(LlamaDecoderLayer.forward)
"""The name under which the layers of all drafts take their cache, of transformers and fused."""

LAYER_CLASSES: dict[str, tuple[type, type, type, type]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
"""By `model_type`: transformers' configuration, decoder layer, norm and rotary embedding."""


class HiddenStateDraft(nn.Module):
    """A draft's own weights. Embeddings and output head are the target's where it has none.

    `d2t` int64 [draft vocabulary].
    """

    d2t: Tensor | None
    drafting: Drafting = EAGLE_DRAFT
    packed: Any
    """What runs its passes in place of its modules; see `backends.pack_draft`."""
    num_changes = 0
    weight_memory = weight_memory

    def __init__(
        self,
        config: Any,
        target: LoadedModel,
        aux_hidden_state_layers: tuple[int, ...],
        d2t: Tensor | None,
        has_embeddings: bool,
        head_rows: int,
    ) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        self.config, self.target = config, target
        self.packed = None
        self.recorded: dict[str, Any] | None = None  # where its layers were fused
        self.watch = Watch(weights)
        self.aux_hidden_state_layers = aux_hidden_state_layers
        width = config.hidden_size
        self.feature_width = width
        self.fused_width = len(aux_hidden_state_layers) * target.config.hidden_size
        if config.model_type in LAYER_CLASSES:  # an MTP head's layer is of the target's kind
            _, self.layer_class, self.norm_class, rotary_class = LAYER_CLASSES[config.model_type]
            self.rotary_emb = rotary_class(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if has_embeddings else None
        self.lm_head = nn.Linear(width, head_rows, bias=False) if head_rows else None
        layer_types = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
        self.layer_types = tuple(layer_types)
        self.register_buffer("d2t", d2t, persistent=False)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(self.parameters()).dtype  # a norm's, which is always a parameter

    @property
    def window(self) -> int | None:
        """Positions that windowed layers attend to; None if no layer has a window."""
        return int(self.config.sliding_window) if WINDOWED in self.layer_types else None

    @property
    def vocabulary(self) -> int:
        """How many logits it gives for each token."""
        return self.target.vocabulary if self.lm_head is None else self.lm_head.out_features

    @property
    def version(self) -> int:
        """Grows with each change of the weights that was noticed."""
        return self.packed.version if self.packed else self.num_changes

    def metadata(self) -> dict[str, Any]:
        """Digest, content, dtype, parameters and placement, as profiles record them."""
        recorded = self.recorded or module_metadata(self) | {"placement": "resident"}
        if self.packed:
            recorded |= {"placement": "compiled", "weights": self.packed.formats}
        return recorded

    def check(self) -> None:
        """Follow changes of the weights, or raise SequoiaPlanError."""
        check_mode(self)
        if self.packed:
            self.packed.check()
        elif self.watch.changes(self):
            self.refresh()

    def refresh(self) -> None:
        """Take the weights anew, whether or not a change can be seen."""
        if self.packed:
            self.packed.refresh()
        self.num_changes += 1
        self.watch.look(self)

    def can_be_captured(self) -> bool:
        """Can a pass be a part of a CUDA graph?"""
        return is_on_one_cuda_device(self) and not rope_changes(self.config)

    def new_layers(self) -> nn.ModuleList:
        """New layers, which have weights of no meaning."""
        return nn.ModuleList(
            self.layer_class(self.config, number) for number in range(len(self.layer_types))
        )

    def new_norm(self, width: int) -> Any:
        """A new norm of the class that its layers have."""
        return self.norm_class(width, eps=self.config.rms_norm_eps)

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """The target's hidden states [..., fused width] as features: in the draft's dtype."""
        return hidden_states.to(self.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [..., tokens] -> [..., tokens, hidden size]."""
        if self.embed_tokens is None:
            return self.target.backend.embed(tokens).to(self.dtype)
        # which may lack the target's last tokens
        tokens = tokens.clamp(max=self.embed_tokens.num_embeddings - 1)
        return self.embed_tokens(tokens).to(self.dtype)

    def head(self, hidden_states: Tensor) -> Tensor:
        """[..., hidden size] -> logits [..., draft vocabulary]."""
        if self.lm_head is None:
            return self.target.backend.head(hidden_states)
        return self.lm_head(hidden_states)

    def cache_layout(self) -> int | CacheLayout:
        """The memory of its layers' keys and values, or the number of its layers."""
        heads, head_dim = int(self.config.num_key_value_heads), int(self.config.head_dim)
        memory = (self.device, self.dtype, heads, head_dim)
        return ((memory, memory),) * len(self.layer_types)

    def masks_by_layer_type(
        self, cache: TreeCache, mask: Tensor, positions: Tensor, slots: Tensor
    ) -> dict[str, Tensor]:
        """The mask as each type of layer takes it.

        Layers with a window get one that also hides positions outside the window. `positions`,
        `slots` int64 [tokens].
        """
        mask = mask_as_dtype(mask, self.dtype)
        masks = {FULL: mask[None, None]}
        if self.window is not None:
            masks[WINDOWED] = windowed_mask(cache, mask, positions, slots, self.window)[None, None]
        return masks

    def run_layers(
        self,
        hidden_states: Tensor,
        angles: tuple[Tensor, Tensor],
        masks: Mapping[str, Tensor],
        cache: Cache | None,
        first_layer: int = 0,
    ) -> Tensor:
        """Run its layers from `first_layer` on. `hidden_states` [batch, tokens, hidden size]."""
        layers: Any = self.layers
        for layer, layer_type in list(zip(layers, self.layer_types, strict=True))[first_layer:]:
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=angles,
                use_cache=cache is not None,
                **{CACHE_ARGUMENT: cache},
            )
        return hidden_states
