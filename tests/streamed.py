"""A small model in a folder whose layers are streamed; used by the tests of streaming."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from architectures import TREE

from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.load import load_model
from sequoia_plan.runtime.models.memory import SLOTS, cache_bytes, own_bytes
from sequoia_plan.runtime.models.offload import Offloaded

PROMPT = torch.arange(3, 20)
LAYERS = 8


def streamed(folder, resident=2):
    """The pair with so many resident layers, and a decoder of it."""
    sizes = Offloaded(str(folder / "target"), "cpu", torch.float32).sizes()
    offload_all = load_pair(str(folder / "target"), str(folder / "draft"), dtype="float32", offload="disk", memory="1GB")
    fixed = offload_all.facts["target"]["resident_bytes"] - sum(sizes)
    draft = own_bytes(load_model(str(folder / "draft"), "cpu", torch.float32)[0], offload_all.target)
    caches = cache_bytes(offload_all.target) + cache_bytes(load_model(str(folder / "draft"), "cpu", torch.float32)[0])
    memory = fixed + draft + caches + (SLOTS + resident) * max(sizes)
    return load_pair(str(folder / "target"), str(folder / "draft"), dtype="float32", offload="disk", memory=memory)


def decoder(pair, tree=TREE):
    return SequoiaDecoder(pair.target, pair.draft, tree)


def tokens(pair, temperature=0.0, seed=1):
    return decoder(pair).generate(PROMPT, 40, temperature=temperature, seed=seed).sequences


def weights(folder):
    """The one weight file of this test."""
    [path] = Path(os.environ["SEQUOIA_PLAN_CACHE"]).glob("*.weights")
    return path
