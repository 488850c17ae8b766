"""What a model is made of, so that a change of it is noticed before the next text."""

from collections.abc import Callable, Hashable
from weakref import ref

import torch
from torch import nn
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import (
    execution_device,
    model_type,
    text_config,
    unwrapped,
)
from sequoia_plan.models.layers.attention import attention_implementation

State = dict[str, Hashable]


class Watch:
    """Remembers the state of a model when it was last looked at, as `state_of` gives it."""

    def __init__(self, state_of: Callable[[PreTrainedModel], State]) -> None:
        self.state_of = state_of
        self.state: State | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle and copies, whose models are other objects in the same state."""
        return Watch, (self.state_of,)

    def look(self, model: PreTrainedModel) -> None:
        """Remember the model's state as it is now."""
        self.state = self.state_of(model)

    def changes(self, model: PreTrainedModel) -> list[str]:
        """The names of entries of the state that differ from those that are remembered."""
        state = self.state_of(model)
        if self.state is None:
            self.state = state
        before = self.state
        return [name for name in before | state if before.get(name) != state.get(name)]


def structure(model: PreTrainedModel) -> State:
    """A model's device and dtype, its configuration, and its modules by name."""
    return _settings(model) | {n: ref(module) for n, module in unwrapped(model).named_modules()}


def weights(module: nn.Module) -> State:
    """What changes with a module's weights and buffers, but not with numbers changed by `.data`."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    return {
        name: (id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for name, tensor in tensors
    }


def everything(model: PreTrainedModel) -> State:
    """What changes with anything that a packed copy of a model depends on."""
    workings: State = {
        name: (
            ref(module),
            type(module).forward,
            id(vars(module).get("forward")),
            (*module._forward_hooks, "before", *module._forward_pre_hooks),
            tuple(settings_of(module).items()),
        )
        for name, module in unwrapped(model).named_modules()
    }
    return _settings(model) | workings | weights(model)


def weight_memory(module: nn.Module) -> tuple[tuple[int, int], ...]:
    """Address and bytes of each of a module's parameters and buffers."""
    tensors = (*module.parameters(), *module.buffers())
    return tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)


def settings_of(module: nn.Module) -> dict[str, bool | int | float | str]:
    """A module's own attributes that are no modules or tensors, as the epsilon of a norm."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name[0] != "_"
    }


def check_mode(model: PreTrainedModel) -> None:
    """Raise SequoiaPlanError if a module is in training mode, or PyTorch chooses other dtypes."""
    for name, module in unwrapped(model).named_modules():
        # what transformers itself adds later, as a larger head, is in training mode
        if module.training and (not name or any(map(_drops_out, (module, *module.children())))):
            raise SequoiaPlanError(
                f"{model_type(model)}: {name or 'the model'} found in training mode, where dropout "
                "changes its logits; call eval() on the model"
            )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise SequoiaPlanError(
            f"{model_type(model)}: found inside torch.autocast, expected the model's own dtype; "
            "load it with another dtype instead"
        )


def _drops_out(module: nn.Module) -> bool:
    """Does a module have a probability that it drops something out?"""
    return any(v for name, v in settings_of(module).items() if name == "p" or "drop" in name)


def _settings(model: PreTrainedModel) -> State:
    """The entries of a model's configuration, its attention, device and dtype."""
    config, text = unwrapped(model).config, text_config(model)
    settings = {
        f"config.{name}": repr(value)
        for name, value in (vars(config) | vars(text)).items()
        # a pass changes the attention's name for a while
        if not name.endswith(("_token_id", "_internal")) and not hasattr(value, "to_dict")
    }
    return settings | {
        "attention": attention_implementation(text),
        "device": execution_device(model),
        "dtype": model.dtype,
    }
