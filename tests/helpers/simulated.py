"""Stand-ins for a CUDA device: graphs that are captured on the CPU, and what `Graphs.capture` calls
of torch.cuda."""

import warnings
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy
import torch
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

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


class Recycling(Simulated):
    """Graphs whose functions allocate from their part's pool, where memory that is freed is handed
    out again; a replay runs the same operations on the same addresses."""

    def capture(self, part, run, changed, inputs):
        super().capture(part, run, changed, inputs)
        before = [tensor.clone() for tensor in changed]
        with Recorder(self.pools[part]) as recorder:
            result = run(*inputs)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        return recorder.replay, result


class Recorder(TorchDispatchMode):
    """Records operations; what they make lies in blocks of memory taken from the list `free`."""

    def __init__(self, free):
        super().__init__()
        self.free, self.blocks, self.operations = free, {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {id_of(tensor) for tensor in tree_leaves((args, kwargs)) if is_tensor(tensor)}
        are_new = [is_tensor(leaf) and id_of(leaf) not in given for leaf in tree_leaves(made)]
        new = iter(are_new)
        result = tree_map(lambda leaf: self.allocated(leaf) if next(new) else leaf, made)
        places = [self.place(leaf) for leaf in tree_leaves(result)]
        outputs = [where if new else None for where, new in zip(places, are_new, strict=True)]
        self.operations.append((function, *tree_map(self.place, (args, kwargs or {})), outputs))
        return result

    def allocated(self, tensor):
        """A copy in the smallest free block that holds it, or in a new one."""
        fitting = [block for block in self.free if len(block) >= tensor.nbytes]
        block = min(fitting, key=len, default=None)
        if block is None:
            block = numpy.empty(max(tensor.nbytes, 1), numpy.uint8)
        else:
            self.free[:] = [other for other in self.free if other is not block]
        lifetime = block[:]  # the tensor's memory holds it
        weakref.finalize(lifetime, self.free.append, block)
        copy = torch.from_numpy(lifetime)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.blocks[id_of(copy)] = block
        return copy.copy_(tensor)

    def place(self, leaf):
        """Where a tensor lies, without holding its memory; other things as they are."""
        block = self.blocks.get(id_of(leaf)) if is_tensor(leaf) else None
        if block is None:
            return leaf
        layout = leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset()
        return partial(self.at, block, layout)

    @staticmethod
    def at(block, layout):
        dtype, *strides = layout
        whole = torch.from_numpy(block)
        return (
            whole[: len(block) // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(*strides)
        )

    def replay(self):
        for function, args, kwargs, outputs in self.operations:
            args, kwargs = tree_map_only(partial, lambda leaf: leaf(), (args, kwargs))
            result = tree_leaves(function(*args, **kwargs))
            for new, output in zip(result, outputs, strict=True):
                if output is not None:
                    output().copy_(new)


def id_of(tensor):
    """The address of its memory."""
    return tensor.untyped_storage().data_ptr()


def simulate_capture(step, not_captured=(), kind=Simulated):
    """Let a step on the CPU capture as a step on CUDA does."""
    step.models.graphs = kind(step.device, not_captured)


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
