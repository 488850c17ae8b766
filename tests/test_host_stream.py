"""Streaming from host memory to a CUDA device, with the device's streams and events simulated: who may run before whom, whatever the timing."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from sequoia_plan.runtime.models.host_stream import HostRing

LAYERS, SLOTS = 7, 3


class Stream:
    """A queue of work. `clock` says which work of each stream is done before what is queued next (a vector clock)."""

    def __init__(self, *_):
        self.clock = Counter()

    def work(self):
        """Queue a piece of work; what is done before it, itself included."""
        self.clock[id(self)] += 1
        return Counter(self.clock)

    def record_event(self):
        return Counter(self.clock)

    def wait_event(self, event):
        self.clock |= event

    def wait_stream(self, other):
        self.clock |= other.clock


class Device:
    """The streams of torch.cuda, and a check of every copy into a slot and every use of it."""

    def __init__(self, monkeypatch):
        self.compute = self.current = Stream()
        self.written, self.used, self.wrong = {}, {}, []
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def write(self, slot, block):
        if not self.used.get(slot, Counter()) <= self.current.clock:
            self.wrong.append(f"slot {slot} is overwritten while it may be in use")
        self.written[slot] = block, self.current.work()

    def use(self, slot, block):
        found, when = self.written.get(slot, (None, Counter()))
        if found != block or not when <= self.current.clock:
            self.wrong.append(f"slot {slot} holds {found}, or may not yet hold {block}")
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


def ring_on(device):
    ring = HostRing([torch.full((8,), number, dtype=torch.uint8) for number in range(LAYERS)], SLOTS, torch.device("cpu"))
    ring.memory = [Slot(device, number) for number in range(SLOTS)]
    return ring


def step(ring, device, layers=LAYERS, begun=True):
    """Draft, then a pass of the target; `layers`: the pass is given up there."""
    if begun:
        ring.begin()
    device.compute.work()  # the draft
    for turn in range(layers):
        ring.take(turn)
        device.use(turn % SLOTS, turn)
        if turn < layers - 1 or layers == LAYERS:
            ring.release(turn)


def test_every_layer_computes_with_its_own_weights(device):
    ring = ring_on(device)
    assert ring.bytes == 8 * LAYERS
    for begun in (True, False, True, True):
        step(ring, device, begun=begun)
    assert device.wrong == []
    assert ring.copies.clock <= device.compute.clock, "a step waits for all that it copies: it can be captured"


@pytest.mark.parametrize("layers", range(1, LAYERS))
def test_a_pass_that_was_given_up(device, layers):
    ring = ring_on(device)
    step(ring, device, layers)
    step(ring, device)
    step(ring, device)
    assert device.wrong == []


@pytest.mark.parametrize("forgotten", ["begin", "take", "release"])
def test_a_wait_that_is_forgotten_is_noticed(device, forgotten):
    """The control."""
    ring = ring_on(device)
    if forgotten == "begin":
        ring.copies.wait_stream = lambda other: None
    elif forgotten == "release":
        ring.copies.wait_event = lambda event: None
    else:
        device.compute.wait_event = lambda event: None
    for _ in range(3):
        step(ring, device)
    assert device.wrong
