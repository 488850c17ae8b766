"""Builds the draft of a checkpoint for its target.

Its module has the shapes that config.json and the target give it, so strict loading of the weights
shows most of what does not fit.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import AFTER_FINAL_NORM, FULL, WINDOWED
from sequoia_plan.models.loaded_model import LoadedModel
from sequoia_plan.models.vocabulary import check_d2t
from sequoia_plan.runtime.draft.checkpoint import (
    BLOCK_DRAFTS,
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE1,
    EAGLE3,
    Checkpoint,
    errors_of,
    load_weights,
)
from sequoia_plan.runtime.draft.dflash_model import DFlashModel, DraftBlock
from sequoia_plan.runtime.draft.eagle_model import Eagle1, Eagle3, Eagle3Norms
from sequoia_plan.runtime.draft.hidden_state_draft import LAYER_CLASSES, HiddenStateDraft

LAYER_IDS = {
    EAGLE1: ((), ()),
    EAGLE3: (
        ("eagle_config.eagle_aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids"),
        ("eagle_aux_hidden_state_layer_ids",),
    ),
    **dict.fromkeys(
        BLOCK_DRAFTS,
        (
            ("dflash_config.target_layer_ids", "target_layer_ids"),
            ("aux_hidden_state_layer_ids",),
        ),
    ),
}
"""Where config.json may have layer numbers: in other layouts, and in that of speculators."""
LIKE_LAYER_IDS = re.compile(r"layer_?ids?$|aux.*layer")
"""Keys that say which hidden states a draft reads, if one knew how their numbers count."""
MAX_BLOCK_SIZE = 4096
"""Tokens; published blocks have 8 to 16."""
ANY, FLAG, ON, UNSCALED = (), (False, True), (True,), (1, 1.0)
SIZES = {
    DFLASH: (),
    DFLASH2: ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    DSPARK: ("markov_rank",),
}
"""The settings of a block draft that are sizes of what it has beyond DFlash; see `DraftBlock`."""
EAGLE3_SETTINGS = {
    "eagle_aux_hidden_state_layer_ids": ANY,
    "parallel_draft_heads_num_layers": ANY,
    "norm_before_residual": FLAG,
    "norm_output": FLAG,
    "norm_before_fc": FLAG,
    "fc_norm": FLAG,
    "use_aux_hidden_state": ON,
    "use_input_layernorm_in_first_layer": ON,
    "use_last_layernorm": ON,
    "next_layer_regular": ON,
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (1,),
}
BLOCK_SETTINGS = {
    **dict.fromkeys([name for names in SIZES.values() for name in names], ANY),
    "block_size": ANY,
    "mask_token_id": ANY,
    "target_layer_ids": ANY,
    "num_target_layers": ANY,
    "is_causal": FLAG,
    "causal": FLAG,
    "sample_from_anchor": FLAG,
    "sliding_window_non_causal": FLAG,
    "use_aux_hidden_state": ON,
    "markov_head_type": ("vanilla",),
    "input_embedding_scale": UNSCALED,
    "output_multiplier": UNSCALED,
    "logit_scale": UNSCALED,
    "final_logit_softcapping": (0, 0.0),
}
"""The known keys of an algorithm's section of config.json, which may also be at the top, and the
values that they may have; those of `ANY` are checked where they are read."""


def load_checkpoint(
    checkpoint: Checkpoint, target: LoadedModel, dtype: torch.dtype
) -> HiddenStateDraft:
    """Build the draft, in `dtype` and on the device where the target computes."""
    device = target.device
    weights = {
        name: checkpoint.weights[name] for name in checkpoint.weights.keys() - {"d2t", "t2d"}
    }
    meaning = f"its config.json makes no {checkpoint.algorithm} draft for this target: "
    with errors_of(checkpoint.folder, meaning):
        with torch.device("meta"):
            draft = _build(checkpoint, target)
        load_weights(draft, weights, torch.empty(0, dtype=dtype, device=device))
    # the buffers of rotary embeddings are computed, not loaded
    draft.rotary_emb = type(draft.rotary_emb)(draft.config).to(device)
    draft.d2t = None if draft.d2t is None else draft.d2t.to(device)
    return draft.eval().requires_grad_(False)


def length_remarks(
    checkpoint: Checkpoint, draft: HiddenStateDraft, target: LoadedModel
) -> tuple[str, ...]:
    """A sentence for users if the draft was trained on shorter texts than the target reads."""
    trained_length = getattr(draft.config, "max_position_embeddings", None)
    context = target.config.max_position_embeddings or 0
    if not trained_length or trained_length >= context:
        return ()
    return (
        f"{checkpoint.folder}: trained on up to {trained_length} tokens (max_position_embeddings), "
        f"the target reads {context}; acceptance falls beyond that",
    )


def eagle3_default_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states of a target that an EAGLE-3 draft reads where its folder does not say.

    SGLang, vLLM and all trainers take these.
    """
    return 2, num_layers // 2, num_layers - 3  # a number k is the output of layer k, from 1


def _build(checkpoint: Checkpoint, target: LoadedModel) -> HiddenStateDraft:
    """The draft's module. Embeddings and head are its own where the target's cannot serve."""
    weights, algorithm = checkpoint.weights, checkpoint.algorithm
    layer_config, d2t = _layer_config(checkpoint, target), d2t_of(checkpoint, target)
    other_width = layer_config.hidden_size != target.config.hidden_size
    settings, vocabulary = _settings(checkpoint), layer_config.vocab_size
    other_head = d2t is not None or (settings.get("draft_vocab_size") or vocabulary) != vocabulary
    has_head = other_head or other_width or "lm_head.weight" in weights
    draft_vocabulary = target.vocabulary if d2t is None else d2t.numel()
    arguments: dict[str, Any] = {
        "config": layer_config,
        "target": target,
        "aux_hidden_state_layers": _aux_hidden_state_layers(checkpoint, target),
        "d2t": d2t,
        "has_embeddings": other_width or "embed_tokens.weight" in weights,
        "head_rows": draft_vocabulary if has_head else 0,
    }
    draft: HiddenStateDraft
    if algorithm == EAGLE1:
        draft = Eagle1(bias="fc.bias" in weights, **arguments)
    elif algorithm == EAGLE3:
        keys = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
        draft = Eagle3(norms=Eagle3Norms(*(bool(settings.get(key)) for key in keys)), **arguments)
    else:
        if algorithm == DFLASH2 and d2t is not None:
            raise SequoiaPlanError("d2t: found, expected a DFlash 2 draft with all tokens")
        draft = DFlashModel(block=_draft_block(checkpoint, settings, target), **arguments)
    assert draft.window is None or draft.window > 0, "sliding_window"
    return draft


def _layer_config(checkpoint: Checkpoint, target: LoadedModel) -> PreTrainedConfig:
    """The configuration of the draft's layers, as an object of transformers."""
    config = checkpoint.config
    section = config["transformer_layer_config"] if checkpoint.from_speculators else config
    num_layers = len({n.split(".")[1] for n in checkpoint.weights if n.startswith("layers.")})
    settings = {"model_type": "llama", "num_hidden_layers": num_layers, **section}
    model_types = ("qwen3",) if checkpoint.algorithm in BLOCK_DRAFTS else tuple(LAYER_CLASSES)
    if settings["model_type"] not in model_types:
        raise SequoiaPlanError(
            f"layers of model_type {settings['model_type']!r:.60}, expected "
            f"{' or '.join(model_types)}"
        )
    if settings["num_hidden_layers"] != num_layers:
        raise SequoiaPlanError(
            f"num_hidden_layers: found {settings['num_hidden_layers']!r:.60}, its weights have "
            f"{num_layers}"
        )
    layer_config = LAYER_CLASSES[settings["model_type"]][0](**settings)
    vocabulary = target.config.vocab_size
    if layer_config.vocab_size != vocabulary:
        raise SequoiaPlanError(
            f"vocab_size: made for a target of {layer_config.vocab_size} tokens, this one has "
            f"{vocabulary}"
        )
    return layer_config


def d2t_of(checkpoint: Checkpoint, target: LoadedModel) -> Tensor | None:
    """int64 [draft vocabulary]: the target's tokens, from the offsets in files; None if they agree.

    `t2d` marks the same tokens; where one of the two was not filled, they differ.
    """
    offsets, t2d = checkpoint.weights.get("d2t"), checkpoint.weights.get("t2d")
    if offsets is None:
        return None
    d2t = torch.arange(offsets.numel(), device="cpu") + offsets.flatten()
    check_d2t(d2t, target.vocabulary, target.vocabulary)
    if t2d is not None and set(d2t.tolist()) != set(t2d.nonzero().flatten().tolist()):
        raise SequoiaPlanError(
            "d2t: expected offsets (target token = draft token + d2t[draft token]) that name the "
            "tokens that t2d marks"
        )
    return d2t.long()


def _aux_hidden_state_layers(checkpoint: Checkpoint, target: LoadedModel) -> tuple[int, ...]:
    """Which hidden states of this target the draft reads, numbered as in aux_hidden_states.py."""
    keys = LAYER_IDS[checkpoint.algorithm][checkpoint.from_speculators]
    layer_ids = {
        name: value
        for name, value in _by_path(checkpoint.config)
        if LIKE_LAYER_IDS.search(name.rpartition(".")[2]) and value is not None
    }
    if unknown_keys := sorted(layer_ids.keys() - keys):
        raise SequoiaPlanError(
            f"found layer ids as {unknown_keys[0]}, whose numbers no known trainer of this layout "
            f"writes; expected {keys[0] if keys else 'none'}"
        )
    if not keys:
        return (AFTER_FINAL_NORM,)
    num_layers = target.config.num_hidden_layers
    shift = 0 if checkpoint.from_speculators else 1  # our number less the number in the file
    key = next(iter(layer_ids), keys[0])
    ids: Any = layer_ids.get(key)
    if ids is None and checkpoint.algorithm == EAGLE3:
        ids = [number - shift for number in eagle3_default_layers(num_layers)]
    is_valid = (
        isinstance(ids, list)
        and all(other == ids for other in layer_ids.values())
        and 0 < len(ids) == len(set(ids))
        and all(_is_int(number) and 0 <= number + shift <= num_layers for number in ids)
    )
    if not is_valid:
        raise SequoiaPlanError(
            f"{key}: found {ids!r:.60}, expected distinct numbers of this target's hidden states, "
            f"{-shift} to {num_layers - shift}"
        )
    return tuple(number + shift for number in ids)


def _by_path(section: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The names and values of all settings, those in sections under names like "section.key"."""
    for name, value in section.items():
        yield prefix + name, value
        if isinstance(value, Mapping):
            yield from _by_path(value, f"{prefix}{name}.")


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of config.json; those in the algorithm's own section come before others.

    An unknown key of that section is refused, and so is a value that makes it another model.
    """
    is_block_draft = checkpoint.algorithm in BLOCK_DRAFTS
    section_name = "dflash_config" if is_block_draft else "eagle_config"
    allowed: Mapping[str, tuple[object, ...]] = (
        BLOCK_SETTINGS if is_block_draft else EAGLE3_SETTINGS
    )
    if checkpoint.algorithm == EAGLE1:
        allowed = {}
    section = checkpoint.config.get(section_name) or {}
    if not isinstance(section, Mapping):
        raise SequoiaPlanError(f"{section_name}: found {section!r:.60}, expected a section")
    if unknown_keys := sorted(key for key in section.keys() - allowed if section[key]):
        raise SequoiaPlanError(
            f"{section_name}.{unknown_keys[0]}: a variant that is not known; expected "
            f"{', '.join(sorted(allowed))}"
        )
    settings = {**checkpoint.config, **section}
    for key, values in allowed.items():
        value = settings.get(key)
        if values and value is not None and json.dumps(value) not in map(json.dumps, values):
            raise SequoiaPlanError(f"{key}: found {value!r:.60}, expected one of {values}")
    return settings


def _draft_block(
    checkpoint: Checkpoint, settings: Mapping[str, Any], target: LoadedModel
) -> DraftBlock:
    """What a block of this DFlash draft is, from its config.json.

    A block is the tokens that one pass reads: the root's, and mask tokens after it.
    """
    from_speculators, algorithm = checkpoint.from_speculators, checkpoint.algorithm
    size, mask_token = settings.get("block_size"), settings.get("mask_token_id")
    num_embeddings = target.num_embeddings
    if not (_is_int(size) and 2 <= size <= MAX_BLOCK_SIZE and _is_int(mask_token)):
        raise SequoiaPlanError(
            f"block_size, mask_token_id: found {size!r:.20} and {mask_token!r:.20}, expected whole "
            f"numbers, and 2 to {MAX_BLOCK_SIZE} tokens"
        )
    if not 0 <= mask_token < num_embeddings:
        raise SequoiaPlanError(
            f"mask_token_id: found {mask_token}, this target's tokens are 0 to {num_embeddings - 1}"
        )
    sizes: dict[str, Any] = {name: settings.get(name) for name in SIZES[algorithm]}
    if not all(_is_int(size) and size >= (algorithm != DSPARK) for size in sizes.values()):
        raise SequoiaPlanError(f"{', '.join(sizes)}: found {sizes!r:.99}, expected whole numbers")
    from_root = settings.get("sample_from_anchor")
    if from_root is None and algorithm == DSPARK and from_speculators:
        raise SequoiaPlanError(
            "sample_from_anchor: missing, expected true or false (whether the first row of a block "
            "drafts a token); drafts of both kinds were written without it"
        )
    return DraftBlock(
        size,
        mask_token,
        from_root=algorithm == DSPARK if from_root is None else from_root,
        causal_layer_types=_causal_layer_types(settings, checkpoint),
        window_from_root=from_speculators,
        **sizes,
    )


def _causal_layer_types(settings: Mapping[str, object], checkpoint: Checkpoint) -> frozenset[str]:
    """The types of layers in which a token of a DFlash block attends to those up to itself.

    Without a setting, these are the layers with a window.
    """
    if checkpoint.from_speculators:
        looks_ahead = settings.get("sliding_window_non_causal", checkpoint.algorithm == DFLASH2)
        return frozenset() if looks_ahead else frozenset([WINDOWED])
    is_causal = settings.get("is_causal", settings.get("causal"))
    if is_causal is None:
        return frozenset([WINDOWED])
    return frozenset([FULL, WINDOWED]) if is_causal else frozenset()


def _is_int(value: object) -> TypeGuard[int]:
    """Is `value` a whole number? JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)
