"""Trains a draft that is a language model: `python -m sequoia_plan_drafts.recipe train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.runtime.draft.draft_file import build_draft, save_draft
from sequoia_plan_drafts.recipe.training import (
    EVALUATION_BATCH,
    TextBatch,
    TrainingSettings,
    TrainingText,
    check_layers,
    config_like,
    count_agreements,
    kl_divergence,
    train,
)


@dataclass(frozen=True)
class LanguageModelRecipe(TrainingSettings):
    """How a language-model draft is made."""

    layers: tuple[int, ...] = (0, 1)


def train_language_model(
    target: Any,
    text: TrainingText,
    recipe: LanguageModelRecipe,
    out: Path,
    target_name: str,
    report: Callable[[str], None] = print,
) -> None:
    """Train a draft for `target` (a Llama in float32) and write it to the file `out`."""
    torch.manual_seed(recipe.seed)
    target_tokens = target.config.vocab_size
    vocabulary = text.most_probable_tokens(recipe.draft_vocabulary, target_tokens)
    draft = untrained_draft(target, vocabulary.d2t, recipe.layers)

    def loss_of(batch: TextBatch, step: int) -> Tensor:
        """The same loss in all steps: the KL divergence at the answer tokens."""
        logits = _logits(draft, batch)
        return kl_divergence(logits, vocabulary.target_to_draft, batch.top_ids, batch.top_logp)

    def agreement_on(conversation_indices: Sequence[int]) -> float:
        """How often the most probable tokens of draft and target agree on these conversations."""
        return top1_agreement(draft, vocabulary.target_to_draft, text, conversation_indices)

    def save(metadata: dict[str, Any]) -> None:
        """Write the draft, with metadata on how it was made."""
        save_draft(draft, out, metadata | {"target": target_name})

    parameters = [  # the embeddings are the target's own, and stay as they are
        parameter for name, parameter in draft.named_parameters() if "embed_tokens" not in name
    ]
    draft.train()
    train(parameters, text, recipe, vocabulary, text.batches, loss_of, agreement_on, save, report)


def untrained_draft(target: Any, d2t: Tensor, layers: Sequence[int]) -> Any:
    """The draft before training: layers, final norm and rows of the head are the target's.

    `d2t` int64 [draft vocabulary].
    """
    check_layers(target, layers)
    config = config_like(target, len(layers))
    draft = build_draft(config, target.get_input_embeddings(), d2t)
    target_weights = target.state_dict()
    weights = {
        "lm_head.weight": target_weights["lm_head.weight"][d2t],
        "model.norm.weight": target_weights["model.norm.weight"],
    }
    for draft_layer, target_layer in enumerate(layers):
        prefix = f"model.layers.{target_layer}."
        for name, weight in target_weights.items():
            if name.startswith(prefix):
                weights[f"model.layers.{draft_layer}.{name.removeprefix(prefix)}"] = weight
    draft.load_state_dict(weights, strict=False)  # the embeddings are in place already
    draft.model.embed_tokens.requires_grad_(False)
    return draft


@torch.no_grad()
def top1_agreement(
    draft: Any, target_to_draft: Tensor, text: TrainingText, numbers: Sequence[int]
) -> float:
    """Share of answer tokens at which draft and target have the same most probable token.

    `target_to_draft` int64 [target vocabulary].
    """
    draft.eval()
    agreements = answer_tokens = 0
    for batch in text.batches(numbers, EVALUATION_BATCH):
        agreements += count_agreements(_logits(draft, batch), target_to_draft, batch.top_ids)
        answer_tokens += batch.rows.numel()
    draft.train()
    return round(agreements / answer_tokens, 4)


def _logits(draft: Any, batch: TextBatch) -> Tensor:
    """Logits [answer tokens, draft vocabulary] for the answer tokens of a batch.

    `batch.rows` are the tokens before them, as indices into all tokens of the batch.
    """
    hidden_states = draft.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    logits: Tensor = draft.lm_head(hidden_states.flatten(0, 1)[batch.rows])
    return logits
