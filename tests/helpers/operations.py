"""Which operations of PyTorch run."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes those that make no view, and how many numbers the first result of each has."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) else result
        if not function.is_view:
            self.calls.append((function.overloadpacket.__name__, getattr(first, "numel", int)()))
        return result
