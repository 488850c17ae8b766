"""Trains a DFlash draft: `python -m sequoia_plan_drafts.recipe dflash`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config

from sequoia_plan.runtime.base.masks import additive_mask
from sequoia_plan.runtime.draft.checkpoint import write_dflash
from sequoia_plan.runtime.draft.dflash_model import DFlashModel, DraftBlock
from sequoia_plan.runtime.models.architecture import FULL
from sequoia_plan_drafts.recipe.training import (
    EVALUATION_BATCH,
    TrainingSettings,
    TrainingText,
    check_layers,
    count_agreements,
    decayed_mean,
    initialise_fc_norm_and_head,
    kl_divergence,
    train,
    unscaled_weights,
)


class BlockBatch(NamedTuple):
    """b conversations of at most n tokens, with m blocks in each.

    A block is a known token (its root) and the levels after it: the tokens that the draft drafts
    for the positions 1, 2, ... after the root. `hidden_states` [b, n, layers * width]; `roots`
    int64 [b, m]; `positions` int64 [b, m]; `label_rows` int64 [b, m, levels]; `top_ids` int64 [a,
    TOP]; `top_logp` float [a, TOP].
    """

    hidden_states: Tensor
    roots: Tensor
    positions: Tensor
    label_rows: Tensor
    top_ids: Tensor
    top_logp: Tensor


@dataclass(frozen=True)
class DFlashRecipe(TrainingSettings):
    """How a DFlash draft is made."""

    layers: tuple[int, ...] = (0, 1)
    size: int = 5
    roots: int = 48
    decay: float = 0.8


def train_dflash(
    target: Any,
    text: TrainingText,
    recipe: DFlashRecipe,
    out: Path,
    target_name: str,
    report: Callable[[str], None] = print,
) -> None:
    """Train a DFlash draft for `target` (a Llama in float32) and write it to the folder `out`.

    The mask token, which stands for the tokens that a block drafts, is the token that the text has
    least often.
    """
    torch.manual_seed(recipe.seed)
    layers = text.hidden_state_layers()
    target_tokens = target.config.vocab_size
    vocabulary = text.most_probable_tokens(recipe.draft_vocabulary, target_tokens)
    target_to_draft = vocabulary.target_to_draft
    mask_token = int(text.token_counts(target_tokens).argmin())
    draft = untrained_draft(target, layers, vocabulary.d2t, recipe, mask_token)
    scale = 1 / text.hidden_state_rms()  # gives every dimension of the hidden states magnitude 1
    make_batches = partial(block_batches, text, scale=scale, recipe=recipe)

    def loss_of(batch: BlockBatch, step: int) -> Tensor:
        """The same loss in all steps: the KL divergence, where deeper levels weigh less."""
        return decayed_mean(level_divergences(draft, target_to_draft, batch), recipe.decay)

    def agreement_on(conversation_indices: Sequence[int]) -> list[float]:
        """By level, how often the most probable tokens of draft and target agree."""
        batches = make_batches(conversation_indices, EVALUATION_BATCH)
        agreements = top1_agreement(draft, target_to_draft, batches)
        return [round(agreement, 4) for agreement in agreements]

    def save(metadata: dict[str, Any]) -> None:
        """Write the draft, with metadata on how it was made."""
        write_dflash(
            out,
            draft.config,
            unscaled_weights(draft, scale),
            vocabulary.d2t,
            layers,
            draft.block,
            metadata | {"target": target_name},
        )

    parameters = list(draft.parameters())
    train(parameters, text, recipe, vocabulary, make_batches, loss_of, agreement_on, save, report)


def untrained_draft(
    target: Any,
    aux_hidden_state_layers: tuple[int, ...],
    d2t: Tensor,
    recipe: DFlashRecipe,
    mask_token: int,
) -> DFlashModel:
    """The draft before training: its layers and its head start as the target's.

    `fc`, which projects the target's hidden states, passes on the last of them alone, and the final
    norm is the target's, scaled (`initialise_fc_norm_and_head`). `d2t` int64 [draft vocabulary].
    """
    check_layers(target, recipe.layers)
    shared_settings = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_parameters",
    )
    config = Qwen3Config(
        **{name: getattr(target.config, name) for name in shared_settings},
        num_hidden_layers=len(recipe.layers),
        tie_word_embeddings=False,
    )
    draft = DFlashModel(
        config,
        target,
        aux_hidden_state_layers,
        d2t,
        has_embeddings=False,
        head_rows=d2t.numel(),
        target_width=config.hidden_size,
        block=DraftBlock(recipe.size, mask_token),
    )
    initialise_fc_norm_and_head(draft, target, d2t)
    for layer, target_layer in zip(draft.layers, recipe.layers, strict=True):
        # not strict: a Llama has no norms of queries and keys
        layer.load_state_dict(target.model.layers[target_layer].state_dict(), strict=False)
    return draft.train()


def block_batches(
    text: TrainingText, numbers: Sequence[int], size: int, scale: Tensor, recipe: DFlashRecipe
) -> Iterator[BlockBatch]:
    """Padded batches of some conversations, with random blocks in each conversation.

    The roots of blocks are drawn, with replacement, from the tokens before an answer token. `scale`
    float [layers * width].
    """
    levels = torch.arange(recipe.size - 1)  # a block's tokens after its root
    for i, batch in enumerate(text.batches(numbers, size)):
        num_conversations, length = batch.tokens.shape
        # for each position, the row of `top_ids` of the answer token after it, or -1; longer than
        # the text, so that a block that goes beyond the text finds -1
        next_label = torch.full((num_conversations, length + recipe.size), -1)
        conversations, positions = batch.rows // length, batch.rows % length
        next_label[conversations, positions] = torch.arange(batch.rows.numel())
        roots = torch.stack([_draw_roots(row >= 0, recipe.roots) for row in next_label])
        # the token on a level is learnt from the label at the position before it
        level_positions = (roots[..., None] + levels).flatten(1)
        label_rows = next_label.gather(1, level_positions).view(*roots.shape, -1)
        batch_indices = numbers[i * size : (i + 1) * size]  # its conversations
        yield BlockBatch(
            text.padded_hidden_states(batch_indices, length, scale),
            batch.tokens.gather(1, roots),
            roots,
            label_rows,
            batch.top_ids,
            batch.top_logp,
        )


def _draw_roots(is_candidate: Tensor, count: int) -> Tensor:
    """int64 [count]: random positions at which `is_candidate` (bool [n]) is true."""
    candidates = is_candidate.nonzero()[:, 0]
    return candidates[torch.randint(candidates.numel(), (count,))]


def level_divergences(draft: DFlashModel, target_to_draft: Tensor, batch: BlockBatch) -> Tensor:
    """float [levels]: the mean KL divergence of draft from target at each level of the blocks.

    `target_to_draft` int64 [target vocabulary].
    """
    return torch.stack(
        [
            kl_divergence(logits, target_to_draft, batch.top_ids[rows], batch.top_logp[rows])
            for logits, rows in logits_by_level(draft, batch)
        ]
    )


@torch.no_grad()
def top1_agreement(
    draft: DFlashModel, target_to_draft: Tensor, batches: Iterator[BlockBatch]
) -> list[float]:
    """By level, the share of blocks where draft and target have the same most probable token.

    The target has read the tokens between the root and the level; the draft has not. Blocks whose
    answer has ended before the level are left out. `target_to_draft` int64 [target vocabulary].
    """
    agreements, totals = [0] * draft.block.levels, [0] * draft.block.levels
    for batch in batches:
        for level, (logits, rows) in enumerate(logits_by_level(draft, batch)):
            agreements[level] += count_agreements(logits, target_to_draft, batch.top_ids[rows])
            totals[level] += rows.numel()
    return [count / max(total, 1) for count, total in zip(agreements, totals, strict=True)]


def logits_by_level(draft: DFlashModel, batch: BlockBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the draft's logits for one level of all blocks after the other, with their labels.

    Level k of a block is the token that the draft drafts for position k + 1 after the block's root.
    Blocks whose answer has ended before a level have no label there, and are left out.
    """
    logits_of_levels = block_logits(draft, batch).unbind(2)  # each [b, m, draft vocabulary]
    label_rows_of_levels = batch.label_rows.unbind(-1)  # each [b, m], -1 for no label
    for logits, label_rows in zip(logits_of_levels, label_rows_of_levels, strict=True):
        has_label = label_rows >= 0
        yield logits[has_label], label_rows[has_label]


def block_logits(draft: DFlashModel, batch: BlockBatch) -> Tensor:
    """The draft's logits for all blocks of a batch, in one pass."""
    size, cache = draft.block.size, DynamicCache()
    context = batch.hidden_states.shape[1]
    draft.cache_context(batch.hidden_states, torch.arange(context)[None], cache)
    # a block's input: its root, and the mask token in place of the tokens that it drafts
    tokens = torch.full((*batch.roots.shape, size), draft.block.mask_token)
    tokens[..., 0] = batch.roots
    positions = batch.positions[..., None] + torch.arange(size)
    masks = {FULL: block_mask(batch.positions, context, size)[:, None]}
    return draft(tokens.flatten(1), positions.flatten(1), masks, cache)


def block_mask(positions: Tensor, context: int, size: int) -> Tensor:
    """The additive mask of a pass over blocks: each sees the text before its root, and itself.

    `positions` int64 [b, m]; returns float32 [b, m * size, context + m * size].
    """
    block_numbers = torch.arange(positions.shape[1] * size) // size
    same_block = block_numbers[:, None] == block_numbers
    before_root = torch.arange(context) < positions[..., None]
    visible_text = before_root.repeat_interleave(size, 1)
    visible_block = same_block.expand(len(positions), -1, -1)
    return additive_mask(torch.cat([visible_text, visible_block], -1), torch.float32)
