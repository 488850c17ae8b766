"""A small model in a folder whose layers are streamed, for the tests of offloading."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from architectures import TREE

from sequoia_plan.runtime import SequoiaDecoder, load_pair
from sequoia_plan.runtime.models.pretrained import load_model
from sequoia_plan.runtime.offload.memory import SLOTS, cache_bytes, own_bytes
from sequoia_plan.runtime.offload.offloaded_target import OffloadedTarget

PROMPT = torch.arange(3, 20)
LAYERS = 8


def streamed(folder, resident=2, placement="auto"):
    """The pair with so many resident layers."""
    target_folder, draft_folder = str(folder / "target"), str(folder / "draft")
    sizes = OffloadedTarget(target_folder, "cpu", torch.float32).layer_sizes()
    options = {"dtype": "float32", "placement": placement, "offload": "disk"}
    load = partial(load_pair, target_folder, draft_folder, **options)
    all_resident = load(memory="1GB")
    target, draft = all_resident.target, load_model(draft_folder, "cpu", torch.float32)[0]
    outside_bytes = all_resident.metadata["target"]["resident_bytes"] - sum(sizes)
    caches = cache_bytes(target) + cache_bytes(draft)
    slot_and_resident_bytes = (SLOTS + resident) * max(sizes)
    return load(memory=outside_bytes + own_bytes(draft, target) + caches + slot_and_resident_bytes)


def decoder(pair, tree=TREE):
    return SequoiaDecoder(pair.target, pair.draft, tree)


def tokens(pair, temperature=0.0, seed=1):
    return decoder(pair).generate(PROMPT, 40, temperature=temperature, seed=seed).sequences


def weights(folder):
    """The one weight file of this test."""
    [path] = Path(os.environ["SEQUOIA_PLAN_CACHE"]).glob("*.weights")
    return path
