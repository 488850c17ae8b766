"""Attention heads that continue what repeats itself, for an EAGLE-3 draft that is trained on.

A row has the embedding of a token, and hidden states of the target from which the one or two tokens
before can be read. So a head can compare the last two tokens of a row with the two before the token
of each earlier row, and pass that token on (an induction head, arXiv 2209.11895). To learn this
takes more text than a recipe has.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sequoia_plan_drafts.recipe.training_text import DraftVocabulary, TextBatch, TrainingText

SLOW_ANGLE = 2e-3
"""Radians a token: tokens are compared in dimensions that rotary embeddings turn by less."""
MATCH_LOGIT = 20.0
"""Of attention, for each of the two tokens that is the same."""
COPY_LOGIT = 8.0
"""What the draft's logit of a token gains, about, if only rows of it are attended to."""
CODE_SCALE = 0.5
"""Of the numbers by which features tell tokens, over the features' magnitude."""
CONVERSATIONS = 200
"""Show how tokens are read from hidden states."""


@torch.no_grad()
def add_induction_heads(
    draft: Any,
    target: Any,
    text: TrainingText,
    vocabulary: DraftVocabulary,
    chain_logits: Callable[[TextBatch, int], Iterator[Tensor]],
    num_heads: int,
) -> None:
    """Make induction heads of those heads of a draft that say least.

    They attend alike, and each passes on a part of what an embedding says. `chain_logits(batch,
    chain)` yields the logits of the draft, which reads hidden states times
    `text.hidden_state_scale`.
    """
    seen: list[Tensor] = []  # outputs
    hook = draft.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    next(chain_logits(next(text.batches(range(len(text.conversations)), 8)), 1))
    hook.remove()
    layer, width = draft.layers[0], draft.config.hidden_size
    attention = layer.self_attn
    head_dim, token_probs = attention.head_dim, vocabulary.token_probs
    embedded = nn.functional.rms_norm(target.get_input_embeddings().weight, (width,))
    centring = without(token_probs @ embedded)
    embedded = embedded @ centring
    chosen = text.conversations[:CONVERSATIONS]
    states = torch.cat([c.hidden_states[2:].float() for c in chosen]) * text.hidden_state_scale
    tokens = torch.cat([torch.stack([c.tokens[2:], c.tokens[1:-1]]) for c in chosen], 1)
    state_centring = without(states.mean(0))
    states = states @ state_centring

    # a token's code: what hidden states a token later tell best, by canonical correlation analysis
    slow = (draft.rotary_emb.inv_freq < SLOW_ANGLE).nonzero()[:, 0]
    size = len(slow)
    own, before = embedded[tokens.long()]
    whiten, whiten_states = whitening(before), whitening(states)
    code = whiten @ torch.linalg.svd(whiten.T @ (before.T @ states) @ whiten_states)[0][:, :size]
    codes = torch.cat([own @ code, before @ code], 1)
    fitted = whiten_states @ (whiten_states.T @ (states.T @ codes)) / len(states)
    # features have the two codes in those directions in which they vary least
    fc = draft.fc.weight
    features = states @ fc.T
    directions = torch.linalg.eigh(features.T @ features)[1][:, : 2 * size]
    scale = CODE_SCALE * features.square().mean().sqrt()
    fc += directions @ (scale * (state_centring @ fitted).T - directions.T @ fc)
    by_feature = (directions / CODE_SCALE / layer.hidden_norm.weight[:, None]).T

    query, key = torch.zeros(2, head_dim, 2 * width)
    both = torch.cat([slow, slow + head_dim // 2])
    key[both, width:] = by_feature
    query[both[size:], width:] = by_feature[:size]
    query[both[:size], :width] = (centring @ code / layer.input_layernorm.weight[:, None]).T
    query *= MATCH_LOGIT * head_dim**0.5 / size
    # values: the best map of so low a rank from embeddings to what raises the tokens' logits
    probs = token_probs[vocabulary.d2t, None]
    head = draft.lm_head.weight * draft.norm.weight
    head = head - (probs * head).sum(0) / probs.sum()
    output_rms = seen[0].square().mean().sqrt()
    raising = COPY_LOGIT * output_rms * head / head.square().sum(1, keepdim=True)
    known, wanted = (probs.sqrt() * rows for rows in (embedded[vocabulary.d2t], raising))
    whiten = whitening(known)
    passed_on = whiten @ (whiten.T @ (known.T @ wanted)) / len(known)
    result = known @ passed_on
    output = torch.linalg.eigh(result.T @ result)[1][:, -num_heads * head_dim :]
    value = torch.zeros(num_heads * head_dim, 2 * width)
    value[:, :width] = (centring @ passed_on @ output / layer.input_layernorm.weight[:, None]).T

    # in place of the heads that say least
    by_head = attention.o_proj.weight.unflatten(1, (-1, head_dim))
    heads = by_head.norm(dim=(0, 2)).argsort()[:num_heads]
    by_head[:, heads] = output.unflatten(1, (num_heads, head_dim))
    new = {"q_proj": query, "k_proj": key, "v_proj": value.unflatten(0, (num_heads, head_dim))}
    for name, rows in new.items():
        getattr(attention, name).weight.unflatten(0, (-1, head_dim))[heads] = rows


def without(direction: Tensor) -> Tensor:
    """The matrix that takes a direction out of rows."""
    return torch.eye(len(direction)) - torch.outer(direction, direction) / direction.dot(direction)


def whitening(rows: Tensor) -> Tensor:
    """The matrix by which rows' products have the mean 1 with themselves, 0 with each other."""
    products = rows.T @ rows / len(rows)
    products += 1e-3 * products.diagonal().mean() * torch.eye(len(products))
    values, vectors = torch.linalg.eigh(products)
    return vectors * values.rsqrt()
