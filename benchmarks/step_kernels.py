"""Count the kernels of a step on CUDA, and the bytes that they move; no GPU is needed.

    python benchmarks/step_kernels.py

The step of Llama-3.1-8B with EAGLE-3 in bfloat16 runs on PyTorch's meta device, which has no
values: every operation counts as one kernel, and a Triton kernel as one for each launch. An
operation moves what it reads and writes; one that looks rows up moves those rows.
"""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu_scale import FULL
from gpu_steps import eagle3_pair
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sequoia_plan.artifacts import TokenTree
from sequoia_plan.runtime import Sampling, SequoiaDecoder, decoding_models
from sequoia_plan.runtime.base import sampling as base_sampling
from sequoia_plan.runtime.models import layer_operations, split_keys
from sequoia_plan.runtime.models.fuse import fuse
from sequoia_plan.runtime.step import TreeStep
from sequoia_plan.runtime.verify import residual

MODULES = (
    *("base.drawing_kernels", "models.layer_kernels", "models.split_key_kernels"),
    *("verify.residual_kernels", "draft.eagle_kernels"),
)
"""Of Triton kernels."""
EXTENT = 8192
"""Slots of the cache."""
LOOK_UPS = {"index", "index_select", "embedding", "gather"}
WRITES = {"index_copy_", "index_copy", "scatter_", "scatter", "index_put_"}
WIDTHS = (1, 4, 9, 14, 14, 12, 10)
"""Nodes of each level: a tree of 64."""


class Kernels(TorchDispatchMode):
    """Counts kernels and the bytes that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.bytes = 0, 0

    def add(self, num_bytes: float) -> None:
        """Count one kernel."""
        self.count, self.bytes = self.count + 1, self.bytes + int(num_bytes)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and count it if it computes anything."""
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and not name.startswith(("empty", "new_empty", "detach", "lift")):
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            if name in LOOK_UPS:
                tensors = [result, result]
            elif name in WRITES:
                tensors = [leaf for leaf in args[1:] if isinstance(leaf, Tensor)] * 2
            self.add(sum(tensor.nbytes for tensor in tensors))
        return result

    def launcher(self, name: str) -> Any:
        """What stands for a Triton kernel: `launcher[grid](...)` counts it."""

        def on_grid(grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
                if name == "rotate_and_cache":  # it writes few slots of a cache
                    tensors = tensors[:1] * 2
                share = grid[0] / len(tensors[0]) if name.startswith("reject") else 1
                self.add(share * sum(tensor.nbytes for tensor in tensors))

            return launch

        return type("Launcher", (), {"__getitem__": lambda _, grid: on_grid(grid)})()


def tree_of_64() -> TokenTree:
    """A tree of 64 nodes on seven levels."""
    parents, first = [-1], 0
    for above, width in itertools.pairwise(WIDTHS):
        parents += sorted(first + place % max(1, above - 2) for place in range(width))
        first += above
    return TokenTree.from_parents(parents)


def step_on_meta(tree: TokenTree) -> TreeStep:
    """The step of fused models without values."""
    device = torch.device("meta")
    pair = eagle3_pair(FULL, device)
    always = SimpleNamespace(get=lambda kind: True)
    for model in (pair.target, pair.draft):
        fuse(model, always)  # type: ignore[arg-type]
    config = pair.target.config
    memory = (device, torch.bfloat16, config.num_key_value_heads, config.head_dim)
    layout = ((memory, memory),) * config.num_hidden_layers
    shared = pair.draft.d2t.numel(), pair.draft.d2t
    with (
        mock.patch.object(decoding_models, "probe", return_value=layout),
        mock.patch.object(decoding_models, "shared_vocabulary", return_value=shared),
        mock.patch.object(torch, "Generator"),
    ):
        return SequoiaDecoder(pair.target, pair.draft, tree).step


def count(step: TreeStep, extent: int, sampling: Sampling) -> Kernels:
    """The kernels of a step, and their bytes."""
    step.models._reserve(extent, step.tree.size)
    num_bits = step.num_parents * step.bits_per_parent(sampling)
    step.sequence.bits = torch.empty(num_bits, dtype=torch.int32, device="meta")
    kernels = Kernels()
    stub = type("Stub", (), {"__getattr__": lambda _, name: kernels.launcher(name)})()
    modules = dict.fromkeys((f"sequoia_plan.runtime.{name}" for name in MODULES), stub)
    with mock.patch.dict(sys.modules, modules), torch.inference_mode(), kernels:
        TreeStep.__call__(step, extent, sampling)
    return kernels


def main() -> None:
    """Print the table."""
    patches = [
        mock.patch.object(module, name, return_value=True)
        for module, name in (
            (layer_operations, "runs_kernels"),
            (split_keys, "kernels_available"),
            (base_sampling, "kernels_available"),
            (residual, "kernels_available"),
        )
    ]
    patches.append(mock.patch.object(split_keys, "_properties", return_value=(9, 132)))
    for patch in patches:
        patch.start()
    for title, tree, sampling in (
        ("plain", TokenTree.chain(1), Sampling()),
        ("64 nodes, T=0", tree_of_64(), Sampling()),
        ("64 nodes, T=.6", tree_of_64(), Sampling(0.6)),
        ("64 nodes, T=.6, top-p .9", tree_of_64(), Sampling(0.6, 0.9)),
    ):
        kernels = count(step_on_meta(tree), EXTENT, sampling)
        print(f"{title}: {kernels.count} kernels, {kernels.bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
