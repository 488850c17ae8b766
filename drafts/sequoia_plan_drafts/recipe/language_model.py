"""Trains a draft that is a language model: `python -m sequoia_plan_drafts.recipe train`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.runtime.draft.draft_file import build_draft, save_draft
from sequoia_plan_drafts.recipe.training import Training, TrainingSettings, config_like
from sequoia_plan_drafts.recipe.training_text import TextBatch, TrainingText


def train_language_model(
    target: Any, text: TrainingText, recipe: TrainingSettings, out: Path, target_name: str
) -> None:
    """Train a draft for `target` (a Llama in float32) and write it to the file `out`."""
    torch.manual_seed(recipe.seed)
    vocabulary = text.draft_vocabulary(target.config.vocab_size, recipe.draft_vocabulary)
    draft = untrained_draft(target, vocabulary.d2t)

    def logits_of(batch: TextBatch, chain: int) -> Iterator[Tensor]:
        """The draft's logits for the answer tokens of a batch."""
        hidden_states = draft.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        yield draft.lm_head(hidden_states.flatten(0, 1)[batch.rows])

    def save(metadata: dict[str, Any]) -> None:
        """Write the draft, with metadata on how it was made."""
        save_draft(draft, out, metadata | {"target": target_name})

    Training(text, recipe, vocabulary, draft, logits_of, save, 1, recipe.steps).run()


def untrained_draft(target: Any, d2t: Tensor) -> Any:
    """The draft before training: first layers, final norm and rows of the head are the target's.

    The embeddings are the target's own, and stay as they are. `d2t` int64 [draft vocabulary].
    """
    layers = target.model.layers[:2]
    draft = build_draft(config_like(target, len(layers)), target.get_input_embeddings(), d2t)
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    draft.lm_head.load_state_dict({"weight": target.get_output_embeddings().weight[d2t]})
    draft.model.layers.load_state_dict(layers.state_dict())
    draft.model.embed_tokens.requires_grad_(False)
    return draft
