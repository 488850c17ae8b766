"""Training a draft that reads the target's hidden states: `python -m sequoia_plan.profiler.distill eagle3`.

The draft is one layer in the layout of EAGLE-3 (arXiv 2503.01840). It minimises the forward KL divergence to the target's law at the answer
tokens, along chains: the first token of a chain is drafted from the target's hidden states, each further one from the draft's own output for
the token before, as in decoding. Without the further ones, drafts are worth little below the first level of a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.profiler.distill.train import Text, shuffled, warmed_up_cosine
from sequoia_plan.runtime.draft.feature_model import Eagle3, Norms
from sequoia_plan.runtime.draft.published import eagle3_taps, write_eagle3
from sequoia_plan.runtime.draft.tapped import FULL

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class FeatureRecipe:
    """How a feature draft is made.

    Args:
        covered: rows of its head.
        steps, batch: optimiser steps, and conversations in each.
        chain: tokens of a chain from half of the steps on; before that 1.
        decay: what a chain's next token counts for in the loss, if this one counts for 1.
        learning_rate: peak of AdamW's, warmed up, then cosine to zero.
        held_out: conversations kept for measuring, from the end of the text.
    """

    covered: int = 8192
    steps: int = 3000
    batch: int = 8
    chain: int = 3
    decay: float = 0.8
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    held_out: int = 100
    seed: int = 0


def train_eagle3(target: Any, text: Text, recipe: FeatureRecipe, out: Path, target_name: str, report: Callable[[str], None] = print) -> None:
    """Train a feature draft for `target` (a Llama in float32) on text with its hidden states, and write it to the folder `out`.

    Raises:
        SequoiaPlanError: if the text was written without hidden states, or with others than EAGLE-3 reads where nothing is said.
    """
    torch.manual_seed(recipe.seed)
    started = time.perf_counter()
    taps = eagle3_taps(target.config.num_hidden_layers)
    for facts in text.facts:
        if tuple(facts.get("taps", ())) != taps:
            wanted = " ".join(map(str, taps))
            raise SequoiaPlanError(f"--text: holds the hidden states {facts.get('taps', [])}, expected {wanted} for this target; write it with --taps {wanted}")
    covered, share, to_draft = text.most_used(recipe.covered, target.config.vocab_size)
    draft = untrained(target, covered)
    learn, held_out = text.split(recipe.held_out)
    scale = 1 / magnitudes(text)
    parameters = list(draft.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.95))
    schedule = warmed_up_cosine(optimiser, recipe.steps)
    rng = np.random.default_rng(recipe.seed)
    step, average = 0, 0.0
    report(f"{len(learn)} conversations, head of {recipe.covered} covers {share:.3f} of the target's mass, {sum(p.numel() for p in parameters)} parameters")
    while step < recipe.steps:
        for batch in batches(text, shuffled(learn, text, recipe.batch, rng), recipe.batch, scale):
            chain = 1 if step < recipe.steps // 2 else recipe.chain
            counts = recipe.decay ** torch.arange(chain)
            loss = (counts * divergences(draft, to_draft, batch, chain)).sum() / counts.sum()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            average = loss.item() if step == 0 else 0.98 * average + 0.02 * loss.item()
            step += 1
            if step % 200 == 0 or step in (1, recipe.steps):
                agreement = [round(each, 4) for each in evaluate(draft, to_draft, batches(text, held_out, 16, scale), recipe.chain)]
                elapsed = time.perf_counter() - started
                report(f"step {step}: loss {average:.3f}, held-out top-1 agreement {agreement}, {elapsed:.0f} s")
                facts = {"recipe": asdict(recipe), "text": text.facts, "target": target_name, "steps": step, "seconds": round(elapsed)}
                facts |= {"covered_mass": round(share, 4), "held_out_top1": agreement}
                weights = dict(draft.state_dict())
                weights |= {"fc.weight": weights["fc.weight"] * scale}  # published drafts read hidden states as they are
                write_eagle3(out, draft.config, {name: value.bfloat16() for name, value in weights.items()}, covered, facts)
            if step >= recipe.steps:
                break


def untrained(target: Any, covered: Tensor) -> Eagle3:
    """The draft before training: the target's first layer over the embedding, which sees nothing of the hidden states yet; the target's final
    norm and its head's rows for `covered`."""
    own = target.config.to_dict()
    config = LlamaConfig(**own | {"num_hidden_layers": 1, "layer_types": None, "tie_word_embeddings": False})
    width, source = config.hidden_size, target.model.layers[0]
    draft = Eagle3(config, target, eagle3_taps(target.config.num_hidden_layers), covered, embeds=False, head=covered.numel(), width=width, norms=Norms())
    layer: Any = draft.layers[0]
    head: Any = draft.get_output_embeddings()
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            weight.zero_()[:, :width] = getattr(source.self_attn, name).weight
        draft.fc.weight.zero_()[:, -width:] = 0.01 * torch.eye(width)
        head.weight.copy_(target.get_output_embeddings().weight[covered])
    layer.self_attn.o_proj.load_state_dict(source.self_attn.o_proj.state_dict())
    for name in ("mlp", "input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).load_state_dict(getattr(source, name).state_dict())
    draft.norm.load_state_dict(target.model.norm.state_dict())
    return draft.train()


def magnitudes(text: Text) -> Tensor:
    """[taps * width]: the root mean square of every dimension of the hidden states. A few are a hundred times the others."""
    sample = np.concatenate([states[1:-1] for states in text.hidden[:100]]).astype(np.float32)  # the first token's are unlike all others
    return torch.from_numpy(np.sqrt((sample**2).mean(0)) + 1e-6)


def batches(text: Text, which: Sequence[int], size: int, scale: Tensor) -> Iterator[Batch]:
    """Padded batches of conversations of n tokens at most, whose row r stands for token r + 1 and the hidden states of token r.

    Yields:
        tokens [b, n - 1]; hidden states [b, n - 1, taps * width] times `scale`; places [a], flat, of the rows that
        draft an answer token; top ids and log p [a, TOP].
    """
    for at, (tokens, places, ids, logp) in enumerate(text.batches(which, size)):
        chosen = which[at * size : (at + 1) * size]
        hidden = torch.zeros(*tokens.shape, scale.numel())
        for row, conversation in enumerate(chosen):
            states = text.hidden[conversation]
            hidden[row, : len(states)] = torch.from_numpy(states.astype(np.float32))
        rows = places - 1 - places // tokens.shape[1]  # each conversation has a row less than tokens, and its rows begin at token 1
        yield tokens[:, 1:], hidden[:, :-1] * scale, rows, ids, logp


def divergences(draft: Eagle3, to_draft: Tensor, batch: Batch, chain: int) -> Tensor:
    """[chain]: mean over answer tokens of KL(target || draft), where the token is the first of a chain, the second, ...; on the covered part
    of the target's most probable tokens."""
    *_, ids, logp = batch
    at = to_draft[ids]
    p = logp.exp() * (at >= 0)
    found = []
    for logits in chains(draft, batch, chain):
        log_q = logits.gather(1, at.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
        found.append((p * (logp - log_q)).sum(-1).mean())
    return torch.stack(found)


@torch.no_grad()
def evaluate(draft: Eagle3, to_draft: Tensor, held_out: Iterable[Batch], chain: int) -> list[float]:
    """Share of answer tokens on whose most probable token draft and target agree, as a chain's first token, second, ...; tokens before are
    the target's."""
    agree, total = [0] * chain, 0
    for batch in held_out:
        best = to_draft[batch[3][:, 0]]
        total += best.numel()
        for token, logits in enumerate(chains(draft, batch, chain)):
            agree[token] += int((logits.argmax(-1) == best).sum())
    return [each / total for each in agree]


def chains(draft: Eagle3, batch: Batch, chain: int) -> Iterator[Tensor]:
    """Logits [a, draft vocabulary] at a batch's places, for tokens that are the first of a chain, the second, ...

    One pass drafts with every row as a chain's first, the next with every row as the second of the chain that began a row before, and so on:
    a row attends to the first pass up to where its chain began, and to its own chain in the passes since.
    """
    tokens, hidden, places, _, _ = batch
    rows = tokens.shape[1]
    features, positions, cache = draft.fuse(hidden), torch.arange(1, rows + 1)[None], DynamicCache()
    for token in range(chain):
        mask = attends(rows, token)[None, None]
        logits, output = draft(tokens, features, positions, {FULL: mask}, cache)
        yield logits.flatten(0, 1)[places]
        features = torch.cat([output[:, :1], output[:, :-1]], 1)


def attends(rows: int, token: int) -> Tensor:
    """The additive mask [rows, (token + 1) * rows] of the pass in which every row is the `token`th of its chain, counted from 0."""
    row, key = torch.arange(rows)[:, None], torch.arange(rows)
    seen = [key <= row - token] + [key == row - token + later for later in range(1, token + 1)]
    return torch.zeros(rows, (token + 1) * rows).masked_fill(~torch.cat(seen, 1), torch.finfo(torch.float32).min)
