"""Training a draft that reads the target's hidden states: `python -m sequoia_plan.profiler.distill eagle3`.

The draft is one layer in the layout of EAGLE-3 (arXiv 2503.01840). In the first half of the steps it minimises the forward KL divergence from
the target's law at the answer tokens. In the second half it does so along chains: the first token of a chain is drafted from the target's
hidden states, each further one from the draft's own output for the token before, as in decoding. Without the further ones, drafts are worth
little below the first level of a tree. There, the probability that speculative sampling rejects the draft's token counts most.
"""

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
from sequoia_plan.profiler.distill.training import (
    Text,
    Training,
    agreeing,
    apart,
    as_published,
    decayed,
    divergence,
    fit,
    hidden_of,
    layers_like,
    magnitudes,
    start_ends,
)
from sequoia_plan.runtime.draft.feature_model import Eagle3, Norms
from sequoia_plan.runtime.draft.load_tapped import load_tapped
from sequoia_plan.runtime.draft.published import eagle3_taps, find_checkpoint, write_eagle3
from sequoia_plan.runtime.draft.tapped import FULL


class Batch(NamedTuple):
    """Conversations of n tokens at most, b of them; row r stands for token r + 1 and the hidden states of token r.

    Args:
        tokens: int64 [b, n - 1].
        hidden: [b, n - 1, taps * width].
        places: int64 [a], the rows that draft an answer token, in all rows one after the other.
        ids, logp: [a, TOP], the target's most probable tokens there and the logarithms of their probabilities.
    """

    tokens: Tensor
    hidden: Tensor
    places: Tensor
    ids: Tensor
    logp: Tensor


@dataclass(frozen=True)
class FeatureRecipe(Training):
    """How a feature draft is made.

    Args:
        chain: tokens of a chain in the second half of the steps; in the first half 1.
        decay: what a chain's next token counts for in the loss, if this one counts for 1.
        divergence: what the divergence counts for in the second half, beside the share of rejected tokens, which counts for 1.
        start: the folder of a trained draft to go on from; all steps are as in the second half. Its head says what `covered` is.
        others: as for `Training`.
    """

    steps: int = 3000
    chain: int = 3
    decay: float = 0.8
    divergence: float = 0.3
    start: str | None = None


def train_eagle3(target: Any, text: Text, recipe: FeatureRecipe, out: Path, target_name: str, report: Callable[[str], None] = print) -> None:
    """Train a feature draft for `target` (a Llama in float32) on text with its hidden states, and write it to the folder `out`.

    Raises:
        SequoiaPlanError: if the text was written without hidden states, or with others than EAGLE-3 reads where nothing is said, or
            `recipe.start` is no draft that this wrote.
    """
    torch.manual_seed(recipe.seed)
    vocabulary = target.config.vocab_size
    text.taps(eagle3_taps(target.config.num_hidden_layers))
    scale = 1 / magnitudes(text)
    if recipe.start:
        draft = loaded(target, recipe.start, scale)
        covered: Any = draft.covered_tokens
        share, to_draft = text.covered_by(covered, vocabulary)
        recipe = replace(recipe, covered=covered.numel())
    else:
        covered, share, to_draft = text.most_used(recipe.covered, vocabulary)
        draft = untrained(target, covered, text.counts(vocabulary))

    def loss_of(batch: Batch, step: int) -> Tensor:
        if step < recipe.steps // 2 and not recipe.start:
            return divergences(draft, to_draft, batch, 1)[0]
        return decayed(losses(draft, to_draft, batch, recipe), recipe.decay)

    def agreement(held_out: Sequence[int]) -> list[float]:
        return [round(each, 4) for each in evaluate(draft, to_draft, batches(text, held_out, 16, scale), recipe.chain)]

    def save(facts: dict[str, Any]) -> None:
        write_eagle3(out, draft.config, as_published(draft, scale), covered, draft.norms.before_residual, facts | {"target": target_name})

    fit(list(draft.parameters()), text, recipe, share, partial(batches, text, scale=scale), loss_of, agreement, save, report)


def untrained(target: Any, covered: Tensor, counts: Tensor) -> Eagle3:
    """The draft before training: nearly the target's first layer over the embedding, and what `start_ends` says.

    In EAGLE-3's layout an embedding reaches what the layer puts out through attention only. So two thirds of the heads start by passing it on:
    queries and keys are one random projection, by which a token finds itself, and values are the embeddings' principal components. The other
    heads are the first layer's, each with keys and values of its own. Features are normed before anything is added to them (`before_residual`),
    so at every level of a tree they are of one magnitude.

    Args:
        counts: float [vocabulary], how often the text has each token.
    """
    config = layers_like(target, 1)
    config.num_key_value_heads = config.num_attention_heads
    width, size, source = config.hidden_size, config.head_dim, target.model.layers[0]
    draft = Eagle3(config, target, eagle3_taps(target.config.num_hidden_layers), covered, False, covered.numel(), width, Norms(before_residual=True))
    layer: Any = draft.layers[0]
    queries, keys, values = (getattr(layer.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj"))
    table = target.get_input_embeddings().weight
    group, norm = target.config.num_attention_heads // target.config.num_key_value_heads, source.input_layernorm.weight
    with torch.no_grad():
        normed = torch.nn.functional.rms_norm(table, (width,))
        often = (counts / counts.sum())[:, None]
        mean, components = (often * normed).sum(0), torch.linalg.eigh((often * normed).T @ normed)[1].flip(1)
        centred = torch.eye(width) - torch.outer(mean, mean) / mean.dot(mean)
        magnitude = (often[:, 0] * table.square().mean(-1).sqrt()).sum()
        for weight in (queries, keys, values):
            weight.zero_()
        layer.self_attn.o_proj.load_state_dict(source.self_attn.o_proj.state_dict())
        for number in range(config.num_attention_heads):
            mine, shared = (slice(at * size, (at + 1) * size) for at in (number, number // group))
            if number < min(2 * config.num_attention_heads // 3, width // size):
                queries[mine, :width] = keys[mine, :width] = 1.2 * torch.linalg.qr(torch.randn(width, size))[0].T @ centred
                values[mine, :width] = components[:, mine].T
                layer.self_attn.o_proj.weight[:, mine] = magnitude * components[:, mine]
            else:
                queries[mine, :width] = source.self_attn.q_proj.weight[mine] * norm
                keys[mine, :width] = source.self_attn.k_proj.weight[shared] * norm
                values[mine, :width] = source.self_attn.v_proj.weight[shared] * norm
    start_ends(draft, target, covered)
    for name in ("mlp", "post_attention_layernorm"):
        getattr(layer, name).load_state_dict(getattr(source, name).state_dict())
    return draft.train()


def loaded(target: Any, folder: str, scale: Tensor) -> Eagle3:
    """The draft in a folder, to be trained further on hidden states multiplied by `scale` [taps * width]."""
    found, layers = find_checkpoint(folder), target.config.num_hidden_layers
    draft: Any = load_tapped(found, target, torch.float32) if found else None
    as_written = isinstance(draft, Eagle3) and draft.norms in (Norms(), Norms(before_residual=True)) and draft.taps == eagle3_taps(layers)
    if not (as_written and draft.config.num_hidden_layers == 1 and draft.lm_head and draft.embed_tokens is None and draft.covered_tokens is not None):
        raise SequoiaPlanError(f"--start {folder}: expected a draft as `eagle3` writes it: EAGLE-3's layout, one layer, a head of its own, no embeddings")
    with torch.no_grad():
        draft.fc.weight /= scale
    unfrozen: Eagle3 = draft.requires_grad_(True).train()
    return unfrozen


def batches(text: Text, which: Sequence[int], size: int, scale: Tensor) -> Iterator[Batch]:
    """Padded batches of conversations, `size` in each; hidden states are multiplied by `scale` [taps * width]."""
    for at, (tokens, places, ids, logp) in enumerate(text.batches(which, size)):
        hidden = hidden_of(text, which[at * size : (at + 1) * size], tokens.shape[1], scale)
        rows = places - 1 - places // tokens.shape[1]  # each conversation has a row less than tokens, and its rows begin at token 1
        yield Batch(tokens[:, 1:], hidden[:, :-1], rows, ids, logp)


def divergences(draft: Eagle3, to_draft: Tensor, batch: Batch, chain: int) -> Tensor:
    """[chain]: `divergence` where the answer token is the first of a chain, the second, ..."""
    return torch.stack([divergence(logits, to_draft, batch.ids, batch.logp) for logits in chains(draft, batch, chain)])


def losses(draft: Eagle3, to_draft: Tensor, batch: Batch, recipe: FeatureRecipe) -> Tensor:
    """[recipe.chain]: what is minimised in the second half, where the answer token is the first of a chain, the second, ..."""
    both = [apart(logits, to_draft, batch.ids, batch.logp) for logits in chains(draft, batch, recipe.chain)]
    return torch.stack([rejected + recipe.divergence * diverging for diverging, rejected in both])


@torch.no_grad()
def evaluate(draft: Eagle3, to_draft: Tensor, held_out: Iterable[Batch], chain: int) -> list[float]:
    """Share of answer tokens on whose most probable token draft and target agree, as a chain's first token, second, ...; tokens before are
    the target's."""
    agree, total = [0] * chain, 0
    for batch in held_out:
        total += batch.places.numel()
        for token, logits in enumerate(chains(draft, batch, chain)):
            agree[token] += agreeing(logits, to_draft, batch.ids)
    return [each / total for each in agree]


def chains(draft: Eagle3, batch: Batch, chain: int) -> Iterator[Tensor]:
    """Logits [a, draft vocabulary] at a batch's places, for tokens that are the first of a chain, the second, ...

    One pass drafts with every row as a chain's first, the next with every row as the second of the chain that began a row before, and so on:
    a row attends to the first pass up to where its chain began, and to its own chain in the passes since.
    """
    rows = batch.tokens.shape[1]
    features, positions, cache = draft.fuse(batch.hidden), torch.arange(1, rows + 1)[None], DynamicCache()
    for token in range(chain):
        mask = attends(rows, token)[None, None]
        _, output = draft(batch.tokens, features, positions, {FULL: mask}, cache, last=1)
        yield draft.logits(output.flatten(0, 1)[batch.places])
        features = torch.cat([output[:, :1], output[:, :-1]], 1)


def attends(rows: int, token: int) -> Tensor:
    """The additive mask [rows, (token + 1) * rows] of the pass in which every row is the `token`th of its chain, counted from 0."""
    row, key = torch.arange(rows)[:, None], torch.arange(rows)
    seen = [key <= row - token] + [key == row - token + later for later in range(1, token + 1)]
    return torch.zeros(rows, (token + 1) * rows).masked_fill(~torch.cat(seen, 1), torch.finfo(torch.float32).min)
