"""Trains a multi-token-prediction (MTP) head: `python -m sequoia_plan_drafts.recipe mtp`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch.nn.functional import linear

from sequoia_plan.artifacts.files import write_atomically
from sequoia_plan.models import backends
from sequoia_plan.runtime.draft.mtp import build_mtp
from sequoia_plan_drafts.recipe.eagle3 import FINAL_NORM_SCALE, ChainRecipe, chain_logits
from sequoia_plan_drafts.recipe.training import Training
from sequoia_plan_drafts.recipe.training_text import TrainingText

HIDDEN_STATE_SCALE = 0.3
"""Factor of the target's hidden state in a new head, beside the embedding."""


def train_mtp(
    target: Any, text: TrainingText, recipe: ChainRecipe, out: Path, target_name: str
) -> None:
    """Train a head for `target` (a Llama in float32) and write the file `out`.

    `--draft mtp` finds the head where the file is in the folder of the target.
    """
    text.select_hidden_states((target.config.num_hidden_layers,))  # after the final norm
    vocabulary = text.draft_vocabulary(target.config.vocab_size, recipe.draft_vocabulary)
    draft = untrained_head(target)
    head = target.get_output_embeddings().weight.detach()  # all of it in decoding
    draft.lm_head = partial(linear, weight=head[vocabulary.d2t])

    def save_head(metadata: dict[str, Any]) -> None:
        """Write the head under the names of Qwen3-Next, with metadata on how it was made."""
        tensors = {
            f"mtp.{name.removeprefix('block.')}": weight.bfloat16()
            for name, weight in draft.heads[0].state_dict().items()
        }
        header = {"sequoia_plan": json.dumps(metadata | {"target": target_name})}
        write_atomically(out, save(tensors, header))

    Training(
        text,
        recipe,
        vocabulary,
        draft,
        partial(chain_logits, draft),
        save_head,
        recipe.chain,
        recipe.steps // 2,
    ).run()


@torch.no_grad()
def untrained_head(target: Any) -> Any:
    """The head before training: the target's first layer, over embedding and hidden state."""
    width, layer = target.config.hidden_size, target.model.layers[0].state_dict()
    identity = target.get_input_embeddings().weight.std() * torch.eye(width)
    tensors = {f"block.layers.0.{name}": weight.clone() for name, weight in layer.items()} | {
        "block.norm.weight": FINAL_NORM_SCALE * target.model.norm.weight,
        "pre_fc_norm_embedding.weight": torch.ones(width),
        "pre_fc_norm_hidden.weight": torch.ones(width),
        "fc.weight": torch.cat([identity, HIDDEN_STATE_SCALE * identity], 1),
    }
    return build_mtp(backends.loaded_as(target), [tensors]).requires_grad_(True)
