"""Stand-ins for a CUDA device: graphs that are captured on the CPU, and what `Graphs.capture` calls
of torch.cuda."""

import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from sequoia_plan.runtime import capture
from sequoia_plan.runtime.capture import Graphs


class Simulated(Graphs):
    """Graphs on the CPU: what is captured is replayed into the memory that the first result lay in;
    parts named in `fails` cannot be."""

    fails: frozenset[str] = frozenset()

    def clear(self, version=0):
        super().clear(version)
        self.captures = []

    def new_stream(self):
        """Nothing runs on it."""

    def capture(self, part, run, changed, inputs):
        if part in self.fails:
            raise RuntimeError("it waits for the device\nand more")
        before = [tensor.clone() for tensor in changed]
        for _ in range(3):  # two runs that prepare the capture, and the result's
            result = run(*inputs)
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        self.captures.append(part)

        def replay():
            for old, new in zip(leaves(result), leaves(run(*inputs)), strict=True):
                old.copy_(new)

        return replay, result


def simulate_capture(step, not_captured=()):
    """Let a step on the CPU capture as a step on CUDA does."""
    step.models.graphs = Simulated(step.device, not_captured)


def leaves(result):
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result) if isinstance(result, tuple) else list(vars(result).values())


class Cuda:
    """torch.cuda as far as `Graphs.capture` uses it, with two habits: a capture whose end fails
    leaves the allocator capturing, and matrix products keep a workspace for each stream.

    Args:
        fails: where the capture fails: "warm" and "checked" in the two runs before it, "inside" in
            its own, "end" when it ends.

    Attributes:
        workspaces: the memory pool of each stream's workspace; None for memory outside of pools.
        graph_workspaces: those that captured products write to.
    """

    def __init__(self, monkeypatch, fails=None, error=RuntimeError):
        self.fails, self.error, self.capturing = fails, error, set()
        self.runs, self.sync, self.pools, self.streams = 0, 0, 0, 0
        self.workspaces, self.graph_workspaces, self.current = {}, [], self.new_stream()
        fakes = {
            "device": lambda device: nullcontext(),
            "current_device": lambda: 0,
            "current_stream": lambda: self.current,
            "Stream": self.new_stream,
            "stream": self.on,
            "get_sync_debug_mode": lambda: self.sync,
            "set_sync_debug_mode": self.set_sync,
            "graph_pool_handle": self.new_pool,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(capture.torch.cuda, name, fake)
        for name, fake in {
            "_cuda_endAllocateToPool": self.end_allocation,
            "_cuda_clearCublasWorkspaces": self.workspaces.clear,
        }.items():
            monkeypatch.setattr(capture.torch._C, name, fake, raising=False)

    def new_stream(self, device=None):
        self.streams += 1
        return SimpleNamespace(number=self.streams, wait_stream=lambda other: None)

    @contextmanager
    def on(self, stream):
        previous, self.current = self.current, stream
        yield
        self.current = previous

    def set_sync(self, mode):
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        self.sync = mode

    def wait(self):
        """An operation that waits for the device, in whatever thread."""
        if self.sync == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.sync == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def multiply(self):
        """A matrix product on the current stream."""
        pool = next(iter(self.capturing), None)
        workspace = self.workspaces.setdefault(self.current.number, pool)
        if self.capturing:
            self.graph_workspaces.append(workspace)

    def new_pool(self):
        self.pools += 1
        return (0, self.pools)

    def end_allocation(self, device, pool):
        if pool not in self.capturing:
            raise RuntimeError("not currently recording to this pool")
        self.capturing.remove(pool)

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        if self.capturing:  # by another thread, and this one now waits for the device
            raise self.error("operation not permitted when stream is capturing")
        self.capturing.add(pool)
        with self.on(stream):
            yield
        if self.fails == "end":
            raise self.error("capture end")
        self.capturing.remove(pool)

    def run(self, total):
        """A function that changes `total`, and fails where it is told to."""
        self.runs += 1
        total.add_(1)
        self.multiply()
        if self.fails == {1: "warm", 2: "checked", 3: "inside"}.get(self.runs):
            raise self.error("run")
        return total.clone()
