"""One transformers model: how it is loaded, where its weights are, whether it can read a tree, its forward pass."""

from sequoia_plan.runtime.models.load import Pair, dtype_name, load_pair, load_target, resolve_dtype

__all__ = ["Pair", "dtype_name", "load_pair", "load_target", "resolve_dtype"]
