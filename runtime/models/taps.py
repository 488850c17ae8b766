"""Hidden states of a model, heard by hooks on its layers while it reads.

A hidden state has one number here whatever a checkpoint calls it: 0 is the embedding, k is what layer k (counted from 1) puts out, so the
last layer's is the one before the final norm. `NORMED` is the one after it, which the output head reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.cache import TreeCache

NORMED = -1

_heard: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()
"""Which hidden states of a module have a hook: one for all decoders of the model."""


def listen(model: Any, layers: nn.ModuleList | None, taps: Sequence[int]) -> None:
    """Let every pass of `model` leave the hidden states `taps` with the cache that it is given (`TreeCache.heard`).

    Passes with another cache, as of transformers' generate, leave nothing anywhere; passes of several threads do not meet.

    Args:
        layers: the model's decoder layers; they may be None if only `NORMED` is asked for.

    Raises:
        SequoiaPlanError: if the model has no such layer.
    """
    for tap in taps:
        if tap != NORMED and not (layers is not None and 0 <= tap <= len(layers)):
            raise SequoiaPlanError(f"draft: reads the hidden state {tap} of a target that has 0 to {0 if layers is None else len(layers)}")
        module = model.base_model if tap == NORMED else layers[max(tap - 1, 0)]  # type: ignore[index]
        known = _heard.setdefault(module, set())
        if tap in known:
            continue
        known.add(tap)
        if tap == 0:
            module.register_forward_pre_hook(partial(_read, tap), with_kwargs=True)
        else:
            module.register_forward_hook(partial(_wrote, tap), with_kwargs=True)


def heard(cache: TreeCache, taps: Sequence[int], device: torch.device) -> Tensor:
    """[tokens, taps * width]: what the pass that just ended left, side by side; `cache` forgets it.

    Raises:
        SequoiaPlanError: if a layer was not run as a module, as in a model that was compiled before its draft was known.
    """
    found, cache.heard = cache.heard, {}
    if missing := [tap for tap in taps if tap not in found]:
        raise SequoiaPlanError(f"target: its hidden state {missing[0]} was not seen in a pass; make the decoder before the model is compiled")
    return torch.cat([found[tap][0].to(device) for tap in taps], -1)


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TreeCache | None:
    for each in (*kwargs.values(), *args):
        if isinstance(each, TreeCache):
            return each
    return None


def _read(tap: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (cache := _cache_of(args, kwargs)) is not None:
        cache.heard[tap] = args[0] if args else kwargs["hidden_states"]


def _wrote(tap: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _cache_of(args, kwargs)) is not None:
        cache.heard[tap] = output if isinstance(output, Tensor) else output[0]
