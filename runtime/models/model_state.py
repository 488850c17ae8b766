"""What a model is made of, so that a change of it is noticed before the next text."""

from collections.abc import Callable, Collection, Hashable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.models.architecture import (
    device_and_dtype,
    model_type,
    text_config,
    unwrapped,
)
from sequoia_plan.runtime.models.attention import attention_implementation

State = dict[str, Hashable]


class Watch:
    """Knows how models were when they were first looked at; copies of it begin anew."""

    def __init__(self, state_of: Callable[[Any], State]) -> None:
        self.state_of = state_of
        self.states: WeakKeyDictionary[Any, State] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """For pickle and copies, whose models are other objects in the same state."""
        return Watch, (self.state_of,)

    def look(self, model: Any) -> None:
        """Take the model as it is now."""
        self.states[unwrapped(model)] = self.state_of(model)

    def changes(self, model: Any) -> list[str]:
        """The names of what is no longer as it was."""
        state = self.state_of(model)
        before = self.states.setdefault(unwrapped(model), state)
        return [name for name in before | state if before.get(name) != state.get(name)]


class Copy:
    """Holds a copy of a model's weights that follows changes of the model."""

    watch: Watch

    def pack(self, model: Any) -> None:
        """Take over the model's weights."""

    def why_not(self, model: Any, names: Collection[str]) -> str:
        """Why a model in which these changed cannot be packed anew; "" if it can."""
        return ""

    def differs(self, model: Any) -> str:
        """Why the copy does not take the model's place; "" if it does."""
        return ""

    def check(self, model: Any) -> bool:
        """Pack the weights anew if the model changed, or raise SequoiaPlanError.

        Returns whether they were packed.
        """
        states = self.watch.states
        # a copy of the model may have changed before it was first looked at
        names = self.watch.changes(model) if unwrapped(model) in states else [""]
        if not names:
            return False
        reason = self.why_not(model, names)
        if not reason:
            self.pack(model)
            if reason := self.differs(model):
                del states[unwrapped(model)]  # the next text tries again
        if reason:
            raise SequoiaPlanError(
                f"{model_type(model)}: {names[0] or 'the model'} changed after it was compiled for "
                f"this processor, and {reason}; make the decoder anew"
            )
        return True


def structure(model: Any) -> State:
    """A model's place, its configuration, and its modules by name."""
    modules = {name: ref(module) for name, module in unwrapped(model).named_modules()}
    return _settings(model) | modules


def workings(model: Any) -> State:
    """What decides how a model computes, apart from its weights."""
    modules: State = {
        name: (
            ref(module),
            type(module).forward,
            id(vars(module).get("forward")),
            (*module._forward_hooks, "before", *module._forward_pre_hooks),
            tuple(numbers_of(module).items()),
        )
        for name, module in unwrapped(model).named_modules()
    }
    return _settings(model) | modules


def copied(model: Any, sampled: bool) -> State:
    """What changes with anything that a copy of the model depends on (see `weights`)."""
    return workings(model) | weights(model, sampled)


def weights(module: Any, sampled: bool) -> State:
    """What changes with a module's weights and buffers.

    Changes through `.data` leave no trace but the numbers, of which `sampled` compares some.
    """
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    return {
        name: (
            id(tensor),
            tensor.data_ptr(),
            0 if tensor.is_inference() else tensor._version,
            _sample(tensor) if sampled else 0,
        )
        for name, tensor in tensors
    }


def numbers_of(module: Any) -> dict[str, Any]:
    """A module's own settings, as the epsilon of a norm."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and name[0] != "_"
    }


def check_mode(model: Any) -> None:
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


def _drops_out(module: Any) -> bool:
    """Does a module have a probability that it drops something out?"""
    return any(v for name, v in numbers_of(module).items() if name == "p" or "drop" in name)


def _settings(model: Any) -> State:
    """The entries of a model's configuration, and its place."""
    config, text = unwrapped(model).config, text_config(model)
    settings: State = {
        f"config.{name}": repr(value)
        for name, value in (vars(config) | vars(text)).items()
        # a pass changes the attention's name for a while
        if not name.endswith(("_token_id", "_internal")) and not hasattr(value, "to_dict")
    }
    device, dtype = device_and_dtype(model)
    place = {"attention": attention_implementation(text), "device": device, "dtype": dtype}
    return settings | place


def _sample(tensor: Tensor) -> int:
    """A hash of a number of each row of a matrix, in columns that change; of all of a vector."""
    step = max(tensor.shape[-1] - 1, 1) if tensor.ndim > 1 else 1  # shorter than a row
    return hash(tensor.detach().flatten()[::step].clone().view(torch.uint8).numpy().tobytes())
