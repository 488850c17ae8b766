"""Which models run in a compiled pass: `runtime.compiled` adds them, decoding asks for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.runtime.models.architecture import model_type, unwrapped

passes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Each model's `CompiledTarget` or `CompiledEagle`; None where PyTorch is to run it."""


def compiled_pass(model: Any) -> Any:
    """The compiled pass of a model; None if PyTorch runs it."""
    return passes.get(unwrapped(model))


def compile_passes(models: Iterable[Any]) -> None:
    """Compile the passes of transformers' models on a CPU, unless it was said what runs them.

    A pass whose model changed beyond what it can follow is given up.
    """
    for model in models:
        if compiled := compiled_pass(model):
            try:
                compiled.check(model)
            except SequoiaPlanError:
                del passes[unwrapped(model)]
        if isinstance(model, PreTrainedModel) and model.device.type == "cpu":
            # decoding on a GPU does not need numba
            from sequoia_plan.runtime.compiled.target import compile_target

            if model not in passes and "memory" in (reason := compile_target(model)):
                warnings.warn(f"{model_type(model)}: PyTorch runs it, {reason}", stacklevel=5)


@contextmanager
def one_thread_of_torch(is_compiled: bool) -> Iterator[None]:
    """A context in which PyTorch computes with one thread, where passes are compiled.

    Its other threads go on spinning after an operation, on the processors that a pass needs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if is_compiled else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
