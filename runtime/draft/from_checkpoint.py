"""Builds the draft of a checkpoint for its target, or says in one line why the two do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.base.errors import first_line
from sequoia_plan.runtime.draft.checkpoint import (
    DFLASH,
    EAGLE1,
    EAGLE3,
    Checkpoint,
    eagle3_default_layers,
)
from sequoia_plan.runtime.draft.dflash_model import DFlashModel, DraftBlock
from sequoia_plan.runtime.draft.eagle_model import Eagle1, Eagle3, Eagle3Norms
from sequoia_plan.runtime.draft.hidden_state_draft import (
    LAYER_CLASSES,
    HiddenStateDraft,
)
from sequoia_plan.runtime.models.architecture import (
    FULL,
    WINDOWED,
    decoder_layers,
    execution_device,
    text_config,
    unwrapped,
)
from sequoia_plan.runtime.models.aux_hidden_states import AFTER_FINAL_NORM
from sequoia_plan.runtime.models.vocabulary import vocabulary_size

CONFIG_CLASSES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""By `model_type`."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""Keys of a configuration that must be at least 1."""
MAX_SIZE, MAX_LAYERS = 1 << 30, 1 << 12
"""The most that sizes and numbers of layers may be: a module of more would be built for minutes."""
DFLASH_SETTINGS = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "causal",
    "sample_from_anchor",
    "num_target_layers",
}
"""Known keys of `dflash_config`; any other one makes the draft another model."""
EAGLE3_NORM_KEYS = {
    "before_residual": "norm_before_residual",
    "output": "norm_output",
    "before_fc": "norm_before_fc",
    "each_before_fc": "fc_norm",
}
"""For each field of `Eagle3Norms`, its key in config.json."""


def load_checkpoint(checkpoint: Checkpoint, target: Any, dtype: torch.dtype) -> HiddenStateDraft:
    """Build the draft, in `dtype` and on the device where the target computes."""
    try:
        return _load(checkpoint, target, dtype)
    except (SequoiaPlanError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # torch and transformers raise errors of many types
        raise checkpoint.error(
            f"config.json: its values make no {checkpoint.algorithm} draft "
            f"({type(error).__name__}: {first_line(error)}); get the draft again"
        ) from error


def _load(checkpoint: Checkpoint, target: Any, dtype: torch.dtype) -> HiddenStateDraft:
    """`load_checkpoint` for a config.json whose values are of the right types."""
    config = _layer_config(checkpoint)
    target_config = text_config(target)
    target_width, vocabulary = int(target_config.hidden_size), int(target_config.vocab_size)
    fc_weight = checkpoint.weights.get("fc.weight")
    if fc_weight is None or fc_weight.ndim != 2:
        raise checkpoint.error(
            f"no matrix fc.weight found, which every {checkpoint.algorithm} draft has; get the "
            "draft again"
        )
    layers = _aux_hidden_state_layers(checkpoint, target, fc_weight, config, target_width)
    if config.vocab_size != vocabulary:
        raise checkpoint.error(
            f"made for a target of {config.vocab_size} tokens (vocab_size), this one has "
            f"{vocabulary}; use a draft made for this target"
        )
    has_embeddings = "embed_tokens.weight" in checkpoint.weights
    if not has_embeddings and config.hidden_size != target_width:
        raise checkpoint.error(
            f"has no embeddings of its own, and its hidden size {config.hidden_size} is not the "
            f"target's, {target_width}"
        )
    arguments = {
        "config": config,
        "target": target,
        "aux_hidden_state_layers": layers,
        "d2t": checkpoint.d2t,
        "has_embeddings": has_embeddings,
        "head_rows": _head_rows(checkpoint, target, config, target_width),
    }
    with torch.device("meta"):
        draft = _build(checkpoint, arguments, target_width)
    _fill(checkpoint, draft, execution_device(target), dtype)
    return draft.eval().requires_grad_(False)


def remarks(checkpoint: Checkpoint, draft: HiddenStateDraft, target: Any) -> list[str]:
    """What a person should know about a draft that loads, a sentence each."""
    sentences = []
    target_model = unwrapped(target)
    architectures = getattr(target_model.config, "architectures", None)
    architecture = (architectures or [type(target_model).__name__])[0]
    if checkpoint.target_architecture and checkpoint.target_architecture != architecture:
        sentences.append(
            f"{checkpoint.folder}: made for {checkpoint.target_name or 'a target'} "
            f"({checkpoint.target_architecture}), this target is a {architecture}; expect little "
            "of it unless they are one model"
        )
    trained_length = getattr(draft.config, "max_position_embeddings", None)
    context = text_config(target).max_position_embeddings or 0
    if trained_length and trained_length < context:
        sentences.append(
            f"{checkpoint.folder}: trained on up to {trained_length} tokens "
            f"(max_position_embeddings), the target reads {context}; acceptance falls beyond that"
        )
    return sentences


def _layer_config(checkpoint: Checkpoint) -> Any:
    """The configuration of the draft's layers, as an object of transformers."""
    model_type = checkpoint.layer_config.get("model_type")
    allowed_types = ("qwen3",) if checkpoint.algorithm == DFLASH else tuple(LAYER_CLASSES)
    if model_type not in allowed_types:
        raise checkpoint.error(
            f"found layers of model_type {model_type!r:.60}, expected {' or '.join(allowed_types)}"
        )
    _check_sizes(checkpoint, checkpoint.layer_config)  # a list for 10^9 layers would take minutes
    try:
        config = CONFIG_CLASSES[model_type](**checkpoint.layer_config)
        _check_sizes(checkpoint, vars(config))
    except SequoiaPlanError:
        raise
    except Exception as error:  # transformers raises errors of many types
        raise checkpoint.error(
            f"config.json: cannot be read as a {model_type} configuration ({first_line(error)})"
        ) from error
    if WINDOWED in (getattr(config, "layer_types", None) or []):
        window = config.sliding_window
        if not isinstance(window, int) or window <= 0:
            raise checkpoint.error(
                f"has layers of sliding_attention and sliding_window {window!r:.20}, expected a "
                "number of positions"
            )
    return config


def _check_sizes(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise SequoiaPlanError unless sizes are whole numbers of at least 1, and the activation is
    known.
    """
    for name in SIZES:
        size = config.get(name)
        highest = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if size is not None and (not _is_int(size) or not 1 <= size <= highest):
            raise checkpoint.error(
                f"config.json: {name}: found {size!r:.40}, expected a whole number, 1 to {highest}"
            )
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise checkpoint.error(
            f"config.json: hidden_act: found {activation!r:.40}, expected an activation of "
            "transformers, as silu"
        )


def _aux_hidden_state_layers(
    checkpoint: Checkpoint, target: Any, fc_weight: Tensor, config: Any, target_width: int
) -> tuple[int, ...]:
    """Which hidden states of this target the draft reads, numbered as in aux_hidden_states.py."""
    if checkpoint.algorithm == EAGLE1:
        width = config.hidden_size
        # the matrix of EAGLE-1 reads an embedding and a hidden state side by side
        if fc_weight.shape[1] != 2 * width or width != target_width:
            raise checkpoint.error(
                f"fc.weight is {_shape(fc_weight)} for a hidden size of {width}, the target's is "
                f"{target_width}: expected {target_width} x {2 * target_width}; use a draft made "
                "for this target"
            )
        return (AFTER_FINAL_NORM,)
    columns = fc_weight.shape[1]
    given_width = checkpoint.config.get("target_hidden_size")
    expected_width = given_width or columns // 3  # EAGLE-3 reads three hidden states
    fits = columns % target_width == 0
    if expected_width != target_width and not fits:
        raise checkpoint.error(
            f"made for a target of hidden size {expected_width}, this one's is {target_width}; use "
            "a draft made for this target"
        )
    if not fits and not given_width:
        raise checkpoint.error(
            f"fc.weight is {_shape(fc_weight)}, which takes no whole number of hidden states of "
            f"{target_width}, the target's hidden size; use a draft made for this target"
        )
    num_states = columns // target_width
    num_layers = len(decoder_layers(unwrapped(target))[1])
    if not fits or (given_width and given_width != target_width):
        raise checkpoint.error(
            f"made for a target of hidden size {given_width}, this one's is {target_width}; use a "
            "draft made for this target"
        )
    if checkpoint.aux_hidden_state_layers is None and checkpoint.algorithm == DFLASH:
        raise checkpoint.error(
            "says no target_layer_ids, and a DFlash draft can be read with no others; get its "
            "config.json again"
        )
    layers = checkpoint.aux_hidden_state_layers or eagle3_default_layers(num_layers)
    if len(layers) != num_states:
        raise checkpoint.error(
            f"fc.weight is {_shape(fc_weight)}, which takes {num_states} hidden states of "
            f"{target_width}, its layer ids are {len(layers)}; use a draft made for this target"
        )
    if len(set(layers)) < len(layers) or not all(0 <= layer <= num_layers for layer in layers):
        raise checkpoint.error(
            f"reads the target's hidden states {', '.join(map(str, layers))}, this one has 0 to "
            f"{num_layers}; use a draft made for this target"
        )
    return layers


def _head_rows(checkpoint: Checkpoint, target: Any, config: Any, target_width: int) -> int:
    """Rows of the draft's own output head; 0 if it uses the target's."""
    head, d2t = checkpoint.weights.get("lm_head.weight"), checkpoint.d2t
    target_tokens = vocabulary_size(target)
    if head is None:
        if checkpoint.algorithm == EAGLE3:
            raise checkpoint.error(
                "no lm_head.weight found, which every EAGLE-3 draft has; get the draft again"
            )
        if d2t is not None:
            raise checkpoint.error(
                "found d2t without an lm_head.weight of its own; get the draft again"
            )
        if config.hidden_size != target_width:
            raise checkpoint.error(
                f"has no head of its own, and its hidden size {config.hidden_size} is not the "
                f"target's, {target_width}"
            )
        return 0
    rows = int(head.shape[0])
    draft_vocabulary = checkpoint.config.get("draft_vocab_size")
    if draft_vocabulary not in (None, rows) and checkpoint.algorithm != EAGLE1:
        raise checkpoint.error(
            f"lm_head.weight has {rows} rows, draft_vocab_size is {draft_vocabulary!r:.20}; get "
            "the draft again"
        )
    if d2t is None:
        if rows != target_tokens:
            raise checkpoint.error(
                f"lm_head.weight has {rows} rows for {target_tokens} target tokens and no d2t says "
                "which; get the draft with its d2t"
            )
        return rows
    if d2t.numel() != rows:
        raise checkpoint.error(
            f"d2t has {d2t.numel()} entries, lm_head.weight has {rows} rows; get the draft again"
        )
    if int(d2t.max()) >= target_tokens:
        raise checkpoint.error(
            f"d2t names the target token {int(d2t.max())}, this target has {target_tokens}; use a "
            "draft made for this target"
        )
    return rows


def _build(
    checkpoint: Checkpoint, arguments: Mapping[str, Any], target_width: int
) -> HiddenStateDraft:
    """Make the draft's module; `_fill` gives it its weights.

    The caller has set the default device to "meta", so the parameters have shapes but no memory.
    """
    if checkpoint.algorithm == EAGLE1:
        return Eagle1(**arguments, bias="fc.bias" in checkpoint.weights)
    if checkpoint.algorithm == DFLASH:
        # The block is what one pass reads: the root's token, and mask tokens in place of the tokens
        # to draft.
        block = _draft_block(checkpoint, arguments["target"])
        return DFlashModel(**arguments, target_width=target_width, block=block)
    config = {**checkpoint.config, **(checkpoint.config.get("eagle_config") or {})}
    norms = {name: bool(config.get(key, False)) for name, key in EAGLE3_NORM_KEYS.items()}
    return Eagle3(**arguments, target_width=target_width, norms=Eagle3Norms(**norms))


def _draft_block(checkpoint: Checkpoint, target: Any) -> DraftBlock:
    """What a block of this DFlash draft is, from its config.json.

    A block is the tokens that one pass reads: the root's, and mask tokens after it.
    """
    config = checkpoint.config
    from_speculators = config.get("speculators_model_type") is not None
    section = {} if from_speculators else dict(config.get("dflash_config") or {})
    unknown_keys = sorted(key for key in section.keys() - DFLASH_SETTINGS if section[key])
    if unknown_keys:
        key = unknown_keys[0]
        raise checkpoint.error(
            f"dflash_config.{key}: found {section[key]!r:.40}, a variant that is not known; "
            f"expected {', '.join(sorted(DFLASH_SETTINGS))}"
        )
    size = section.get("block_size", config.get("block_size"))
    mask_token = section.get("mask_token_id", config.get("mask_token_id"))
    num_embeddings = target.get_input_embeddings().num_embeddings
    if not _is_int(size) or size < 2:
        raise checkpoint.error(
            f"block_size: found {size!r:.20}, expected a whole number of tokens, 2 or more"
        )
    if not _is_int(mask_token) or not 0 <= mask_token < num_embeddings:
        raise checkpoint.error(
            f"mask_token_id: found {mask_token!r:.20}, expected a token of the target, 0 to "
            f"{num_embeddings - 1}"
        )
    from_root = section.get("sample_from_anchor", config.get("sample_from_anchor", False))
    return DraftBlock(
        size,
        mask_token,
        from_root=bool(from_root),
        causal_layer_types=_causal_layer_types(config, section, from_speculators),
        window_from_root=from_speculators,
    )


def _causal_layer_types(
    config: Mapping[str, Any], section: Mapping[str, Any], from_speculators: bool
) -> frozenset[str]:
    """The types of layers in which a token of a DFlash block attends to those up to itself.

    Without a setting, these are the layers with a window.
    """
    if from_speculators:
        looks_ahead = config.get("sliding_window_non_causal", False)
        return frozenset() if looks_ahead else frozenset([WINDOWED])
    is_causal = config.get("is_causal", section.get("causal"))
    if is_causal is None:
        return frozenset([WINDOWED])
    return frozenset([FULL, WINDOWED]) if is_causal else frozenset()


def _fill(
    checkpoint: Checkpoint, draft: HiddenStateDraft, device: torch.device, dtype: torch.dtype
) -> None:
    """Give the module its weights, after a check of their names and shapes."""
    expected = draft.state_dict()
    for name in sorted(expected.keys() | checkpoint.weights.keys()):
        weight = checkpoint.weights.get(name)
        if weight is None:
            raise checkpoint.error(
                f"no tensor {name} found, expected {_shape(expected[name])}; its weights and "
                "config.json do not fit, get the draft again"
            )
        if name not in expected:
            raise checkpoint.error(
                f"found a tensor {name}, which its config.json gives no place; it may be a variant "
                "that is not known"
            )
        if weight.shape != expected[name].shape:
            raise checkpoint.error(
                f"{name} is {_shape(weight)}, expected {_shape(expected[name])} by its config.json "
                "and the target; get the draft again"
            )
    # the buffers of rotary embeddings are computed, not loaded
    draft.rotary_emb = type(draft.rotary_emb)(draft.config).to(device)
    weights = {name: weight.to(device, dtype) for name, weight in checkpoint.weights.items()}
    draft.load_state_dict(weights, assign=True)
    draft.d2t = None if checkpoint.d2t is None else checkpoint.d2t.to(device)


def _shape(tensor: Tensor | nn.Parameter) -> str:
    """A tensor's shape as error messages show it."""
    return " x ".join(map(str, tensor.shape))


def _is_int(value: Any) -> TypeGuard[int]:
    """Is `value` a whole number? JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)
