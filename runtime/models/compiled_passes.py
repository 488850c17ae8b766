"""Which models run in a compiled pass: `runtime.backends.packed` adds them, decoding asks for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sequoia_plan.runtime.models.architecture import unwrapped

CAN_COMPILE = find_spec("numba") is not None
"""A slim runtime decodes without numba."""
passes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Each model's `CompiledTarget` or `CompiledEagle`; None where PyTorch is to run it."""


def compiled_pass(model: Any) -> Any:
    """The compiled pass of a model; None if PyTorch runs it."""
    return passes.get(unwrapped(model))


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
