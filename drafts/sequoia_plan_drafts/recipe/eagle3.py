"""Trains an EAGLE-3 draft: `python -m sequoia_plan_drafts.recipe eagle3`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.draft.checkpoint import find_checkpoint
from sequoia_plan.runtime.draft.eagle3_folder import write_eagle3
from sequoia_plan.runtime.draft.eagle_model import Eagle3, Eagle3Norms
from sequoia_plan.runtime.draft.from_checkpoint import eagle3_default_layers, load_checkpoint
from sequoia_plan.runtime.models.architecture import FULL
from sequoia_plan_drafts.recipe.training import (
    EVALUATION_BATCH,
    TrainingSettings,
    TrainingText,
    config_like,
    count_agreements,
    decayed_mean,
    divergence_and_rejection,
    initialise_fc_norm_and_head,
    kl_divergence,
    train,
    unscaled_weights,
)

COPYING_HEADS_LOGIT_SCALE = 1.2
"""Factor of the random projections in heads that pass a token's embedding on."""


class ChainBatch(NamedTuple):
    """b conversations of at most n tokens. Row r pairs token r + 1 with token r's hidden states.

    `tokens` int64 [b, n - 1]; `hidden_states` [b, n - 1, layers * width]; `rows` int64 [a];
    `top_ids` int64 [a, TOP]; `top_logp` float [a, TOP].
    """

    tokens: Tensor
    hidden_states: Tensor
    rows: Tensor
    top_ids: Tensor
    top_logp: Tensor


@dataclass(frozen=True)
class Eagle3Recipe(TrainingSettings):
    """How an EAGLE-3 draft is made."""

    steps: int = 3000
    chain: int = 3
    decay: float = 0.8
    divergence: float = 0.3
    start: str | None = None


def train_eagle3(
    target: Any,
    text: TrainingText,
    recipe: Eagle3Recipe,
    out: Path,
    target_name: str,
    report: Callable[[str], None] = print,
) -> None:
    """Train an EAGLE-3 draft for `target` (a Llama in float32) and write it to the folder `out`."""
    torch.manual_seed(recipe.seed)
    target_tokens = target.config.vocab_size
    # raises an error if the text holds others
    text.hidden_state_layers(eagle3_default_layers(target.config.num_hidden_layers))
    scale = 1 / text.hidden_state_rms()  # gives every dimension of the hidden states magnitude 1
    if recipe.start:
        draft = load_for_training(target, recipe.start, scale)
        assert draft.d2t is not None
        vocabulary = text.draft_vocabulary(draft.d2t, target_tokens)
        recipe = replace(recipe, draft_vocabulary=draft.d2t.numel())
    else:
        vocabulary = text.most_probable_tokens(recipe.draft_vocabulary, target_tokens)
        draft = untrained_draft(target, vocabulary.d2t, text.token_counts(target_tokens))
    target_to_draft = vocabulary.target_to_draft
    first_chain_step = 0 if recipe.start else recipe.steps // 2
    make_batches = partial(chain_batches, text, scale=scale)

    def loss_of(batch: ChainBatch, step: int) -> Tensor:
        """The KL divergence in the first half of the steps, then the loss along chains."""
        if step < first_chain_step:
            return chain_divergences(draft, target_to_draft, batch, 1)[0]
        return decayed_mean(chain_losses(draft, target_to_draft, batch, recipe), recipe.decay)

    def agreement_on(conversation_indices: Sequence[int]) -> list[float]:
        """By place in a chain, how often the most probable tokens of draft and target agree."""
        batches = make_batches(conversation_indices, EVALUATION_BATCH)
        agreements = top1_agreement(draft, target_to_draft, batches, recipe.chain)
        return [round(agreement, 4) for agreement in agreements]

    def save(metadata: dict[str, Any]) -> None:
        """Write the draft, with metadata on how it was made."""
        write_eagle3(
            out,
            draft.config,
            unscaled_weights(draft, scale),
            vocabulary.d2t,
            draft.norms.before_residual,
            metadata | {"target": target_name},
        )

    parameters = list(draft.parameters())
    train(parameters, text, recipe, vocabulary, make_batches, loss_of, agreement_on, save, report)


def untrained_draft(target: Any, d2t: Tensor, token_counts: Tensor) -> Eagle3:
    """The draft before training: nearly the target's first layer, over the embedding.

    `d2t` int64 [draft vocabulary]; `token_counts` float [vocabulary].
    """
    config = config_like(target, 1)
    config.num_key_value_heads = config.num_attention_heads
    draft = Eagle3(
        config,
        target,
        aux_hidden_state_layers=eagle3_default_layers(target.config.num_hidden_layers),
        d2t=d2t,
        has_embeddings=False,
        head_rows=d2t.numel(),
        norms=Eagle3Norms(before_residual=True),
    )
    layer: Any = draft.layers[0]
    target_layer = target.model.layers[0]
    with torch.no_grad():
        _initialise_heads(layer.self_attn, target, token_counts)
    initialise_fc_norm_and_head(draft, target, d2t)
    for name in ("mlp", "post_attention_layernorm"):
        getattr(layer, name).load_state_dict(getattr(target_layer, name).state_dict())
    return draft.train()


def _initialise_heads(attention: Any, target: Any, token_counts: Tensor) -> None:
    """Give a new draft's attention its copying heads, and the heads of the target's first layer.

    In a copying head, queries and keys are one random projection of the centred embedding, by which
    a token attends to itself. Values are a few principal components of the embeddings, and the
    output projection turns them back into an embedding. `token_counts` float [vocabulary].
    """
    config, target_layer = target.config, target.model.layers[0]
    target_attention = target_layer.self_attn
    width, head_dim = config.hidden_size, attention.head_dim
    num_heads = config.num_attention_heads
    heads_per_key = num_heads // config.num_key_value_heads
    # each has principal components of its own, of which there are `width`
    num_copying_heads = min(2 * num_heads // 3, width // head_dim)
    input_norm = target_layer.input_layernorm.weight
    queries, keys, values = (
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
    )

    embeddings = target.get_input_embeddings().weight
    normed = torch.nn.functional.rms_norm(embeddings, (width,))
    frequency = (token_counts / token_counts.sum())[:, None]
    mean = (frequency * normed).sum(0)
    # columns are principal components, the largest first: eigh's eigenvalues ascend
    components = torch.linalg.eigh((frequency * normed).T @ normed)[1].flip(1)
    # takes the mean's direction out
    centring = torch.eye(width) - torch.outer(mean, mean) / mean.dot(mean)
    embedding_rms = (frequency[:, 0] * embeddings.square().mean(-1).sqrt()).sum()

    for weight in (queries, keys, values):
        weight.zero_()
    attention.o_proj.load_state_dict(target_attention.o_proj.state_dict())
    for head in range(num_heads):
        rows = slice(head * head_dim, (head + 1) * head_dim)  # of a projection
        key_head = head // heads_per_key
        key_rows = slice(key_head * head_dim, (key_head + 1) * head_dim)
        if head < num_copying_heads:
            projection = torch.linalg.qr(torch.randn(width, head_dim))[0].T
            queries[rows, :width] = COPYING_HEADS_LOGIT_SCALE * projection @ centring
            keys[rows, :width] = queries[rows, :width]
            values[rows, :width] = components[:, rows].T
            attention.o_proj.weight[:, rows] = embedding_rms * components[:, rows]
        else:
            queries[rows, :width] = target_attention.q_proj.weight[rows] * input_norm
            keys[rows, :width] = target_attention.k_proj.weight[key_rows] * input_norm
            values[rows, :width] = target_attention.v_proj.weight[key_rows] * input_norm


def load_for_training(target: Any, folder: str, scale: Tensor) -> Eagle3:
    """Load a draft of `train_eagle3` to train it further on hidden states times `scale`.

    `scale` float [layers * width].
    """
    checkpoint = find_checkpoint(folder)
    draft: Any = load_checkpoint(checkpoint, target, torch.float32) if checkpoint else None
    if not _is_trainable(draft, target):
        raise SequoiaPlanError(
            f"--start {folder}: expected a draft as `eagle3` writes it: EAGLE-3's layout, one "
            "layer, a head of its own, no embeddings"
        )
    with torch.no_grad():
        draft.fc.weight /= scale
    trainable: Eagle3 = draft.requires_grad_(True).train()
    return trainable


def _is_trainable(draft: Any, target: Any) -> bool:
    """Whether `write_eagle3` can write the draft without losing anything."""
    return (
        isinstance(draft, Eagle3)
        and draft.norms in (Eagle3Norms(), Eagle3Norms(before_residual=True))
        and draft.aux_hidden_state_layers == eagle3_default_layers(target.config.num_hidden_layers)
        and draft.config.num_hidden_layers == 1
        and draft.lm_head is not None
        and draft.embed_tokens is None
        and draft.d2t is not None
    )


def chain_batches(
    text: TrainingText, numbers: Sequence[int], size: int, scale: Tensor
) -> Iterator[ChainBatch]:
    """Padded batches of some conversations.

    `scale` float [layers * width].
    """
    for i, batch in enumerate(text.batches(numbers, size)):
        length = batch.tokens.shape[1]
        batch_indices = numbers[i * size : (i + 1) * size]  # its conversations
        hidden_states = text.padded_hidden_states(batch_indices, length, scale)
        # `batch.rows` counts `length` rows a conversation, and row t there reads token t. Here each
        # conversation has one row fewer, and token t is in row t - 1.
        rows = batch.rows - 1 - batch.rows // length
        yield ChainBatch(
            batch.tokens[:, 1:], hidden_states[:, :-1], rows, batch.top_ids, batch.top_logp
        )


def chain_divergences(
    draft: Eagle3, target_to_draft: Tensor, batch: ChainBatch, chain: int
) -> Tensor:
    """The mean KL divergence of draft from target, by place in a drafted chain.

    Every answer token takes each place in turn: in chains of which it is the first token, the
    second and so on. The target's distribution is that after the text before the token.
    `target_to_draft` int64 [target vocabulary]; returns float [chain].
    """
    return torch.stack(
        [
            kl_divergence(logits, target_to_draft, batch.top_ids, batch.top_logp)
            for logits in chain_logits(draft, batch, chain)
        ]
    )


def chain_losses(
    draft: Eagle3, target_to_draft: Tensor, batch: ChainBatch, recipe: Eagle3Recipe
) -> Tensor:
    """float [recipe.chain]: the loss of the second half of the steps, by place in the chain.

    It is the probability that speculative sampling rejects the draft's token, plus
    `recipe.divergence` times the KL divergence, means over answer tokens. `target_to_draft` int64
    [target vocabulary].
    """
    losses = []
    for logits in chain_logits(draft, batch, recipe.chain):
        divergence, rejection = divergence_and_rejection(
            logits, target_to_draft, batch.top_ids, batch.top_logp
        )
        losses.append(rejection + recipe.divergence * divergence)
    return torch.stack(losses)


@torch.no_grad()
def top1_agreement(
    draft: Eagle3, target_to_draft: Tensor, batches: Iterable[ChainBatch], chain: int
) -> list[float]:
    """Share of answer tokens at which draft and target have the same most probable token.

    `target_to_draft` int64 [target vocabulary].
    """
    agreements, answer_tokens = [0] * chain, 0
    for batch in batches:
        answer_tokens += batch.rows.numel()
        for place, logits in enumerate(chain_logits(draft, batch, chain)):
            agreements[place] += count_agreements(logits, target_to_draft, batch.top_ids)
    return [count / answer_tokens for count in agreements]


def chain_logits(draft: Eagle3, batch: ChainBatch, chain: int) -> Iterator[Tensor]:
    """The draft's logits for the answer tokens, as a chain's first token, as its second, and so on.

    The first pass drafts with every row as the first of a chain, the next pass with every row as
    the second of the chain that began a row before, and so on. A row attends to the first pass up
    to where its chain began, and to its own chain in the passes since.
    """
    num_rows = batch.tokens.shape[1]
    features, cache = draft.fuse(batch.hidden_states), DynamicCache()
    positions = torch.arange(1, num_rows + 1)[None]
    for place in range(chain):
        masks = {FULL: chain_mask(num_rows, place)[None, None]}
        _, outputs = draft(batch.tokens, features, positions, masks, cache, logits_to_keep=1)
        yield draft.logits(outputs.flatten(0, 1)[batch.rows])
        # the feature of a row is the output of the row before; row 0 has none before it
        features = torch.cat([outputs[:, :1], outputs[:, :-1]], 1)


def chain_mask(num_rows: int, place: int) -> Tensor:
    """The additive mask of the pass in which every row is at `place` (from 0) of its chain.

    Returns float32 [num_rows, (place + 1) * num_rows].
    """
    row, key = torch.arange(num_rows)[:, None], torch.arange(num_rows)
    chain_start = row - place
    visible = [key <= chain_start]  # of the first pass, then of each later one
    visible += [key == chain_start + later for later in range(1, place + 1)]
    return additive_mask(torch.cat(visible, 1), torch.float32)
