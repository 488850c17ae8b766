"""Checks of what people give the decoder, where a mistake would be common or silent."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.runtime.models.architecture import text_config, unwrapped

WITHOUT_EFFECT = ("input_ids", "attention_mask", "labels", "use_cache", "logits_to_keep")
"""Inputs of a model's `forward` that are checked elsewhere, or do not change what is generated."""


def check_loaded(target: Any, draft: Any, tree: Any) -> None:
    """Refuse names and files in place of loaded models and of a loaded tree."""
    for name, model in (("target", target), ("draft", draft)):
        if isinstance(model, str) or (model is None and name == "target"):
            raise ArgumentError(
                f"{name}: found {model!r:.60}, expected a loaded model; load_pair loads both by "
                "name, and transformers' from_pretrained loads one"
            )
    if not isinstance(tree, TokenTree):
        raise ArgumentError(
            f"tree: found {tree!r:.60}, expected a TokenTree; load_tree(file) reads one"
        )


def refuse_other_inputs(inputs: Mapping[str, Any], num_tokens: int, model: Any) -> None:
    """Refuse inputs of a model that decoding with a tree would ignore."""
    taken = inspect.signature(unwrapped(model).forward).parameters
    for name, value in inputs.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name == "position_ids":  # multimodal models have a row for each dimension
            rows = torch.as_tensor(value).flatten(0, -2)
            is_ignored = any(row != list(range(num_tokens)) for row in rows.tolist())
        elif name in ("cache", "past_key_values"):
            is_ignored = not hasattr(value, "get_seq_length") or bool(value.get_seq_length())
        elif name.endswith("token_type_ids"):  # in multimodal models, 0 is text
            is_text = text_config(model) is not unwrapped(model).config
            is_ignored = any(_values(value)) or (name in taken and not is_text)
        else:
            is_ignored = isinstance(value, Tensor) and (name in taken or name.endswith("_embeds"))
        if is_ignored:  # transformers makes position_ids of an attention mask
            raise ArgumentError(
                f"{name}: found {value!s:.60}, expected none, because decoding with a token tree "
                "reads token ids alone and would ignore it; leave it out, and attention masks of "
                "another length than the prompt's"
            )


def check_attention_mask(mask: Any, num_tokens: int) -> None:
    """Refuse a mask that hides tokens or is of another length than the prompt."""
    entries = _values(mask)
    if len(entries) != num_tokens or not all(entries):
        raise SequoiaPlanError(
            f"attention_mask: found {len(entries)} entries, {entries.count(0)} of them hide "
            f"tokens, expected {num_tokens}, one for each token of the prompt, and none hidden; "
            "leave padding out"
        )


def _values(numbers: Any) -> list[Any]:
    """The entries of a tensor, an array or nested lists, one after the other."""
    values: list[Any] = torch.as_tensor(numbers).flatten().tolist()
    return values
