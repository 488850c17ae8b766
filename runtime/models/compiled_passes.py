"""Which models run in a compiled pass: `runtime.compiled` adds them, decoding asks for them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

passes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""For each model that was compiled, its `CompiledTarget` or `CompiledEagle`."""


def compiled_pass(model: Any) -> Any:
    """The compiled pass of a model; None if PyTorch runs it."""
    return passes.get(model)
