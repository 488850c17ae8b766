"""Which operations of PyTorch run."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Notes those that make no view, and how many numbers the first result of each has.

    Also the devices of whatever operations read and give.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.devices = [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        self.devices |= {tensor.device.type for tensor in tensors}
        if not function.is_view:
            self.calls.append((function.overloadpacket.__name__, getattr(first, "numel", int)()))
        return result
