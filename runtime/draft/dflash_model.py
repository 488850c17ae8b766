"""The model of DFlash (arXiv 2602.06036), DFlash 2 and DSpark: it drafts a block in one pass.

A block is the root's token and mask tokens after it, with attention both ways. The text before the
block is seen through the target's hidden states: each layer makes keys and values of them with its
own weights, once for each committed token. The draft's cache holds these, and nothing of a block.

DFlash 2 has convolutions around attention and MLP, and a selector; DSpark has a Markov head. The
last two make the probabilities of a node's children depend on the node's token, without a pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, apply_rotary_pos_emb

from sequoia_plan.artifacts import dflash_draft
from sequoia_plan.models.base.architecture import WINDOWED
from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.models.layers.fused_layer import FusedAttention
from sequoia_plan.runtime.draft.hidden_state_draft import HiddenStateDraft


class BlockConvolution(nn.Module):
    """A convolution over the tokens of a block before attention or MLP, and another after it.

    A token's output is a weighted sum of itself and the tokens before it. The weights are learned
    ones for each channel plus what the token itself adds to all channels of a group.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        assert width % group == 0, "conv_group_size"
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def forward(self, hidden_states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A convolution, `sublayer`, and a convolution: [1, block, width] -> the same shape."""
        added = self.kernel_projection(hidden_states)
        added = added.unflatten(-1, (*self.base_kernel.shape[:2], -1))
        kernels = self.base_kernel + added.repeat_interleave(self.group, -1)
        before, after = kernels[:, :, 0], kernels[:, :, 1]
        return _convolved(sublayer(_convolved(hidden_states, before)), after)


def _convolved(hidden_states: Tensor, kernel: Tensor) -> Tensor:
    """Each row and those before it, weighted by `kernel` [1, block, taps, width] and added."""
    taps = range(kernel.shape[-2])
    shifted = [nn.functional.pad(hidden_states, (0, 0, tap, -tap)) for tap in taps]
    return (torch.stack(shifted, -2) * kernel).sum(-2)


class ConvolvedLayer(Qwen3DecoderLayer):
    """A layer of DFlash 2: Qwen3's, with convolutions around its attention and its MLP."""

    def __init__(self, config: PreTrainedConfig, number: int, taps: int, group: int) -> None:
        super().__init__(config, number)
        self.attention_conv = BlockConvolution(config.hidden_size, taps, group)
        self.mlp_conv = BlockConvolution(config.hidden_size, taps, group)

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        """[1, block, hidden size] -> the same shape."""
        hidden_states = hidden_states + self.attention_conv(
            self.input_layernorm(hidden_states),
            lambda rows: self.self_attn(hidden_states=rows, **inputs)[0],
        )
        rows = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.mlp_conv(rows, self.mlp)


class CandidateSelector(nn.Module):
    """DFlash 2's: the `top_k` tokens of a level with the largest logits get scores by parent."""

    def __init__(self, vocabulary: int, width: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))  # of parents
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))  # of children
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def prepare(self, logits: Tensor, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """By level, for `forward`: logits, -inf outside the top k; their tokens; projections."""
        largest, candidates = logits.float().topk(min(self.top_k, logits.shape[-1]))
        unary = largest.new_full(logits.shape, -torch.inf).scatter(-1, candidates, largest)
        return unary, candidates, self.hidden_projection(hidden_states)

    def forward(self, parents: Tensor, unary: Tensor, candidates: Tensor, hidden: Tensor) -> Tensor:
        """Logits [nodes, vocabulary] of the children of these parent tokens, from `prepare`'s."""
        context = self.predecessor_codebook[parents] * hidden
        scores = self.successor_codebook[candidates] @ context[..., None]
        return unary.scatter_add(-1, candidates, scores[..., 0].float())


class MarkovHead(nn.Module):
    """DSpark's: all logits of a level get a bias by the parent's token."""

    def __init__(self, vocabulary: int, draft_vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocabulary, bias=False)

    def prepare(self, logits: Tensor, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """What `forward` needs of each level: its logits [levels, vocabulary]."""
        return (logits,)

    def forward(self, parents: Tensor, logits: Tensor) -> Tensor:
        """The logits of the children of nodes with the tokens `parents`, [nodes, vocabulary]."""
        return logits + self.markov_w2(self.markov_w1(parents))[:, : logits.shape[-1]]


@dataclass(frozen=True)
class DraftBlock:
    """What a block is, and where the checkpoints differ."""

    size: int
    mask_token: int
    from_root: bool = False
    causal_layer_types: frozenset[str] = frozenset()
    window_from_root: bool = False  # it ends before the root, else with each token
    conv_kernel_size: int = 0
    conv_group_size: int = 1
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0

    @property
    def levels(self) -> int:
        """Levels below the root that a block gives probabilities for."""
        return self.size if self.from_root else self.size - 1


class DFlashModel(HiddenStateDraft):
    """DFlash's layers, those of Qwen3."""

    def __init__(self, block: DraftBlock, **shared: Any) -> None:
        """See `HiddenStateDraft` for the other arguments."""
        super().__init__(**shared)
        self.block, width = block, self.config.hidden_size
        self.drafting = dflash_draft(block.size, block.levels)
        self.fc = nn.Linear(self.states_width, width, bias=False)
        self.hidden_norm, self.norm = self.new_norm(width), self.new_norm(width)
        if block.conv_kernel_size:
            self.layer_class = partial(
                ConvolvedLayer, taps=block.conv_kernel_size, group=block.conv_group_size
            )
        self.layers = self.new_layers()
        tokens = self.config.vocab_size
        if block.selector_rank:
            self.candidate_selector = CandidateSelector(
                tokens, width, block.selector_rank, block.selector_top_k
            )
        if block.markov_rank:
            own_tokens = tokens if self.d2t is None else self.d2t.numel()
            self.markov_head = MarkovHead(tokens, own_tokens, block.markov_rank)

    @property
    def path_head(self) -> CandidateSelector | MarkovHead | None:
        """What makes the logits of a node's children depend on its token."""
        return getattr(self, "candidate_selector", None) or getattr(self, "markov_head", None)

    def cache_context(self, hidden_states: Tensor, positions: Tensor, cache: Cache) -> None:
        """Write keys and values made of the target's hidden states of committed tokens to a cache.

        `hidden_states` [1, tokens, layers * target's width]; `positions` int64 [1, tokens].
        """
        context = self.hidden_norm(self.fc(hidden_states.to(self.dtype)))
        cos, sin = self.rotary_emb(context, positions)
        for number, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            if isinstance(attention, FusedAttention):
                _, keys, values = attention.queries_keys_values(context, (cos, sin))
            else:
                shape = (*context.shape[:-1], -1, attention.head_dim)
                keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
                keys = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
                values = attention.v_proj(context).view(shape).transpose(1, 2)
            cache.update(keys, values, number)

    def block_masks(self, length: Tensor, extent: int) -> dict[str, Tensor]:
        """Additive masks [1, 1, block, extent] by layer type; `length` int64 [1], the root's."""
        slots = torch.arange(extent, device=length.device)
        block_slots = (length + torch.arange(self.block.size, device=length.device))[:, None]
        whole_block = (slots < length + self.block.size).expand(self.block.size, -1)
        masks = {}
        for layer_type in dict.fromkeys(self.layer_types):
            causal = layer_type in self.block.causal_layer_types
            visible = slots <= block_slots if causal else whole_block
            if layer_type == WINDOWED and self.window is not None:
                end = length if self.block.window_from_root else block_slots + 1
                visible = visible & (slots >= end - self.window)  # what is after `end`, too
            masks[layer_type] = additive_mask(visible, self.dtype)[None, None]
        return masks

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor],
        cache: Cache | None = None,
    ) -> Tensor:
        """One pass over a block: what the head reads, [1, levels, hidden size].

        `tokens` int64 [1, size]; `positions` int64 [1, size].
        """
        embedded = self.embed(tokens)
        hidden = self.run_layers(embedded, self.rotary_emb(embedded, positions), masks, cache)
        # the root's row is left out if it drafts nothing
        return self.norm(hidden[:, self.block.size - self.block.levels :])
