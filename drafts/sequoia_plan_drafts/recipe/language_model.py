"""Trains a draft that is a language model: `python -m sequoia_plan_drafts.recipe train`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError
from sequoia_plan.runtime.draft.draft_file import build_draft, save_draft
from sequoia_plan_drafts.recipe.training import Training, TrainingSettings, config_like
from sequoia_plan_drafts.recipe.training_text import TextBatch, TrainingText


@dataclass(frozen=True)
class LanguageModelRecipe(TrainingSettings):
    """How a language-model draft is made, from these layers of the target."""

    layers: tuple[int, ...] = (0, 1)


def train_language_model(
    target: Any,
    text: TrainingText,
    recipe: LanguageModelRecipe,
    out: Path,
    target_name: str,
) -> None:
    """Train a draft for `target` (a Llama in float32) and write it to the file `out`."""
    torch.manual_seed(recipe.seed)
    vocabulary = text.draft_vocabulary(target.config.vocab_size, recipe.draft_vocabulary)
    draft = untrained_draft(target, vocabulary.d2t, recipe.layers).train()

    def logits_of(batch: TextBatch, chain: int) -> Iterator[Tensor]:
        """The draft's logits for the answer tokens of a batch."""
        hidden_states = draft.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        yield draft.lm_head(hidden_states.flatten(0, 1)[batch.rows])

    def save(metadata: dict[str, Any]) -> None:
        """Write the draft, with metadata on how it was made."""
        save_draft(draft, out, metadata | {"target": target_name})

    training = Training(text, recipe, vocabulary, draft, logits_of, save, 1, recipe.steps)
    training.run()


def untrained_draft(target: Any, d2t: Tensor, layers: Sequence[int]) -> Any:
    """The draft before training: layers, final norm and rows of the head are the target's.

    The embeddings are the target's own, and stay as they are. `d2t` int64 [draft vocabulary].
    """
    num_layers = target.config.num_hidden_layers
    if wrong := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise ArgumentError(f"--layers {wrong[0]}: the target has the layers 0 to {num_layers - 1}")
    draft = build_draft(config_like(target, len(layers)), target.get_input_embeddings(), d2t)
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    draft.lm_head.load_state_dict({"weight": target.get_output_embeddings().weight[d2t]})
    for draft_layer, target_layer in zip(draft.model.layers, layers, strict=True):
        draft_layer.load_state_dict(target.model.layers[target_layer].state_dict())
    draft.model.embed_tokens.requires_grad_(False)
    return draft
