"""Trains an EAGLE-3 draft: `python -m sequoia_plan_drafts.recipe eagle3`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models import backends
from sequoia_plan.models.base.masks import additive_mask
from sequoia_plan.runtime.draft.checkpoint import find_checkpoint
from sequoia_plan.runtime.draft.eagle3_folder import write_eagle3
from sequoia_plan.runtime.draft.eagle_model import Eagle3, Eagle3Norms
from sequoia_plan.runtime.draft.from_checkpoint import eagle3_default_layers, load_checkpoint
from sequoia_plan_drafts.recipe.induction import add_induction_heads, without
from sequoia_plan_drafts.recipe.training import Training, TrainingSettings, config_like
from sequoia_plan_drafts.recipe.training_text import DraftVocabulary, TextBatch, TrainingText

FINAL_NORM_SCALE = 0.3
"""Factor of the target's final norm in a new draft: with the whole of it, one layer is confident
and wrong."""
COPYING_HEADS_LOGIT_SCALE = 1.2
"""Factor of the random projections in heads that pass a token's embedding on."""


@dataclass(frozen=True)
class Eagle3Recipe(TrainingSettings):
    """How an EAGLE-3 draft is made: from the folder `start`, or anew."""

    steps: int = 3000
    chain: int = 3
    start: str | None = None
    induction_heads: int = 0
    inner: int = 4096
    bits: int = 16


def train_eagle3(
    target: Any, text: TrainingText, recipe: Eagle3Recipe, out: Path, target_name: str
) -> None:
    """Train an EAGLE-3 draft for `target` (a Llama in float32) and write it to the folder `out`."""
    torch.manual_seed(recipe.seed)
    target_tokens = target.config.vocab_size
    text.select_hidden_states(eagle3_default_layers(target.config.num_hidden_layers))
    scale = text.hidden_state_scale
    if recipe.start:
        draft = load_for_training(target, recipe.start, scale)
        assert draft.d2t is not None
        recipe = replace(recipe, draft_vocabulary=draft.d2t.numel())
        vocabulary = text.draft_vocabulary(target_tokens, recipe.draft_vocabulary, draft.d2t)
    else:
        vocabulary = text.draft_vocabulary(target_tokens, recipe.draft_vocabulary)
        draft = untrained_draft(target, vocabulary, recipe.inner)
    logits = partial(chain_logits, draft, scale=scale)
    if recipe.induction_heads:
        add_induction_heads(draft, target, text, vocabulary, logits, recipe.induction_heads)
    attention = draft.layers[0].self_attn
    # induction heads have rows of zeros; the noise of steps would spoil what compares tokens
    if not attention.q_proj.weight.any(1).all():
        for projection in (draft.fc, attention.q_proj, attention.k_proj):
            projection.requires_grad_(False)

    def save(metadata: dict[str, Any]) -> None:
        """Write the draft, which reads unscaled hidden states, with metadata on how it was made."""
        weights = draft.state_dict()
        weights["fc.weight"] = weights["fc.weight"] * scale
        write_eagle3(
            out,
            draft.config,
            {name: weight.bfloat16() for name, weight in weights.items()},
            vocabulary.d2t,
            draft.norms.before_residual,
            metadata | {"target": target_name},
            in_8_bits=recipe.bits == 8,
        )

    Training(
        text,
        recipe,
        vocabulary,
        draft,
        logits,
        save,
        recipe.chain,
        0 if recipe.start else recipe.steps // 2,
    ).run()


def untrained_draft(target: Any, vocabulary: DraftVocabulary, inner: int = 4096) -> Any:
    """The draft before training: nearly the target's first layer, over the embedding.

    Of the first layer's inner units, the `inner` with the largest weights.
    """
    d2t = vocabulary.d2t
    config = config_like(target, 1)
    config.intermediate_size = min(inner, config.intermediate_size)
    config.num_key_value_heads = config.num_attention_heads
    draft: Any = Eagle3(
        config=config,
        target=backends.loaded_as(target),
        aux_hidden_state_layers=eagle3_default_layers(target.config.num_hidden_layers),
        d2t=d2t,
        has_embeddings=False,
        head_rows=d2t.numel(),
        norms=Eagle3Norms(before_residual=True),
    )
    layer: Any = draft.layers[0]
    target_layer = target.model.layers[0]
    with torch.no_grad():
        _initialise_heads(layer.self_attn, target, vocabulary.token_probs)
        # the target's last hidden state passes through `fc` as it is
        draft.fc.weight.zero_()[:, -config.hidden_size :] = torch.eye(config.hidden_size)
        draft.norm.weight.copy_(FINAL_NORM_SCALE * target.model.norm.weight)
        draft.lm_head.weight.copy_(target.get_output_embeddings().weight[d2t])
        norm, mlp = target_layer.post_attention_layernorm, target_layer.mlp
        layer.post_attention_layernorm.load_state_dict(norm.state_dict())
        # units of the inner width are rows of two matrices and columns of the third
        rows = {"gate_proj": mlp.gate_proj.weight, "up_proj": mlp.up_proj.weight}
        rows["down_proj"] = mlp.down_proj.weight.T
        sizes = torch.stack([weight.norm(dim=1) for weight in rows.values()]).prod(0)
        units = sizes.topk(config.intermediate_size).indices.sort().values
        for name, weight in rows.items():
            own = getattr(layer.mlp, name).weight
            own.copy_(weight[units] if own.shape[0] == len(units) else weight[units].T)
    return draft


def _initialise_heads(attention: Any, target: Any, token_probs: Tensor) -> None:
    """Give a new draft's attention its copying heads, and the heads of the target's first layer.

    In a copying head, queries and keys are one random projection of the centred embedding, by which
    a token attends to itself. Values are a few principal components of the embeddings, and the
    output projection turns them back into an embedding. `token_probs` float [vocabulary].
    """
    config, target_layer = target.config, target.model.layers[0]
    width, head_dim = config.hidden_size, attention.head_dim
    # each has principal components of its own, of which there are `width`
    num_copying_heads = min(2 * config.num_attention_heads // 3, width // head_dim)
    copying, others = slice(num_copying_heads), slice(num_copying_heads, None)
    columns = slice(num_copying_heads * head_dim)  # of the output projection

    embeddings = target.get_input_embeddings().weight
    normed = torch.nn.functional.rms_norm(embeddings, (width,))
    frequency = token_probs[:, None]
    # columns are principal components, the largest first: eigh's eigenvalues ascend
    components = torch.linalg.eigh((frequency * normed).T @ normed)[1].flip(1)[:, columns]
    centring = without(token_probs @ normed)
    embedding_rms = (frequency[:, 0] * embeddings.square().mean(-1).sqrt()).sum()
    projections = torch.linalg.qr(torch.randn(num_copying_heads, width, head_dim))[0].mT

    copied = {
        "q_proj": COPYING_HEADS_LOGIT_SCALE * projections @ centring,
        "k_proj": COPYING_HEADS_LOGIT_SCALE * projections @ centring,
        "v_proj": components.T.unflatten(0, (num_copying_heads, head_dim)),
    }
    for name, weight in copied.items():
        own = getattr(attention, name).weight.zero_().unflatten(0, (-1, head_dim))
        targets = getattr(target_layer.self_attn, name).weight.unflatten(0, (-1, head_dim))
        targets = targets.repeat_interleave(len(own) // len(targets), 0)
        own[copying, :, :width] = weight
        own[others, :, :width] = targets[others] * target_layer.input_layernorm.weight
    attention.o_proj.load_state_dict(target_layer.self_attn.o_proj.state_dict())
    attention.o_proj.weight[:, columns] = embedding_rms * components


def load_for_training(target: Any, folder: str, scale: Tensor) -> Eagle3:
    """Load a draft of `train_eagle3` to train it further on hidden states times `scale`.

    `scale` float [layers * width].
    """
    checkpoint = find_checkpoint(folder)
    draft: Any = checkpoint and load_checkpoint(
        checkpoint, backends.loaded_as(target), torch.float32
    )
    layers = eagle3_default_layers(target.config.num_hidden_layers)
    norms = (Eagle3Norms(), Eagle3Norms(before_residual=True))  # what `write_eagle3` can write
    if (
        not isinstance(draft, Eagle3)
        or (draft.d2t is None or draft.embed_tokens is not None)
        or (draft.norms not in norms or draft.aux_hidden_state_layers != layers)
    ):
        raise SequoiaPlanError(f"--start {folder}: expected a draft as `eagle3` writes it")
    with torch.no_grad():
        draft.fc.weight /= scale
    return draft.requires_grad_(True)


def chain_logits(draft: Any, batch: TextBatch, chain: int, scale: Any = 1.0) -> Iterator[Tensor]:
    """The draft's logits for the answer tokens, as a chain's first token, as its second, and so on.

    It reads hidden states times `scale`.

    An input row pairs a token with the hidden states of the token before it. The first pass drafts
    with every row as the first of a chain, the next with every row as the second of the chain that
    began a row before, and so on. A row attends to the first pass up to where its chain began, and
    to its own chain in the passes since.
    """
    num_rows = batch.tokens.shape[1] - 1
    tokens, features = batch.tokens[:, 1:], draft.features_of(batch.hidden_states[:, :-1] * scale)
    # `batch.rows` counts a row more in each conversation, where row t there is token t
    rows = batch.rows - 1 - batch.rows // (num_rows + 1)
    cache = DynamicCache()
    angles = draft.rotary_emb(features, torch.arange(1, num_rows + 1)[None])
    for place in range(chain):
        masks = draft.masks_by_layer_type(cache, chain_mask(num_rows, place), None, None)
        _, outputs = draft(tokens, features, angles, masks, cache, logits_to_keep=1)
        yield draft.head(outputs.flatten(0, 1)[rows])
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
