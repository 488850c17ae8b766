"""What drafts that read the target's hidden states have in common: own weights and passes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
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
from sequoia_plan.models.backends import COMPILED, FUSED, RESIDENT, fused
from sequoia_plan.models.base.architecture import FULL, WINDOWED, rope_changes
from sequoia_plan.models.base.cache import CacheLayout, TreeCache, cache_argument
from sequoia_plan.models.base.masks import mask_as_dtype, windowed_mask
from sequoia_plan.models.files.metadata import module_metadata
from sequoia_plan.models.layers.attention import attending
from sequoia_plan.models.loaded_model import LoadedModel, Traits
from sequoia_plan.models.module_state import Watch, check_mode, weight_memory, weights
from sequoia_plan.models.parallel import is_on_one_cuda_device

if TYPE_CHECKING:  # it needs numba
    from sequoia_plan.runtime.draft.packed_eagle import PackedEagle

CACHE_ARGUMENT = cache_argument(LlamaDecoderLayer.forward)
"""The name under which the layers of all drafts take their cache, of transformers and fused."""

LAYER_CLASSES = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
"""By `model_type`: transformers' configuration, decoder layer, norm and rotary embedding."""


class HiddenStateDraft(nn.Module):
    """A draft's own weights. Embeddings and output head are the target's where it has none.

    `d2t` int64 [draft vocabulary]. `compiled` runs its passes if they are; `recorded` is what
    profiles record of it if its layers were fused. `version` grows with each change of the weights
    that was noticed. `notes_finite`: see `Drafter`.
    """

    d2t: Tensor | None
    layers: nn.ModuleList
    drafting: Drafting = EAGLE_DRAFT
    compiled: "PackedEagle | None" = None
    recorded: dict[str, object] | None = None
    version = 0
    notes_finite, traits = False, Traits(reads_features=True)

    def __init__(
        self,
        config: PreTrainedConfig,
        target: LoadedModel,
        aux_hidden_state_layers: tuple[int, ...],
        d2t: Tensor | None,
        has_embeddings: bool,
        head_rows: int,
    ) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        self.config, self.target, self.watch = config, target, Watch(weights)
        self.aux_hidden_state_layers = aux_hidden_state_layers
        self.feature_width = width = config.hidden_size
        self.states_width = len(aux_hidden_state_layers) * target.config.hidden_size
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
        return self.config.sliding_window if WINDOWED in self.layer_types else None

    @property
    def vocabulary(self) -> int:
        """How many logits it gives for each token."""
        return self.target.vocabulary if self.lm_head is None else self.lm_head.out_features

    @property
    def feature_dtype(self) -> torch.dtype:
        """The dtype of the features that it reads."""
        return self.dtype

    @property
    def backend(self) -> "HiddenStateDraft | PackedEagle":
        """What runs its passes: itself, unless they are compiled."""
        return self.compiled or self

    def run_as(self, placement: str) -> tuple[str, ...]:
        """Have passes compiled or layers fused; a remark for users if they cannot be compiled."""
        remarks: tuple[str, ...] = ()
        if placement == COMPILED:
            from sequoia_plan.runtime.draft.packed_eagle import PackedEagle, why_not

            if not (reason := why_not(self)):
                self.compiled = PackedEagle(self)
                return ()
            remarks = (f"draft: PyTorch runs it, its pass is not compiled: {reason}",)
        if placement != RESIDENT:
            self.recorded = fused(self, FUSED)
        return remarks

    def metadata(self) -> dict[str, object]:
        """Digest, content, dtype, parameters and placement, as profiles record them."""
        if self.compiled:
            return self.compiled.metadata()
        return self.recorded or module_metadata(self) | {"placement": RESIDENT}

    def check(self) -> None:
        """Note changes of the weights; SequoiaPlanError in training mode or under autocast."""
        check_mode(self)
        if self.watch.changes(self):
            self.refresh()

    def refresh(self) -> None:
        """Take the weights anew, whether or not a change can be seen."""
        self.version += 1
        self.watch.look(self)

    def can_be_captured(self) -> bool:
        """Can a pass be a part of a CUDA graph?"""
        return is_on_one_cuda_device(self) and not rope_changes(self.config)

    def weight_memory(self) -> tuple[tuple[int, int], ...]:
        """Address and bytes of each tensor."""
        return weight_memory(self)

    def new_cache(self, capacity: int, *, counts_positions: bool) -> TreeCache:
        """A cache of so many slots."""
        layout = self.cache_layout()
        return TreeCache(layout, capacity, self.device, counts_positions=counts_positions)

    def read(
        self, cache: TreeCache, tokens: Tensor, features: Tensor, rows: Sequence[Tensor],
        logits_to_keep: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One pass over tokens, each with the feature of the token before it.

        `tokens` int64 [n]; `features` [n, width]; `rows`: slots int64 [n], positions of the tokens
        before them, the mask [n, extent], and the positions' cosines and sines [1, n, head size].
        Returns logits and outputs of the last `logits_to_keep` tokens.
        """
        slots, positions, mask, *angles = rows
        masks = self.masks_by_layer_type(cache, mask, positions, slots)
        cache.at(slots, mask.shape[1])
        with attending(self.config, slots):
            logits, outputs = self(
                tokens[None], features[None], angles, masks, cache, logits_to_keep
            )
        return logits[0], outputs[0, -logits_to_keep:]

    def new_layers(self) -> nn.ModuleList:
        """New layers, whose weights are still to be loaded."""
        return nn.ModuleList(
            self.layer_class(self.config, number) for number in range(len(self.layer_types))
        )

    def new_norm(self, width: int) -> nn.Module:
        """A new norm of the class that its layers have."""
        return self.norm_class(width, eps=self.config.rms_norm_eps)

    def features_of(self, hidden_states: Tensor) -> Tensor:
        """The target's hidden states [..., fused width] as features: in the draft's dtype."""
        return hidden_states.to(self.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [..., tokens] -> [..., tokens, hidden size]."""
        if self.embed_tokens is None:
            return self.target.backend.embed(tokens).to(self.dtype)
        # its own embeddings may lack the target's last tokens
        tokens = tokens.clamp(max=self.embed_tokens.num_embeddings - 1)
        return self.embed_tokens(tokens).to(self.dtype)

    def head(self, hidden_states: Tensor) -> Tensor:
        """[..., hidden size] -> logits [..., draft vocabulary]."""
        if self.lm_head is None:
            return self.target.backend.head(hidden_states)
        return self.lm_head(hidden_states)

    def cache_layout(self) -> int | CacheLayout:
        """The memory of its layers' keys and values, or the number of its layers."""
        config = self.config
        memory = (self.device, self.dtype, config.num_key_value_heads, config.head_dim)
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
        layers = list(zip(self.layers, self.layer_types, strict=True))
        for layer, layer_type in layers[first_layer:]:
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[layer_type],
                position_embeddings=angles,
                use_cache=cache is not None,
                **{CACHE_ARGUMENT: cache},
            )
        return hidden_states
