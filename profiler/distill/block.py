"""Training a draft that says a block at once: `python -m sequoia_plan.profiler.distill dflash`.

The draft is DFlash's (arXiv 2602.06036). It minimises the forward KL divergence to the target's law at the tokens after a root, level by level,
in blocks from roots drawn anew for every batch: a block sees what came before its root through the target's hidden states, and of its own
tokens only the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config

from sequoia_plan.profiler.distill.training import Text, Training, agreeing, as_published, decayed, divergence, fit, hidden_of, magnitudes, start_ends
from sequoia_plan.runtime.draft.block_model import Block, BlockModel
from sequoia_plan.runtime.draft.published import write_dflash
from sequoia_plan.runtime.draft.tapped import FULL


class Blocks(NamedTuple):
    """Conversations of n tokens at most, b of them, with m roots in each.

    Args:
        hidden: [b, n, taps * width], the target's hidden states at every token.
        roots: int64 [b, m], the tokens that blocks begin with.
        positions: int64 [b, m], theirs.
        laws: int64 [b, m, levels], the row of `ids` and `logp` for each level of each block, or -1 where the answer has ended.
        ids, logp: [a, TOP], the target's most probable tokens and the logarithms of their probabilities.
    """

    hidden: Tensor
    roots: Tensor
    positions: Tensor
    laws: Tensor
    ids: Tensor
    logp: Tensor


@dataclass(frozen=True)
class BlockRecipe(Training):
    """How a block draft is made.

    Args:
        layers: the target's layers to start from.
        size: tokens of a block, the root's included.
        roots: blocks in each conversation of a batch.
        decay: what a level counts for in the loss, if the one above counts for 1.
        others: as for `Training`.
    """

    layers: tuple[int, ...] = (0, 1)
    size: int = 5
    roots: int = 48
    decay: float = 0.8


def train_dflash(target: Any, text: Text, recipe: BlockRecipe, out: Path, target_name: str, report: Callable[[str], None] = print) -> None:
    """Train a block draft for `target` (a Llama in float32) on text with its hidden states, and write it to the folder `out`.

    Raises:
        SequoiaPlanError: if the text was written without hidden states, or its folders hold different ones.
    """
    torch.manual_seed(recipe.seed)
    taps = text.taps()
    covered, share, to_draft = text.most_used(recipe.covered, target.config.vocab_size)
    draft, scale = untrained(target, taps, covered, recipe, int(text.counts(target.config.vocab_size).argmin())), 1 / magnitudes(text)

    def loss_of(batch: Blocks, step: int) -> Tensor:
        return decayed(divergences(draft, to_draft, batch), recipe.decay)

    def agreement(held_out: Sequence[int]) -> list[float]:
        return [round(each, 4) for each in evaluate(draft, to_draft, batches(text, held_out, 16, scale, recipe))]

    def save(facts: dict[str, Any]) -> None:
        write_dflash(out, draft.config, as_published(draft, scale), covered, taps, draft.block, facts | {"target": target_name})

    fit(list(draft.parameters()), text, recipe, share, partial(batches, text, scale=scale, recipe=recipe), loss_of, agreement, save, report)


def untrained(target: Any, taps: tuple[int, ...], covered: Tensor, recipe: BlockRecipe, mask: int) -> BlockModel:
    """The draft before training: layers of the target, and what `start_ends` says. `mask` stands for the tokens that a block is to say."""
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    sizes = {name: getattr(target.config, name) for name in (*shared, "max_position_embeddings", "rope_parameters")}
    config = Qwen3Config(**sizes, num_hidden_layers=len(recipe.layers), tie_word_embeddings=False)
    draft = BlockModel(config, target, taps, covered, embeds=False, head=covered.numel(), width=config.hidden_size, block=Block(recipe.size, mask))
    start_ends(draft, target, covered)
    for layer, number in zip(draft.layers, recipe.layers, strict=True):
        layer.load_state_dict(target.model.layers[number].state_dict(), strict=False)  # norms of queries and keys are new
    return draft.train()


def batches(text: Text, which: Sequence[int], size: int, scale: Tensor, recipe: BlockRecipe) -> Iterator[Blocks]:
    """Padded batches of conversations, `size` in each; hidden states are multiplied by `scale` [taps * width]. Roots are drawn from the tokens
    before an answer's, as often as it needs."""
    below = torch.arange(recipe.size - 1)
    for at, (tokens, places, ids, logp) in enumerate(text.batches(which, size)):
        longest = tokens.shape[1]
        law = torch.full((tokens.shape[0], longest + recipe.size), -1)
        law[places // longest, places % longest] = torch.arange(places.numel())
        positions = torch.stack([row.nonzero()[:, 0][torch.randint(int(row.sum()), (recipe.roots,))] for row in law >= 0])
        laws = law.gather(1, (positions[..., None] + below).flatten(1)).view(*positions.shape, -1)
        hidden = hidden_of(text, which[at * size : (at + 1) * size], longest, scale)
        yield Blocks(hidden, tokens.gather(1, positions), positions, laws, ids, logp)


def divergences(draft: BlockModel, to_draft: Tensor, batch: Blocks) -> Tensor:
    """[levels]: `divergence` at each level."""
    return torch.stack([divergence(logits, to_draft, batch.ids[rows], batch.logp[rows]) for logits, rows in levels(draft, batch)])


@torch.no_grad()
def evaluate(draft: BlockModel, to_draft: Tensor, held_out: Iterator[Blocks]) -> list[float]:
    """By level, share of places on whose most probable token draft and target agree; the target has the tokens between, which the draft has not."""
    agree, total = [0] * draft.block.levels, [0] * draft.block.levels
    for batch in held_out:
        for level, (logits, rows) in enumerate(levels(draft, batch)):
            agree[level] += agreeing(logits, to_draft, batch.ids[rows])
            total[level] += rows.numel()
    return [each / max(of, 1) for each, of in zip(agree, total, strict=True)]


def levels(draft: BlockModel, batch: Blocks) -> Iterator[tuple[Tensor, Tensor]]:
    """By level, logits [r, draft vocabulary] of the blocks that have a token there, and the rows int64 [r] of its law in the batch."""
    for logits, rows in zip(blocks(draft, batch).unbind(2), batch.laws.unbind(-1), strict=True):
        yield logits[rows >= 0], rows[rows >= 0]


def blocks(draft: BlockModel, batch: Blocks) -> Tensor:
    """Logits [b, m, levels, draft vocabulary] of all blocks of a batch, in one pass."""
    size, cache = draft.block.size, DynamicCache()
    draft.remember(batch.hidden, torch.arange(batch.hidden.shape[1])[None], cache)
    tokens = torch.full((*batch.roots.shape, size), draft.block.mask)
    tokens[..., 0] = batch.roots
    positions = batch.positions[..., None] + torch.arange(size)
    return draft(tokens.flatten(1), positions.flatten(1), {FULL: attends(batch.positions, batch.hidden.shape[1], size)[:, None]}, cache)


def attends(positions: Tensor, context: int, size: int) -> Tensor:
    """The additive mask [b, m * size, context + m * size]: the context before the root, and the block itself."""
    own = torch.arange(positions.shape[1] * size) // size
    before = (torch.arange(context) < positions[..., None]).repeat_interleave(size, 1)
    seen = torch.cat([before, (own[:, None] == own).expand(len(positions), -1, -1)], -1)
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
