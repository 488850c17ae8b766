"""Training a draft on the target's own text: `python -m sequoia_plan.profiler.distill train`.

The draft starts as a few of the target's own layers with the target's embeddings (kept, shared) and, as its head, the
embedding rows of the tokens the target uses most. It minimises the forward KL divergence to the target's law at the
answer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.profiler.distill.training import Text, Training, agreeing, divergence, fit, layers_like
from sequoia_plan.runtime.draft.file import build_draft, save_draft


@dataclass(frozen=True)
class Recipe(Training):
    """How a draft is made.

    Args:
        layers: which of the target's layers it starts as.
        others: as for `Training`.
    """

    layers: tuple[int, ...] = (0, 1)


def train(target: Any, text: Text, recipe: Recipe, out: Path, target_name: str, report: Callable[[str], None] = print) -> None:
    """Train a draft for `target` (a Llama in float32) and write it to `out`."""
    torch.manual_seed(recipe.seed)
    draft, to_draft, share = _start(target, text, recipe)

    def loss_of(batch: tuple[Tensor, Tensor, Tensor, Tensor], step: int) -> Tensor:
        tokens, places, ids, logp = batch
        return divergence(_logits(draft, tokens, places), to_draft, ids, logp)

    def save(facts: dict[str, Any]) -> None:
        save_draft(draft, out, facts | {"target": target_name})

    parameters = [p for name, p in draft.named_parameters() if "embed_tokens" not in name]
    draft.train()
    fit(parameters, text, recipe, share, text.batches, loss_of, lambda held_out: evaluate(draft, to_draft, text, held_out), save, report)


@torch.no_grad()
def evaluate(draft: Any, to_draft: Tensor, text: Text, which: Sequence[int]) -> float:
    """Share of answer tokens at which draft and target agree on the most probable token."""
    draft.eval()
    agree = total = 0
    for tokens, places, ids, _ in text.batches(which, 16):
        agree += agreeing(_logits(draft, tokens, places), to_draft, ids)
        total += places.numel()
    draft.train()
    return round(agree / total, 4)


def _logits(draft: Any, tokens: Tensor, places: Tensor) -> Tensor:
    hidden = draft.model(input_ids=tokens, use_cache=False).last_hidden_state
    logits: Tensor = draft.lm_head(hidden.flatten(0, 1)[places])
    return logits


def _start(target: Any, text: Text, recipe: Recipe) -> tuple[Any, Tensor, float]:
    """The untrained draft, the map from the target's tokens to its own (-1: not covered), and the mass it covers."""
    vocabulary = target.config.vocab_size
    covered, share, to_draft = text.most_used(recipe.covered, vocabulary)
    draft = build_draft(layers_like(target, len(recipe.layers)), target.get_input_embeddings(), covered)
    weights = target.state_dict()
    start = {"lm_head.weight": weights["lm_head.weight"][covered], "model.norm.weight": weights["model.norm.weight"]}
    for to, layer in enumerate(recipe.layers):
        prefix = f"model.layers.{layer}."
        start |= {f"model.layers.{to}.{name.removeprefix(prefix)}": value for name, value in weights.items() if name.startswith(prefix)}
    draft.load_state_dict(start, strict=False)
    draft.model.embed_tokens.requires_grad_(False)
    return draft, to_draft, share
