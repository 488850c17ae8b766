"""From a checkpoint (published.py) to a draft that fits its target, or to one line that says why it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from sequoia_plan.runtime.draft.block_model import Block, BlockModel
from sequoia_plan.runtime.draft.feature_model import Eagle1, Eagle3, Norms
from sequoia_plan.runtime.draft.published import DFLASH, EAGLE1, EAGLE3, Checkpoint, eagle3_taps
from sequoia_plan.runtime.draft.tapped import FULL, LAYERS, WINDOWED, TappedDraft
from sequoia_plan.runtime.models.forward import decoder_layers, execution_device, plain, text_config
from sequoia_plan.runtime.models.load import first_line
from sequoia_plan.runtime.models.taps import NORMED
from sequoia_plan.runtime.models.vocabulary import vocabulary_size

CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
DFLASH_SETTINGS = {"block_size", "mask_token_id", "target_layer_ids", "causal", "sample_from_anchor", "num_target_layers"}
"""Of `dflash_config`; each of the others makes it another model."""


def load_tapped(checkpoint: Checkpoint, target: Any, dtype: torch.dtype) -> TappedDraft:
    """The draft, on the device where the target computes.

    Raises:
        SequoiaPlanError: if it was made for another target, or its tensors and its configuration do not fit each other.
    """
    config = _config(checkpoint)
    width, vocabulary = int(text_config(target).hidden_size), int(text_config(target).vocab_size)
    fc = checkpoint.weights.get("fc.weight")
    if fc is None or fc.ndim != 2:
        raise checkpoint.refuse(f"no matrix fc.weight found, which every {checkpoint.kind} draft has; get the draft again")
    taps = _taps(checkpoint, target, fc, config, width)
    if config.vocab_size != vocabulary:
        raise checkpoint.refuse(f"made for a target of {config.vocab_size} tokens (vocab_size), this one has {vocabulary}; use a draft made for this target")
    head = checkpoint.weights.get("lm_head.weight")
    embeds = "embed_tokens.weight" in checkpoint.weights
    if not embeds and config.hidden_size != width:
        raise checkpoint.refuse(f"has no embeddings of its own, and its hidden size {config.hidden_size} is not the target's, {width}")
    rows = _head_rows(checkpoint, target, head, config, width)
    shared = {"config": config, "target": target, "taps": taps, "covered": checkpoint.covered, "embeds": embeds, "head": rows}
    with torch.device("meta"):
        draft = _build(checkpoint, shared, width)
    _fill(checkpoint, draft, execution_device(target), dtype)
    return draft.eval().requires_grad_(False)


def remarks(checkpoint: Checkpoint, draft: TappedDraft, target: Any) -> list[str]:
    """What a person should know about a draft that loads, a sentence each."""
    said = []
    name, architecture = checkpoint.made_for
    found = (getattr(plain(target).config, "architectures", None) or [type(plain(target)).__name__])[0]
    if architecture and architecture != found:
        said.append(
            f"{checkpoint.folder}: made for {name or 'a target'} ({architecture}), this target is a {found}; expect little of it unless they are one model"
        )
    length, context = getattr(draft.config, "max_position_embeddings", None), text_config(target).max_position_embeddings or 0
    if length and length < context:
        said.append(
            f"{checkpoint.folder}: trained on up to {length} tokens (max_position_embeddings), the target reads {context}; acceptance falls beyond that"
        )
    return said


def _config(checkpoint: Checkpoint) -> Any:
    kind = checkpoint.layers.get("model_type")
    allowed = tuple(LAYERS) if checkpoint.kind != DFLASH else ("qwen3",)
    if kind not in allowed:
        raise checkpoint.refuse(f"found layers of model_type {kind!r:.60}, expected {' or '.join(allowed)}")
    try:
        config = CONFIGS[kind](**checkpoint.layers)
    except Exception as error:  # whatever foreign code does with settings it does not expect
        raise checkpoint.refuse(f"config.json: cannot be read as a {kind} configuration ({first_line(error)})") from error
    kinds = getattr(config, "layer_types", None) or []
    if WINDOWED in kinds and not (isinstance(config.sliding_window, int) and config.sliding_window > 0):
        raise checkpoint.refuse(f"has layers of sliding_attention and sliding_window {config.sliding_window!r:.20}, expected a number of positions")
    return config


def _taps(checkpoint: Checkpoint, target: Any, fc: Tensor, config: Any, width: int) -> tuple[int, ...]:
    """The hidden states that the draft reads of this target."""
    if checkpoint.kind == EAGLE1:
        if fc.shape[1] != 2 * config.hidden_size or config.hidden_size != width:
            raise checkpoint.refuse(
                f"fc.weight is {_shape(fc)} for a hidden size of {config.hidden_size}, the target's is {width}: expected {width} x {2 * width}; "
                "use a draft made for this target"
            )
        return (NORMED,)
    said = checkpoint.settings.get("target_hidden_size")
    if (said or fc.shape[1] // 3) != width and fc.shape[1] % width:
        raise checkpoint.refuse(f"made for a target of hidden size {said or fc.shape[1] // 3}, this one's is {width}; use a draft made for this target")
    count, last = fc.shape[1] // width, len(decoder_layers(plain(target))[1])
    if fc.shape[1] % width or (said and said != width):
        raise checkpoint.refuse(f"made for a target of hidden size {said}, this one's is {width}; use a draft made for this target")
    if checkpoint.taps is None and checkpoint.kind == DFLASH:
        raise checkpoint.refuse("says no target_layer_ids, and a DFlash draft can be read with no others; get its config.json again")
    taps = checkpoint.taps or eagle3_taps(last)
    if len(taps) != count:
        raise checkpoint.refuse(
            f"fc.weight is {_shape(fc)}, which takes {count} hidden states of {width}, its layer ids are {len(taps)}; use a draft made for this target"
        )
    if len(set(taps)) < len(taps) or not all(0 <= tap <= last for tap in taps):
        raise checkpoint.refuse(f"reads the target's hidden states {', '.join(map(str, taps))}, this one has 0 to {last}; use a draft made for this target")
    return taps


def _head_rows(checkpoint: Checkpoint, target: Any, head: Tensor | None, config: Any, width: int) -> int:
    """Rows of the draft's own head; 0 if it takes the target's."""
    covered, tokens = checkpoint.covered, vocabulary_size(target)
    rows = 0 if head is None else int(head.shape[0])
    if head is None:
        if checkpoint.kind == EAGLE3:
            raise checkpoint.refuse("no lm_head.weight found, which every EAGLE-3 draft has; get the draft again")
        if covered is not None:
            raise checkpoint.refuse("found d2t without an lm_head.weight of its own; get the draft again")
        if config.hidden_size != width:
            raise checkpoint.refuse(f"has no head of its own, and its hidden size {config.hidden_size} is not the target's, {width}")
        return 0
    said = checkpoint.settings.get("draft_vocab_size")
    if said not in (None, rows) and checkpoint.kind != EAGLE1:
        raise checkpoint.refuse(f"lm_head.weight has {rows} rows, draft_vocab_size is {said!r:.20}; get the draft again")
    if covered is None and rows != tokens:
        raise checkpoint.refuse(f"lm_head.weight has {rows} rows for {tokens} target tokens and no d2t says which; get the draft with its d2t")
    if covered is not None and covered.numel() != rows:
        raise checkpoint.refuse(f"d2t has {covered.numel()} entries, lm_head.weight has {rows} rows; get the draft again")
    if covered is not None and int(covered.max()) >= tokens:
        raise checkpoint.refuse(f"d2t names the target token {int(covered.max())}, this target has {tokens}; use a draft made for this target")
    return rows


def _build(checkpoint: Checkpoint, shared: Mapping[str, Any], width: int) -> TappedDraft:
    """The module, without memory for its weights."""
    if checkpoint.kind == EAGLE1:
        return Eagle1(**shared, bias="fc.bias" in checkpoint.weights)
    if checkpoint.kind == DFLASH:
        return BlockModel(**shared, width=width, block=_block(checkpoint, shared["target"]))
    settings: Mapping[str, Any] = {**checkpoint.settings, **(checkpoint.settings.get("eagle_config") or {})}
    flags = {"before_residual": "norm_before_residual", "output": "norm_output", "before_fc": "norm_before_fc", "each_before_fc": "fc_norm"}
    return Eagle3(**shared, width=width, norms=Norms(**{ours: bool(settings.get(theirs, False)) for ours, theirs in flags.items()}))


def _block(checkpoint: Checkpoint, target: Any) -> Block:
    """What a block of this draft is."""
    said, nested = checkpoint.settings, checkpoint.settings.get("speculators_model_type") is not None
    own = {} if nested else dict(said.get("dflash_config") or {})
    if unknown := sorted(name for name in own.keys() - DFLASH_SETTINGS if own[name]):
        raise checkpoint.refuse(
            f"dflash_config.{unknown[0]}: found {own[unknown[0]]!r:.40}, a variant that is not known; expected {', '.join(sorted(DFLASH_SETTINGS))}"
        )
    size, mask = (own.get(name, said.get(name)) for name in ("block_size", "mask_token_id"))
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise checkpoint.refuse(f"block_size: found {size!r:.20}, expected a whole number of tokens, 2 or more")
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < target.get_input_embeddings().num_embeddings:
        raise checkpoint.refuse(f"mask_token_id: found {mask!r:.20}, expected a token of the target, 0 to {target.get_input_embeddings().num_embeddings - 1}")
    if nested:
        causal = frozenset() if said.get("sliding_window_non_causal", False) else frozenset([WINDOWED])
    else:
        everywhere = said.get("is_causal", own.get("causal"))
        causal = frozenset([WINDOWED] if everywhere is None else [FULL, WINDOWED] if everywhere else [])
    return Block(size, mask, bool(own.get("sample_from_anchor", said.get("sample_from_anchor", False))), causal, window_from_root=nested)


def _fill(checkpoint: Checkpoint, draft: TappedDraft, device: torch.device, dtype: torch.dtype) -> None:
    """Give the module its weights."""
    expected = draft.state_dict()
    for name in sorted(expected.keys() | checkpoint.weights.keys()):
        found = checkpoint.weights.get(name)
        if found is None:
            raise checkpoint.refuse(f"no tensor {name} found, expected {_shape(expected[name])}; its weights and config.json do not fit, get the draft again")
        if name not in expected:
            raise checkpoint.refuse(f"found a tensor {name}, which its config.json gives no place; it may be a variant that is not known")
        if found.shape != expected[name].shape:
            raise checkpoint.refuse(f"{name} is {_shape(found)}, expected {_shape(expected[name])} by its config.json and the target; get the draft again")
    draft.rotary_emb = type(draft.rotary_emb)(draft.config).to(device)  # its buffers are computed, not read
    draft.load_state_dict({name: tensor.to(device, dtype) for name, tensor in checkpoint.weights.items()}, assign=True)
    if draft.covered_tokens is not None:
        draft.covered_tokens = checkpoint.covered.to(device) if checkpoint.covered is not None else None


def _shape(tensor: Tensor | nn.Parameter) -> str:
    return " x ".join(map(str, tensor.shape))
