"""Streaming from host memory to a CUDA device, with simulated CUDA streams and events.

The tests say which work may run before which, whatever the timing.
"""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from sequoia_plan.models.offload.host_stream import HostStream

pytestmark = pytest.mark.slow

LAYERS, SLOTS = 7, 3


class Stream:
    """A queue of work.

    `clock` is a vector clock: the work of each stream that is done before what is queued next.
    """

    def __init__(self, device=None, priority=0):
        self.clock, self.priority = Counter(), priority

    def work(self):
        """Queue a piece of work. Returns the clock when it is done."""
        self.clock[id(self)] += 1
        return Counter(self.clock)

    def record_event(self):
        return Counter(self.clock)

    def wait_event(self, event):
        self.clock |= event

    def wait_stream(self, stream):
        self.clock |= stream.clock


class Device:
    """The streams of torch.cuda, and a check of every copy into a slot and every use of it."""

    def __init__(self, monkeypatch):
        self.compute = self.current = Stream()
        self.written, self.used, self.errors = {}, {}, []
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream):
        previous, self.current = self.current, stream
        yield
        self.current = previous

    def write(self, slot, block):
        if not self.used.get(slot, Counter()) <= self.current.clock:
            self.errors.append(f"slot {slot} is overwritten while it may be in use")
        self.written[slot] = block, self.current.work()

    def use(self, slot, block):
        written_block, clock = self.written.get(slot, (None, Counter()))
        if written_block != block or not clock <= self.current.clock:
            self.errors.append(f"slot {slot} holds {written_block}, or may not yet hold {block}")
        self.used[slot] = self.current.work()


class Slot:
    """Memory that tells the device who writes to it."""

    def __init__(self, device, number):
        self.device, self.number = device, number

    def __getitem__(self, part):
        return self

    def copy_(self, block, non_blocking):
        assert non_blocking
        self.device.write(self.number, int(block[0]))


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


@pytest.fixture
def stream(device):
    blocks = [torch.full((8,), layer, dtype=torch.uint8) for layer in range(LAYERS)]
    stream = HostStream(blocks, SLOTS, torch.device("cpu"))
    stream.memory = [Slot(device, number) for number in range(SLOTS)]
    return stream


def step(stream, device, layers=LAYERS, begins=True):
    """Draft, then run a pass of the target; it is abandoned after so many layers."""
    if begins:
        stream.begin_step()
    device.compute.work()  # the draft
    for layer in range(layers):
        stream.wait_for(layer)
        device.use(layer % SLOTS, layer)
        if layer < layers - 1 or layers == LAYERS:
            stream.release(layer)


def test_every_layer_computes_with_its_own_weights(stream, device):
    assert stream.bytes == 8 * LAYERS
    for begins in (True, False, True, True):
        step(stream, device, begins=begins)
    assert device.errors == []
    # a step waits for all that it copies, so it can be captured
    assert stream.copies.clock <= device.compute.clock


def test_copies_are_never_on_the_stream_of_a_capture(stream):
    """PyTorch has 32 streams of each priority, which it hands out in turn."""
    assert stream.copies.priority < torch.cuda.Stream(None).priority


@pytest.mark.parametrize("layers", range(1, LAYERS))
def test_a_pass_that_was_given_up(stream, device, layers):
    for count in (layers, LAYERS, LAYERS):
        step(stream, device, count)
    assert device.errors == []


@pytest.mark.parametrize(
    ("queue", "wait"),
    [("copies", "wait_stream"), ("copies", "wait_event"), ("compute", "wait_event")],
)
def test_a_wait_that_is_forgotten_is_noticed(stream, device, queue, wait):
    """The control."""
    setattr({"copies": stream.copies, "compute": device.compute}[queue], wait, lambda work: None)
    for _ in range(3):
        step(stream, device)
    assert device.errors
