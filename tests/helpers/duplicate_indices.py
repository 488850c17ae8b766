"""A torch dispatch mode in which writing to one place twice is an error.

On CUDA such a write is undefined: any of the values may stay, so the CPU's tests cannot see it.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoDuplicateIndices(TorchDispatchMode):
    """Raises AssertionError where an operation writes several values to one place.

    Attributes:
        writes: operations that wrote by index.
    """

    def __init__(self):
        super().__init__()
        self.writes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__.strip("_")
        if name == "index_copy":
            self.check(name, [args[2]], args[3])
        elif name in ("index_put", "index_put_impl", "unsafe_index_put"):
            is_accumulated = kwargs.get("accumulate", len(args) > 3 and args[3])
            if not is_accumulated:
                self.check(name, [index for index in args[1] if index is not None], args[2])
        elif name == "scatter" and "src" in function._overloadname and "reduce" not in kwargs:
            self.check_lines(name, args[1], args[2])
        return function(*args, **kwargs)

    def check(self, name, indices, values):
        """The places are combinations of indices; one value for all of them is no conflict."""
        self.writes += 1
        if indices[0].dtype == torch.bool or values.numel() == 1:
            return
        places = torch.stack(torch.broadcast_tensors(*indices)).flatten(1)
        assert places.unique(dim=1).shape == places.shape, f"{name} writes twice to {places}"

    def check_lines(self, name, dim, index):
        """Each line along `dim` has indices of its own."""
        self.writes += 1
        ordered = index.sort(dim).values
        twice = ordered.narrow(dim, 1, max(index.shape[dim] - 1, 0)) == ordered.narrow(
            dim, 0, max(index.shape[dim] - 1, 0)
        )
        assert not twice.any(), f"{name} writes twice to {index}"
