"""Hidden states of a model's layers, recorded by hooks while it runs (aux hidden states).

They are numbered as `architecture.AFTER_FINAL_NORM` says.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import AFTER_FINAL_NORM, decoder_layers
from sequoia_plan.models.base.cache import TreeCache


def register_hooks(model: PreTrainedModel, layer_numbers: Sequence[int]) -> None:
    """Let every pass of `model` record hidden states in the cache that it is given.

    They are in `TreeCache.aux_hidden_states` after the pass. Passes with other caches, as those of
    transformers' generate, record nothing; passes of several threads do not interfere.
    """
    layers = decoder_layers(model)[1] if {*layer_numbers} - {AFTER_FINAL_NORM} else ()
    for number in layer_numbers:
        if number == AFTER_FINAL_NORM:
            module = model.base_model
        elif 0 <= number <= len(layers):
            module = layers[max(number - 1, 0)]
        else:
            raise SequoiaPlanError(
                f"draft: reads the hidden state {number} of a target that has 0 to {len(layers)}"
            )
        hooks = module._forward_pre_hooks if number == 0 else module._forward_hooks
        # one hook serves all decoders of a model
        if any(isinstance(hook, partial) and hook.args == (number,) for hook in hooks.values()):
            continue
        register = module.register_forward_hook if number else module.register_forward_pre_hook
        register(partial(_record, number), with_kwargs=True)


def take_aux_hidden_states(
    cache: TreeCache, layer_numbers: Sequence[int], device: torch.device
) -> Tensor:
    """[tokens, layers * width]: what the last pass recorded, side by side. Clears the record."""
    recorded, cache.aux_hidden_states = cache.aux_hidden_states, {}
    if missing := [number for number in layer_numbers if number not in recorded]:
        raise SequoiaPlanError(
            f"target: its hidden state {missing[0]} was not seen in a pass: its hooks were "
            "removed, or it was compiled before; make the decoder anew, before it is compiled"
        )
    return torch.cat([recorded[number][0].to(device) for number in layer_numbers], -1)


def tree_cache_among(args: Iterable[object], kwargs: Mapping[str, object]) -> TreeCache | None:
    """The TreeCache among a module's arguments; None if it runs with another cache or none."""
    for argument in (*kwargs.values(), *args):
        if isinstance(argument, TreeCache):
            return argument
    return None


def _record(
    number: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any = None,
) -> None:
    """A hook: record what a module returns under `number` in its TreeCache; if 0, what it reads."""
    if (cache := tree_cache_among(args, kwargs)) is not None:
        states = output if number else (args or [kwargs["hidden_states"]])
        cache.aux_hidden_states[number] = states if isinstance(states, Tensor) else states[0]
