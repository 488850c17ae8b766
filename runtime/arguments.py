"""Checks of the arguments that people give the decoder: each error says what to give instead."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sequoia_plan.artifacts import ArgumentError, SequoiaPlanError, TokenTree
from sequoia_plan.runtime.base.sampling import Sampling
from sequoia_plan.runtime.models.architecture import unwrapped

SEEDS = (-(1 << 63), (1 << 64) - 1)
"""The lowest and the highest seed that torch's generators take."""
WITHOUT_EFFECT = ("input_ids", "attention_mask", "labels", "use_cache", "logits_to_keep")
"""Inputs of a model's `forward` that are checked elsewhere, or do not change what is generated."""


def check_models(target: Any, draft: Any, tokenizer: Any) -> None:
    """Raise ArgumentError for names or classes in place of loaded models or a tokenizer."""
    for name, model in (("target", target), ("draft", draft)):
        if name == "draft" and model is None:
            continue
        if isinstance(model, type) or not hasattr(model, "config"):
            raise ArgumentError(
                f"{name}: found {model!r:.60}, expected a loaded model; load_pair loads both by "
                "name, and transformers' from_pretrained loads one"
            )
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise ArgumentError(
            f"tokenizer: found {tokenizer!r:.60}, expected a loaded one; transformers' "
            "AutoTokenizer.from_pretrained loads it"
        )


def check_tree(tree: Any) -> None:
    """Raise ArgumentError for anything that is not a TokenTree."""
    if not isinstance(tree, TokenTree):
        raise ArgumentError(
            f"tree: found {tree!r:.60}, expected a TokenTree; load_tree(file) reads one"
        )


def check_backend(compile: Any) -> None:
    """Raise ArgumentError unless `compile` is what `SequoiaDecoder` takes: a flag or a backend."""
    if isinstance(compile, str):
        if compile not in torch._dynamo.list_backends(None):
            names = ", ".join(torch._dynamo.list_backends())
            raise ArgumentError(f"compile: found {compile!r:.60}, expected {names}")
    elif not isinstance(compile, bool) and compile is not None and not callable(compile):
        raise ArgumentError(f"compile: found {compile!r:.60}, expected True, False or a backend")


def check_sampling(sampling: Any) -> None:
    """Raise ArgumentError for anything that is no Sampling."""
    if not isinstance(sampling, Sampling):
        raise ArgumentError(
            f"sampling: found {sampling!r:.60}, expected a Sampling, as Sampling(temperature=0.6)"
        )


def check_listeners(streamer: Any, stopping_criteria: Any) -> None:
    """Raise ArgumentError unless these are a streamer (or None) and a list of functions."""
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ArgumentError(
            f"streamer: found {streamer!r:.60}, expected an object with put(tokens) and end()"
        )
    is_list = isinstance(stopping_criteria, (list, tuple))
    if not is_list or not all(map(callable, stopping_criteria)):
        raise ArgumentError(
            f"stopping_criteria: found {stopping_criteria!r:.60}, expected a list of functions "
            "(input_ids, scores)"
        )


def whole_number(name: str, value: Any, lowest: int, highest: int | None = None) -> int:
    """`value` as an int."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < lowest or (highest is not None and number > highest):
        limits = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        raise ArgumentError(f"{name}: found {value!r:.60}, expected a whole number, {limits}")
    return number


def refuse_other_inputs(inputs: Mapping[str, Any], num_tokens: int, model: Any) -> None:
    """Refuse inputs of a model that decoding with a tree would ignore."""
    taken = inspect.signature(unwrapped(model).forward).parameters
    for name, value in inputs.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name == "position_ids":
            is_ignored = _values(value) != list(range(num_tokens))
        elif name in ("cache", "past_key_values"):
            is_ignored = not hasattr(value, "get_seq_length") or bool(value.get_seq_length())
        elif name == "token_type_ids":
            is_ignored = name in taken or any(_values(value))
        else:
            is_ignored = isinstance(value, Tensor) and (name in taken or name.endswith("_embeds"))
        if is_ignored:
            if name == "position_ids":  # transformers makes them of the attention mask
                raise ArgumentError(
                    f"position_ids: found {_values(value)!s:.60}, expected 0 to {num_tokens - 1}; "
                    "leave them out, and attention masks of another length than the prompt's"
                )
            raise ArgumentError(
                f"{name}: decoding with a token tree reads token ids alone and would ignore it; "
                "leave it out"
            )


def check_attention_mask(mask: Any, num_tokens: int) -> None:
    """Raise SequoiaPlanError unless `mask` has `num_tokens` entries and hides none of them."""
    entries = _values(mask)
    if len(entries) != num_tokens:
        raise ArgumentError(
            f"attention_mask: found {len(entries)} entries, expected {num_tokens}, one for each "
            "token of the prompt"
        )
    if not all(entries):
        raise SequoiaPlanError(
            "attention_mask: hides tokens of the prompt, expected none hidden; leave padding out"
        )


def _values(numbers: Any) -> list[Any]:
    """The entries of a tensor, an array or nested lists, one after the other; [] for others."""
    try:
        entries: list[Any] = torch.as_tensor(numbers).flatten().tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return []
    return entries
