"""Stand-ins for a CUDA device: graphs that are captured on the CPU, and what `Graphs.capture` calls
of torch.cuda."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from sequoia_plan.runtime import capture
from sequoia_plan.runtime.capture import Graphs


class Simulated(Graphs):
    """Graphs on the CPU: what is captured is replayed into the memory that the first result lay in;
    parts named in `fails` cannot be."""

    fails: frozenset[str] = frozenset()

    def new_pool(self):
        self.captures = []

    def __call__(self, key, run, changed=list, inputs=()):
        self.key = key
        return super().__call__(key, run, changed, inputs)

    def capture(self, run, changed, inputs):
        if self.key[0] in self.fails:
            raise RuntimeError("it waits for the device\nand more")
        before = [tensor.clone() for tensor in changed]
        for _ in range(3):  # two runs that prepare the capture, and the result's
            result = run(*inputs)
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        self.captures.append(self.key[0])

        def replay():
            for old, new in zip(leaves(result), leaves(run(*inputs)), strict=True):
                old.copy_(new)

        return replay, result


def leaves(result):
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result) if isinstance(result, tuple) else list(vars(result).values())


class Cuda:
    """torch.cuda as far as `Graphs.capture` uses it, with the allocator's habit: a capture whose
    end fails leaves it capturing.

    Args:
        fails: where the capture fails: "warm" and "checked" in the two runs before it, "inside" in
        its own, "end" when it ends.
    """

    def __init__(self, monkeypatch, fails=None, error=RuntimeError):
        self.fails, self.error, self.capturing, self.runs, self.sync, self.pools = (
            fails,
            error,
            set(),
            0,
            0,
            0,
        )
        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes = {
            "device": lambda device: nullcontext(),
            "current_device": lambda: 0,
            "current_stream": lambda: stream,
            "Stream": lambda device: stream,
            "stream": lambda stream: nullcontext(),
            "get_sync_debug_mode": lambda: self.sync,
            "set_sync_debug_mode": self.set_sync,
            "graph_pool_handle": self.new_pool,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(capture.torch.cuda, name, fake)
        monkeypatch.setattr(
            capture.torch._C, "_cuda_endAllocateToPool", self.end_allocation, raising=False
        )

    def set_sync(self, mode):
        self.sync = mode

    def new_pool(self):
        self.pools += 1
        return (0, self.pools)

    def end_allocation(self, device, pool):
        if pool not in self.capturing:
            raise RuntimeError("not currently recording to this pool")
        self.capturing.remove(pool)

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.capturing.add(pool)
        yield
        if self.fails == "end":
            raise self.error("capture end")
        self.capturing.remove(pool)

    def run(self, total):
        """A function that changes `total`, and fails where it is told to."""
        self.runs += 1
        total.add_(1)
        if self.fails == {1: "warm", 2: "checked", 3: "inside"}.get(self.runs):
            raise self.error("run")
        return total.clone()
