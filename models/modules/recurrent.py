"""Layers with a recurrent state beside attention: their state follows a chain, and goes back.

Each token changes such a state (a linear attention's, a state space's, a short convolution's), and
the state keeps no earlier values. So it is copied before the pass over a chain. Once the chain is
verified, the layers take the copy, and read again what they have read of the accepted tokens.
"""

import copy
from collections.abc import Sequence

from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from sequoia_plan.artifacts import SequoiaPlanError
from sequoia_plan.models.base.architecture import unwrapped
from sequoia_plan.models.base.cache import CacheLayer, TreeCache
from sequoia_plan.models.modules.aux_hidden_states import tree_cache_among


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """The modules with a recurrent state: they know their layer, and have a convolution."""
    return [
        module
        for module in unwrapped(model).modules()
        if hasattr(module, "layer_idx")
        and any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


class RecurrentCache(TreeCache):
    """The cache of a model with recurrent modules, which go back to a committed token."""

    states: Sequence[dict[str, object]] = ()
    inputs: list[tuple[nn.Module, tuple[object, ...], dict[str, object]]] | None = None

    def new_layer(self) -> CacheLayer:
        """A layer that may have keys and values, recurrent states, or both."""
        return _RecurrentCacheLayer(self)

    def clear(self) -> None:
        """Forget the recurrent states, before a prompt."""
        self.inputs = None
        for layer in self.layers:
            LinearAttentionLayer.__init__(layer)

    def save(self) -> None:
        """Copy the recurrent states, and record what the next pass's modules read."""
        attention = ("cache", "keys", "values", "is_initialized")
        self.inputs = []
        self.states = [
            {k: copy.deepcopy(v) for k, v in vars(layer).items() if k not in attention}
            for layer in self.layers
        ]

    def roll_back(self, count: Tensor) -> None:
        """Let the states be those after the first `count` (int64 [1]) tokens of the pass."""
        inputs, self.inputs = self.inputs, None
        if inputs is None or self.slots is None or (kept := int(count)) == len(self.slots):
            return
        if not inputs:
            raise SequoiaPlanError(
                "target: the inputs of its recurrent layers were not seen in a pass: hooks were "
                "removed; make the decoder anew"
            )

        def accepted(argument: object) -> object:
            """The rows of the accepted tokens, if the argument has a row for each token."""
            if isinstance(argument, Tensor) and argument.ndim == 3:
                return argument[:, :kept]
            return argument

        for layer, state in zip(self.layers, self.states, strict=True):
            layer.__dict__.update(state)
        for module, args, options in inputs:
            module(*map(accepted, args), **{k: accepted(v) for k, v in options.items()})


class _RecurrentCacheLayer(LinearAttentionLayer, CacheLayer):
    """One layer of a `RecurrentCache`: keys and values by slot, and recurrent states."""

    def __init__(self, cache: TreeCache) -> None:
        CacheLayer.__init__(self, cache)
        LinearAttentionLayer.__init__(self)


def record_inputs(module: nn.Module) -> None:
    """Let every pass with a `RecurrentCache` note what the module reads."""
    if _record not in module._forward_pre_hooks.values():  # one hook serves all decoders
        module.register_forward_pre_hook(_record, with_kwargs=True)


def _record(module: nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
    """A hook that notes a module's arguments in the cache among them."""
    cache = tree_cache_among(args, options)
    if isinstance(cache, RecurrentCache) and cache.inputs is not None:
        cache.inputs.append((module, args, options))
