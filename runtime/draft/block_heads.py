"""What block drafts have beyond DFlash's first version.

DFlash 2 has convolutions around attention and MLP, and a selector; DSpark has a Markov head. The
last two make the probabilities of a node's children depend on the node's token, without a pass.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer


class BlockConvolution(nn.Module):
    """A convolution over the tokens of a block before a part of a layer, and another after it.

    A token's output is a weighted sum of itself and the tokens before it. The weights are learned
    ones for each channel plus what the token itself adds to all channels of a group.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        assert width % group == 0, "conv_group_size"
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def forward(self, rows: Tensor, part: Any) -> Tensor:
        """`part` between both convolutions: [1, block, width] -> the same shape."""
        added = self.kernel_projection(rows).unflatten(-1, (*self.base_kernel.shape[:2], -1))
        kernels = self.base_kernel + added.repeat_interleave(self.group, -1)
        return _convolved(part(_convolved(rows, kernels[:, :, 0])), kernels[:, :, 1])


def _convolved(rows: Tensor, kernel: Tensor) -> Tensor:
    """Each row and those before it, weighted by `kernel` [1, block, taps, width] and added."""
    shifted = [nn.functional.pad(rows, (0, 0, tap, -tap)) for tap in range(kernel.shape[-2])]
    return (torch.stack(shifted, -2) * kernel).sum(-2)


class ConvolvedLayer(Qwen3DecoderLayer):
    """A layer of DFlash 2: Qwen3's, with convolutions around its attention and its MLP."""

    def __init__(self, config: Any, number: int, taps: int, group: int) -> None:
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
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def prepare(self, logits: Tensor, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """What all nodes of a level share, from [levels, vocabulary] and [levels, width]."""
        largest, candidates = logits.float().topk(min(self.top_k, logits.shape[-1]))
        unary = largest.new_full(logits.shape, -torch.inf).scatter(-1, candidates, largest)
        return unary, candidates, self.hidden_projection(hidden_states)

    def forward(self, parents: Tensor, unary: Tensor, candidates: Tensor, hidden: Tensor) -> Tensor:
        """The logits of the children of nodes with these tokens, [nodes, vocabulary]."""
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
        """What all nodes of a level share, [levels, vocabulary]."""
        return (logits,)

    def forward(self, parents: Tensor, logits: Tensor) -> Tensor:
        """The logits of the children of nodes with these tokens, [nodes, vocabulary]."""
        return logits + self.markov_w2(self.markov_w1(parents))[:, : logits.shape[-1]]
